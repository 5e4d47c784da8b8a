"""Recordings of an arm: what was sent and measured, on one clock, and a motion that a model refuses."""

from pathlib import Path

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.hal.arm import ArmState
from robot_rl.real.messages import Status
from robot_rl.real.station import load_station
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.sysid.record import RecordConfig, _log_of, _on_our_clock, record

HOME = np.array(load_station("sim_in_process").home_rad)


def status(stamp_ns: int, state: ArmState | None, sent_rad: float) -> Status:
    sent = np.full(7, sent_rad)
    return Status(
        stamp_ns=stamp_ns,
        state=state,
        phase="running",
        plan=0,
        sent_rad=sent,
        sent_gripper=0.04,
        limited=False,
    )


def measured(arrived_ns: int, device_ns: int, position_rad: float) -> ArmState:
    position = np.full(7, position_rad)
    return ArmState(
        stamp_ns=arrived_ns, device_stamp_ns=device_ns, position_rad=position, velocity_rad_s=0 * position
    )


def test_the_arms_own_stamps_are_moved_to_our_clock() -> None:
    """Stamps every 10 ns of a clock that is 500 behind; ways of 3, 7, 4 and 3: the shortest way is 3."""
    device = np.array([1000, 1010, 1020, 1030])
    arrived = device + 500 + np.array([3, 7, 4, 3])
    np.testing.assert_array_equal(_on_our_clock(arrived, device), device + 503)


def test_a_clock_that_stands_does_not_count() -> None:
    arrived = np.array([1503, 1517, 1524, 1533])
    np.testing.assert_array_equal(_on_our_clock(arrived, np.full(4, 1000)), arrived)


def test_each_measurement_counts_once_and_targets_as_they_were_sent() -> None:
    ms = 10**6
    first, second, third = (measured((10 * i + 5) * ms, (10 * i + 900) * ms, 0.1 * i) for i in range(3))
    statuses = [
        status(10 * ms, first, np.nan),  # nothing was sent before the first plan
        status(20 * ms, second, 1.0),
        status(30 * ms, second, 2.0),
        status(40 * ms, third, 3.0),
    ]
    log = _log_of(load_station("sim_in_process"), statuses)
    assert log.target_s == pytest.approx([0.010, 0.020, 0.030])  # after the first status, at 10 ms
    assert log.target_rad[:, 0] == pytest.approx([1.0, 2.0, 3.0])
    assert log.measured_s == pytest.approx([-0.005, 0.005, 0.015])
    assert log.position_rad[:, 6] == pytest.approx([0.0, 0.1, 0.2])
    assert log.gripper == 0.04


def test_an_arm_that_measures_nothing_is_named() -> None:
    with pytest.raises(DeviceError, match="only 0 measurements came"):
        _log_of(load_station("sim_in_process"), [status(1, None, 0.0)])


def test_a_motion_that_is_too_low_or_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    def refused(config: RecordConfig) -> None:
        with ProgressDisplay() as display:
            record(config, display, lambda _: None)

    with pytest.raises(ConfigError, match=r"amplitude_rad: with 0.8, \w+ may get down to -?0\.\d+ m"):
        refused(RecordConfig(station="sim_in_process", amplitude_rad=0.8, out=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"ros2\.command is 'trajectory', allowed: position"):
        refused(RecordConfig(station="sim_arm_trajectory", out=str(tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # seconds of real time
def test_an_arm_in_the_drivers_process_is_recorded(tmp_path: Path) -> None:
    config = RecordConfig(station="sim_in_process", seconds=4.0, out=str(tmp_path))
    with ProgressDisplay() as display:
        path, log, num_limited = record(config, display, lambda _: None)
    assert path.is_file()
    assert log.seconds > 4.5  # half a second of rest before and after
    assert num_limited == 0
    assert log.target_rad[0] == pytest.approx(HOME, abs=1e-3)
    assert np.ptp(log.position_rad, axis=0).min() > 0.05
    assert np.abs(log.position_rad[-1] - HOME).max() < 0.01
