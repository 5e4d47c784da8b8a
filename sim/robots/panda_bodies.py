"""Bodies with Pandas: one on a base that drives in the plane, and two next to one another.

The arms are those of `panda.py`, unchanged. Of the base no real machine is meant: it has two slides and a yaw
joint, 30 kg, and servos that close their lead in kd / kp = 0.1 s, as the Panda's do.

Elements of `mobile_panda`: those of the Panda, with `arm_` before their names; bodies `base`, `base_x`,
`base_y`, `base_yaw`; joints and actuators of the last three names. Elements of `two_pandas`: those of the
Panda twice, with `left_` and `right_` before their names, on the body `torso`; left is towards y.
"""

import mujoco
from mujoco import mjtGeom, mjtJoint

from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.robots import panda
from robot_rl.sim.robots.panda import PANDA
from robot_rl.sim.robots.physics import empty_spec
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.servo import add_position_servo
from robot_rl.sim.robots.two_arms import Place, prefixed, side_by_side

_ARM = "arm_"
_RAISED = prefixed(PANDA, _ARM)
"""The arm on the base."""
_BASE_JOINTS = ("base_x", "base_y", "base_yaw")
_BASE_AXES = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_BASE_KP, _BASE_KD = (20000.0, 20000.0, 2000.0), (2000.0, 2000.0, 200.0)
_BASE_MASS_KG, _BASE_INERTIA = 10.0, (0.4, 0.4, 0.6)
"""Of each of the three bodies."""
_BASE_HALF_M = (0.28, 0.22, 0.14)
BASE_HEIGHT_M = 0.3
"""Of the Panda's own base above the floor."""
APART_M = 0.7
"""Between the bases of two arms, along y."""
_GREY = (0.35, 0.37, 0.40, 1.0)

MOBILE_LIMITS = SafetyLimits(
    position_low_rad=(-2.0, -2.0, -3.0, *panda.LIMITS.position_low_rad),
    position_high_rad=(2.0, 2.0, 3.0, *panda.LIMITS.position_high_rad),
    velocity_rad_s=(1.0, 1.0, 1.5, *panda.LIMITS.velocity_rad_s),
    acceleration_rad_s2=(5.0, 5.0, 7.5, *panda.LIMITS.acceleration_rad_s2),
    effort_n_m=(2000.0, 2000.0, 200.0, *panda.LIMITS.effort_n_m),
)


def build_mobile() -> mujoco.MjSpec:
    """Returns the Panda on a base that drives: the base at the origin, z up, no scene."""
    spec = empty_spec("mobile_panda")
    parent = spec.worldbody.add_body(name="base")
    for index, name in enumerate(_BASE_JOINTS):
        parent = parent.add_body(name=name)
        parent.explicitinertial = True
        parent.mass, parent.inertia, parent.ipos = _BASE_MASS_KG, _BASE_INERTIA, (0.0, 0.0, 0.15)
        parent.add_joint(
            name=name,
            type=mjtJoint.mjJNT_HINGE if name == "base_yaw" else mjtJoint.mjJNT_SLIDE,
            axis=_BASE_AXES[index],
            range=(MOBILE_LIMITS.position_low_rad[index], MOBILE_LIMITS.position_high_rad[index]),
        )
    parent.add_geom(
        type=mjtGeom.mjGEOM_BOX,
        pos=(0.0, 0.0, 0.5 * BASE_HEIGHT_M),
        size=_BASE_HALF_M,
        rgba=_GREY,
        contype=0,
        conaffinity=0,
    )
    rows = zip(_BASE_JOINTS, _BASE_KP, _BASE_KD, MOBILE_LIMITS.effort_n_m[:3], strict=True)
    for name, kp, kd, effort in rows:
        add_position_servo(spec, name=name, joint=spec.joint(name), kp=kp, kd=kd, effort=effort)
    spec.attach(panda.build(), frame=parent.add_frame(pos=(0.0, 0.0, BASE_HEIGHT_M)), prefix=_ARM)
    return spec


MOBILE_PANDA = Robot(
    name="mobile_panda",
    kind="mobile_arm",
    arm_joints=(*_BASE_JOINTS, *_RAISED.arm_joints),
    arm_actuators=(*_BASE_JOINTS, *_RAISED.arm_actuators),
    arms=_RAISED.all_arms,
    effectors=_RAISED.all_effectors,
    finger_joints=_RAISED.finger_joints,
    tool_site=_RAISED.tool_site,
    home_rad=(0.0, 0.0, 0.0, *PANDA.home_rad),
    limits=MOBILE_LIMITS,
    build=build_mobile,
)
TWO_PANDAS = side_by_side(
    "two_pandas",
    (PANDA, PANDA),
    (
        Place(robot=PANDA.name, pos_m=(0.0, 0.5 * APART_M, 0.0)),
        Place(robot=PANDA.name, pos_m=(0.0, -0.5 * APART_M, 0.0)),
    ),
)
"""Their middle is the origin, and both look along x."""
