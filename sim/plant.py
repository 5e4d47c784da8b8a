"""A simulated arm: one simulation of a task, which the caller advances.

Scene, servos and starts are those of `SimVectorEnv`, so what is measured on the arm can be compared
with what was measured in training. World frame and arm's base frame are the same. n arm joints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DeviceError, require
from robot_rl.core.registry import resolve
from robot_rl.hal.arm import ArmState
from robot_rl.sim.cameras import BatchRenderer, Camera
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]


class MujocoPlant:
    """A `robot_rl.real.plant.Plant`; drawing belongs to the thread that asks for the first picture."""

    def __init__(
        self,
        task: str = "pick_cube",
        robot: str | None = None,
        *,
        friction_n_m: float = 0.0,
        image_size: tuple[int, int] = (96, 96),
    ) -> None:
        """Builds the scene, at the start of episode 0.

        Args:
            task: name in the registry.
            robot: name or file; the task's own if None.
            friction_n_m: dry friction of every arm joint (N of a slide), which training did not have.
            image_size: height and width of pictures in pixels.
        """
        require(friction_n_m >= 0, "friction_n_m", friction_n_m, "0 or more")
        self._robot: Robot = load_robot(robot or resolve("task", task, at="task").default_robot)
        self._env = SimVectorEnv(EnvConfig(task=task, robot=robot, num_threads=1), 1, autoreset="disabled")
        self._backend, self._index, self._size = self._env.backend, self._env.index, image_size
        self._renderer: BatchRenderer | None = None
        self._timestep_ns = round(1e9 * self._backend.timestep_s)
        self._rest_ns = 0
        self._bind()
        if friction_n_m:
            self._backend.expand("dof_frictionloss")[:, self._index.arm_dof] = friction_n_m
        self.reset(0)

    def _bind(self) -> None:
        bind = self._backend.bind
        self._qpos, self._qvel = bind("qpos")[0], bind("qvel")[0]
        self._ctrl, self._force = bind("ctrl")[0], bind("actuator_force")[0]
        self._body_pos, self._body_quat = bind("xpos")[0], bind("xquat")[0]
        self._axis, self._anchor = bind("xaxis"), bind("xanchor")

    @property
    def joint_names(self) -> tuple[str, ...]:
        return self._robot.arm_joints

    @property
    def finger_names(self) -> tuple[str, ...]:
        return self._robot.finger_joints

    @property
    def gripper_range(self) -> tuple[float, float]:
        return self._robot.gripper_closed, self._robot.gripper_open

    @property
    def position_limits_rad(self) -> tuple[Array, Array]:
        limits = self._robot.limits
        return np.array(limits.position_low_rad), np.array(limits.position_high_rad)

    @property
    def velocity_limits_rad_s(self) -> Array:
        return np.array(self._robot.limits.velocity_rad_s)

    @property
    def effort_limits_n_m(self) -> Array:
        return np.array(self._robot.limits.effort_n_m)

    @property
    def servo_s(self) -> Array:
        return self._backend.servo_time_s()

    def command(self, target_rad: Array, gripper: float) -> None:
        self._ctrl[self._index.arm_ctrl] = target_rad
        self._ctrl[self._index.effector_ctrl] = gripper

    def targets(self) -> tuple[Array, float]:
        return self._ctrl[self._index.arm_ctrl].copy(), float(self._ctrl[self._index.effector_ctrl].sum())

    def step(self, dt_s: float) -> None:
        # Whole nanoseconds: at 300 Hz a sum of floats would lose a physics step now and then.
        num_steps, self._rest_ns = divmod(self._rest_ns + round(1e9 * dt_s), self._timestep_ns)
        if not num_steps:
            return
        self._has_moved = True
        if self._backend.step(num_steps)[0]:
            raise DeviceError(
                f"{self._env.task}: the simulation diverged at targets {self._ctrl.tolist()}. "
                "Reset the scene; a smaller friction_n_m or gentler targets keep it stable."
            )

    def measure(self) -> ArmState:
        effort = self._force[self._index.arm_ctrl].copy()
        if not self._has_moved:
            effort[:] = 0.0  # it still holds the value of the previous episode
        return ArmState(
            stamp_ns=0,
            position_rad=self._qpos[self._index.arm_qpos].copy(),
            velocity_rad_s=self._qvel[self._index.arm_dof].copy(),
            effort_n_m=effort,
            # A cup measures nothing: where fingers are, there is what it was commanded.
            gripper=float(self.fingers().mean()) if self.finger_names else self.targets()[1],
        )

    def fingers(self) -> Array:
        return self._qpos[self._index.finger_qpos].copy()

    def objects(self) -> Mapping[str, Array]:
        return {
            name: np.concatenate([self._body_pos[thing.body], self._body_quat[thing.body]])
            for name, thing in self._index.tracked.items()
        }

    def tool_pose(self) -> Array:
        return self._env.controller.tool_poses(np.zeros(1, int))[0]

    def jacobian(self) -> Array:
        return self._index.jacobian_rows(self._axis, self._anchor, self.tool_pose()[None, :3])[0].T

    def state(self) -> Array:
        return self._env.get_state()[0]

    def set_state(self, row: Array) -> None:
        self._env.set_state(row[None])

    def picture(self, camera: str) -> Array:
        if self._renderer is None:
            height, width = self._size
            cameras = [Camera(name=name, height=height, width=width) for name in self._backend.cameras]
            self._renderer = self._backend.renderer(cameras)
        return self._renderer.render_batch(np.zeros(1, int), camera)[0]

    def reset(self, seed: int) -> None:
        self._env.reset(seed=[seed])
        self._rest_ns = 0
        self._has_moved = False

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
