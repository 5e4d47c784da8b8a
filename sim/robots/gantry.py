"""A gantry, built in code: three slides, a yaw hinge, and two coupled fingers or a suction cup.

Made for fast experiments. Its joint positions are the tool's own coordinates (x, y, z in metres,
yaw in radians), so that its kinematics cost next to nothing and hide nothing. No real machine is
meant; masses and gains are chosen for a servo that closes its lead in kd / kp = 0.1 s, as the
Panda's does.

Elements: bodies `frame`, `bridge`, `carriage`, `column`, `hand`, `left_finger`, `right_finger`;
joints `x`, `y`, `z`, `yaw`, `finger_joint1`, `finger_joint2`; actuators of the same names and
`gripper` (half opening in m); geoms `left_pad`, `right_pad`; site `tool`. With the cup: body `cup` in the
place of the fingers' bodies and joints, actuator `suction` (share of its force).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import mujoco
from mujoco import mjtGeom, mjtJoint

from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.servo import (
    add_capsule,
    add_finger_coupling,
    add_position_servo,
    add_sliding_fingers,
    add_suction,
)

LIMITS = SafetyLimits(
    position_low_rad=(0.15, -0.45, 0.005, -3.0),
    position_high_rad=(0.85, 0.45, 0.45, 3.0),
    velocity_rad_s=(1.0, 1.0, 1.0, 3.0),
    acceleration_rad_s2=(10.0, 10.0, 10.0, 30.0),
    effort_n_m=(100.0, 100.0, 100.0, 5.0),
)

FINGER_TRAVEL_M = 0.04
_KP = (2000.0, 2000.0, 2000.0, 20.0)
_KD = (200.0, 200.0, 200.0, 2.0)
_JOINTS = ("x", "y", "z", "yaw")
_GRIPPER_KP_N_M, _GRIPPER_KD_N_S_M, _GRIPPER_FORCE_N = 500.0, 50.0, 100.0
_FINGER_ARMATURE_KG, _FINGER_DAMPING_N_S_M = 0.1, 10.0

_TOOL_FROM_HAND_M, _FINGER_MOUNT_M = 0.10, 0.055
_TIP_M = _TOOL_FROM_HAND_M - _FINGER_MOUNT_M
_PAD_RADIUS_M = 0.004
_PAD_TORSION_M = 0.008
"""Torsional friction: torque about the contact's normal over the normal force."""
_BEAM_Y_M, _BEAM_Z_M = 0.55, 0.62

_CUP_RADIUS_M = 0.012
_VACUUM_PA = 60e3
"""Below the pressure of the air, as small ejectors make it."""
_CUP_FORCE_N = _VACUUM_PA * math.pi * _CUP_RADIUS_M**2
"""27 N."""
_LIP_RADIUS_M = 0.004

_WHITE = (0.93, 0.94, 0.95, 1.0)
_GREY = (0.35, 0.37, 0.40, 1.0)
_DARK = (0.16, 0.17, 0.19, 1.0)
_ORANGE = (0.90, 0.50, 0.15, 1.0)
Rgba = tuple[float, float, float, float]


def build() -> mujoco.MjSpec:
    """Returns the gantry: base at the origin, z up, position servos, no scene."""
    spec, hand = _build_arm("gantry")
    _add_fingers(hand)
    add_finger_coupling(spec, leader="finger_joint1", follower="finger_joint2")
    add_position_servo(
        spec, name="gripper", joint=spec.joint("finger_joint1"),
        kp=_GRIPPER_KP_N_M, kd=_GRIPPER_KD_N_S_M, effort=_GRIPPER_FORCE_N,
    )  # fmt: skip
    return spec


def build_suction() -> mujoco.MjSpec:
    """Returns the gantry with a suction cup in the place of its fingers."""
    spec, hand = _build_arm("suction_gantry")
    cup = _add_cup(hand)
    add_suction(spec, name="suction", body=cup, force_n=_CUP_FORCE_N)
    return spec


