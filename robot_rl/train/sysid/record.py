"""Moves an arm of a station by a chirp, behind its supervisor, and records what it was sent and did.

    home -> start -> plans, each replaces the one before at the same times -> pause -> park

The supervisor holds each target by its own clock, so a late plan changes nothing. What is recorded is what it
sent, after safety. n arm joints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robot_rl.core.errors import ConfigError, DeviceError, SafetyStopError, require
from robot_rl.real.claim import device_of
from robot_rl.real.client import ArmClient
from robot_rl.real.launch import StationProcesses
from robot_rl.real.messages import Plan, Status
from robot_rl.real.station import StationConfig, load_station
from robot_rl.sched.leases import LeaseStore
from robot_rl.sim.joint_log import Array, JointLog
from robot_rl.sim.robots.excitation import Chirp, lowest_point
from robot_rl.sim.robots.loading import load_robot
from robot_rl.telemetry.progress import PhaseProgress, ProgressDisplay
from robot_rl.train.record import new_folder

BY = "sysid"
_PLAN_S = 0.5
"""How far a plan reaches: less than the supervisor's longest silence of a policy."""
_EVERY_S = 0.1
_STILL_S = 0.5
"""Rest before and after, so that the simulation begins at rest."""
_CHECKED_HZ = 20.0
_CLOCKS_APART = 0.01
"""Largest difference of the rates of the arm's clock and of ours; a simulated clock may stand still."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig(Chirp):
    """How an arm is moved, and where."""

    station: str
    """A shipped station, or the path of a station file."""
    clearance_m: float = 0.04
    """How far above the base plane all moving parts have to stay, by the robot's model."""
    out: str = "runs"
    lease_wait_s: float = 0.0
    """How long to wait for an arm that another program holds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lease_wait_s >= 0, "lease_wait_s", self.lease_wait_s, "0 or more")


def record(
    config: RecordConfig, display: ProgressDisplay, ask: Callable[[str], None]
) -> tuple[Path, JointLog, int]:
    """Moves the arm; returns the file of the recording, the recording, and how many targets safety changed.

    Args:
        config: what and where.
        display: shows progress.
        ask: asks a person whether the space of a real arm is free.

    Raises:
        ConfigError: the motion would bring a part too low.
        RobotRLError: the arm is not there, or was stopped; the message says what to do.
    """
    station = load_station(config.station)
    hz = station.supervisor.command_hz
    if station.ros2 is not None and station.ros2.command != "position":
        raise ConfigError(
            f"station {station.name}: ros2.command is {station.ros2.command!r}, allowed: position. What an "
            "arm is sent is recorded target by target; copy the station file and change it there."
        )
    targets = config.targets(station.limits, np.asarray(station.home_rad), hz)
    _check_clearance(config, station, targets[:: max(1, round(hz / _CHECKED_HZ))])
    with LeaseStore().hold(device_of(station), holder="sysid", wait_s=config.lease_wait_s) as lease:
        folder = new_folder(config.out, f"sysid-{station.name}")
        display.message(f"recording: {folder}")
        processes = StationProcesses(config.station, folder / "station", token=lease.token)
        with processes, processes.client() as arm:
            if station.real:
                ask(_warning(config, station))
            with display.phase("sysid", round(config.seconds), unit="seconds") as progress:
                statuses = _move(arm, station, targets, progress)
            arm.control("pause", by=BY)
            arm.control("park", by=BY)
    log, num_limited = _log_of(station, statuses), sum(status.limited for status in statuses)
    path = folder / "recording.npz"
    log.save(path)
    return path, log, num_limited


def _check_clearance(config: RecordConfig, station: StationConfig, poses_rad: Array) -> None:
    lowest_m, part = lowest_point(load_robot(station.robot), poses_rad)
    if lowest_m < config.clearance_m:
        raise ConfigError(
            f"amplitude_rad: with {config.amplitude_rad:g}, {part} may get down to {lowest_m:.3f} m above "
            f"the base plane, allowed: {config.clearance_m:g} m (clearance_m). Take a smaller amplitude_rad, "
            "or a higher home_rad in the station file."
        )


def _warning(config: RecordConfig, station: StationConfig) -> str:
    return (
        f"All joints of {station.name} move by up to {config.amplitude_rad:g} rad about home_rad for "
        f"{config.seconds:g} s, at up to {config.share:.0%} of their limits. Nothing may be in reach, and "
        "the gripper holds nothing. Step away, with the e-stop button in your hand."
    )


def _move(arm: ArmClient, station: StationConfig, targets: Array, progress: PhaseProgress) -> list[Status]:
    """Sends the targets; returns the status of every cycle of the supervisor."""
    arm.control("home", by=BY)
    arm.control("start", by=BY)
    statuses: list[Status] = []
    arm.on_status = statuses.append
    period_ns = round(1e9 / station.supervisor.command_hz)
    still = np.repeat(targets[:1], round(_STILL_S * 1e9 / period_ns), axis=0)
    targets = np.concatenate([still, targets, still])
    begin_ns = time.monotonic_ns()
    reach, number = round(1e9 * _PLAN_S / period_ns), 0
    while (first := (time.monotonic_ns() - begin_ns) // period_ns) < len(targets):
        piece = targets[first : first + reach]
        plan = Plan(
            number=number,
            start_ns=begin_ns + first * period_ns,
            period_ns=period_ns,
            targets_rad=piece,
            gripper=np.full(len(piece), station.gripper.open),
        )
        arm.send(plan)
        number += 1
        due_ns = begin_ns + round(1e9 * number * _EVERY_S)
        while (now_ns := time.monotonic_ns()) < due_ns:
            time.sleep(min(0.02, 1e-9 * (due_ns - now_ns)))
            _require_running(arm.status, station)
        progress.update(min(round(1e-9 * (now_ns - begin_ns)), progress.total))
    arm.on_status = None
    return statuses


def _require_running(status: Status, station: StationConfig) -> None:
    if status.phase == "stopped":
        raise SafetyStopError(
            f"station {station.name}: stopped: {status.reason}. Look at the arm, then `robot-rl arm clear "
            "by=<your name>`, and record again, with a smaller share or amplitude_rad."
        )
    if status.phase != "running":
        raise DeviceError(
            f"station {station.name}: the arm is {status.phase}{f': {status.reason}' * bool(status.reason)}. "
            "Record again."
        )


def _log_of(station: StationConfig, statuses: list[Status]) -> JointLog:
    """Returns targets when they were sent, and each measurement once, when the arm's own clock says."""
    states = {status.state.stamp_ns: status.state for status in statuses if status.state is not None}
    if len(states) < 2:
        raise DeviceError(f"station {station.name}: only {len(states)} measurements came. See station/*.log.")
    arrived_ns = np.array(sorted(states))
    measured = [states[int(stamp)] for stamp in arrived_ns]
    begin_ns = statuses[0].stamp_ns
    times_ns = _on_our_clock(arrived_ns, np.array([state.device_stamp_ns for state in measured]))
    fresh = np.append(True, np.diff(times_ns) > 0)
    sent = {status.stamp_ns: status.sent_rad for status in statuses if np.isfinite(status.sent_rad).all()}
    sent_ns = np.array(sorted(sent))
    return JointLog(
        robot=station.robot,
        joints=station.joints,
        target_s=1e-9 * (sent_ns - begin_ns),
        target_rad=np.stack([sent[int(stamp)] for stamp in sent_ns]),
        measured_s=1e-9 * (times_ns - begin_ns)[fresh],
        position_rad=np.stack([state.position_rad for state in measured])[fresh],
        velocity_rad_s=np.stack([state.velocity_rad_s for state in measured])[fresh],
        gripper=station.gripper.open,
    )


def _on_our_clock(arrived_ns: Array, device_ns: Array) -> Array:
    """Returns when measurements were made, less the shortest way: the arm's stamps, moved to our clock.

    Arrivals come late now and then; the arm's stamps do not. Where it has no clock of its own, or one that
    does not run like ours, arrivals are all there is.
    """
    lasted_ns, device_lasted_ns = int(arrived_ns[-1] - arrived_ns[0]), int(device_ns[-1] - device_ns[0])
    if abs(device_lasted_ns - lasted_ns) > _CLOCKS_APART * lasted_ns:
        return arrived_ns
    return device_ns + (arrived_ns - device_ns).min()
