"""Franka Emika Panda with its parallel gripper, built in code from published numbers; no meshes.

Sources: kinematics, joint limits, speeds, accelerations and torques are those of the maker's
interface specification (modified Denavit-Hartenberg table); link masses, centres of mass and
inertias are the rounded values identified by Gaz et al., "Dynamic Identification of the Franka
Emika Panda Robot With Retrieval of Feasible Parameters", RA-L 2019, so they are approximate;
hand and fingers follow the hand's data sheet. Servo gains are the usual ones for this arm.

Elements: bodies `link0`..`link7`, `hand`, `left_finger`, `right_finger`; joints `joint1`..`joint7`,
`finger_joint1`, `finger_joint2`; actuators `actuator1`..`actuator7`, `gripper` (half opening in m);
geoms `left_pad`, `right_pad` (grasping), others by body; site `tool`.
"""

import math
from dataclasses import dataclass

import mujoco
import numpy as np

from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.servo import (
    add_capsule,
    add_finger_coupling,
    add_position_servo,
    add_sliding_fingers,
)

LIMITS = SafetyLimits(
    position_low_rad=(-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
    position_high_rad=(2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
    velocity_rad_s=(2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61),
    acceleration_rad_s2=(15.0, 7.5, 10.0, 12.5, 15.0, 20.0, 20.0),
    effort_n_m=(87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0),
)

_KP = (400.0, 400.0, 400.0, 400.0, 120.0, 120.0, 50.0)
_KD = (40.0, 40.0, 40.0, 40.0, 12.0, 12.0, 5.0)
# The usual model has 4500 and 450: with torque limits that damping makes joints shake each other once
# a servo saturates. A saturated servo is stable below kd = 2 armature / timestep = 40 (bang-bang bound);
# these values are near the arm's own joint-impedance defaults.
_ARMATURE_KG_M2 = 0.1
_DAMPING_N_M_S = 1.0

FINGER_TRAVEL_M = 0.04
GRIPPER_KP_N_M = 500.0
"""Gripper stiffness in the half opening: five times the usual model, 10 N on a 4 cm object."""
_GRIPPER_KD_N_S_M = 50.0
_GRIPPER_FORCE_N = 100.0
_FINGER_ARMATURE_KG = 0.1
_FINGER_DAMPING_N_S_M = 10.0

_FLANGE_M = 0.107
_FINGER_MOUNT_M = 0.0584
_TOOL_FROM_HAND_M = 0.1034
_TIP_M = _TOOL_FROM_HAND_M - _FINGER_MOUNT_M
_PAD_RADIUS_M = 0.004
_PAD_HALF_WIDTH_M = 0.0075


@dataclass(frozen=True, kw_only=True)
class _Link:
    """Modified DH row of the joint that carries the link, and the link's inertia."""

    alpha_rad: float
    a_m: float
    d_m: float
    mass_kg: float
    com_m: tuple[float, float, float]
    inertia: tuple[float, float, float, float, float, float]
    """xx, yy, zz, xy, xz, yz about the centre of mass, kg m^2."""


_Q = math.pi / 2
_BASE = (0.63, (-0.041, 0.0, 0.05), (3.2e-3, 3.9e-3, 4.3e-3, 0.0, 1.5e-4, 0.0))
_LINKS = (
    _Link(alpha_rad=0.0, a_m=0.0, d_m=0.333, mass_kg=4.971, com_m=(0.0039, 0.0021, -0.0476),
          inertia=(0.7034, 0.7066, 0.00912, -1.39e-4, 6.77e-3, 1.917e-2)),
    _Link(alpha_rad=-_Q, a_m=0.0, d_m=0.0, mass_kg=0.647, com_m=(-0.0031, -0.0287, 0.0035),
          inertia=(7.96e-3, 2.811e-2, 2.600e-2, -3.93e-3, 1.025e-2, 7.04e-4)),
    _Link(alpha_rad=_Q, a_m=0.0, d_m=0.316, mass_kg=3.229, com_m=(0.0275, 0.0393, -0.0665),
          inertia=(3.724e-2, 3.616e-2, 1.083e-2, -4.76e-3, -1.140e-2, -1.281e-2)),
    _Link(alpha_rad=_Q, a_m=0.0825, d_m=0.0, mass_kg=3.588, com_m=(-0.0532, 0.1044, 0.0275),
          inertia=(2.585e-2, 1.955e-2, 2.832e-2, 7.80e-3, -1.33e-3, 8.64e-3)),
    _Link(alpha_rad=-_Q, a_m=-0.0825, d_m=0.384, mass_kg=1.226, com_m=(-0.0120, 0.0411, -0.0384),
          inertia=(3.555e-2, 2.947e-2, 8.63e-3, -2.12e-3, -4.04e-3, 2.29e-4)),
    _Link(alpha_rad=_Q, a_m=0.0, d_m=0.0, mass_kg=1.667, com_m=(0.0601, -0.0141, -0.0105),
          inertia=(1.96e-3, 4.35e-3, 5.43e-3, 1.09e-4, -1.16e-3, 3.41e-4)),
    _Link(alpha_rad=_Q, a_m=0.088, d_m=0.0, mass_kg=0.736, com_m=(0.0105, -0.0043, 0.0616),
          inertia=(1.252e-2, 1.003e-2, 4.82e-3, -4.28e-4, -1.20e-3, -7.41e-4)),
)  # fmt: skip

_WHITE = (0.93, 0.94, 0.95, 1.0)
_GREY = (0.35, 0.37, 0.40, 1.0)
_DARK = (0.16, 0.17, 0.19, 1.0)

# (body, end point, end point, radius, colour, touches the scene); metres, in the body's frame.
_CAPSULES = (
    ("link0", (-0.06, 0.0, 0.03), (0.0, 0.0, 0.05), 0.075, _WHITE, False),
    ("link1", (0.0, 0.0, -0.19), (0.0, 0.0, -0.02), 0.062, _WHITE, False),
    ("link2", (0.0, 0.0, -0.07), (0.0, 0.0, 0.07), 0.058, _GREY, False),
    ("link2", (0.0, 0.0, 0.0), (0.0, -0.16, 0.0), 0.058, _WHITE, False),
    ("link3", (0.0, 0.0, -0.14), (0.02, 0.0, -0.06), 0.057, _WHITE, False),
    ("link3", (0.0825, -0.06, 0.0), (0.0825, 0.06, 0.0), 0.053, _GREY, False),
    ("link4", (0.0, 0.0, 0.0), (-0.0825, 0.11, 0.0), 0.055, _WHITE, False),
    ("link5", (0.0, 0.0, -0.24), (0.0, 0.03, -0.10), 0.055, _WHITE, True),
    ("link5", (0.0, 0.07, -0.14), (0.0, 0.0, 0.0), 0.042, _WHITE, True),
    ("link6", (0.0, 0.0, -0.05), (0.0, 0.0, 0.03), 0.050, _GREY, False),
    ("link6", (0.0, 0.0, 0.0), (0.088, 0.0, 0.0), 0.048, _WHITE, True),
    ("link7", (0.0, 0.0, 0.01), (0.0, 0.0, 0.075), 0.044, _WHITE, False),
    ("hand", (0.0, -0.075, 0.032), (0.0, 0.075, 0.032), 0.031, _DARK, True),
)  # fmt: skip


def build() -> mujoco.MjSpec:
    """Returns the arm and hand: base at the origin, z up, position servos, no scene."""
    spec = mujoco.MjSpec()
    spec.modelname = "panda"
    spec.compiler.degree = False
    physics_options(spec)
    bodies = _add_links(spec)
    _add_hand(bodies)
    _add_shapes(bodies)
    _add_servos(spec)
    return spec


def _add_links(spec: mujoco.MjSpec) -> dict[str, mujoco.MjsBody]:
    """Chains base and seven links; weight is compensated, as the arm's own controller does."""
    mass_kg, com_m, inertia = _BASE
    parent = spec.worldbody.add_body(name="link0")
    _set_inertia(parent, mass_kg, com_m, inertia)
    bodies = {"link0": parent}
    for index, link in enumerate(_LINKS):
        sin, cos = math.sin(link.alpha_rad), math.cos(link.alpha_rad)
        parent = parent.add_body(
            name=f"link{index + 1}",
            pos=(link.a_m, -sin * link.d_m, cos * link.d_m),
            quat=(math.cos(link.alpha_rad / 2), math.sin(link.alpha_rad / 2), 0.0, 0.0),
            gravcomp=1.0,
        )
        _set_inertia(parent, link.mass_kg, link.com_m, link.inertia)
        parent.add_joint(
            name=f"joint{index + 1}",
            type=mujoco.mjtJoint.mjJNT_HINGE,
            axis=(0, 0, 1),
            range=(LIMITS.position_low_rad[index], LIMITS.position_high_rad[index]),
            armature=_ARMATURE_KG_M2,
            damping=np.array([_DAMPING_N_M_S, 0.0, 0.0]),
        )
        bodies[parent.name] = parent
    return bodies


def _add_hand(bodies: dict[str, mujoco.MjsBody]) -> None:
    """Adds the hand (turned -45 degrees on the flange), two sliding fingers and the tool site."""
    eighth = math.pi / 8
    quat = (math.cos(eighth), 0.0, 0.0, -math.sin(eighth))
    hand = bodies["link7"].add_body(name="hand", pos=(0, 0, _FLANGE_M), quat=quat, gravcomp=1.0)
    _set_inertia(hand, 0.73, (-0.01, 0.0, 0.03), (1.0e-3, 2.5e-3, 1.7e-3, 0.0, 0.0, 0.0))
    hand.add_site(name="tool", pos=(0, 0, _TOOL_FROM_HAND_M), size=(0.006, 0.006, 0.006), group=4)
    bodies["hand"] = hand
    fingers = add_sliding_fingers(
        hand,
        mount_m=_FINGER_MOUNT_M,
        travel_m=FINGER_TRAVEL_M,
        armature_kg=_FINGER_ARMATURE_KG,
        damping_n_s_m=_FINGER_DAMPING_N_S_M,
    )
    for finger in fingers.values():
        _set_inertia(finger, 0.015, (0.0, 0.01, 0.02), (2.4e-6, 2.4e-6, 7.5e-7, 0.0, 0.0, 0.0))
        bodies[finger.name] = finger


def _add_shapes(bodies: dict[str, mujoco.MjsBody]) -> None:
    """Adds the capsules that are drawn, some of which touch the scene, and the finger pads."""
    for body, start, end, radius_m, colour, touches in _CAPSULES:
        add_capsule(bodies[body], start, end, radius_m, colour, touches=touches)
    for side in ("left", "right"):
        finger = bodies[f"{side}_finger"]
        add_capsule(finger, (0.0, 0.0165, 0.004), (0.0, 0.0150, 0.042), 0.0105, _DARK, touches=True)
        _add_pad(finger, f"{side}_pad")


def _add_pad(finger: mujoco.MjsBody, name: str) -> None:
    """Adds the drawn tip and the capsule across it that grasps.

    Against the face of a box the capsule makes two contacts where a box pad makes four: a third
    cheaper in motion with the same hold, and the line across the tip still aligns the box.
    The pad's own friction is low: MuJoCo takes the larger of two, so the object's decides a grasp.
    """
    finger.add_geom(
        type=mujoco.mjtGeom.mjGEOM_BOX,
        pos=(0.0, 0.0055, 0.0445),
        size=(0.0105, 0.0045, 0.0095),
        rgba=_GREY,
        contype=0,
        conaffinity=0,
    )
    finger.add_geom(
        name=name,
        type=mujoco.mjtGeom.mjGEOM_CAPSULE,
        fromto=(-_PAD_HALF_WIDTH_M, _PAD_RADIUS_M, _TIP_M, _PAD_HALF_WIDTH_M, _PAD_RADIUS_M, _TIP_M),
        size=(_PAD_RADIUS_M, 0.0, 0.0),
        rgba=_GREY,
        contype=0,
        conaffinity=1,
        condim=3,
        friction=(0.5, 0.005, 0.0001),
    )


def _add_servos(spec: mujoco.MjSpec) -> None:
    """Adds a servo per joint; the gripper's acts on one finger, the other follows it."""
    rows = zip(PANDA.arm_actuators, PANDA.arm_joints, _KP, _KD, LIMITS.effort_n_m, strict=True)
    for name, joint, kp, kd, effort in rows:
        add_position_servo(spec, name=name, joint=spec.joint(joint), kp=kp, kd=kd, effort=effort)
    add_position_servo(
        spec, name="gripper", joint=spec.joint("finger_joint1"),
        kp=GRIPPER_KP_N_M, kd=_GRIPPER_KD_N_S_M, effort=_GRIPPER_FORCE_N,
    )  # fmt: skip
    add_finger_coupling(spec, leader="finger_joint1", follower="finger_joint2")


def _set_inertia(
    body: mujoco.MjsBody,
    mass_kg: float,
    com_m: tuple[float, float, float],
    inertia: tuple[float, float, float, float, float, float],
) -> None:
    """Sets mass, centre of mass and inertia (xx, yy, zz, xy, xz, yz) instead of deriving them from shapes."""
    body.explicitinertial = True
    body.mass = mass_kg
    body.ipos = com_m
    body.fullinertia = inertia


PANDA = Robot(
    name="panda",
    arm_joints=tuple(f"joint{i}" for i in range(1, 8)),
    arm_actuators=tuple(f"actuator{i}" for i in range(1, 8)),
    gripper_actuator="gripper",
    gripper_open=FINGER_TRAVEL_M,
    gripper_closed=0.0,
    finger_joints=("finger_joint1", "finger_joint2"),
    tool_site="tool",
    home_rad=(0.0, -0.1432, 0.0, -2.3651, 0.0, 2.2220, 0.7854),
    gripper_home=FINGER_TRAVEL_M,
    limits=LIMITS,
    build=build,
)
"""Home: tool 0.28 m above the base plane at x = 0.48 m, gripper pointing down, fingers opening along y."""
