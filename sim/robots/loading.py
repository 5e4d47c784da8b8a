"""A robot by its name in the registry, or by the file that describes it."""

from pathlib import Path

from robot_rl.core.registry import resolve
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.robot_file import read_robot_file


def load_robot(name_or_path: str) -> Robot:
    """Returns a robot of the registry by name, or the one a YAML file describes.

    Raises:
        UnknownComponentError: no robot of that name.
        ModelError: the robot file is missing or wrong.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        return read_robot_file(Path(name_or_path))
    return resolve("robot", name_or_path, at="robot")