def _build_arm(name: str) -> tuple[mujoco.MjSpec, mujoco.MjsBody]:
    """Returns the gantry without an end effector, and its hand."""
    spec = mujoco.MjSpec()
    spec.modelname = name
    spec.compiler.degree = False
    physics_options(spec)
    frame = spec.worldbody.add_body(name="frame")
    _add_frame_shapes(frame)
    hand = _add_hand(_add_slides(frame))
    for joint, kp, kd, effort in zip(_JOINTS, _KP, _KD, LIMITS.effort_n_m, strict=True):
        add_position_servo(spec, name=joint, joint=spec.joint(joint), kp=kp, kd=kd, effort=effort)
    return spec, hand


def _add_frame_shapes(frame: mujoco.MjsBody) -> None:
    """Adds a beam along x on two posts, behind the scene; they are drawn and touch nothing."""
    add_capsule(frame, (0.05, _BEAM_Y_M, _BEAM_Z_M), (0.95, _BEAM_Y_M, _BEAM_Z_M), 0.025, _GREY)
    for x in (0.05, 0.95):
        add_capsule(frame, (x, _BEAM_Y_M, 0.02), (x, _BEAM_Y_M, _BEAM_Z_M), 0.025, _GREY)


def _add_slides(frame: mujoco.MjsBody) -> mujoco.MjsBody:
    """Chains the three slides, whose bodies' origins all are the tool's point; returns the last."""
    parent = frame
    names = ("bridge", "carriage", "column")
    for index, (name, mass_kg) in enumerate(zip(names, (2.0, 1.0, 1.0), strict=True)):
        parent = parent.add_body(name=name)
        _set_inertia(parent, mass_kg)
        parent.add_joint(
            name=_JOINTS[index],
            type=mjtJoint.mjJNT_SLIDE,
            axis=tuple(float(i == index) for i in range(3)),
            range=(LIMITS.position_low_rad[index], LIMITS.position_high_rad[index]),
        )
        if name == "bridge":
            add_capsule(parent, (0.0, -0.5, _BEAM_Z_M), (0.0, _BEAM_Y_M, _BEAM_Z_M), 0.022, _WHITE)
        elif name == "carriage":
            _add_box(parent, (0.0, 0.0, _BEAM_Z_M), (0.035, 0.035, 0.04), _ORANGE)
        else:
            add_capsule(parent, (0.0, 0.0, 0.14), (0.0, 0.0, _BEAM_Z_M), 0.016, _WHITE)
            parent.gravcomp = 1.0
    return parent


def _add_hand(column: mujoco.MjsBody) -> mujoco.MjsBody:
    """Adds the hand (turned upside down: its z axis approaches) and the tool site; returns the hand."""
    hand = column.add_body(name="hand", pos=(0, 0, _TOOL_FROM_HAND_M), quat=(0, 1, 0, 0), gravcomp=1.0)
    _set_inertia(hand, 0.7)
    hand.add_joint(
        name="yaw",
        type=mjtJoint.mjJNT_HINGE,
        axis=(0, 0, -1),
        range=(LIMITS.position_low_rad[3], LIMITS.position_high_rad[3]),
        armature=0.05,
    )
    hand.add_site(name="tool", pos=(0, 0, _TOOL_FROM_HAND_M), size=(0.006, 0.006, 0.006), group=4)
    add_capsule(hand, (0.0, -0.065, 0.025), (0.0, 0.065, 0.025), 0.028, _DARK, touches=True)
    return hand


def _add_fingers(hand: mujoco.MjsBody) -> None:
    """Adds two sliding fingers."""
    fingers = add_sliding_fingers(
        hand,
        mount_m=_FINGER_MOUNT_M,
        travel_m=FINGER_TRAVEL_M,
        armature_kg=_FINGER_ARMATURE_KG,
        damping_n_s_m=_FINGER_DAMPING_N_S_M,
    )
    for side, finger in fingers.items():
        _set_inertia(finger, 0.015)
        _add_box(finger, (0.0, 0.009, 0.5 * _TIP_M), (0.009, 0.005, 0.5 * _TIP_M), _GREY)
        _add_pad(finger, f"{side}_pad")


