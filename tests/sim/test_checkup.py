"""The checks of an arm: numbers of two joints by hand, and what a good, a weak and a distant arm are told."""

from collections.abc import Callable
from pathlib import Path

import mujoco
import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.checkup import Checkup, check_robot
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.physics import physics_options
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.servo import add_position_servo
from robot_rl.sim.robots.servo_check import ServoCheck
from tests.arms import write_arm

LIFT_KG, BOB_KG, ARM_M = 2.0, 1.0, 0.3
LIFT_KP, LIFT_KD, SWING_KP, SWING_KD = 1200.0, 120.0, 40.0, 4.0


def lift_and_swing(gravcomp: float = 1.0, *, is_motor: bool = False) -> Robot:
    """A vertical slide of 2 kg that carries a level arm: a bob of 1 kg, 0.3 m from its hinge."""

    def build() -> mujoco.MjSpec:
        spec = mujoco.MjSpec()
        spec.compiler.degree = False
        physics_options(spec)
        lift = spec.worldbody.add_body(name="lift", gravcomp=gravcomp)
        arm = lift.add_body(name="arm", gravcomp=gravcomp)
        slide, hinge = mujoco.mjtJoint.mjJNT_SLIDE, mujoco.mjtJoint.mjJNT_HINGE
        lift.add_joint(name="lift", type=slide, axis=(0, 0, 1), range=(-0.5, 0.5))
        arm.add_joint(name="swing", type=hinge, axis=(0, 1, 0), range=(-1, 1), armature=0.01)
        for body, mass, at in ((lift, LIFT_KG, (0.0, 0.0, 0.0)), (arm, BOB_KG, (ARM_M, 0.0, 0.0))):
            body.explicitinertial, body.mass, body.ipos = True, mass, at
            body.inertia = [1e-9, 1e-9, 1e-9]
        arm.add_site(name="tool", pos=(ARM_M, 0, 0), quat=(0, 1, 0, 0))
        for name, kp, kd, effort in (("lift", LIFT_KP, LIFT_KD, 100), ("swing", SWING_KP, SWING_KD, 10)):
            add_position_servo(spec, name=name, joint=spec.joint(name), kp=kp, kd=kd, effort=effort)
        if is_motor:
            spec.actuator("swing").biasprm = np.zeros(mujoco.mjNBIAS)
        return spec

    limits = SafetyLimits(
        position_low_rad=(-0.5, -1.0),
        position_high_rad=(0.5, 1.0),
        velocity_rad_s=(1.0, 1.0),
        acceleration_rad_s2=(10.0, 10.0),
        effort_n_m=(100.0, 10.0),
    )
    names = ("lift", "swing")
    return Robot(
        name="lift_and_swing", arm_joints=names, arm_actuators=names, tool_site="tool", home_rad=(0.0, 0.0),
        limits=limits, build=build,
    )  # fmt: skip


def test_sag_is_weight_over_stiffness() -> None:
    lift, swing = ServoCheck(lift_and_swing(gravcomp=0.0)).joints()
    # The lift carries 3 kg: 29.43 N over 1200 N/m. The bob hangs with 2.943 N m, heaviest level: where
    # 40 x = 2.943 cos x, that is x = 0.07338.
    assert (lift.weight, swing.weight) == (pytest.approx(29.43), pytest.approx(2.943))
    assert lift.sag == pytest.approx(29.43 / 1200, rel=1e-3)
    assert swing.sag == pytest.approx(0.07338, rel=1e-3)
    assert (lift.unit, swing.unit) == ("m", "rad")
    assert (lift.sag, swing.sag) == (lift.sag_uncompensated, swing.sag_uncompensated)


def test_weight_that_is_compensated_sags_only_in_the_last_column() -> None:
    lift, swing = ServoCheck(lift_and_swing()).joints()
    assert max(lift.sag, swing.sag) < 1e-9
    assert lift.sag_uncompensated == pytest.approx(29.43 / 1200, rel=1e-3)
    assert swing.sag_uncompensated == pytest.approx(0.07338, rel=1e-3)


def test_a_load_is_not_compensated() -> None:
    # 0.1 kg: 0.981 N / 1200 N/m = 0.8175 mm, and 0.2943 N m / 40 N m/rad = 7.3575 mrad on 0.3 m: 2.207 mm.
    assert 1e3 * ServoCheck(lift_and_swing()).load_sag_m() == pytest.approx(0.8175 + 2.207, rel=1e-2)


def test_a_critically_damped_step() -> None:
    # M = 3 kg, kp = 400 M, kd = 40 M: x(t) = 1 - (1 + 20 t) exp(-20 t) is 0.632 at 20 t = 2.146, and within a
    # tenth at 20 t = 3.890. The integrator is implicit, so a little slower: at most two of its steps of 5 ms.
    lift, _ = ServoCheck(lift_and_swing()).joints()
    assert lift.lag_s == pytest.approx(0.1073, abs=0.012)
    assert lift.settle_s == pytest.approx(0.1945, abs=0.02)
    assert lift.overshoot < 0.01
    assert (lift.kp, lift.kd) == (1200.0, 120.0)


