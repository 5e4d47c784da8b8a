"""The left-right mirror image of a task's observations and actions: y of the world changes its sign.

M = diag(1, -1, 1) takes a frame with rotation R at p to M R M at M p: its own y axis is mirrored too, as
that of a box or of a gripper may be. Then a position, velocity or direction v becomes M v, in the
world and in such a frame; what turns (w) becomes -M w; a quaternion (w, x, y, z) becomes (w, -x, y, -z).
A joint turns the other way if its axis lies in the mirror plane, and slides the other way if it is
normal to it, both from the home posture; fingers change places. All of it is read off the compiled model.
GR-RL (Li et al. 2025) calls it morphological symmetry and has it for two arms, which change places.

D state elements, A action dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from mujoco import mjtJoint, mjtSensor
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve
from robot_rl.data.episodes import Episodes
from robot_rl.sim.control import action_names
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.task import Task, compile_task, control_of, state_sensors
from robot_rl.sim.vector import EnvConfig

Array = NDArray[Any]

_MIRROR = np.array([1.0, -1.0, 1.0])
_SENSORS = {
    mjtSensor.mjSENS_FRAMEPOS: _MIRROR,
    mjtSensor.mjSENS_FRAMELINVEL: _MIRROR,
    mjtSensor.mjSENS_FRAMEXAXIS: _MIRROR,
    mjtSensor.mjSENS_FRAMEZAXIS: _MIRROR,
    mjtSensor.mjSENS_FRAMEANGVEL: -_MIRROR,
    mjtSensor.mjSENS_FRAMEQUAT: np.array([1.0, -1.0, 1.0, -1.0]),
    mjtSensor.mjSENS_JOINTPOS: np.ones(1),
    mjtSensor.mjSENS_JOINTVEL: np.ones(1),
}
"""Kind of sensor -> sign of each element. Joints: those of a task's own, which move in the mirror plane."""
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
        """Returns the episodes, and behind them the mirror image of each."""

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
            **{name: twice(getattr(episodes, name)) for name in _SAME},
        )


_SAME = ("reward", "terminated", "truncated", "success")


def reflection_of(config: EnvConfig, *, at: str = "env") -> Reflection:
    """Returns the mirror image of a task on a robot.

    Raises:
        ConfigError: the task or the robot is not symmetric, or there are pictures.
    """
    task: Task = resolve("task", config.task, at="env.task")()
    robot = load_robot(config.robot or task.default_robot)
    if not task.symmetric:
        raise ConfigError(f"{at}: {task.name} has no mirror image: left is not like right. Leave it out.")
    if config.cameras:
        raise ConfigError(f"{at}: got cameras {list(config.cameras)}, allowed: none, which are not mirrored")
    model = compile_task(task, robot)
    joints = _joints(model, robot, at)
    sensors, index, sign, offset = state_sensors(task, robot), [], [], []
    sizes = np.array([int(model.sensor(name).dim[0]) for name in sensors])
    firsts = dict(zip(sensors, np.cumsum(sizes) - sizes, strict=True))
    for name in sensors:
        partner, turn, shift = joints.get(name, (name, 1.0, 0.0))
        signs = turn * _SENSORS[mjtSensor(int(model.sensor(name).type[0]))]
        index += range(firsts[partner], firsts[partner] + len(signs))
        sign += list(signs)
        offset += [shift] * len(signs)
    back = [f"{name.removesuffix('.pos')}.delta" for name, (_, turn, _) in joints.items() if turn < 0]
    actions = action_names(control_of(task, robot), robot)
    return Reflection(
        index=np.array(index),
        sign=np.array(sign),
        offset=np.array(offset),
        action_sign=np.array([-1.0 if name in (*_TURNED, *back) else 1.0 for name in actions]),
    )


def _joints(model: mujoco.MjModel, robot: Robot, at: str) -> dict[str, tuple[str, float, float]]:
    """Returns, for the sensor of each of the robot's joints: whose image it is, its sign, and its offset."""
    posture = mujoco.MjData(model)
    for name, home in zip(robot.arm_joints, robot.home_rad, strict=True):
        posture.joint(name).qpos[:] = home
    mujoco.mj_kinematics(model, posture)
    images: dict[str, tuple[str, float, float]] = {}
    for names, homes in ((robot.arm_joints, robot.home_rad), (robot.finger_joints, None)):
        for number, name in enumerate(names):
            joint = posture.joint(name)
            slides = model.joint(name).type[0] == mjtJoint.mjJNT_SLIDE
            image = _MIRROR * joint.xaxis * (1.0 if slides else -1.0)
            where = _MIRROR * joint.xanchor
            # An arm joint is its own image, a finger's is the one that is and points where it would.
            partner = name if homes is not None else _nearest(posture, names, where, image)
            turn = float(image @ posture.joint(partner).xaxis)
            moved = posture.joint(partner).xanchor - where
            if abs(abs(turn) - 1.0) > _ALIGNED**2 or (not slides and np.linalg.norm(moved) > _ALIGNED):
                raise ConfigError(
                    f"{at}: robot {robot.name} has no mirror image, {name} is neither in the plane y = 0 nor "
                    "normal to it at home. Leave it out."
                )
            sign = float(np.sign(turn))
            offset = (1.0 - sign) * homes[number] if homes is not None else 0.0
            images[f"{name}.pos"] = (f"{partner}.pos", sign, offset)
    return images


def _nearest(posture: mujoco.MjData, names: tuple[str, ...], anchor_m: Array, axis: Array) -> str:
    """Returns the joint whose place and axis are nearest to those given."""
    wanted = np.concatenate([anchor_m, axis])

    def distance(name: str) -> float:
        joint = posture.joint(name)
        return float(np.linalg.norm(np.concatenate([joint.xanchor, joint.xaxis]) - wanted))

    return min(names, key=distance)
