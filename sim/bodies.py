"""One state and one action for robots that differ, as one policy of all of them needs.

    panda.joint1.pos      a joint of one robot; where that robot is not, at rest
    panda.present         1 where the robot is there, else 0
    tool.pos.0, gripper   every other name is one element for all that have it; 0 where it is not

A robot takes its own elements of an action and ignores the others. What a network learns of a robot's own
elements is that robot's encoder and head: the first and last layers have weights of their own for each.
RDT-1B (Liu et al. 2024, arXiv 2410.07864, section 4.2) has such a space, in which a joint's number decides;
deviation: the joints of two robots are never one element, as they measure different things.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from robot_rl.core.arrays import Array, copied, like, namespace
from robot_rl.core.errors import ConfigError, nearest, require
from robot_rl.core.names import GRIPPERS, PRESENT
from robot_rl.core.registry import resolve
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.backends.engines import make_backend
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.control import action_names
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.task import build_scene, control_of, state_quantities


class Element(NamedTuple):
    """One number of a state or an action."""

    own: str
    """Its name in an env of one robot."""
    name: str
    """Its name in one of several."""
    rest: float
    """Its value where the robot is not."""


@dataclass(frozen=True)
class Layout:
    """The elements of several robots, and which of them one robot has."""

    names: tuple[str, ...]
    rest: tuple[float, ...]
    """One value for each name, which holds where this robot measures nothing else."""
    where: tuple[int, ...]
    """The index in `names` of each element that the robot has."""
    shown: tuple[int, ...]
    """The indices of these among all elements of the robot."""


class Among:
    """Puts the elements of one robot among those of all, and takes them out again, in a back end's arrays.

    N rows, k elements of the robot, D of all.
    """

    def __init__(self, layout: Layout, backend: Backend) -> None:
        self.where = layout.where
        self._where = backend.asarray(np.asarray(layout.where, np.int64))
        self._rest = backend.asarray(np.asarray(layout.rest)[None])

    def put(self, values: Array) -> Array:
        """Returns (N, D), with the robot's `values` (N, k) in their places."""
        shape = (len(values), self._rest.shape[1])
        everything = copied(namespace(values).broadcast_to(like(self._rest, values), shape))
        everything[:, self._where] = values
        return everything

    def take(self, values: Array) -> Array:
        """Returns the robot's elements (N, k) of `values` (N, D)."""
        return values[:, self._where]


@dataclass(frozen=True)
class _Body:
    """A robot in a task."""

    robot: Robot
    state: tuple[Element, ...]
    action: tuple[Element, ...]

    def chosen(self, beginnings: tuple[str, ...]) -> list[int]:
        """Returns the indices of elements of `state` of which one name begins so; all without beginnings."""
        begin = self.robot.own_elements(beginnings) or ("",)
        return [
            index
            for index, element in enumerate(self.state)
            if element.own.startswith(begin) or element.name.startswith(begin)
        ]


def layouts_of(config: EnvConfig) -> tuple[Layout, Layout]:
    """Returns the state and the action of the robots `env.robots`, for the robot of the env.

    Raises:
        ConfigError: no such task or robot, the env's own is not among them, or `env.state` has what none has.
    """
    mine = (config.task, config.robot or resolve("task", config.task).default_robot)
    pairs = list(dict.fromkeys(config.pairs()))
    if mine not in pairs:
        given = ",".join(config.robots)
        raise ConfigError(f"env.robots: got [{given}], allowed: a list with {mine[1]}, the robot of this env")
    bodies = [
        _body(*pair, config.common_actions, config.gripper_steps, _written_ns(pair[1])) for pair in pairs
    ]
    known = dict[str, str]()
    for body, (_, robot) in zip(bodies, pairs, strict=True):
        is_same = known.setdefault(body.robot.name, robot) == robot
        require(is_same, "env.robots", robot, f"one robot named {body.robot.name}")
    body = bodies[pairs.index(mine)]
    present = {f"{each.robot.name}{PRESENT}": float(each.robot.name == body.robot.name) for each in bodies}
    _check_beginnings(config.state, bodies, present)
    prefixes = tuple(f"{each.robot.name}." for each in bodies)
    shown = body.chosen(config.state)
    states = chain.from_iterable([each.state[i] for i in each.chosen(config.state)] for each in bodies)
    effectors = {each.name for body in bodies for each in body.robot.all_effectors}
    # Tools first, then effectors, and the gripper last, as in the action of one robot.
    actions = sorted(
        chain.from_iterable(each.action for each in bodies),
        key=lambda element: (element.own.removesuffix(".step") in effectors, element.own in GRIPPERS),
    )
    return (
        _layout(states, [body.state[i] for i in shown], shown, prefixes, present),
        _layout(actions, body.action, range(len(body.action)), prefixes, {}),
    )


def _layout(
    elements: Iterable[Element],
    mine: Sequence[Element],
    shown: Sequence[int],
    prefixes: tuple[str, ...],
    present: dict[str, float],
) -> Layout:
    """Returns the robots' own elements, who is present, and the elements that have one name for all."""
    found = {element.name: element.rest for element in elements}
    own = {name: rest for name, rest in found.items() if name.startswith(prefixes)}
    values = {**own, **present, **{name: rest for name, rest in found.items() if name not in own}}
    index = {name: number for number, name in enumerate(values)}
    where = tuple(index[element.name] for element in mine)
    return Layout(tuple(values), tuple(values.values()), where, tuple(shown))


def _written_ns(robot: str) -> int:
    """Returns when a robot's file was written last; 0 of a robot of the registry."""
    file = Path(robot)
    return file.stat().st_mtime_ns if file.is_file() else 0


@cache
def _body(task_name: str, robot_name: str, common: bool, gripper_steps: bool, written_ns: int) -> _Body:
    """Returns the elements of a robot in a task; `written_ns`: so that an edited file is read again."""
    task, robot = resolve("task", task_name)(), load_robot(robot_name)
    config, quantities = EnvConfig(task=task_name, num_threads=1), state_quantities(task, robot)
    backend = make_backend(config, build_scene(task, robot), robot, quantities, 1, array="numpy")
    rest = {f"{joint}.pos": at for joint, at in zip(robot.arm_joints, robot.home_rad, strict=True)}
    rest |= {f"{joint}.pos": at for joint, at in zip(robot.finger_joints, robot.finger_home, strict=True)}
    state = [
        Element(name, f"{robot.name}.{name}" if name in rest else name, rest.get(name, 0.0))
        for name in backend.view.elements(quantities)[1]
    ]
    names = action_names(
        control_of(task, robot, common=common, gripper_steps=gripper_steps, at="env.robots: "), robot
    )
    action = [
        Element(name, f"{robot.name}.{name}" if name.endswith(".delta") else name, 0.0) for name in names
    ]
    return _Body(robot, tuple(state), tuple(action))


def _check_beginnings(beginnings: tuple[str, ...], bodies: Sequence[_Body], present: Collection[str]) -> None:
    """Refuses beginnings of names that no body has."""
    for beginning in beginnings:
        if beginning not in present and not any(body.chosen((beginning,)) for body in bodies):
            names = dict.fromkeys(element.name for body in bodies for element in body.state)
            raise ConfigError(
                f"env.state: got {beginning!r}, with which no element of the state begins."
                f"{nearest(beginning, names)}"
            )
