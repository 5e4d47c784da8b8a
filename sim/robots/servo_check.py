"""Measures whether an arm's servos suit its masses: in a step, under its weight, and under a load.

The robot alone, simulated with the options of the shipped scenes. n arm joints; a slide's numbers are in
m and N where a hinge's are in rad and N m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.servo_block import servos_block

Array = NDArray[Any]

STEP_RAD, STEP_M = 0.1, 0.05
"""Steps of a hinge and of a slide: about those of a full-scale action."""
WATCHED_S = 2.5
"""Simulated time of each measurement."""
LOAD_KG = 0.1
"""Twice the shipped tasks' cubes, as `randomize` makes them; its weight is not compensated."""
_SETTLED = 0.1
"""A joint within this share of the step is settled."""
_POSES = 256
"""Random postures within the limits, to find the heaviest of each joint."""


@dataclass(frozen=True, kw_only=True)
class JointReport:
    """Measurements of one joint."""

    joint: str
    unit: str
    """rad or m."""
    kp: float
    kd: float
    """With the joint's own damping."""
    lag_s: float
    """Until 63 % of a step is made; infinite if never."""
    overshoot: float
    """Largest share of the step beyond its end."""
    settle_s: float
    """Until it stays within a tenth of the step; infinite if it does not."""
    weight: float
    """Torque or force that the arm's own weight puts on it in its heaviest posture."""
    effort: float
    """Largest torque or force of its servo."""
    sag: float
    """How far it hangs below its target under the arm's weight, at home and in every joint's heaviest
    posture. Robot files have their weight compensated: then 0."""
    sag_uncompensated: float
    """The same if nothing compensated the weight: what a real arm with these gains alone would do."""


