"""What can go wrong around an arm: how it is done, what has to follow, how it is mended.

A strike does it; the time until the arm has to stop follows from the settings of station and mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import arm_strikes as do
from arm_chain import Chain
from arm_modes import ESTOP_MAX_AGE_S, Mode
from arm_shim import missing
from arm_strikes import TICK_S, Struck, alone_s

from robot_rl.real.station import StationConfig

Notice = Callable[[Mode, StationConfig], float]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    how: str
    """What is done, for the table."""
    outcome: str
    """What has to follow, for the table."""
    strike: Callable[[Chain], Struck]
    """Does it and asserts the outcome."""
    mend: Callable[[Chain], None]
    """Makes the chain whole again, so that the policy drives."""
    notice: Notice | None
    """How long the arm may go on as before, by the settings; None if it is not to stop."""
    kind: str = "plain"
    """Which chain, of CHAINS."""
    needs: Callable[[], str] = str
    """Returns what this machine lacks."""
    not_in: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    """Modes in which it cannot be, and why."""


CHAINS: dict[str, dict[str, bool]] = {
    "plain": {},
    "lost": {},  # the arm's log dies with it: then the wire is tapped, and nobody knows the way
    "camera": {"camera": True},
    "clock": {"shifts_clock": True},
    "far_arm": {"arm_is_far": True},
    "far_host": {"has_far_host": True},
    "button": {"has_button": True},
}


# How long the arm may go on as before


def _at_once(mode: Mode, station: StationConfig) -> float:
    return 2.0 / station.supervisor.command_hz


def _unseen(mode: Mode, station: StationConfig) -> float:
    return station.supervisor.max_state_age_s


def _unreachable(mode: Mode, station: StationConfig) -> float:
    return max(_unseen(mode, station), alone_s(mode, station))


def _unwatched(mode: Mode, station: StationConfig) -> float:
    return station.supervisor.hold_after_s + TICK_S


def _silent(mode: Mode, station: StationConfig) -> float:
    """A silent policy's last plan is followed: for as long as a silent policy may be alive."""
    config = station.supervisor
    if mode.plan_s <= config.stop_after_s + config.hold_after_s:
        return mode.plan_s
    return config.stop_after_s + config.hold_after_s + _at_once(mode, station)


def _of(seconds: float) -> Notice:
    return lambda mode, station: seconds