def test_the_block_is_computed_from_the_masses() -> None:
    # Armature: at least a ninth of the inertia, rounded up; kd rounded down, so that it stays at 400 x the
    # armature or less. Lift: 3 kg + 0.34, kd = 40 x 3.34 = 133.6, kp = ten times that.
    # Swing: 1 kg x 0.09 m2 and an armature of 0.02, the least: kd = 40 x 0.11 = 4.4.
    assert ServoCheck(lift_and_swing()).servos_block().splitlines() == [
        "  servos:",
        "    kp: [1300, 44]",
        "    kd: [130, 4.4]",
        "    armature_kg_m2: [0.34, 0.02]",
    ]


def test_a_motor_is_no_servo() -> None:
    assert ServoCheck(lift_and_swing()).unlike_servos() == []
    assert ServoCheck(lift_and_swing(is_motor=True)).unlike_servos() == ["swing"]


def states(found: Checkup) -> dict[str, str]:
    return {check.name: check.state for check in found.checks}


def test_a_good_arm_passes(tmp_path: Path) -> None:
    found = check_robot(str(write_arm(tmp_path)), ["push_cube"])
    assert set(states(found).values()) == {"ok"}
    assert (found.robot, found.servos, len(found.joints)) == ("ur", "", 6)


@pytest.mark.parametrize("name", ["panda", "gantry"])
def test_the_shipped_robots_pass(name: str) -> None:
    assert set(states(check_robot(name, ["reach"])).values()) == {"ok"}


def weak(folder: Path) -> Path:
    kp, kd = (10.0,) * 3 + (3.0,) * 3, (1.0,) * 3 + (0.3,) * 3
    return write_arm(folder, fingers=True, servos=None, kp=kp, kd=kd)


def with_block(path: Path, block: str) -> Path:
    """Puts the block where the doctor says: under `model:`."""
    path.write_text(path.read_text().replace("model:\n", f"model:\n{block}\n"))
    return path


def test_weak_servos_and_a_finger_that_nothing_moves_are_told(tmp_path: Path) -> None:
    found = check_robot(str(weak(tmp_path)), ["reach"])
    checks = {check.name: check for check in found.checks}
    assert (checks["servos"].state, checks["gripper"].state) == ("fail", "fail")
    assert "pan does not settle within 2.5 s of a step" in checks["servos"].detail
    assert "under 0.1 kg the tool sinks by 3" in checks["servos"].detail  # 37 mm
    assert checks["gripper"].detail.startswith("finger_right does not follow grip")
    mended = ServoCheck(load_robot(str(with_block(weak(tmp_path), found.servos))))
    assert mended.idle_fingers() == []
    assert all(row.lag_s < 0.15 and row.settle_s < 0.3 and row.overshoot < 0.1 for row in mended.joints())


@pytest.mark.slow
def test_the_block_makes_a_weak_arm_pick(tmp_path: Path) -> None:
    found = check_robot(str(weak(tmp_path)), ["pick_cube"])
    assert states(found)["pick_cube: expert"] == "fail"  # 19 %
    found = check_robot(str(with_block(weak(tmp_path), found.servos)), ["pick_cube"])
    assert set(states(found).values()) == {"ok"}  # 100 %


def test_an_arm_out_of_reach_is_told_how_far(tmp_path: Path) -> None:
    found = check_robot(str(write_arm(tmp_path, base_m="-0.5 0 0")), ["reach"])
    last = found.checks[-1]
    assert (last.name, last.state) == ("reach: reach", "fail")
    assert last.detail.startswith("0% of 16 places within reach, (0.65, ")
    assert last.detail.endswith("m not by 55 cm")


def replaced(*pairs: tuple[str, str]) -> Callable[[Path], str]:
    def change(path: Path) -> str:
        text = path.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
        return str(path)

    return change


@pytest.mark.parametrize(
    ("change", "name", "state", "says"),
    [
        (replaced(("approach_axis: [0, 1, 0]", "approach_axis: [0, 0, 1]")), "home", "fail", "its z axis"),
        (replaced(("-0.2829]", "3.195]")), "home", "fail", "its x axis"),
        (replaced(("velocity_rad_s: [3.14, 3.14, 3.14", "velocity_rad_s: [0.1, 0.1, 0.1")), "reach: speed",
         "fail", "s of 2.5 s at the joints' speed limits"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    change: Callable[[Path], str], name: str, state: str, says: str, tmp_path: Path
) -> None:
    found = check_robot(change(write_arm(tmp_path)), ["reach"])
    (check,) = [check for check in found.checks if check.name == name]
    assert (check.state, says in check.detail) == (state, True), check


def test_joints_that_are_slow_are_not_taken_for_short(tmp_path: Path) -> None:
    slow = replaced(("velocity_rad_s: [3.14, 3.14, 3.14", "velocity_rad_s: [0.05, 0.05, 0.05"))
    checks = states(check_robot(slow(write_arm(tmp_path)), ["push_cube"]))
    assert (checks["push_cube: reach"], checks["push_cube: speed"]) == ("ok", "fail")


def test_a_task_that_needs_a_gripper_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="robot: ur has no gripper, and stack_cube needs one"):
        check_robot(str(write_arm(tmp_path)), ["reach", "stack_cube"])
