"""System identification: known joints are found again from a recording of them."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import mujoco
import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.core.errors import ConfigError, DatasetError, ModelError, UnknownComponentError
from robot_rl.sim.joint_log import JointLog
from robot_rl.sim.robots.excitation import Chirp, lowest_point
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.measured import Measured, joints_of, with_measured
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.robots.sysid import _mean_held, identify, toolbox

fits = pytest.mark.skipif(find_spec("tabulate") is None, reason="needs the extra `sysid`")
TRUTH = Measured(
    friction_n_m=(3.0, 1.0, 2.0, 0.1),
    damping_n_m_s=(8.0, 4.0, 12.0, 0.3),
    armature_kg_m2=(0.9, 1.5, 0.6, 0.02),
)
HZ = 100.0


def record(robot: Robot, *, delay_s: float, noise_rad: float, seconds: float = 8.0) -> JointLog:
    """Returns what a robot does under a chirp; each target is sent `delay_s` before it acts."""
    model = robot.build().compile()
    arm = [int(model.joint(name).qposadr[0]) for name in robot.arm_joints]
    servos = [model.actuator(name).id for name in robot.arm_actuators]
    data, home = mujoco.MjData(model), np.array(robot.home_rad)
    targets = Chirp(seconds=seconds, amplitude_rad=0.1).targets(robot.limits, home, HZ)
    data.qpos[arm], data.ctrl[servos] = home, home
    steps = round(1.0 / (HZ * model.opt.timestep))
    rng, positions = np.random.default_rng(0), []
    for target in targets:
        positions.append(data.qpos[arm] + noise_rad * rng.standard_normal(len(arm)))
        data.ctrl[servos] = target
        mujoco.mj_step(model, data, steps)
    times_s = np.arange(len(targets)) / HZ
    return JointLog(
        robot="gantry",
        joints=robot.arm_joints,
        target_s=times_s + 100.0,
        target_rad=targets,
        measured_s=times_s + 100.0 + delay_s,
        position_rad=np.array(positions),
        velocity_rad_s=np.zeros_like(targets),
    )


@fits
def test_joints_of_a_recording_are_found_again() -> None:
    gantry = load_robot("gantry")
    log = record(with_measured(gantry, TRUTH), delay_s=0.03, noise_rad=2e-5, seconds=6.0)
    fit = identify(log)
    # Two hundredths of a millimetre of noise: 2 % of all numbers, a tenth of a millisecond.
    for name, truth in TRUTH.given().items():
        assert getattr(fit.measured, name) == pytest.approx(truth, rel=0.02), name
    assert fit.delay_s == pytest.approx(0.03, abs=1e-4)
    assert max(fit.rmse_deg) < 0.1 * min(fit.rmse_before_deg)
    # Noise of 2e-5 is 0.00115 degrees, and all that is left (degrees stand for 1/57 m of a slide).
    assert fit.rmse_deg == pytest.approx((0.00115,) * 4, rel=0.15)
    for name in TRUTH.given():
        half = np.array(fit.interval[name])
        assert (half > 0).all()
        assert (np.abs(np.subtract(getattr(fit.measured, name), TRUTH.given()[name])) < 3 * half).all()


@fits
def test_without_a_delay_a_late_recording_fits_worse() -> None:
    fit = identify(record(load_robot("gantry"), delay_s=0.03, noise_rad=0.0, seconds=4.0), delay=False)
    assert fit.delay_s == 0.0
    assert "delay_s" not in fit.interval
    assert min(fit.rmse_deg) > 0.01  # with a delay nothing is left


@fits
def test_a_recording_that_does_not_suit_is_refused() -> None:
    log = record(load_robot("gantry"), delay_s=0.0, noise_rad=0.0, seconds=4.0)
    with pytest.raises(ModelError, match=r"the recording has 4 joints .* robot panda has 7"):
        identify(log, load_robot("panda"))
    short = replace(log, target_s=log.target_s[:100], target_rad=log.target_rad[:100])
    with pytest.raises(ModelError, match=r"has 1.0 s .* needs 1.6 s or more"):
        identify(short)


def test_a_toolbox_that_lacks_its_packages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco.sysid", ModuleType("mujoco.sysid"))  # as MuJoCo leaves it then
    with pytest.raises(ConfigError, match=r"toolbox needs more packages: pip install -e '.\[sysid\]'"):
        toolbox()


def test_targets_that_change_within_a_step_count_by_their_time() -> None:
    # 0 until 0.006 s, then 1, then 3 from 0.014 s on; steps of 5 ms from 0:
    # [5, 10) has 4 ms of 1: 0.8. [10, 15) has 4 ms of 1 and 1 ms of 3: 1.4. [15, 20) has 3.
    means = _mean_held(
        np.array([0.0, 0.005, 0.010, 0.015]),
        0.005,
        np.array([0.0, 0.006, 0.014]),
        np.array([[0.0], [1.0], [3.0]]),
    )
    assert means[:, 0] == pytest.approx([0.0, 0.8, 1.4, 3.0])


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = record(load_robot("gantry"), delay_s=0.01, noise_rad=0.0, seconds=4.0)
    log.save(tmp_path / "recording.npz")
    again = JointLog.load(tmp_path / "recording.npz")
    assert again.joints == log.joints
    np.testing.assert_array_equal(again.position_rad, log.position_rad)
    (tmp_path / "recording.npz").write_bytes(b"no archive")
    with pytest.raises(DatasetError, match=r"recording: .*`robot-rl sysid record` writes one"):
        JointLog.load(tmp_path / "recording.npz")
    with pytest.raises(DatasetError, match="measured_s does not grow"):
        replace(log, measured_s=log.measured_s[::-1])
    with pytest.raises(DatasetError, match="not finite"):
        replace(log, position_rad=np.full_like(log.position_rad, np.nan))


def test_a_chirp_stays_within_its_share_of_the_limits() -> None:
    robot = load_robot("panda")
    chirp = Chirp(share=0.5)
    targets = chirp.targets(robot.limits, np.array(robot.home_rad), 1000.0)
    assert targets.shape == (20_000, 7)
    np.testing.assert_allclose(targets[0], robot.home_rad)
    assert np.abs(targets - robot.home_rad).max() == pytest.approx(0.2, abs=2e-3)
    # The joints follow their targets with the time constant of the servos, 0.1 s: a low pass.
    joints = np.empty_like(targets)
    joints[0] = here = targets[0]
    for index, target in enumerate(targets[1:], start=1):
        joints[index] = here = here + (target - here) * 1e-3 / robot.limits.lookahead_s
    speed = np.diff(joints, axis=0) * 1000.0
    acceleration = np.diff(speed, axis=0) * 1000.0
    # 6 %: the amplitude itself changes, and fades.
    assert (np.abs(speed).max(axis=0) <= 1.06 * 0.5 * np.array(robot.limits.velocity_rad_s)).all()
    assert (np.abs(acceleration).max(axis=0) <= 1.06 * 0.5 * np.array(robot.limits.acceleration_rad_s2)).all()


def test_the_lowest_part_of_a_motion_is_named() -> None:
    panda = load_robot("panda")
    home_m, _ = lowest_point(panda, np.array([panda.home_rad]))
    lowered = np.array(panda.home_rad)
    lowered[1] += 0.4  # the shoulder bends forward: the hand is 0.48 m away from it, and comes down
    lower_m, part = lowest_point(panda, np.array([panda.home_rad, lowered]))
    assert lower_m < home_m - 0.1
    assert part == "hand"


def test_measured_joints_of_a_file_replace_those_of_the_robot(tmp_path: Path) -> None:
    path = tmp_path / "worn.yaml"
    path.write_text("like: gantry\nmeasured:\n  friction_n_m: [1.0, 2.0, 3.0, 4.0]\n")
    worn, gantry = load_robot(str(path)), load_robot("gantry")
    assert worn.name == "gantry"
    assert joints_of(worn) == replace(joints_of(gantry), friction_n_m=(1.0, 2.0, 3.0, 4.0))
    other = tmp_path / "second.yaml"
    other.write_text("like: worn.yaml\nmeasured:\n  armature_kg_m2: [0.5, 0.6, 0.7, 0.8]\n")
    assert joints_of(load_robot(str(other))).friction_n_m == (1.0, 2.0, 3.0, 4.0)
    assert joints_of(load_robot(str(other))).armature_kg_m2 == (0.5, 0.6, 0.7, 0.8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: gantry\nmeasured: {friction_n_m: [1.0]}\n", "measured.friction_n_m has 1 entries for 4"),
        ("like: gantry\nmeasured: {friction_n_m: [1, -1, 1, 1]}\n", r"allowed: numbers from 0"),
        ("like: gantry\nmeasured: {fricton_n_m: [1, 1, 1, 1]}\n", r"fricton_n_m.*friction_n_m"),
        ("like: gantry\nmeasured: [1, 2]\n", r"measured: got \[1, 2\], allowed: friction_n_m, "),
        ("like: gantry\nhome_rad: [0, 0, 0]\n", "unknown keys home_rad, allowed: like, measured"),
        ("like: gantri\n", "Did you mean 'gantry'"),
        ("like: self.yaml\n", "names a file that leads back here"),
    ],
)
def test_mistakes_in_a_measured_robot_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "self.yaml"
    path.write_text(text)
    with pytest.raises((ModelError, ConfigError, UnknownComponentError), match=message):
        load_robot(str(path))


@pytest.mark.parametrize("words", [["--json"], ["fitt"]])
def test_a_command_without_its_sub_command_is_answered(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sysid", *words]) == 2
    assert "allowed: record, fit. `robot-rl sysid --help`" in capsys.readouterr().err