FAULTS = {
    "policy_killed": Fault(
        how="SIGKILL", outcome="held, then stopped", strike=do.kill_policy, mend=do.new_policy,
        notice=_at_once,
    ),
    "policy_stopped": Fault(
        how="SIGSTOP", outcome="held, then stopped", strike=do.hang_policy("stopped"), mend=do.clear,
        notice=_silent,
    ),
    "policy_busy": Fault(
        how="spins", outcome="held, then stopped", strike=do.hang_policy("busy"), mend=do.clear,
        notice=_silent,
    ),
    "policy_disk": Fault(
        how="its disk blocks", outcome="held, then stopped", strike=do.block_policy, mend=do.clear,
        notice=_silent,
    ),
    "supervisor_killed": Fault(
        how="SIGKILL; a new one", outcome="driver takes the controller away, latched",
        strike=do.kill_supervisor, mend=do.new_supervisor, notice=_at_once,
    ),
    "supervisor_stopped": Fault(
        how="SIGSTOP", outcome="driver holds, latched", strike=do.hang_supervisor("stopped"),
        mend=do.clear, notice=_unwatched,
    ),
    "supervisor_busy": Fault(
        how="spins, keeps the lock", outcome="driver holds, latched", strike=do.hang_supervisor("busy"),
        mend=do.clear, notice=_unwatched,
    ),
    "supervisor_loop": Fault(
        how="its main loop spins", outcome="driver holds, latched", strike=do.hang_supervisor("loop"),
        mend=do.clear, notice=_unwatched,
    ),
    "supervisor_homing": Fault(
        how="SIGSTOP on the way home", outcome="driver holds, latched", strike=do.stop_supervisor_homing,
        mend=do.go_again, notice=_unwatched,
    ),
    "supervisor_disk": Fault(
        how="its disk blocks; stop", outcome="stopped as always", strike=do.block_supervisor,
        mend=do.clear, notice=_at_once,
    ),
    "driver_killed": Fault(
        how="SIGKILL", outcome="stopped: the driver is gone", strike=do.kill_driver, mend=do.new_station,
        notice=alone_s,
    ),
    "driver_stopped": Fault(
        how="SIGSTOP", outcome="stopped: joint states too old", strike=do.hang_driver("stopped"),
        mend=do.clear, notice=alone_s,
    ),
    "driver_busy": Fault(
        how="spins, keeps the lock", outcome="stopped: joint states too old",
        strike=do.hang_driver("busy"), mend=do.clear, notice=alone_s,
    ),
    "driver_loop": Fault(
        how="its main loop spins", outcome="stopped: joint states too old", strike=do.hang_driver("loop"),
        mend=do.clear, notice=alone_s,
    ),
    "driver_disk": Fault(
        how="its disk blocks; supervisor SIGSTOP", outcome="driver holds, latched", strike=do.block_driver,
        mend=do.clear, notice=_unwatched,
    ),
    "disk_full_pause": Fault(
        how="full disk; pause", outcome="paused as always", strike=do.pause_on_full_disk, mend=do.go_again,
        notice=_at_once,
    ),
    "disk_full_hold": Fault(
        how="full disk; policy SIGSTOP", outcome="held, then stopped", strike=do.hold_on_full_disk,
        mend=do.clear, notice=_silent,
    ),
    "disk_full_stop": Fault(
        how="full disk; stop", outcome="stopped as always", strike=do.stop_on_full_disk, mend=do.clear,
        notice=_at_once,
    ),
    "disk_full_end": Fault(
        how="full disk; SIGTERM of the supervisor", outcome="driver takes the controller away",
        strike=do.end_on_full_disk, mend=do.new_supervisor, notice=_at_once,
    ),
    "arm_killed": Fault(
        how="SIGKILL; a new arm", outcome="stopped: joint states too old", strike=do.kill_arm,
        mend=do.new_arm, notice=_unseen, kind="lost",
    ),
    "arm_frozen": Fault(
        how="SIGSTOP, 0.5 s and more", outcome="stopped: joint states too old", strike=do.freeze_arm,
        mend=do.clear, notice=_unseen,
    ),
    "network_cut": Fault(
        how="veth link down, arm in a netns", outcome="stopped: joint states too old", strike=do.cut_cable,
        mend=do.plug_in, notice=_unreachable, kind="far_arm",
        needs=lambda: missing("unshare", "nsenter", "ip"),
    ),
    "clock_step": Fault(
        how="+1 h, -1 h, back (LD_PRELOAD)", outcome="goes on", strike=do.step_clock, mend=do.nothing,
        notice=None, kind="clock",
    ),
    "camera_frozen": Fault(
        how="SIGSTOP of the camera", outcome="policy pauses, arm holds", strike=do.freeze_camera,
        mend=do.thaw_camera, notice=_of(0.5 + 0.05), kind="camera",
    ),
    "nan_action": Fault(
        how="NaN in a plan", outcome="stopped: not finite", strike=do.nan_action, mend=do.clear,
        notice=_of(0.1),
    ),
    "far_action": Fault(
        how="10 rad away, and back", outcome="limited, goes on; stopped at speed", strike=do.far_action,
        mend=do.clear, notice=_at_once,
    ),
    "stale_states": Fault(
        how="broadcaster deactivated", outcome="stopped: joint states too old", strike=do.silence_states,
        mend=do.speak_again, notice=_unseen,
    ),
    "second_commander": Fault(
        how="a second publisher", outcome="stopped: rival named", strike=do.second_commander,
        mend=do.clear, notice=_of(0.5 + 0.2),
    ),
    "controller_switched": Fault(
        how="our controller deactivated", outcome="stopped: controller named", strike=do.switch_controller,
        mend=do.clear, notice=_of(0.25 + 0.2),
    ),
    "estop_best_effort": Fault(
        how="button without receipts", outcome="stopped: e-stop", strike=do.press_button, mend=do.clear,
        notice=_at_once,
    ),
    "estop_silent": Fault(
        how="button falls silent", outcome="stopped: e-stop", strike=do.silence_button,
        mend=do.revive_button, notice=_of(ESTOP_MAX_AGE_S + TICK_S), kind="button",
    ),
    "rival_renamed": Fault(
        how="a copy of the station, renamed", outcome="rival refused, first drives on",
        strike=do.rival(renamed=True), mend=do.nothing, notice=None,
    ),
    "rival_state": Fault(
        how="another ROBOT_RL_STATE", outcome="rival refused, first drives on",
        strike=do.rival(other_state=True), mend=do.nothing, notice=None,
    ),
    "rival_user": Fault(
        how="another user", outcome="rival refused, first drives on",
        strike=do.rival(other_state=True, other_user=True), mend=do.nothing, notice=None,
        needs=do.needs_nobody,
    ),
    "rival_host": Fault(
        how="another host: no files shared", outcome="rival refused, first drives on",
        strike=do.rival(other_state=True, far=True), mend=do.nothing, notice=None, kind="far_host",
        needs=do.needs_namespaces,
    ),
}  # fmt: skip
