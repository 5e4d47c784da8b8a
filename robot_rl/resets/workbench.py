"""Simulations in which starts are made: put the arm and the thing somewhere, let go, look whether they stay.

B simulations, n arm joints. Poses are 7 numbers: metres and quaternion (w, x, y, z), in the world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve
from robot_rl.sim.backends.model_index import Tracked
from robot_rl.sim.poses import compose, cross, quaternion_product, rotate, yaw_quaternion
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.start_classes import TOOL, Resets
from robot_rl.sim.task import Task, control_of
from robot_rl.sim.vector import SimVectorEnv

Array = NDArray[Any]

_IK_STEPS, _IK_DAMPING, _IK_TURN_RAD, _IK_POSTURE = 25, 0.02, 0.3, 0.1
"""Iterations, damping of the least squares, largest turn of a joint in one, pull towards home."""
_MARGIN = 1e-3
"""Share of a joint's range that stays free at its limits."""
_GRAVITY_M_S2 = 9.81
_DOWN = np.array([0.0, 1.0, 0.0, 0.0])
"""Of a tool that points down: half a turn about x."""


class Workbench:
    """The simulations of one task, with what they cost."""

    def __init__(self, env: SimVectorEnv) -> None:
        """Takes over simulations, which do not begin the next episode by themselves.

        Raises:
            ConfigError: the task declares no starts, or the robot has a suction cup, or not one arm.
        """
        config, num_envs = env.config, env.num_envs
        self.task: Task = resolve("task", config.task, at="task")()
        self.robot = load_robot(config.robot or self.task.default_robot)
        as_usual = "Let episodes begin as the task draws them: env.resets.bank=null."
        if len(self.robot.all_arms) != 1:
            raise ConfigError(
                f"robot: got {self.robot.name}, of kind {self.robot.kind}; banks of starts are made with the "
                f"tool of one arm. {as_usual}"
            )
        if self.task.resets is None:
            raise ConfigError(
                f"task: {config.task!r} declares no starts. Give it `resets = Resets(thing=..., goal=...)`, "
                "see docs/resets.md."
            )
        self.declared: Resets = self.task.resets
        if self.robot.has_cup:
            raise ConfigError(
                f"robot: banks of starts are made for fingers and for bare arms, and {self.robot.name} has a "
                f"suction cup. {as_usual}"
            )
        self.control = control_of(self.task, self.robot)
        self.env = env
        self.backend, self.index, self.num = self.env.backend, self.env.index, num_envs
        bind = self.backend.bind
        self._qpos, self._qvel, self._ctrl = bind("qpos"), bind("qvel"), bind("ctrl")
        self._pos, self._quat = bind("xpos"), bind("xquat")
        self._axis, self._anchor = bind("xaxis"), bind("xanchor")
        self._time, self.force = bind("time"), bind("xfrc_applied")
        self._mass = self.backend.expand("body_mass")
        self.all = np.arange(num_envs)
        self.thing: Tracked | None = self._tracked(self.declared.thing)
        self._goal = self._tracked(self.declared.goal)
        self.control_steps = 0
        self._limits = (
            np.asarray(self.robot.limits.position_low_rad, float),
            np.asarray(self.robot.limits.position_high_rad, float),
        )
        self._next_seed = 0

    def _tracked(self, name: str) -> Tracked | None:
        if name in ("", TOOL):
            return None
        if name not in self.index.tracked:
            raise ConfigError(
                f"resets of {self.task.name}: no body {name!r} that moves or is put somewhere; there are "
                f"{', '.join(self.index.tracked)}."
            )
        return self.index.tracked[name]

    @property
    def physics_steps(self) -> int:
        return self.control_steps * self.env.num_substeps

    @property
    def can_grip(self) -> bool:
        """Whether the task's actions open and shut a gripper."""
        return self.control.gripper != "shut" and bool(self.robot.gripper_actuator)

    @property
    def hold(self) -> str:
        """How the thing is held: as the task declares, and never by a gripper that is not used."""
        return "none" if self.declared.hold == "grasp" and not self.can_grip else self.declared.hold

    def slide_range(self) -> tuple[float, float]:
        """Returns the limits of the thing's slide."""
        _, limits = self.backend.locate("jnt_range", self.declared.thing)
        return float(limits[0]), float(limits[1])

    @property
    def is_slide(self) -> bool:
        """Whether the thing moves on a slide or a hinge, and is held by its place."""
        return self.thing is not None and self.thing.held_by != "free"

    # Poses

    def tool_pose(self) -> Array:
        return self.env.controller.tool_poses(self.all)

    def thing_pose(self) -> Array:
        """Returns the poses (B, 7) of the thing; of the tool where the task has none."""
        return self.tool_pose() if self.thing is None else self.pose_of(self.thing)

    def goal_pose(self) -> Array:
        """Returns the poses (B, 7) at which the thing is in its place, of a slide in which it is now."""
        if self._goal is None:
            return self.thing_pose()
        at = np.tile(np.array([*self.declared.at_goal_m, 1.0, 0.0, 0.0, 0.0]), (self.num, 1))
        return compose(self.pose_of(self._goal), at)

    def pose_of(self, body: Tracked) -> Array:
        return np.concatenate([self._pos[:, body.body], self._quat[:, body.body]], axis=1)

    def grip_pose(self) -> Array:
        """Returns the poses (B, 7) of the middle of the box that is grasped or pushed."""
        at = np.tile(np.array([*self.declared.grip_m, 1.0, 0.0, 0.0, 0.0]), (self.num, 1))
        return compose(self.thing_pose(), at)

    def slide(self) -> Array:
        """Returns the positions (B,) of a thing on a slide."""
        assert self.thing is not None
        return self._qpos[:, self.thing.qpos].copy()

    def fingers(self) -> Array:
        return self._qpos[:, self.index.finger_qpos].copy()

    def pointing_down(self, yaw_rad: Array) -> Array:
        """Returns quaternions (B, 4) of tools that point down, their x axes at angles about z."""
        return quaternion_product(yaw_quaternion(yaw_rad), np.tile(_DOWN, (len(yaw_rad), 1)))

    @property
    def home_yaw(self) -> float:
        """The angle of the tool's x axis at home."""
        home = self.backend.tool_orientation(self.robot.home_rad)
        return float(np.arctan2(home[1, 0], home[0, 0]))

    @property
    def open_m(self) -> float:
        """How far the fingers open."""
        return len(self.robot.finger_joints) * self.robot.gripper_open

    def turn_of(self, pose: Array) -> Array:
        """Returns by how much tools (B, 7) are turned about z from home, (B,), in [-pi, pi)."""
        x_axis = rotate(pose[:, 3:], np.tile(np.eye(3)[0], (len(pose), 1)))
        yaw = np.arctan2(x_axis[:, 1], x_axis[:, 0]) - self.home_yaw
        return (yaw + np.pi) % (2 * np.pi) - np.pi

    def upright(self, pose: Array) -> Array:
        """Returns tools (B, 7) that point down where tilted ones were; at home's angle if no action turns."""
        turn = self.turn_of(pose) if self.control.rotation != "none" else np.zeros(len(pose))
        return np.concatenate([pose[:, :3], self.pointing_down(turn + self.home_yaw)], axis=1)

    # Putting

    def reseed(self, seed: int) -> None:
        """Says the first seed of the episodes that `begin` begins."""
        self._next_seed = seed // 2

    def begin(self) -> Array:
        """Begins episodes as the task does, each with a seed of its own; returns the tools' poses (B, 7)."""
        self.env.reset(seed=self._next_seed)
        self._next_seed += self.num
        if self.declared.hold == "held":
            self.control_steps += self.num  # the gripper shuts
        self._qvel[:] = 0.0
        return self.tool_pose()

    def put_thing(self, pose: Array) -> None:
        """Puts the thing (a free body) at poses (B, 7); `forward` makes it so."""
        assert self.thing is not None
        self._qpos[:, self.thing.qpos : self.thing.qpos + 7] = pose

    def put_slide(self, position: Array) -> None:
        assert self.thing is not None
        self._qpos[:, self.thing.qpos] = position

    def push_thing(self, weights: Array) -> None:
        """Pushes the thing, until the next call, by a force (3,) or (B, 3) in multiples of its weight."""
        assert self.thing is not None
        mass = self._mass[:, self.thing.body].reshape(self.num, 1)
        self.force[:, self.thing.body, :3] = _GRAVITY_M_S2 * mass * weights

    def put_fingers(self, position: Array | float) -> None:
        self._qpos[:, self.index.finger_qpos] = position

    def command_gripper(self, is_shut: Array) -> None:
        """Gives the gripper its command: shut or open, (B,) bool."""
        robot = self.robot
        self.command_fingers(np.where(is_shut, robot.gripper_closed, robot.gripper_open))

    def command_fingers(self, position: Array) -> None:
        """Gives the gripper a command (B,)."""
        self._ctrl[:, self.index.effector_ctrl] = position[:, None]

    def forward(self) -> None:
        self.backend.forward()

    def put_tool(self, wanted: Array) -> Array:
        """Moves the arm, without physics, until the tool is at poses (B, 7); the servos will hold it there.

        Damped least squares with a pull towards home (Buss 2009, sections 4 and 5). Returns the distance that
        is left (B, 2), in metres and radians.
        """
        low, high = self._limits
        free = _MARGIN * (high - low)
        home = np.asarray(self.robot.home_rad)
        damping = _IK_DAMPING**2 * np.eye(6)
        for _ in range(_IK_STEPS):
            error = self._tool_error(wanted)
            if np.abs(error).max() < 1e-4:
                break
            rows = self.index.jacobian_rows(self._axis, self._anchor, self.tool_pose()[:, :3])
            jacobian, position = rows.transpose(0, 2, 1), self._qpos[:, self.index.arm_qpos]
            posture = _IK_POSTURE * (home - position)
            rest = error[:, :, None] - jacobian @ posture[:, :, None]
            step = posture + (rows @ np.linalg.solve(jacobian @ rows + damping, rest))[:, :, 0]
            step *= np.minimum(1.0, _IK_TURN_RAD / np.maximum(np.abs(step).max(axis=1), 1e-9))[:, None]
            self._qpos[:, self.index.arm_qpos] = np.clip(position + step, low + free, high - free)
            self.forward()
        self._ctrl[:, self.index.arm_ctrl] = self._qpos[:, self.index.arm_qpos]
        error = self._tool_error(wanted)
        return np.stack([np.linalg.norm(error[:, :3], axis=1), np.linalg.norm(error[:, 3:], axis=1)], axis=1)

    def _tool_error(self, wanted: Array) -> Array:
        """Returns what is left to the wanted poses, (B, 6): metres, and about each axis a sine."""
        tool = self.tool_pose()
        turn = sum(
            0.5 * cross(rotate(tool[:, 3:], axis), rotate(wanted[:, 3:], axis))
            for axis in (np.tile(row, (self.num, 1)) for row in np.eye(3))
        )
        return np.concatenate([wanted[:, :3] - tool[:, :3], turn], axis=1)

    # Simulating

    def step(self, num_steps: int, watch: Callable[[], None] | None = None) -> Array:
        """Simulates control steps with the servos as they are commanded; returns what diverged, (B,)."""
        diverged = np.zeros(self.num, bool)
        for _ in range(num_steps):
            diverged |= self.backend.step(self.env.num_substeps)
            self.control_steps += self.num
            if watch is not None:
                watch()
        return diverged

    def speeds(self) -> Array:
        """Returns (B, 3): of the fastest arm joint, of the thing, and its spin."""
        arm = np.abs(self._qvel[:, self.index.arm_dof]).max(axis=1)
        if self.thing is None:
            return np.stack([arm, 0 * arm, 0 * arm], axis=1)
        dof = self.thing.dof
        if self.is_slide:
            return np.stack([arm, np.abs(self._qvel[:, dof]), 0 * arm], axis=1)
        moves, spins = (np.linalg.norm(self._qvel[:, dof + i : dof + i + 3], axis=1) for i in (0, 3))
        return np.stack([arm, moves, spins], axis=1)

    def rows(self, ids: Array) -> tuple[Array, Array]:
        """Returns the states of some simulations, at time 0, and what they have drawn of the model."""
        self._time[ids] = 0.0
        return self.backend.read_states()[ids].copy(), self.env.drawn(ids)

    def thing_velocity(self) -> Array:
        """Returns the velocity (B, 3) of a free thing."""
        assert self.thing is not None
        return self._qvel[:, self.thing.dof : self.thing.dof + 3]

    def command_arm_home(self) -> None:
        """Puts the arm at home, out of the way."""
        home = np.asarray(self.robot.home_rad)
        self._qpos[:, self.index.arm_qpos] = home
        self._ctrl[:, self.index.arm_ctrl] = home
