"""A hand of four equal fingers with four joints each, built in code; its palm looks up and stands still.

No real hand is meant. The fingers stand around the middle of the palm; each swings to the side about the axis
that points there, and bends inwards about three more. Masses and gains are chosen for servos that close their
lead in kd / kp = 0.1 s.

Elements: body `palm`; of each finger f in 1..4, counter-clockwise from x: bodies, joints and actuators
`finger{f}_swing`, `finger{f}_bend1`..`finger{f}_bend3`, geoms `finger{f}_tip`; site `tool` on the palm, z up.
"""

import math

import mujoco
import numpy as np
from mujoco import mjtGeom, mjtJoint

from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.servo import add_capsule, add_position_servo

PALM_M = 0.10
"""Height of the palm's top above the table, where the fingers begin."""
RADIUS_M = 0.06
"""Distance of the fingers' feet from the middle."""
_LENGTHS_M = (0.045, 0.035, 0.030)
_MASS_KG, _RADIUS_M = 0.02, 0.008
_ARMATURE_KG_M2, _KP, _KD, _EFFORT_N_M = 0.0025, 1.0, 0.1, 0.6
_NAMES = ("swing", "bend1", "bend2", "bend3")
_LOW_RAD, _HIGH_RAD = (-0.7, -0.4, -0.2, -0.2), (0.7, 1.2, 1.5, 1.5)
_FINGERS = 4
_JOINTS = tuple(f"finger{finger}_{name}" for finger in range(1, _FINGERS + 1) for name in _NAMES)
_WHITE, _GREY, _DARK = (0.93, 0.94, 0.95, 1.0), (0.35, 0.37, 0.40, 1.0), (0.16, 0.17, 0.19, 1.0)

LIMITS = SafetyLimits(
    position_low_rad=_FINGERS * _LOW_RAD,
    position_high_rad=_FINGERS * _HIGH_RAD,
    velocity_rad_s=len(_JOINTS) * (4.0,),
    acceleration_rad_s2=len(_JOINTS) * (60.0,),
    effort_n_m=len(_JOINTS) * (_EFFORT_N_M,),
)


def build() -> mujoco.MjSpec:
    """Returns the hand: the palm's middle over the origin, z up, position servos, no scene."""
    spec = mujoco.MjSpec()
    spec.modelname = "claw"
    spec.compiler.degree = False
    physics_options(spec)
    palm = spec.worldbody.add_body(name="palm")
    palm.add_geom(
        type=mjtGeom.mjGEOM_CYLINDER,
        pos=(0.0, 0.0, 0.5 * PALM_M),
        size=(RADIUS_M + 0.015, 0.5 * PALM_M, 0.0),
        rgba=_DARK,
        contype=0,
        conaffinity=1,
    )
    palm.add_site(name="tool", pos=(0.0, 0.0, PALM_M), size=(0.006, 0.006, 0.006), group=4)
    for finger in range(1, _FINGERS + 1):
        _add_finger(palm, finger)
    for name in _JOINTS:
        add_position_servo(spec, name=name, joint=spec.joint(name), kp=_KP, kd=_KD, effort=_EFFORT_N_M)
    return spec


def _add_finger(palm: mujoco.MjsBody, finger: int) -> None:
    """Adds a finger, in whose frame x points out of the palm's middle and z up."""
    angle = 2.0 * math.pi * (finger - 1) / _FINGERS
    place = (RADIUS_M * math.cos(angle), RADIUS_M * math.sin(angle), PALM_M)
    turned = (math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2))
    parent = palm.add_body(name=f"finger{finger}_swing", pos=place, quat=turned)
    for index, name in enumerate(_NAMES):
        if index:
            height = _LENGTHS_M[index - 2] if index > 1 else 0.0
            parent = parent.add_body(name=f"finger{finger}_{name}", pos=(0.0, 0.0, height))
        parent.gravcomp = 1.0
        parent.explicitinertial = True
        parent.mass, parent.ipos = _MASS_KG, (0.0, 0.0, 0.015)
        parent.inertia = [0.4 * _MASS_KG * 0.015**2] * 3
        parent.add_joint(
            name=f"finger{finger}_{name}",
            type=mjtJoint.mjJNT_HINGE,
            axis=(0.0, -1.0, 0.0) if index else (-1.0, 0.0, 0.0),
            range=(_LOW_RAD[index], _HIGH_RAD[index]),
            armature=_ARMATURE_KG_M2,
            damping=np.array([0.01, 0.0, 0.0]),
        )
        if index:
            end = (0.0, 0.0, _LENGTHS_M[index - 1])
            add_capsule(parent, (0.0, 0.0, 0.0), end, _RADIUS_M, _WHITE if index < 3 else _GREY)
    parent.add_geom(
        name=f"finger{finger}_tip",
        type=mjtGeom.mjGEOM_SPHERE,
        pos=(0.0, 0.0, _LENGTHS_M[2]),
        size=(0.010, 0.0, 0.0),
        rgba=_DARK,
        contype=0,
        conaffinity=1,
        condim=4,
        friction=(1.0, 0.005, 0.0001),
    )


CLAW = Robot(
    name="claw",
    kind="hand",
    arm_joints=_JOINTS,
    arm_actuators=_JOINTS,
    tool_site="tool",
    home_rad=_FINGERS * (0.0, 0.1, 0.0, 0.0),
    limits=LIMITS,
    build=build,
)
"""Home: the fingers upright, bent inwards a little. A positive swing moves a tip counter-clockwise."""
