"""Breaks every part of a deployment, again and again, and says what the arm did.

    python tests/faults/arm_campaign.py --repeats 20 [--fault NAME] [--jobs 2] [--json]

Real processes: `robot-rl serve-sim-arm` over ROS 2, driver host, supervisor, and a policy that sways
the arm at up to 1 rad/s and records every step. The arm's own log says how far it went after the fault, and
whether any command beyond its limits came. The bound of the way is what the limits allow:
velocity limit x (time to notice + 50 ms of a busy machine) + velocity limit x lookahead, joint by joint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from arm_chain import BROADCASTER, POSITION, Chain, missing, until
from arm_judge import ArmLog, Array, beyond_limits, damage_of, read_log, stop_of

from robot_rl.core.errors import RobotRLError
from robot_rl.real.ros2.node import open_node

_BUSY_S = 0.05
_SEEN_S = 0.8
"""What is looked at after the outcome: the arm has to be at rest by then."""
_HOUR_S = 3600
_INSIDE = "ROBOT_RL_FAULTS_INSIDE"


Struck = tuple[int, float]
"""When the arm had to begin to stop (monotonic, ns); seconds from the fault to its outcome."""


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
    notice_s: float | None
    """How long the arm may go on as before, by the settings; None if it is not to stop."""
    chain: dict[str, bool] = field(default_factory=lambda: dict[str, bool]())
    """What the chain has besides."""
    needs: Callable[[], str] = str
    """Returns what this machine lacks."""
    is_arm_lost: bool = False
    """Whether the arm's log dies with it: then the wire is tapped, and nobody knows the way."""


# Strikes: each begins with the arm in motion.


def _now_ns() -> int:
    return time.monotonic_ns()


def kill_policy(chain: Chain) -> Struck:
    assert chain.policy is not None
    begun_ns = _now_ns()
    chain.policy.kill()
    held_s = chain.event("hold", r"^the policy is gone", begun_ns)
    chain.event("stop", r"^the policy is gone: no plan for", begun_ns)
    assert chain.status.phase == "stopped"
    return begun_ns, held_s


