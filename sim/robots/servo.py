"""Servos, sliding fingers, suction cups and capsules, written once for every robot."""

from collections.abc import Sequence

import mujoco
import numpy as np

_CUP_SOLREF, _CUP_SOLIMP, _CUP_SOLMIX = (0.01, 1.0), (0.95, 0.99), 1000.0
"""Of a cup's contacts; the last is their weight against those of the thing, whose friction still counts."""


def add_position_servo(
    spec: mujoco.MjSpec, *, name: str, joint: mujoco.MjsJoint, kp: float, kd: float, effort: float
) -> None:
    """Adds `force = kp (control - position) - kd velocity`, limited to the effort and the joint's range.

    A joint transmission, not a tendon: its stiffness stays on the diagonal of the `discrete`
    integrator's matrix, where it costs nothing.
    """
    gain, bias = np.zeros(mujoco.mjNGAIN), np.zeros(mujoco.mjNBIAS)
    gain[0], bias[1], bias[2] = kp, -kp, -kd
    spec.add_actuator(
        name=name,
        target=joint.name,
        trntype=mujoco.mjtTrn.mjTRN_JOINT,
        gaintype=mujoco.mjtGain.mjGAIN_FIXED,
        biastype=mujoco.mjtBias.mjBIAS_AFFINE,
        gainprm=gain,
        biasprm=bias,
        ctrlrange=joint.range,
        ctrllimited=True,
        forcerange=(-effort, effort),
        forcelimited=True,
    )


def add_finger_coupling(spec: mujoco.MjSpec, *, leader: str, follower: str) -> None:
    """Makes the follower's position equal the leader's, stiffly (5 ms)."""
    coupling = spec.add_equality(
        name=f"{follower}_follows",
        type=mujoco.mjtEq.mjEQ_JOINT,
        objtype=mujoco.mjtObj.mjOBJ_JOINT,
        name1=follower,
        name2=leader,
        solref=(0.005, 1.0),
    )
    coupling.data[:2] = (0.0, 1.0)


def add_sliding_fingers(
    hand: mujoco.MjsBody, *, mount_m: float, travel_m: float, armature_kg: float, damping_n_s_m: float
) -> dict[str, mujoco.MjsBody]:
    """Adds `left_finger` and `right_finger` on `finger_joint1` and `finger_joint2`; returns them by side."""
    fingers: dict[str, mujoco.MjsBody] = {}
    for index, (side, quat) in enumerate((("left", (1, 0, 0, 0)), ("right", (0, 0, 0, 1)))):
        finger = hand.add_body(name=f"{side}_finger", pos=(0, 0, mount_m), quat=quat, gravcomp=1.0)
        finger.add_joint(
            name=f"finger_joint{index + 1}",
            type=mujoco.mjtJoint.mjJNT_SLIDE,
            axis=(0, 1, 0),
            range=(0.0, travel_m),
            armature=armature_kg,
            damping=np.array([damping_n_s_m, 0.0, 0.0]),
        )
        fingers[side] = finger
    return fingers


def add_suction(spec: mujoco.MjSpec, *, name: str, body: mujoco.MjsBody, force_n: float) -> None:
    """Adds `force = control force_n` that pulls a body and what its own geoms touch together.

    MuJoCo's adhesion: all contacts share the force alike, and without one there is none.
    """
    set_cup_contacts(body)
    gain = np.zeros(mujoco.mjNGAIN)
    gain[0] = force_n
    spec.add_actuator(
        name=name,
        target=body.name,
        trntype=mujoco.mjtTrn.mjTRN_BODY,
        gaintype=mujoco.mjtGain.mjGAIN_FIXED,
        biastype=mujoco.mjtBias.mjBIAS_NONE,
        gainprm=gain,
        ctrlrange=(0.0, 1.0),
        ctrllimited=True,
    )


def set_cup_contacts(body: mujoco.MjsBody) -> None:
    """Makes the contacts of a suction cup stiff, and only of what touches it.

    By the usual ones 20 N pull a cube of 25 g in by 4 mm, by these 0.5 mm. In a `gap` things would be drawn
    before they touch: 20 N move 50 g by 10 mm in one time step of 5 ms, through the lip.
    """
    for geom in body.geoms:
        geom.solref, geom.solimp[:2], geom.solmix = _CUP_SOLREF, _CUP_SOLIMP, _CUP_SOLMIX
        geom.margin = geom.gap = 0.0


def add_capsule(
    body: mujoco.MjsBody,
    start: Sequence[float],
    end: Sequence[float],
    radius_m: float,
    rgba: tuple[float, float, float, float],
    *,
    touches: bool = False,
) -> None:
    """Adds a capsule that may touch the scene, never another geom of a robot (contype 0)."""
    body.add_geom(
        type=mujoco.mjtGeom.mjGEOM_CAPSULE,
        fromto=(*start, *end),
        size=(radius_m, 0.0, 0.0),
        rgba=rgba,
        contype=0,
        conaffinity=int(touches),
    )