def _add_pad(finger: mujoco.MjsBody, name: str) -> None:
    """Adds the ball at the finger tip that grasps.

    One contact with torsional friction (condim 4) holds what the two of a capsule hold, with 8
    constraint rows instead of 12: a fifth less time a step.
    """
    finger.add_geom(
        name=name,
        type=mjtGeom.mjGEOM_SPHERE,
        pos=(0.0, _PAD_RADIUS_M, _TIP_M),
        size=(_PAD_RADIUS_M, 0.0, 0.0),
        rgba=_GREY,
        contype=0,
        conaffinity=1,
        condim=4,
        friction=(0.5, _PAD_TORSION_M, 0.0001),
    )


def _add_cup(hand: mujoco.MjsBody) -> mujoco.MjsBody:
    """Adds the cup, four balls whose lowest points are its lip, and its stem, which pulls nothing.

    Four contacts hold a face flat, as a ring does, and each is the cheapest that there is. The stem is of the
    hand, since adhesion pulls by all geoms of a body.
    """
    low = _TOOL_FROM_HAND_M - 2 * _CUP_RADIUS_M
    add_capsule(hand, (0.0, 0.0, 0.02), (0.0, 0.0, low), _CUP_RADIUS_M, _GREY, touches=True)
    cup = hand.add_body(name="cup", pos=(0, 0, _TOOL_FROM_HAND_M), gravcomp=1.0)
    _set_inertia(cup, 0.03)
    ring_m = (_CUP_RADIUS_M - _LIP_RADIUS_M) / math.sqrt(2.0)
    for x, y in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        cup.add_geom(
            type=mjtGeom.mjGEOM_SPHERE,
            pos=(x * ring_m, y * ring_m, -_LIP_RADIUS_M),
            size=(_LIP_RADIUS_M, 0.0, 0.0),
            rgba=_ORANGE,
            contype=0,
            conaffinity=1,
            condim=3,
            friction=(0.5, 0.005, 0.0001),
        )
    return cup


def _set_inertia(body: mujoco.MjsBody, mass_kg: float) -> None:
    """Gives a body the inertia of a ball of 5 cm about its origin: slides feel the mass alone."""
    body.explicitinertial = True
    body.mass = mass_kg
    body.ipos = (0.0, 0.0, 0.0)
    body.inertia = [0.4 * mass_kg * 0.05**2] * 3


def _add_box(body: mujoco.MjsBody, at: Sequence[float], half_size_m: Sequence[float], rgba: Rgba) -> None:
    """Adds a drawn box that touches nothing."""
    body.add_geom(
        type=mjtGeom.mjGEOM_BOX, pos=tuple(at), size=tuple(half_size_m), rgba=rgba, contype=0, conaffinity=0
    )


GANTRY = Robot(
    name="gantry",
    arm_joints=_JOINTS,
    arm_actuators=_JOINTS,
    gripper_actuator="gripper",
    gripper_open=FINGER_TRAVEL_M,
    gripper_closed=0.0,
    finger_joints=("finger_joint1", "finger_joint2"),
    tool_site="tool",
    home_rad=(0.48, 0.0, 0.28, 0.0),
    gripper_home=FINGER_TRAVEL_M,
    limits=LIMITS,
    build=build,
)
"""Home: the tool where the Panda's is, fingers opening along y."""

SUCTION_GANTRY = replace(
    GANTRY,
    name="suction_gantry",
    gripper_actuator="suction",
    gripper_open=0.0,
    gripper_closed=1.0,
    finger_joints=(),
    gripper_home=0.0,
    build=build_suction,
)
"""The tool is in the middle of the cup's lip, at the place between the finger tips."""
