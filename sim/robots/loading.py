"""A robot by its name in the registry, or by the file that describes it."""

from pathlib import Path

from robot_rl.core.errors import ModelError
from robot_rl.core.files import is_yaml
from robot_rl.core.registry import resolve
from robot_rl.sim.robots.measured import LIKE, read_measured
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.robot_file import read_content, read_robot
from robot_rl.sim.robots.two_arms import SIDES, read_two_arms

_MODELS = (".urdf", ".xml", ".mjcf", ".xacro")
_DEEPEST = 4
"""Most files that name one another."""


def load_robot(name_or_path: str, *, depth: int = 0) -> Robot:
    """Returns a robot of the registry by name, or the one a YAML file describes.

    Raises:
        UnknownComponentError: no robot of that name.
        ModelError: the robot file is missing or wrong, or it is a model without one.
    """
    if is_yaml(name_or_path):
        path = Path(name_or_path)
        content = read_content(path)
        key = next((key for key in (LIKE, *SIDES) if key in content), None)
        if key is None:
            return read_robot(path, content)
        if depth == _DEEPEST:
            raise ModelError(f"robot file {path}: {key}: names a file that leads back here.")
        read = read_measured if key == LIKE else read_two_arms
        return read(path, content, lambda other: load_robot(other, depth=depth + 1))
    if name_or_path.endswith(_MODELS):
        raise ModelError(
            f"robot: {name_or_path} is a model; a robot file (.yaml) names it, its joints, tool and limits: "
            f"docs/tasks.md, A robot of your own. `robot-rl new robot file={name_or_path}` drafts one."
        )
    return resolve("robot", name_or_path, at="robot")