def kill_supervisor(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.kill(chain.station_processes.supervisor_pid)
    until(lambda: "stopping: the supervisor is gone" in chain.driver_log.read_text(), "the driver stops")
    until(lambda: not chain.is_active(POSITION), f"{POSITION} is inactive")
    return begun_ns, 1e-9 * (_now_ns() - begun_ns)


def kill_driver(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.kill(chain.station_processes.driver_pid)
    seconds = chain.event("stop", r"^the driver is gone", begun_ns)
    assert chain.status.phase == "stopped"
    return begun_ns, seconds


def kill_arm(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.kill(chain.arm_pid)
    return _stale(chain, begun_ns)


def cut_cable(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.set_cable(plugged=False)
    return _stale(chain, begun_ns)


def silence_states(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.switch(deactivate=(BROADCASTER,))
    return _stale(chain, begun_ns)


def _stale(chain: Chain, begun_ns: int) -> Struck:
    seconds = chain.event("stop", r"^the newest joint state is \d+ ms old", begun_ns)
    assert chain.status.phase == "stopped"
    return begun_ns, seconds


def freeze_arm(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    os.kill(chain.arm_pid, signal.SIGSTOP)
    struck = _stale(chain, begun_ns)
    time.sleep(0.5)
    os.kill(chain.arm_pid, signal.SIGCONT)
    return struck


def step_clock(chain: Chain) -> Struck:
    """Steps an hour forward, an hour back: nothing may happen."""
    begun_ns = _now_ns()
    for shift_s in (_HOUR_S, -_HOUR_S, 0):
        _step_clock(chain, shift_s)
    processes = chain.station_processes
    for pid in (processes.driver_pid, processes.supervisor_pid):
        assert "wall_clock.so" in Path(f"/proc/{pid}/maps").read_text(), f"{pid} has the true clock"
    stops = [event for event in chain.events(begun_ns) if event["event"] in ("hold", "stop", "pause")]
    assert not stops, f"the wall clock mattered: {stops}"
    return begun_ns, math.nan


def _step_clock(chain: Chain, shift_s: int) -> None:
    chain.set_clock(shift_s)
    plan = chain.status.plan + 6
    until(lambda: abs(chain.said()[-1]["wall_s"] - time.time() - shift_s) < 60, "the step is seen")
    until(lambda: chain.status.plan > plan, "the policy drives on")


def freeze_camera(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    os.kill(chain.camera_pid(), signal.SIGSTOP)
    seconds = chain.event("pause", r"^pause by policy", begun_ns)
    assert chain.status.phase == "paused"
    return begun_ns, seconds


def nan_action(chain: Chain) -> Struck:
    begun_ns = _now_ns()
    chain.tell_policy("nan")
    seconds = chain.event("stop", r"^plan \d+: not finite", begun_ns)
    assert chain.status.phase == "stopped"
    return begun_ns, seconds


def far_action(chain: Chain) -> Struck:
    """The policy asks for 10 rad in two joints, and back; the second time a person stops the arm at speed."""
    begun_ns = _now_ns()
    seconds = _limited(chain)
    plan = chain.status.plan
    until(lambda: chain.status.plan > plan + 16, "the policy drives on")
    faults = [event for event in chain.events(begun_ns) if event["event"] in ("hold", "stop")]
    assert not faults, f"a limited command is no reason to stop: {faults}"
    _limited(chain)
    time.sleep(0.2)
    stopped_ns = _now_ns()
    chain.watcher.control("stop", by="a person")
    chain.event("stop", r"^stop by a person", stopped_ns)
    return stopped_ns, seconds


def _limited(chain: Chain) -> float:
    begun_ns = _now_ns()
    chain.tell_policy("far")
    until(lambda: chain.status.limited, "the supervisor limits")
    return 1e-9 * (_now_ns() - begun_ns)


def second_commander(chain: Chain) -> Struck:
    """Another node streams to our command topic: where the arm is, so that it holds against us."""
    begun_ns = _now_ns()
    node = open_node("rival", domain_id=chain.domain_id)
    try:
        kind = "std_msgs/msg/Float64MultiArray"
        publisher = node.create_publisher(kind, f"{POSITION}/commands")

        def fight() -> bool:
            state = chain.status.state
            assert state is not None
            chain.rival_rad.append(np.asarray(state.position_rad, float))
            publisher.publish(node.message(kind, data=state.position_rad))
            return any(event["event"] == "stop" for event in chain.events(begun_ns))

        until(fight, "the driver stops")
        seconds = chain.event("stop", r"/rival commands this arm too", begun_ns)
    finally:
        node.close()
    return begun_ns, seconds


def switch_controller(chain: Chain) -> Struck:
    """Somebody switches our controller off, as with `ros2 control switch_controllers`."""
    begun_ns = _now_ns()
    chain.switch(deactivate=(POSITION,))
    seconds = chain.event("stop", rf"{POSITION} is inactive", begun_ns)
    assert chain.status.phase == "stopped"
    return begun_ns, seconds


# Mends


def clear(chain: Chain) -> None:
    chain.clear()


def new_policy(chain: Chain) -> None:
    chain.end_policy()
    chain.clear()
    chain.start_policy()


def new_station(chain: Chain) -> None:
    chain.end_policy()
    chain.end_station()
    chain.start_station()
    chain.start_policy()


def new_arm(chain: Chain) -> None:
    chain.end_arm()
    chain.start_arm()
    chain.clear()


def plug_in(chain: Chain) -> None:
    chain.set_cable(plugged=True)
    chain.clear()


def speak_again(chain: Chain) -> None:
    chain.switch(activate=(BROADCASTER,))
    chain.clear()


def thaw_camera(chain: Chain) -> None:
    os.kill(chain.camera_pid(), signal.SIGCONT)


def nothing(chain: Chain) -> None:
    """Nothing was broken."""


_CYCLE_S = 0.01
_AGE_S = 0.2  # supervisor.max_state_age_s of this campaign
FAULTS = {
    "policy_killed": Fault(
        how="SIGKILL", outcome="held, then stopped", strike=kill_policy, mend=new_policy,
        notice_s=2 * _CYCLE_S,
    ),
    "supervisor_killed": Fault(
        how="SIGKILL", outcome="driver takes the controller away", strike=kill_supervisor, mend=new_station,
        notice_s=2 * _CYCLE_S,
    ),
    "driver_killed": Fault(
        how="SIGKILL", outcome="stopped: the driver is gone", strike=kill_driver, mend=new_station,
        notice_s=_CYCLE_S,
    ),
    "arm_killed": Fault(
        how="SIGKILL; a new arm", outcome="stopped: joint states too old", strike=kill_arm, mend=new_arm,
        notice_s=_AGE_S, is_arm_lost=True,
    ),
    "arm_frozen": Fault(
        how="SIGSTOP, 0.5 s and more", outcome="stopped: joint states too old", strike=freeze_arm, mend=clear,
        notice_s=_AGE_S,
    ),
    "network_cut": Fault(
        how="veth link down, arm in a netns", outcome="stopped: joint states too old", strike=cut_cable,
        mend=plug_in, notice_s=_AGE_S, chain={"cuts_cable": True},
        needs=lambda: missing("unshare", "nsenter", "ip"),
    ),
    "clock_step": Fault(
        how="+1 h, -1 h, back (LD_PRELOAD)", outcome="goes on", strike=step_clock, mend=nothing,
        notice_s=None, chain={"shifts_clock": True},
        needs=lambda: missing("cc"),
    ),
    "camera_frozen": Fault(
        how="SIGSTOP of the camera", outcome="policy pauses, arm holds", strike=freeze_camera,
        mend=thaw_camera, notice_s=0.5 + 0.05, chain={"camera": True},
    ),
    "nan_action": Fault(
        how="NaN in a plan", outcome="stopped: not finite", strike=nan_action, mend=clear, notice_s=0.1
    ),
    "far_action": Fault(
        how="10 rad away, and back", outcome="limited, goes on; stopped at speed", strike=far_action,
        mend=clear, notice_s=2 * _CYCLE_S,
    ),
    "stale_states": Fault(
        how="broadcaster deactivated", outcome="stopped: joint states too old", strike=silence_states,
        mend=speak_again, notice_s=_AGE_S,
    ),
    "second_commander": Fault(
        how="a second publisher", outcome="stopped: rival named", strike=second_commander, mend=clear,
        notice_s=0.5 + 0.2,
    ),
    "controller_switched": Fault(
        how="our controller deactivated", outcome="stopped: controller named", strike=switch_controller,
        mend=clear, notice_s=0.25 + 0.2,
    ),
}  # fmt: skip


@dataclass(kw_only=True)
class Row:
    """What the repeats of one fault came to."""

    fault: str
    how: str
    outcome: str
    repeats: int = 0
    reached_p50_s: float = float("nan")
    reached_max_s: float = float("nan")
    rest_p50_s: float = float("nan")
    rest_max_s: float = float("nan")
    way_rad: float = float("nan")
    """Largest of all joints and repeats; NaN if the arm is not to stop, or lost."""
    bound_rad: float = float("nan")
    """Of the joint that went farthest of its own bound."""
    commands: int = 0
    beyond_limits: int = 0
    steps: int = 0
    steps_lost: int = 0
    seconds: float = 0.0
    """Of one repeat."""
    not_run: str = ""
    """What the machine lacks."""
    failures: list[str] = field(default_factory=lambda: list[str]())

    @property
    def is_good(self) -> bool:
        return (
            not (self.not_run or self.failures or self.beyond_limits or self.steps_lost) and self.repeats > 0
        )


@dataclass(kw_only=True)
class Repeat:
    """How one repeat went."""

    begun_ns: int
    """From here on the arm has to come to rest."""
    end_ns: int
    reached_s: float
    """From the fault to its outcome."""
    took_s: float


def run_fault(name: str, repeats: int, seed: int, folder: Path) -> Row:
    """Runs the repeats of one fault on one chain; a repeat that fails gets the next one a new chain."""
    fault, rng = FAULTS[name], np.random.default_rng(seed)
    row = Row(fault=name, how=fault.how, outcome=fault.outcome, not_run=fault.needs())
    done = list[Repeat]()
    while row.repeats < repeats and not row.not_run:
        part = folder / f"{name}-{row.repeats}"
        part.mkdir()
        chain, first, before = Chain(part, **fault.chain), row.repeats, len(done)
        try:
            with contextlib.closing(chain):
                chain.start()
                chain.until_driving()
                while row.repeats < repeats:
                    row.repeats += 1
                    done.append(strike(fault, chain, float(rng.uniform(0.0, 0.5))))
            judge(row, fault, chain, done[before:])
        except (AssertionError, RobotRLError, OSError) as error:
            row.repeats = max(row.repeats, first + 1)
            row.failures.append(f"repeat {row.repeats}: {error!r} (kept: {part})")
    if done:
        reached = [repeat.reached_s for repeat in done]
        row.reached_p50_s, row.reached_max_s = float(np.median(reached)), max(reached)
        row.seconds = float(np.mean([repeat.took_s for repeat in done]))
    return row


def strike(fault: Fault, chain: Chain, wait_s: float) -> Repeat:
    """Does one repeat; the policy drives before and after it."""
    entered_s = time.monotonic()
    time.sleep(wait_s)
    begun_ns, reached_s = fault.strike(chain)
    time.sleep(_SEEN_S if fault.notice_s is not None else 0.0)
    end_ns = _now_ns()
    fault.mend(chain)
    chain.until_driving()
    return Repeat(begun_ns=begun_ns, end_ns=end_ns, reached_s=reached_s, took_s=time.monotonic() - entered_s)


def judge(row: Row, fault: Fault, chain: Chain, repeats: Sequence[Repeat]) -> None:
    """Reads the logs that a chain left, and adds what they say to the row."""
    row.steps += chain.steps
    row.steps_lost += chain.flushed_lost
    row.failures += damage_of(chain.store) if chain.steps else []
    log = chain.tap() if fault.is_arm_lost else read_log(chain.arm_log)
    limits = chain.station.limits
    wrong = beyond_limits(log.without(chain.rival_rad), limits)
    row.commands += int((np.abs(np.diff(log.commanded_rad, axis=0)).max(axis=1) > 0).sum())
    row.beyond_limits += len(wrong)
    row.failures += wrong[:5]
    if fault.notice_s is not None and not fault.is_arm_lost:
        speed = np.asarray(limits.velocity_rad_s)
        judge_ways(row, log, repeats, speed * (fault.notice_s + _BUSY_S + limits.lookahead_s), chain)


def judge_ways(row: Row, log: ArmLog, repeats: Sequence[Repeat], bound_rad: Array, chain: Chain) -> None:
    """Compares how far the arm went in each repeat with the bound (n,)."""
    rests: list[float] = []
    for repeat in repeats:
        stop = stop_of(log, chain.station.limits, repeat.begun_ns, repeat.end_ns)
        rests.append(stop.rest_s)
        joint = int(np.argmax(stop.way_rad / bound_rad))
        if not stop.way_rad[joint] <= row.way_rad:  # NaN is the first
            row.way_rad, row.bound_rad = float(stop.way_rad[joint]), float(bound_rad[joint])
        if stop.way_rad[joint] > bound_rad[joint]:
            row.failures.append(
                f"joint {joint} went {stop.way_rad[joint]:.3f} rad, bound {bound_rad[joint]:.3f}"
            )
        if not np.isfinite(stop.rest_s):
            row.failures.append("the arm still moves at the end of the repeat")
    if rests:
        row.rest_p50_s, row.rest_max_s = float(np.median(rests)), float(np.max(rests))


# The program


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text."""
    head = (
        "fault", "how", "outcome", "repeats",
        "reached p50 / max s", "rest p50 / max s", "way max / bound rad",
        "commands", "beyond", "steps", "lost", "failures",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        pairs = (
            (row.reached_p50_s, row.reached_max_s),
            (row.rest_p50_s, row.rest_max_s),
            (row.way_rad, row.bound_rad),
        )
        texts = [f"{a:.3f} / {b:.3f}" if a == a else "-" for a, b in pairs]
        counts = [f"{value:,}" for value in (row.commands, row.beyond_limits, row.steps, row.steps_lost)]
        failures = "NOT RUN" if row.not_run else str(len(row.failures))
        lines.append((row.fault, row.how, row.outcome, str(row.repeats), *texts, *counts, failures))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def enter_namespace() -> None:
    """Begins this program again in a network namespace of its own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", *user, "--net", sys.executable, *sys.argv])


def run_apart(name: str, given: argparse.Namespace) -> Row:
    """Runs one fault in a process of its own."""
    words = ["--fault", name, "--repeats", str(given.repeats), "--seed", str(given.seed), "--json"]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=False)
    try:
        row = Row(**json.loads(done.stdout.splitlines()[-1])["rows"][0])
    except (IndexError, ValueError) as error:
        fault = FAULTS[name]
        row = Row(fault=name, how=fault.how, outcome=fault.outcome)
        row.failures.append(f"the campaign itself ended with {done.returncode}: {error}")
    print(
        f"{name}: {row.repeats} repeats, {row.seconds:.1f} s each, {len(row.failures)} failures",
        file=sys.stderr,
    )
    return row


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything was not as it has to be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--fault", choices=FAULTS, help="only this one")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    if given.fault is None:
        with ThreadPoolExecutor(given.jobs) as pool:
            rows = list(pool.map(lambda name: run_apart(name, given), FAULTS))
    else:
        fault = FAULTS[given.fault]
        if fault.chain.get("cuts_cable") and _INSIDE not in os.environ and not fault.needs():
            enter_namespace()
        folder = Path(tempfile.mkdtemp(prefix="robot-rl-arm-faults-"))
        rows = [run_fault(given.fault, given.repeats, given.seed, folder)]
    if not given.json:
        print(table(rows))
    for row in rows:
        for failure in (row.failures or [row.not_run]) if not row.is_good else []:
            print(f"FAILED {row.fault}: {failure}", file=sys.stderr)
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
