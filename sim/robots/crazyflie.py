"""The quadrotor Crazyflie 2.1, built in code from published numbers; no meshes.

Sources: mass, inertia, places of the rotors, largest speed of a rotor, torque per thrust and time constant
of the motors are those of Eschmann, Albani, Loianno, "Learning to Fly in Seconds", RA-L 2024 (arXiv
2311.13081), and of the simulator that belongs to it. Thrust as the square of the speed, and the ratio of
torque and thrust, go back to Foerster, "System Identification of the Crazyflie 2.0 Nano Quadrocopter",
ETH Zurich, 2015.

Deviations: the lag is of the thrust, not of a rotor's speed, so that an action is linear in force; no drag.

Elements: body `frame` on the free joint `frame`, x forward, z up; actuators `rotor1`..`rotor4`, from the
front right counter-clockwise, control and activation in newtons; sensors `rotor1.thrust`.. in newtons and
`gyro` (rad/s, in the body); site `tool` in the middle of the body.
"""

import mujoco
from mujoco import mjtGeom, mjtObj

from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.robots.robot import Effector, Robot

MASS_KG = 0.027
INERTIA_KG_M2 = (3.85e-6, 3.85e-6, 5.9675e-6)
ARM_M = 0.028
"""Distance of a rotor from the middle along x, and along y."""
MOTOR_TIME_S = 0.15
"""After this time a rotor has done 63 % of a step of its set-point."""
MAX_THRUST_N = 3.16e-10 * 21702.0**2
"""Of one rotor: 0.149 N, at its largest speed in revolutions a minute."""
TORQUE_M = 0.005964552
"""Reaction torque (N m) of one newton of thrust."""
HOVER_THRUST_N = MASS_KG * 9.81 / 4
"""Of one rotor."""

_ROTORS = (  # place along x and y, and sense of the reaction torque: +1 turns the body to the left
    (ARM_M, -ARM_M, -1),
    (ARM_M, ARM_M, 1),
    (-ARM_M, ARM_M, -1),
    (-ARM_M, -ARM_M, 1),
)
_NAMES = tuple(f"rotor{number}" for number in range(1, 5))
_DARK, _ORANGE, _GREY = (0.16, 0.17, 0.19, 1.0), (0.90, 0.50, 0.15, 1.0), (0.55, 0.57, 0.60, 0.6)
_GROUND_RADIUS_M = 0.05


def build() -> mujoco.MjSpec:
    """Returns the quadrotor alone: its body at the origin, z up, no scene."""
    spec = mujoco.MjSpec()
    spec.modelname = "crazyflie"
    spec.compiler.degree = False
    physics_options(spec)
    frame = spec.worldbody.add_body(name="frame")
    frame.add_freejoint(name="frame")
    frame.explicitinertial = True
    frame.mass, frame.inertia, frame.ipos = MASS_KG, INERTIA_KG_M2, (0.0, 0.0, 0.0)
    frame.add_site(name="tool", size=(0.006, 0.006, 0.006), group=4)
    _add_shapes(frame)
    for name, (x, y, sense) in zip(_NAMES, _ROTORS, strict=True):
        frame.add_site(name=name, pos=(x, y, 0.0), size=(0.004, 0.004, 0.004), group=4)
        rotor = spec.add_actuator(
            name=name,
            target=name,
            trntype=mujoco.mjtTrn.mjTRN_SITE,
            gear=(0.0, 0.0, 1.0, 0.0, 0.0, sense * TORQUE_M),
            dyntype=mujoco.mjtDyn.mjDYN_FILTEREXACT,
            ctrlrange=(0.0, MAX_THRUST_N),
            ctrllimited=True,
        )
        rotor.dynprm[0] = MOTOR_TIME_S
        spec.add_sensor(
            name=f"{name}.thrust",
            type=mujoco.mjtSensor.mjSENS_ACTUATORFRC,
            objtype=mjtObj.mjOBJ_ACTUATOR,
            objname=name,
        )
    spec.add_sensor(name="gyro", type=mujoco.mjtSensor.mjSENS_GYRO, objtype=mjtObj.mjOBJ_SITE, objname="tool")
    return spec


def _add_shapes(frame: mujoco.MjsBody) -> None:
    """Adds board, motors and discs of the rotors, which are drawn, and the ball that touches the scene."""
    frame.add_geom(type=mjtGeom.mjGEOM_BOX, size=(0.017, 0.017, 0.008), rgba=_DARK, contype=0, conaffinity=0)
    nose = {"pos": (0.02, 0.0, 0.0), "size": (0.005, 0.005, 0.004)}
    frame.add_geom(type=mjtGeom.mjGEOM_BOX, rgba=_ORANGE, contype=0, conaffinity=0, **nose)
    for x, y, _ in _ROTORS:
        for radius_m, at_m, half_m, rgba in ((0.005, 0.0, 0.009, _DARK), (0.023, 0.011, 0.001, _GREY)):
            frame.add_geom(
                type=mjtGeom.mjGEOM_CYLINDER,
                pos=(x, y, at_m),
                size=(radius_m, half_m, 0.0),
                rgba=rgba,
                contype=0,
                conaffinity=0,
            )
    frame.add_geom(
        type=mjtGeom.mjGEOM_SPHERE,
        size=(_GROUND_RADIUS_M, 0.0, 0.0),
        group=3,
        contype=0,
        conaffinity=1,
    )


CRAZYFLIE = Robot(
    name="crazyflie",
    kind="rotors",
    arm_joints=(),
    arm_actuators=(),
    effectors=tuple(
        Effector(name=name, actuator=name, low=0.0, high=MAX_THRUST_N, home=HOVER_THRUST_N) for name in _NAMES
    ),
    tool_site="tool",
    home_rad=(),
    limits=SafetyLimits(
        position_low_rad=(),
        position_high_rad=(),
        velocity_rad_s=(),
        acceleration_rad_s2=(),
        effort_n_m=(),
    ),
    build=build,
)
"""Home: all rotors carry a quarter of the weight."""
