"""Position servos and finger coupling, written once for every robot."""

import mujoco
import numpy as np


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
