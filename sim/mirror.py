"""Measurements of an arm in the terms of simulation: observation, targets, success, expert.

One simulation that is never stepped: measured joints and poses are written into it, and the code of
simulation reads them. World frame and arm's base frame are the same. n arm joints, A action dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robot_rl.core.errors import ConfigError, require
from robot_rl.core.registry import resolve
from robot_rl.hal.vector import Obs
from robot_rl.sim.backends.model_index import Tracked
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.experts import Expert
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import require_arm
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]


class Mirror:
    """A task as it stands on a table, in the terms of `SimVectorEnv` with one env."""

    def __init__(self, config: EnvConfig) -> None:
        """Builds the scene without cameras: real cameras take the pictures.

        Raises:
            ConfigError: the robot is no arm, a tracked pose gives no position of a part, or there is a
                formula.
        """
        allowed = "none with an arm: it is followed in simulation alone"
        require(config.formula is None, "env.formula", config.formula, allowed)
        quiet = replace(
            config.unseen().demonstrated(),
            randomize=False,
            domain=DomainConfig(),
            variation="fixed",
            privileged=False,
            num_threads=1,
        )
        self.env = SimVectorEnv(quiet, 1, autoreset="disabled")
        """Describes the task (names, spaces, rates), and draws."""
        task = resolve("task", config.task, at="env.task")
        self.robot = load_robot(config.robot or task.default_robot)
        require_arm(self.robot, "what is measured on a station", at="env.robot")
        self.camera: str = task.camera
        """The camera of the model that shows the task best."""
        bind = self.env.backend.bind
        self._qpos, self._qvel = bind("qpos")[0], bind("qvel")[0]
        self._gripper = bind("ctrl")[0, self.env.index.effector_ctrl]
        self._mocap_pos, self._mocap_quat = bind("mocap_pos")[0], bind("mocap_quat")[0]
        self._body_pos, self._axis = bind("xpos")[0], bind("xaxis")[0]
        self._sort_objects()

    def _sort_objects(self) -> None:
        """Sorts the tracked bodies by what their pose is written to."""
        by_kind: dict[str, dict[str, Tracked]] = {"mocap": {}, "free": {}, "slide": {}}
        for name, thing in self.env.index.tracked.items():
            if thing.held_by not in by_kind:
                raise ConfigError(
                    f"mirror of {self.env.task}: the pose of {name!r} does not give its joints, allowed: "
                    "bodies that are free, fixed, or on one slide."
                )
            by_kind[thing.held_by][name] = thing
        self._mocap, self._free, self._slides = by_kind.values()

    @property
    def objects(self) -> tuple[str, ...]:
        """Names of the bodies whose poses the task needs."""
        return (*self._mocap, *self._free, *self._slides)

    def begin(self, seed: int) -> None:
        """Begins an episode: the expert's noise depends on its seed."""
        self.env.reset(seed=[seed])

    def show(
        self,
        position_rad: Array,
        velocity_rad_s: Array,
        fingers: ArrayLike,
        objects: Mapping[str, Array],
        object_velocity_m_s: Mapping[str, Array] | None = None,
    ) -> Obs:
        """Writes a measurement into the simulation and returns its observation, one row.

        Args:
            position_rad: (n,)
            velocity_rad_s: (n,)
            fingers: position of all finger joints, or of each.
            objects: pose (7,) of every name in `objects`: position and quaternion (w, x, y, z).
            object_velocity_m_s: (3,) of those that move; 0 if missing.

        Raises:
            ConfigError: a pose is missing.
        """
        missing = [name for name in self.objects if name not in objects]
        if missing:
            raise ConfigError(
                f"mirror of {self.env.task}: nothing was measured of {', '.join(missing)}; "
                f"needed: {', '.join(self.objects)}. Name their trackers in the station's `objects`."
            )
        self._qvel[:] = 0.0
        index = self.env.index
        self._qpos[index.arm_qpos], self._qvel[index.arm_dof] = position_rad, velocity_rad_s
        self._qpos[index.finger_qpos] = fingers
        moving = object_velocity_m_s or {}
        for name, thing in self._mocap.items():
            self._mocap_pos[thing.mocap] = objects[name][:3]
            self._mocap_quat[thing.mocap] = objects[name][3:]
        for name, thing in self._free.items():
            self._qpos[thing.qpos : thing.qpos + 7] = objects[name]
            self._qvel[thing.dof : thing.dof + 3] = moving.get(name, 0.0)
        if self._slides:
            self._slide(objects, moving)
        return self.env.set_state(self.env.backend.read_states())

    def _slide(self, objects: Mapping[str, Array], moving: Mapping[str, Array]) -> None:
        """Sets each slide to the distance of its body from where the body would be at 0."""
        for thing in self._slides.values():
            self._qpos[thing.qpos] = 0.0
        self.env.backend.forward()
        for name, thing in self._slides.items():
            axis = self._axis[thing.joint]
            self._qpos[thing.qpos] = axis @ (objects[name][:3] - self._body_pos[thing.body])
            self._qvel[thing.dof] = axis @ np.broadcast_to(moving.get(name, 0.0), 3)

    def commanded(self, gripper: float) -> None:
        """Notes the last command of the gripper, from which actions that change it go on."""
        self._gripper[:] = gripper

    def targets(self, actions: Array, *, servo_s: float = math.inf) -> tuple[Array, Array]:
        """Returns joint targets (T, n) and gripper commands (T,) of actions (T, A) from now on.

        The first is the target of simulation. The others are predicted with the present Jacobian, for an
        arm that closes its lead with the time constant `servo_s`.
        """
        controller, actions = self.env.controller, self.env.own_actions(actions)
        share = -math.expm1(-1.0 / (self.env.control_hz * servo_s))
        position = controller.joint_positions()
        targets, commands = np.empty((len(actions), controller.num_joints)), np.empty(len(actions))
        last = self._gripper[None].copy()
        for step, action in enumerate(actions):
            targets[step] = controller.targets(action[None], position)[0]
            last = controller.effectors(action[None], last)
            commands[step] = last[0, 0]
            position = position + share * (targets[step] - position)
        return targets, commands

    def judge(self) -> tuple[bool, bool, float]:
        """Returns success, failure and reward of the measured state."""
        success, failed, reward = self.env.judge()
        return bool(success[0]), bool(failed[0]), float(reward[0])

    def expert(self, bias_m: float = 0.0, noise_m: float = 0.0, noise_seed: int = 0) -> Expert:
        """Returns the task's scripted expert, which acts on the measured state."""
        return self.env.expert(bias_m, noise_m, noise_seed)

    def close(self) -> None:
        self.env.close()
