"""The left-right mirror image of a task's observations and actions: y of the world changes its sign.

M = diag(1, -1, 1) takes a frame with rotation R at p to M R M at M p: its own y axis is mirrored too, as
that of a box or of a gripper may be. Then a position, velocity or direction v becomes M v, in the
world and in such a frame; what turns (w) becomes -M w; a quaternion (w, x, y, z) becomes (w, -x, y, -z).
A joint turns the other way if its axis lies in the mirror plane, and slides the other way if it is
normal to it, both from the home posture; fingers change places. All of it is read off the robot at home.
GR-RL (Li et al. 2025) calls it morphological symmetry and has it for two arms, which change places.

D state elements, A action dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, require
from robot_rl.core.registry import resolve
from robot_rl.data.episodes import Episodes
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.monitor import NAMES
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import RobotNames
from robot_rl.sim.task import Task, state_quantities
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]

_MIRROR = np.array([1.0, -1.0, 1.0])
_SIGNS = {
    "pos": _MIRROR,
    "linvel": _MIRROR,
    "xaxis": _MIRROR,
    "yaxis": -_MIRROR,
    "zaxis": _MIRROR,
    "angvel": -_MIRROR,
    "quat": np.array([1.0, -1.0, 1.0, -1.0]),
}
"""Kind of quantity -> sign of each element. One number is of a task's own joint, in the mirror plane: 1."""
_TURNED = ("tool.dy", "tool.yaw", "tool.rx", "tool.rz")
_ALIGNED = 1e-3
"""How far, in metres and as a sine, a joint may be from the plane or from its normal."""


@dataclass(frozen=True, kw_only=True)
class Reflection:
    """state -> sign * state[index] + offset, action -> action_sign * action; twice is nothing."""

    index: Array
    """(D,) int."""
    sign: Array
    """(D,) 1 or -1."""
    offset: Array
    """(D,)"""
    action_sign: Array
    """(A,) 1 or -1."""

    def state(self, state: Array) -> Array:
        """Returns the mirror image of states (..., D)."""
        return (self.sign * state[..., self.index] + self.offset).astype(state.dtype)

    def action(self, action: Array) -> Array:
        """Returns the mirror image of actions (..., A)."""
        return (self.action_sign * action).astype(action.dtype)

    def with_images(self, episodes: Episodes) -> Episodes:
        """Returns the episodes, followed by the mirror image of each."""

        def twice(values: Array) -> Array:
            return np.concatenate([values, values])

        def both(obs: dict[str, Array]) -> dict[str, Array]:
            return {"state": np.concatenate([obs["state"], self.state(obs["state"])])}

        return dataclasses.replace(
            episodes,
            obs=both(episodes.obs),
            final_obs=both(episodes.final_obs),
            action=np.concatenate([episodes.action, self.action(episodes.action)]),
            episode_index=np.concatenate(
                [episodes.episode_index, episodes.episode_index + episodes.num_episodes]
            ),
            source=None if episodes.source is None else twice(episodes.source),
            start=None if episodes.start is None else twice(episodes.start),
            **{
                name: twice(getattr(episodes, name))
                for name in ("reward", "terminated", "truncated", "success")
            },
        )


def reflection_of(config: EnvConfig, *, at: str = "env") -> Reflection:
    """Returns the mirror image of a task on a robot.

    Raises:
        ConfigError: the task or the robot is not symmetric, or there are pictures.
    """
    task: Task = resolve("task", config.task, at="env.task")()
    robot = load_robot(config.robot or task.default_robot)
    if not task.symmetric:
        raise ConfigError(f"{at}: {task.name} has no mirror image: left is not like right. Leave it out.")
    require(not config.robots, "env.robots", config.robots, f"none with {at}: one robot is mirrored")
    if config.cameras:
        raise ConfigError(f"{at}: got cameras {list(config.cameras)}, allowed: none, which are not mirrored")
    env = SimVectorEnv(EnvConfig(task=config.task, robot=config.robot, num_threads=1), 1)
    joints = _joints(env.backend, robot, at)
    names, index, sign, offset = state_quantities(task, robot), [], [], []
    sizes = np.array([env.view[name].shape[1] for name in names])
    firsts = dict(zip(names, np.cumsum(sizes) - sizes, strict=True))
    for name, size in zip(names, sizes, strict=True):
        partner, turn, shift = joints.get(name, (name, 1.0, 0.0))
        signs = turn * (np.ones(1) if size == 1 else _SIGNS[name.rpartition(".")[2]])
        index += range(firsts[partner], firsts[partner] + len(signs))
        sign += list(signs)
        offset += [shift] * len(signs)
    for _ in NAMES if config.formula else ():  # a mirror image is as far in its formula
        index.append(len(index))
        sign.append(1.0)
        offset.append(0.0)
    back = [f"{name.removesuffix('.pos')}.delta" for name, (_, turn, _) in joints.items() if turn < 0]
    return Reflection(
        index=np.array(index),
        sign=np.array(sign),
        offset=np.array(offset),
        action_sign=np.array([-1.0 if name in (*_TURNED, *back) else 1.0 for name in env.action_names]),
    )


def _joints(backend: Backend, robot: RobotNames, at: str) -> dict[str, tuple[str, float, float]]:
    """Returns, for each of the robot's joints: whose image it is, its sign, and its offset."""
    index = backend.index
    backend.bind("qpos")[:, index.arm_qpos] = np.asarray(robot.home_rad)
    backend.forward()
    axes = dict(zip(index.joint_of, backend.bind("xaxis")[0], strict=True))
    anchors = dict(zip(index.joint_of, backend.bind("xanchor")[0], strict=True))
    images: dict[str, tuple[str, float, float]] = {}
    for names, homes in ((robot.arm_joints, robot.home_rad), (robot.finger_joints, None)):
        for number, name in enumerate(names):
            slides = name in index.slides
            axis = _MIRROR * axes[name] * (1.0 if slides else -1.0)
            anchor = _MIRROR * anchors[name]
            # An arm joint is its own image; that of a finger is the joint that is nearest to it.
            away = {
                each: np.linalg.norm([anchors[each] - anchor, axes[each] - axis])
                for each in ((name,) if homes is not None else names)
            }
            partner = min(away, key=lambda each: away[each])
            turn = float(axis @ axes[partner])
            moved = anchors[partner] - anchor
            if abs(abs(turn) - 1.0) > _ALIGNED**2 or (not slides and np.linalg.norm(moved) > _ALIGNED):
                raise ConfigError(
                    f"{at}: robot {robot.name} has no mirror image, {name} is neither in the plane y = 0 nor "
                    "normal to it at home. Leave it out."
                )
            sign = float(np.sign(turn))
            offset = (1.0 - sign) * homes[number] if homes is not None else 0.0
            images[f"{name}.pos"] = (f"{partner}.pos", sign, offset)
    return images
