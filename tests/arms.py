"""An arm that is not ours: six joints, lengths, masses and torques of a Universal Robots UR5e, in capsules.

Written as an MJCF and a robot file, as its owner would have them: with fingers or a bare tool, with the
MJCF's own servos or those of a `servos:` block.
"""

from pathlib import Path

JOINTS = ("pan", "lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
HOME_RAD = (-0.2829, -1.1458, 1.3258, 1.3908, 1.5708, -0.2829)
"""The tool 0.28 m above the table at x = 0.48 m, pointing down."""
EFFORT_N_M = (150.0, 150.0, 150.0, 28.0, 28.0, 28.0)

SERVOS = {
    "kp": (400, 400, 400, 120, 120, 50),
    "kd": (40, 40, 40, 12, 12, 5),
    "armature_kg_m2": (0.1, 0.1, 0.1, 0.1, 0.1, 0.1),
}
"""kp / kd = 10 / s, kd at most 2 x armature / time step: what the tasks are made for."""

_FINGER = """
<body name="finger_{side}" pos="{x} 0.14 0">
 <joint name="finger_{side}" type="slide" axis="{sign} 0 0" range="0 0.04" armature="0.1" damping="10"/>
 <inertial pos="0 0.02 0" mass="0.02" diaginertia="1e-5 1e-5 1e-5"/>
 <geom type="capsule" fromto="{x} 0.06 -0.0075 {x} 0.06 0.0075" size="0.004" friction="0.5 0.005 0.0001"/>
</body>
"""


def write_arm(
    folder: Path,
    *,
    name: str = "ur",
    fingers: bool = False,
    servos: dict[str, tuple[float, ...]] | None = SERVOS,
    kp: tuple[float, ...] = SERVOS["kp"],
    kd: tuple[float, ...] = SERVOS["kd"],
    base_m: str = "0 0 0",
) -> Path:
    """Writes the MJCF and the robot file; returns the latter's path.

    Args:
        folder: where.
        name: of the robot and of its files.
        fingers: two of them, or a rod of the same length.
        servos: of the robot file's block; none, and so the MJCF's own servos, if None.
        kp: of the MJCF's servos.
        kd: of the MJCF's servos.
        base_m: where the arm stands: the tasks expect it at the origin.
    """
    (folder / f"{name}.xml").write_text(_mjcf(fingers, kp, kd, base_m))
    path = folder / f"{name}.yaml"
    path.write_text(_yaml(name, fingers, servos))
    return path


def _mjcf(fingers: bool, kp: tuple[float, ...], kd: tuple[float, ...], base_m: str) -> str:
    hand = '<geom type="capsule" fromto="0 0.1 0 0 0.192 0" size="0.008" mass="0.1"/>'
    if fingers:
        hand = _FINGER.format(side="left", x=0.0, sign=1) + _FINGER.format(side="right", x=0.0, sign=-1)
        hand += '<geom type="capsule" fromto="-0.06 0.13 0 0.06 0.13 0" size="0.02" mass="0.5"/>'
    actuators = [
        f'<position name="{joint}" joint="{joint}" kp="{p}" kv="{d}" forcerange="{-e} {e}" inheritrange="1"/>'
        for joint, p, d, e in zip(JOINTS, kp, kd, EFFORT_N_M, strict=True)
    ]
    if fingers:
        actuators.append('<position name="grip" joint="finger_left" kp="500" kv="50" inheritrange="1"/>')
    return f"""
<mujoco>
<compiler angle="radian"/>
<default><joint range="-3.2 3.2" armature="0.1"/></default>
<worldbody><body name="base" pos="{base_m}">
 <geom type="capsule" fromto="0 0 0.03 0 0 0.1" size="0.07" mass="4"/>
 <body name="shoulder" pos="0 0 0.163"><joint name="pan" axis="0 0 1"/>
  <geom type="capsule" fromto="0 0 0 0 0.1 0" size="0.06" mass="3.76" contype="0" conaffinity="0"/>
  <body name="upper_arm" pos="0 0.138 0"><joint name="lift" axis="0 1 0"/>
   <geom type="capsule" fromto="0 0 0 0.425 0 0" size="0.05" mass="8.06" contype="0" conaffinity="0"/>
   <body name="forearm" pos="0.425 -0.131 0"><joint name="elbow" axis="0 1 0"/>
    <geom type="capsule" fromto="0 0 0 0.392 0 0" size="0.04" mass="2.85" contype="0" conaffinity="0"/>
    <body name="wrist_1" pos="0.392 0 0"><joint name="wrist_1" axis="0 1 0"/>
     <geom type="capsule" fromto="0 0 0 0 0.127 0" size="0.04" mass="1.37"/>
     <body name="wrist_2" pos="0 0.127 0"><joint name="wrist_2" axis="0 0 -1"/>
      <geom type="capsule" fromto="0 0 0 0 0 -0.1" size="0.04" mass="1.3"/>
      <body name="wrist_3" pos="0 0 -0.1"><joint name="wrist_3" axis="0 1 0"/>
       <geom type="capsule" fromto="0 0.03 0 0 0.08 0" size="0.03" mass="0.365"/>
       {hand}
 </body></body></body></body></body></body></body></worldbody>
<actuator>{" ".join(actuators)}</actuator>
</mujoco>
"""


def _yaml(name: str, fingers: bool, servos: dict[str, tuple[float, ...]] | None) -> str:
    lines = [
        f"name: {name}",
        "model:",
        f"  file: {name}.xml",
        "  tool: {body: wrist_3, pos_m: [0, 0.2, 0], approach_axis: [0, 1, 0], opening_axis: [1, 0, 0]}",
    ]
    if servos is not None:
        lines += ["  servos:", *(f"    {key}: {list(values)}" for key, values in servos.items())]
        if fingers:
            lines += ["    gripper_kp: 500", "    gripper_kd: 50", "    gripper_effort: 100"]
            lines += ["    gripper_armature: 0.1"]
    if fingers:
        lines += ["gripper_actuator: grip", "gripper_open: 0.04", "gripper_closed: 0", "gripper_home: 0.04"]
        lines += ["finger_joints: [finger_left, finger_right]"]
    return "\n".join(
        [
            *lines,
            f"arm_joints: {list(JOINTS)}",
            f"arm_actuators: {list(JOINTS)}",
            "tool_site: tool",
            f"home_rad: {list(HOME_RAD)}",
            "limits:",
            f"  position_low_rad: {[-3.2] * 6}",
            f"  position_high_rad: {[3.2] * 6}",
            f"  velocity_rad_s: {[3.14] * 6}",
            f"  acceleration_rad_s2: {[15.0] * 6}",
            f"  effort_n_m: {list(EFFORT_N_M)}",
            "",
        ]
    )
