"""The `servos:` block of a robot file, computed from the masses of its model."""

import math
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.sim.robots.robot import RobotNames

Array = NDArray[Any]

_RATE_HZ = 10.0
"""kp / kd of a good servo: it closes its lead with a time constant of 0.1 s, as the shipped arms do."""

STIFFNESS = 4.0 * _RATE_HZ**2
"""kp over the joint's inertia."""
SLIDING_GRIPPER, TURNING_GRIPPER = (500, 50, 100.0, 0.1), (20, 2, 3.0, 0.03)
"""kp, kd, effort and armature of a gripper's servo whose model has none: N and m, N m and rad."""


def servos_block(robot: RobotNames, model: mujoco.MjModel) -> str:
    """Returns a `servos:` block, for under `model:` of the robot file.

    kp = 400 M and kd = 40 M, for M = inertia at home + armature: critically damped, with
    kp / kd = 10 per second. The joint's own damping is a part of kd; where it is more, kp follows it. The
    armature is the file's, or what lets a saturated servo be stable at that damping:
    kd <= 2 armature / time step, which is armature >= M / 10.
    """
    data = mujoco.MjData(model)
    for name, position in zip(robot.arm_joints, robot.home_rad, strict=True):
        data.joint(name).qpos[:] = position
    for name in robot.finger_joints:
        data.joint(name).qpos[:] = robot.gripper_home
    mujoco.mj_forward(model, data)
    dof = [int(model.joint(name).dofadr[0]) for name in robot.arm_joints]
    whole = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, data, whole)
    own, damping = model.dof_armature[dof], model.dof_damping[dof]
    inertia = np.diag(whole)[dof] - own
    armature = [_two_digits(value, math.ceil) for value in np.maximum(own, least_armature(inertia))]
    wanted = 4.0 * _RATE_HZ * (inertia + np.array(armature))
    total = [_two_digits(value, math.floor) for value in np.maximum(wanted, damping)]
    rest = [max(whole - held, 0.1 * whole) for whole, held in zip(total, damping, strict=True)]
    rows = {
        "kp": [_RATE_HZ * value for value in total],
        "kd": [_two_digits(value, math.floor) for value in rest],
        "armature_kg_m2": armature,
    }
    lines = [f"    {key}: [{', '.join(f'{value:g}' for value in row)}]" for key, row in rows.items()]
    return "\n".join(["  servos:", *lines, *_gripper_lines(robot, model)])


def least_armature(inertia: Array) -> Array:
    """Returns the armatures with which saturated servos of these inertias are stable."""
    return np.maximum(inertia / 9.0, 0.02)


def _gripper_lines(robot: RobotNames, model: mujoco.MjModel) -> list[str]:
    if not robot.finger_joints:
        return []
    finger = model.joint(robot.finger_joints[0])
    slides = finger.type[0] == mujoco.mjtJoint.mjJNT_SLIDE
    kp, kd, effort, armature = SLIDING_GRIPPER if slides else TURNING_GRIPPER
    damping = float(model.dof_damping[finger.dofadr[0]])
    kp, kd = max(kp, _RATE_HZ * damping), max(kd - damping, 0.1 * kd)
    number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_ACTUATOR, robot.gripper_actuator)
    if number >= 0 and model.actuator_forcelimited[number]:
        effort = float(model.actuator_forcerange[number, 1])
    elif model.jnt_actfrclimited[finger.id]:  # a URDF's
        effort = float(model.jnt_actfrcrange[finger.id, 1])
    return [
        f"    gripper_kp: {kp:g}",
        f"    gripper_kd: {kd:g}",
        f"    gripper_effort: {effort:g}",
        f"    gripper_armature: {armature}",
    ]


def _two_digits(value: float, rounding: Callable[[float], int]) -> float:
    """Returns a number rounded to two digits, up or down."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{rounding(round(value / unit, 6)) * unit:.2g}")