class ServoCheck:
    """Simulates one robot; every number is measured."""

    def __init__(self, robot: Robot) -> None:
        self._robot = robot
        self._model = robot.build().compile()
        index = ModelIndex(self._model, robot)
        self._qpos, self._dof, self._ctrl = index.arm_qpos, index.arm_dof, index.arm_ctrl
        self._home = np.asarray(robot.home_rad)
        self._low = np.asarray(robot.limits.position_low_rad)
        self._high = np.asarray(robot.limits.position_high_rad)
        self._is_slide = ~index.is_hinge

    def unlike_servos(self) -> list[str]:
        """Returns the actuators that are no position servos: a target would be their torque."""
        model, robot, found = self._model, self._robot, []
        for name in (*robot.arm_actuators, *(() if robot.has_cup else robot.effector_actuators)):
            actuator = model.actuator(name)
            follows = actuator.biasprm[1] < 0.0 and np.isclose(-actuator.biasprm[1], actuator.gainprm[0])
            found += [] if follows else [name]
        return found

    def joints(self) -> list[JointReport]:
        """Returns the measurements of every joint."""
        weights, poses = self._heaviest()
        bare = self._robot.build().compile()
        bare.body_gravcomp[:] = 0.0
        sag = np.max([self._sag(self._model, pose) for pose in poses], axis=0)
        sag_bare = np.max([self._sag(bare, pose) for pose in poses], axis=0)
        damping = self._model.dof_damping[self._dof]
        bias = self._model.actuator_biasprm[self._ctrl]
        steps = [self._step(number) for number in range(len(self._home))]
        return [
            JointReport(
                joint=name,
                unit="m" if self._is_slide[i] else "rad",
                kp=float(-bias[i, 1]),
                kd=float(damping[i] - bias[i, 2]),
                lag_s=steps[i][0],
                overshoot=steps[i][1],
                settle_s=steps[i][2],
                weight=float(weights[i]),
                effort=self._robot.limits.effort_n_m[i],
                sag=float(sag[i]),
                sag_uncompensated=float(sag_bare[i]),
            )
            for i, name in enumerate(self._robot.arm_joints)
        ]

    def load_sag_m(self) -> float:
        """Returns how far the tool sinks at home under a load that is not compensated."""
        spec = self._robot.build()
        site = spec.site(self._robot.tool_site)
        load = site.parent.add_body(name="load", pos=site.pos)
        load.add_geom(size=(0.01, 0.0, 0.0), mass=LOAD_KG, contype=0, conaffinity=0)
        model = spec.compile()
        loaded, empty = (self._held_tool(each) for each in (model, self._model))
        return float(np.linalg.norm(loaded - empty))

    def tool_sag_m(self) -> float:
        """Returns the distance of the tool from its place at home, under the arm's own weight."""
        data = self._at(self._model, self._home)
        return float(np.linalg.norm(self._held_tool(self._model) - data.site(self._robot.tool_site).xpos))

    def idle_fingers(self) -> list[str]:
        """Returns the fingers that do not follow the gripper's servo."""
        robot = self._robot
        travel = abs(robot.gripper_open - robot.gripper_closed)
        ends: list[list[float]] = []
        data = self._at(self._model, self._home)
        for wanted in (robot.gripper_open, robot.gripper_closed):
            data.actuator(robot.gripper_actuator).ctrl = wanted
            self._run(self._model, data)
            ends.append([float(data.joint(name).qpos[0]) for name in robot.finger_joints])
        moved = np.abs(np.subtract(ends[0], ends[1]))
        return [name for name, way in zip(robot.finger_joints, moved, strict=True) if not way > 0.5 * travel]

    def unnamed_joints(self) -> list[str]:
        """Returns the joints that the robot file does not name and no equality couples to another."""
        model, named = self._model, {*self._robot.arm_joints, *self._robot.finger_joints}
        couples = model.eq_type == mujoco.mjtEq.mjEQ_JOINT
        coupled = {*model.eq_obj1id[couples].tolist(), *model.eq_obj2id[couples].tolist()}
        names = [(model.joint(i).name, i in coupled) for i in range(model.njnt)]
        return [name or "one without a name" for name, is_led in names if not (is_led or name in named)]

    def home_tool(self) -> tuple[Array, Array]:
        """Returns position (3,) and orientation (3, 3), world from tool, at home."""
        site = self._at(self._model, self._home).site(self._robot.tool_site)
        return site.xpos.copy(), site.xmat.reshape(3, 3).copy()

    def servos_block(self) -> str:
        """Returns a `servos:` block of numbers computed from the masses, for the robot file."""
        return servos_block(self._robot, self._model)

    def _heaviest(self) -> tuple[Array, list[Array]]:
        """Returns the largest weight on every joint, and the postures to look at: home and those."""
        rng = np.random.default_rng(0)
        poses = np.vstack([self._home, rng.uniform(self._low, self._high, (_POSES, len(self._home)))])
        weights = np.abs([self._at(self._model, pose).qfrc_bias[self._dof] for pose in poses])
        return weights.max(axis=0), [self._home, *poses[np.unique(weights.argmax(axis=0))]]

    def _step(self, number: int) -> tuple[float, float, float]:
        """Returns lag, overshoot and settling time of one joint in a step from home."""
        data = self._at(self._model, self._home)
        self._run(self._model, data)
        step = STEP_M if self._is_slide[number] else STEP_RAD
        room = self._high[number] - self._home[number], self._home[number] - self._low[number]
        step = min(step, max(room)) * (1.0 if room[0] >= room[1] else -1.0)
        start = float(data.qpos[self._qpos][number])
        target = self._home.copy()
        target[number] += step
        data.ctrl[self._ctrl] = target
        way = (np.array(self._run(self._model, data))[:, number] - start) / step
        made = np.flatnonzero(way >= 1.0 - math.exp(-1.0))
        away = np.flatnonzero(~(np.abs(way - 1.0) < _SETTLED))
        dt_s = self._model.opt.timestep
        lag_s = dt_s * float(made[0] + 1) if len(made) else math.inf
        last = int(away[-1]) + 1 if len(away) else 0
        settle_s = dt_s * last if last < len(way) else math.inf
        return lag_s, max(0.0, float(way.max()) - 1.0), settle_s

    def _sag(self, model: mujoco.MjModel, pose: Array) -> Array:
        data = self._at(model, pose)
        self._run(model, data)
        return np.abs(data.qpos[self._qpos] - pose)

    def _held_tool(self, model: mujoco.MjModel) -> Array:
        """Returns the tool's position (3,) after the servos have held home."""
        data = self._at(model, self._home)
        self._run(model, data)
        return data.site(self._robot.tool_site).xpos.copy()

    def _at(self, model: mujoco.MjModel, pose: Array) -> mujoco.MjData:
        """Returns the robot at rest in a posture, which its servos hold."""
        data = mujoco.MjData(model)
        data.qpos[self._qpos] = pose
        data.ctrl[self._ctrl] = pose
        for name in self._robot.finger_joints:
            data.joint(name).qpos[:] = self._robot.gripper_home
        for name in self._robot.effector_actuators:
            data.actuator(name).ctrl = self._robot.gripper_home
        mujoco.mj_forward(model, data)
        return data

    def _run(self, model: mujoco.MjModel, data: mujoco.MjData) -> list[Array]:
        """Simulates for a while; returns the arm's positions after every time step."""
        trace: list[Array] = []
        for _ in range(round(WATCHED_S / model.opt.timestep)):
            mujoco.mj_step(model, data)
            trace.append(data.qpos[self._qpos].copy())
        return trace
