"""Where episodes begin that no bank of starts begins: as their task draws it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from robot_rl.core.arrays import Array, assign, like
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.backends.model_index import cells
from robot_rl.sim.control import Controller
from robot_rl.sim.poses import compose
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.task import Task
from robot_rl.sim.variants import Variants


class OwnStarts:
    """Puts simulations into the starts that a task draws; n of them begin at a time."""

    def __init__(
        self,
        task: Task,
        robot: Robot,
        backend: Backend,
        controller: Controller,
        variants: Variants,
        num_substeps: int,
    ) -> None:
        """Binds what it writes.

        Args:
            task: draws.
            robot: begins at home.
            backend: whose arrays are written.
            controller: says where the tools are.
            variants: change where things begin.
            num_substeps: of a control step.
        """
        self._task, self._robot, self._backend = task, robot, backend
        self._controller, self._variants, self._num_substeps = controller, variants, num_substeps
        self._index, bind = backend.index, backend.bind
        self._qpos, self._qvel, self._ctrl = bind("qpos"), bind("qvel"), bind("ctrl")
        self._mocap_pos = bind("mocap_pos")
        self._act = bind("act") if self._index.lagging else None
        self._home = backend.asarray(np.asarray(robot.home_rad))
        self._finger_home = backend.asarray(np.array(robot.finger_home))
        self._effector_home = backend.asarray(np.array([each.home for each in robot.all_effectors]))

    def begin(self, ids: Array, rng: EpisodeRng, seeds: Array, episodes: Array) -> None:
        """Puts simulations (n,), cleared, into starts; `rng` has drawn the task's randomisation."""
        robot, task, index = self._robot, self._task, self._index
        noise = rng.uniform(-task.joint_noise_rad, task.joint_noise_rad, size=len(robot.arm_joints))
        arm = self._home + noise
        assign(self._qpos, cells(ids, index.arm_qpos), arm)
        start = self._variants.begin(ids, seeds, episodes, task.start(rng))
        fingers = self._finger_home if start.fingers is None else start.fingers
        self._qpos[cells(ids, index.finger_qpos)] = fingers
        assign(self._ctrl, cells(ids, index.arm_ctrl), arm)
        self._ctrl[cells(ids, index.effector_ctrl)] = self._effector_home
        if self._act is not None:
            self._act[cells(ids, index.lagging_act)] = self._effector_home[index.lagging]
        for joint, value in start.joints.items():
            first = index.qpos_of[joint]
            assign(self._qpos, (ids, slice(first, first + value.shape[1])), value)
        for joint, value in start.velocities.items():
            first = index.dof_of[joint]
            assign(self._qvel, (ids, slice(first, first + value.shape[1])), value)
        for body, value in start.mocap.items():
            assign(self._mocap_pos, (ids, index.mocap_of[body]), value)
        if start.held:
            self._put_in_hand(ids, start.held)

    def _put_in_hand(self, ids: Array, held: Mapping[str, Array]) -> None:
        """Places things between the fingers, which then have one control step to close on them."""
        backend, xp = self._backend, self._backend.xp
        backend.forward(ids)
        world_from_tool = self._controller.tool_poses(ids)
        for joint, tool_from_thing in held.items():
            first = self._index.qpos_of[joint]
            pose = compose(world_from_tool, like(tool_from_thing, world_from_tool))
            assign(self._qpos, (ids, slice(first, first + 7)), pose)
        self._ctrl[cells(ids, self._index.effector_ctrl)] = self._robot.gripper_closed
        closing = xp.zeros(backend.num_sims, dtype=xp.bool, device=backend.device)
        closing[ids] = True
        backend.step(self._num_substeps, closing)
