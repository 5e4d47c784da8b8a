"""The rules of robots and tasks as checks, for those of any package or file.

    from robot_rl.sim.conformance import check_robot, check_task
    check_robot("ur5e.yaml")
    check_task("my_package.tasks:LiftCube")

A broken rule raises `ConformanceError`, which says what it got and what it needs. `ROBOT_RULES` and
`TASK_RULES` are the single rules by name; tests/sim checks each of them on all that is shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import TABLE, table
from robot_rl.hal.conformance import ConformanceError, check_vector_env
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.robot_rules import ALIGNED, ROBOT_RULES, StandingRobot
from robot_rl.sim.task_rules import TASK_RULES
from robot_rl.sim.vector import SimVectorEnv

__all__ = ["ROBOT_RULES", "TASK_RULES", "ConformanceError", "broken_rules", "check_robot", "check_task"]

_SHORT_S = 0.5
"""Length of the episodes in which the rules of `VectorEnv` are checked."""


def check_robot(robot: Robot | str, *, aligned: float = ALIGNED) -> None:
    """Checks what tasks, controller and drivers rely on.

    Args:
        robot: one, a name of the registry, or the path of a robot file.
        aligned: largest error of each direction at home, a component of unit vectors.

    Raises:
        ConformanceError: names the rule.
        RobotRLError: the robot cannot be built.
    """
    built = load_robot(robot) if isinstance(robot, str) else robot
    for rule in ROBOT_RULES.values():
        rule(StandingRobot(built, aligned))


def broken_rules(robot: Robot) -> dict[str, str]:
    """Returns the messages of the rules that a robot breaks, by the rule's name in `ROBOT_RULES`.

    Raises:
        RobotRLError: the robot cannot be built.
    """
    found: dict[str, str] = {}
    for name, rule in ROBOT_RULES.items():
        try:
            rule(StandingRobot(robot))
        except ConformanceError as error:
            found[name] = str(error)
    return found


def check_task(name: str, *, robot: str | None = None) -> None:
    """Checks what a run relies on: of the task itself, and of the environment that it makes.

    Args:
        name: of the registry, or `module:class`, which needs no registration.
        robot: that does it; the task's own if None.

    Raises:
        ConformanceError: names the rule.
    """
    with _registered(name) as task:
        for rule in TASK_RULES.values():
            rule(task, robot)
        config = EnvConfig(task=task, robot=robot, horizon_s=_SHORT_S, randomize=True, num_threads=1)
        check_vector_env(_maker(config, "same_step"))
        check_vector_env(_maker(config, "disabled"))


def _maker(config: EnvConfig, autoreset: Any) -> Callable[[int], SimVectorEnv]:
    return lambda num_envs: SimVectorEnv(config, num_envs, autoreset=autoreset)


@contextmanager
def _registered(name: str) -> Generator[str]:
    """Yields the name of a task; one of `module:class` is in the registry meanwhile."""
    module, colon, attribute = name.partition(":")
    if not colon:
        yield name
        return
    from importlib import import_module

    own = getattr(import_module(module), attribute).name
    taken = table("task").get(own)
    if taken not in (None, name):
        raise ConfigError(f"{name}: the task {own!r} is {taken} already. Give yours another name.")
    if taken is not None:
        yield own
        return
    TABLE["task"][own] = name
    try:
        yield own
    finally:
        del TABLE["task"][own]
