"""Breaks every part of a deployment in every command mode, again and again, and says what the arm did.

    python tests/faults/arm_campaign.py --repeats 10 [--fault NAME ...] [--mode NAME ...] [--jobs 2]
        [--out FILE] [--quick] [--json]

Real processes: `robot-rl serve-sim-arm` over ROS 2, driver host, supervisor, and a policy that sways
the arm at up to 1 rad/s and records every step. The arm's own log says how far it went after the fault, and
the commands on the wire are judged by the rules of their mode, at the times at which they were sent. Bounds
are what the settings allow:

    way   velocity limit x (time to notice + 50 ms of a busy machine + lag of the arm + half a brake ramp)
    rest  time to notice + 50 ms + brake ramp at the acceleration limit + decay to 2 % of full speed

Several faults of a mode share a chain of processes; one that fails gets the next one a new chain. With --out
every finished row is kept as a line of JSON, and rows that were good are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from arm_chain import Chain
from arm_faults import CHAINS, FAULTS, Fault
from arm_judge import (
    STILL_SHARE,
    ArmLog,
    Array,
    Wrong,
    beyond_limits,
    beyond_motion,
    beyond_pose,
    beyond_speeds,
    beyond_trajectory,
    beyond_twist,
    damage_of,
    position_at,
    read_log,
    stop_of,
)
from arm_modes import BRAKE_S, MODES
from arm_shim import missing
from standstill import BUSY_S, stood_still, watched

from robot_rl.core.errors import RobotRLError
from robot_rl.real.station import StationConfig

_AFTER_S = 0.1
"""How long the arm is looked at after its bound."""
_CYCLE_S = 0.01
"""Of the simulated arm."""
_NEVER_NS = 2**63 - 1
_JERK_S = 0.01
"""Acceleration limit over jerk limit of a brake ramp."""
_WIDTH = 6
"""Faults that share a chain."""
_PR_SET_PDEATHSIG = 1
_INSIDE = "ROBOT_RL_FAULTS_INSIDE"
_STILL = "ROBOT_RL_FAULTS_STILL"
"""Where those that watch the processors write."""
QUICK = {
    "position": (
        "policy_killed", "supervisor_stopped", "supervisor_disk", "disk_full_stop", "estop_best_effort",
        "far_action", "rival_renamed", "network_cut", "arm_killed",
    ),
    "velocity": (
        "supervisor_killed", "supervisor_stopped", "driver_busy", "disk_full_hold", "second_commander",
        "stale_states", "rival_state", "camera_frozen",
    ),
    "trajectory": (
        "policy_stopped", "supervisor_stopped", "supervisor_homing", "driver_stopped", "driver_disk",
        "disk_full_pause", "nan_action", "estop_silent",
    ),
    "twist": (
        "policy_busy", "supervisor_busy", "driver_killed", "disk_full_end", "controller_switched",
        "clock_step",
    ),
    "pose": (
        "policy_disk", "supervisor_loop", "driver_loop", "arm_frozen", "rival_user", "rival_host",
    ),
}  # fmt: skip
"""Each fault once, in one of the modes it says most about, and the hang of the supervisor in each."""


@dataclass(kw_only=True)
class Row:
    """What the repeats of one fault in one mode came to."""

    fault: str
    mode: str
    how: str
    outcome: str
    repeats: int = 0
    reached_p50_s: float = math.nan
    reached_max_s: float = math.nan
    rest_p50_s: float = math.nan
    rest_max_s: float = math.nan
    rest_bound_s: float = math.nan
    way_rad: float = math.nan
    """Largest of all joints and repeats; NaN if the arm is not to stop, or lost."""
    bound_rad: float = math.nan
    """Of the joint that went farthest of its own bound."""
    commands: int = 0
    beyond_limits: int = 0
    steps: int = 0
    steps_lost: int = 0
    seconds: float = 0.0
    """Of one repeat."""
    said: str = ""
    """What the last rival was told."""
    busy: int = 0
    """How often the machine stood still: before a fault, when the arm was stopped for want of joint states,
    or in a repeat that failed, which was then done again."""
    not_run: str = ""
    """Why not: what the machine lacks, or what the mode cannot have."""
    failures: list[str] = field(default_factory=lambda: list[str]())

    @property
    def is_good(self) -> bool:
        return not (self.failures or self.beyond_limits or self.steps_lost) and bool(
            self.repeats or self.not_run
        )


@dataclass(kw_only=True)
class Repeat:
    """How one repeat went."""

    fault: str
    entered_ns: int
    begun_ns: int
    """From here on the arm has to come to rest."""
    end_ns: int
    reached_s: float
    """From the fault to its outcome."""
    frozen_s: float
    said: str
    took_s: float


def bounds_of(fault: Fault, mode: str, station: StationConfig) -> tuple[Array, float]:
    """Returns how far each joint may go (n,), and after how long the arm has to be at rest."""
    assert fault.notice is not None
    limits, chosen = station.limits, MODES[mode]
    velocity, acceleration = np.asarray(limits.velocity_rad_s), np.asarray(limits.acceleration_rad_s2)
    notice_s, brake_s = fault.notice(chosen, station) + BUSY_S, BRAKE_S.get(mode, 0.0)
    way = velocity * (notice_s + chosen.lag_s + 0.5 * brake_s)
    ramp_s = max(brake_s, float((velocity / acceleration).max()) + _JERK_S)
    return way, notice_s + ramp_s + chosen.settle_s * math.log(1.0 / STILL_SHARE)


class Session:
    """Some faults of one mode, one after the other, on as few chains as will do."""

    def __init__(self, mode: str, faults: Sequence[str], repeats: int, seed: int, domain_id: int) -> None:
        self._mode, self._repeats, self._domain_id = mode, repeats, domain_id
        self._rng = np.random.default_rng(seed)
        self._folder = Path(tempfile.mkdtemp(prefix="robot-rl-arm-faults-"))
        self._done: dict[str, list[Repeat]] = {name: [] for name in faults}
        self.rows = {name: new_row(name, mode) for name in faults}
        self._chains = 0

    def run(self) -> None:
        """Runs all repeats; a repeat that fails gets the next one a new chain."""
        while due := [name for name, row in self.rows.items() if row.repeats < self._due(row)]:
            self._run_chain(due)
        for name, row in self.rows.items():
            done = self._done[name]
            if done:
                reached = [repeat.reached_s for repeat in done if repeat.reached_s == repeat.reached_s]
                if reached:
                    row.reached_p50_s, row.reached_max_s = float(np.median(reached)), max(reached)
                row.seconds = float(np.mean([repeat.took_s for repeat in done]))

    def _due(self, row: Row) -> int:
        return 0 if row.not_run else self._repeats

    def _run_chain(self, due: Sequence[str]) -> None:
        """Runs until all is done, or something fails."""
        self._chains += 1
        part = self._folder / f"chain-{self._chains}"
        part.mkdir()
        row, repeats, chain = self.rows[due[0]], list[Repeat](), None
        self._entered_ns = time.monotonic_ns()
        try:
            chain = Chain(part, self._mode, self._domain_id, **CHAINS[FAULTS[due[0]].kind])
            try:
                with contextlib.closing(chain):
                    row.repeats += 1  # if the chain does not even start
                    chain.start()
                    chain.until_driving()
                    row.repeats -= 1
                    for name in due:
                        row = self.rows[name]
                        self._repeat(name, row, chain, repeats)
            finally:
                self._judge(chain, repeats)
        except (AssertionError, RobotRLError, OSError, subprocess.SubprocessError) as error:
            if chain is not None and is_excused(row, log_of(chain, row.fault), self._entered_ns):
                row.repeats = max(0, row.repeats - 1)
                return
            row.failures.append(f"repeat {row.repeats}: {str(error) or repr(error)} (kept: {part})")

    def _repeat(self, name: str, row: Row, chain: Chain, repeats: list[Repeat]) -> None:
        steps, lost, busy = chain.recorded, chain.flushed_lost, chain.num_busy
        try:
            while row.repeats < self._repeats:
                row.repeats += 1
                self._entered_ns = time.monotonic_ns()
                repeats.append(strike(name, chain, float(self._rng.uniform(0.0, 0.4))))
                self._done[name].append(repeats[-1])
                row.said = repeats[-1].said
        finally:
            row.busy += chain.num_busy - busy
            row.steps += max(0, chain.recorded - steps)
            row.steps_lost += chain.flushed_lost - lost

    def _judge(self, chain: Chain, repeats: Sequence[Repeat]) -> None:
        """Reads the logs that a chain left, and adds what they say to the rows."""
        if not repeats:
            return
        last = self.rows[repeats[-1].fault]
        last.failures += damage_of(chain.store) if chain.steps else []
        log = log_of(chain, repeats[-1].fault)
        wrong = beyond(chain, log)
        sent_ns = np.array([stamp_ns for stamp_ns, _ in chain.sent], np.int64)
        for name in dict.fromkeys(repeat.fault for repeat in repeats):
            row, mine = self.rows[name], [repeat for repeat in repeats if repeat.fault == name]
            first_ns, end_ns = mine[0].entered_ns, mine[-1].end_ns
            row.commands += int(((sent_ns >= first_ns) & (sent_ns <= end_ns)).sum())
            bad = [one for one in wrong if first_ns <= one.stamp_ns <= end_ns]
            row.beyond_limits += len(bad)
            row.failures += [str(one) for one in bad[:3]]
            if FAULTS[name].notice is not None and log is not None:
                judge_rest(row, log, mine, chain.station)


def new_row(name: str, mode: str) -> Row:
    """Returns an empty row; one that says why it cannot be run, if so."""
    fault = FAULTS[name]
    why = fault.not_in.get(mode, "") or missing("cc") or fault.needs()
    return Row(fault=name, mode=mode, how=fault.how, outcome=fault.outcome, not_run=why)


def strike(name: str, chain: Chain, wait_s: float) -> Repeat:
    """Does one repeat; the policy drives before and after it."""
    fault = FAULTS[name]
    entered_ns = time.monotonic_ns()
    time.sleep(wait_s)
    struck = fault.strike(chain)
    if fault.notice is not None:
        _, rest_s = bounds_of(fault, chain.command, chain.station)
        until_s = 1e-9 * struck.begun_ns + rest_s + struck.frozen_s + _AFTER_S
        time.sleep(max(0.0, until_s - time.monotonic()))
    end_ns = time.monotonic_ns()
    fault.mend(chain)
    chain.until_driving()
    return Repeat(
        fault=name,
        entered_ns=entered_ns,
        begun_ns=struck.begun_ns,
        end_ns=end_ns,
        reached_s=struck.reached_s,
        frozen_s=struck.frozen_s,
        said=struck.said,
        took_s=1e-9 * (time.monotonic_ns() - entered_ns),
    )


def beyond(chain: Chain, log: ArmLog | None) -> list[Wrong]:
    """Returns what was commanded and may not be, by the rules of the chain's mode."""
    limits, found, sent = chain.station.limits, list[Wrong](), chain.sent
    targets = chain.targets_sent() if chain.mode.kind.startswith("std_msgs") else None
    match chain.command:
        case "position":
            assert targets is not None
            return beyond_limits(targets, limits, log)
        case "velocity":
            assert targets is not None
            found += beyond_speeds(targets.stamp_ns, targets.commanded_rad, limits)
        case "trajectory":
            longest_s = chain.station.supervisor.max_plan_s
            for stamp_ns, said in sent:
                here = None if log is None else position_at(log, stamp_ns)
                found += beyond_trajectory(stamp_ns, said, here, limits, longest_s)
        case _:
            judge_one = beyond_twist if chain.command == "twist" else beyond_pose
            for stamp_ns, said in sent:
                found += judge_one(stamp_ns, said)
    if log is not None and chain.command != "trajectory":
        found += beyond_motion(log, limits, leads=chain.command == "velocity")
    return sorted(found, key=lambda one: one.stamp_ns)


def log_of(chain: Chain, fault: str) -> ArmLog | None:
    """Returns the arm's log; None if it died with the arm."""
    return None if FAULTS[fault].kind == "lost" else read_log(chain.arm_log)


def is_excused(row: Row, log: ArmLog | None, begun_ns: int, end_ns: int = _NEVER_NS) -> bool:
    """Returns whether a repeat that failed says nothing of ours, and counts it: the machine stood still.

    The arm's own loop has real-time priority: nothing but a machine that stands still, for which no bound
    allows, keeps it from its next cycle. Where one processor stood, with what was on it, those that watch
    them know. No excuse where the arm itself is struck, or for a row that needs one more often than it has
    repeats.
    """
    if log is None or row.fault == "arm_frozen" or row.busy > row.repeats:
        return False
    stamps_ns = log.stamp_ns[(log.stamp_ns >= begun_ns) & (log.stamp_ns <= end_ns)]
    stood = bool((np.diff(stamps_ns) > 1e9 * (BUSY_S + _CYCLE_S)).any())
    if _STILL in os.environ:
        stood = stood or stood_still(Path(os.environ[_STILL]), begun_ns, min(end_ns, time.monotonic_ns()))
    row.busy += stood
    return stood


def judge_rest(row: Row, log: ArmLog, repeats: Sequence[Repeat], station: StationConfig) -> None:
    """Compares how far the arm went in each repeat, and for how long, with the bounds."""
    bound_rad, bound_s = bounds_of(FAULTS[row.fault], row.mode, station)
    rests: list[float] = []
    for repeat in repeats:
        stop = stop_of(log, station.limits, repeat.begun_ns, repeat.end_ns)
        joint, allowed_s = int(np.argmax(stop.way_rad / bound_rad)), bound_s + repeat.frozen_s
        failures: list[str] = []
        if stop.way_rad[joint] > bound_rad[joint]:
            failures.append(f"joint {joint} went {stop.way_rad[joint]:.3f} rad, bound {bound_rad[joint]:.3f}")
        if not stop.rest_s <= allowed_s:
            seen_s = 1e-9 * (repeat.end_ns - repeat.begun_ns)
            what = "at rest after" if stop.rest_s == stop.rest_s else "still moving after"
            after_s = stop.rest_s if stop.rest_s == stop.rest_s else seen_s
            failures.append(f"{what} {after_s:.2f} s, bound {allowed_s:.2f}")
        if failures and is_excused(row, log, repeat.entered_ns, repeat.end_ns):
            row.repeats -= 1
            continue
        row.failures += failures
        rests.append(stop.rest_s)
        if not stop.way_rad[joint] <= row.way_rad:  # NaN is the first
            row.way_rad, row.bound_rad = float(stop.way_rad[joint]), float(bound_rad[joint])
        row.rest_bound_s = np.nanmax([row.rest_bound_s, allowed_s])
    rests += [row.rest_max_s] if row.rest_max_s == row.rest_max_s else []
    if rests:
        row.rest_p50_s, row.rest_max_s = float(np.median(rests)), float(np.max(rests))


# The program


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text, by fault."""
    head = (
        "fault", "how", "outcome", "mode", "repeats",
        "reached p50 / max s", "rest p50 / max / bound s", "way max / bound rad",
        "commands", "beyond", "steps", "lost", "failures",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    before = ""
    for row in sorted(rows, key=lambda row: (list(FAULTS).index(row.fault), list(MODES).index(row.mode))):
        numbers = (
            (row.reached_p50_s, row.reached_max_s),
            (row.rest_p50_s, row.rest_max_s, row.rest_bound_s),
            (row.way_rad, row.bound_rad),
        )
        texts = [
            " / ".join(f"{one:.2f}" for one in some) if some[-1] == some[-1] else "-" for some in numbers
        ]
        counts = [f"{value:,}" for value in (row.commands, row.beyond_limits, row.steps, row.steps_lost)]
        failures = "NOT RUN" if row.not_run else str(len(row.failures))
        names = ("", "", "") if row.fault == before else (row.fault, row.how, row.outcome)
        before = row.fault
        lines.append((*names, row.mode, str(row.repeats), *texts, *counts, failures))
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


Unit = tuple[str, tuple[str, ...]]
"""A mode, and faults that share its chains."""


def units_of(cells: Sequence[tuple[str, str]]) -> Iterator[Unit]:
    """Yields cells (mode, fault) by mode and chain, those that take longest first."""
    for kind in reversed(CHAINS):
        for mode in MODES:
            names = [fault for each, fault in cells if each == mode and FAULTS[fault].kind == kind]
            for first in range(0, len(names), _WIDTH):
                yield mode, tuple(names[first : first + _WIDTH])


def run_here(given: argparse.Namespace) -> list[Row]:
    """Runs one unit in this process."""
    (mode,), names = given.mode, given.fault
    is_apart = any(len({"arm_is_far", "has_far_host"} & CHAINS[FAULTS[name].kind].keys()) for name in names)
    if is_apart and _INSIDE not in os.environ and not any(FAULTS[name].needs() for name in names):
        enter_namespace()
    session = Session(mode, names, given.repeats, given.seed, given.domain)
    session.run()
    return list(session.rows.values())


def run_apart(unit: Unit, given: argparse.Namespace, domain_id: int) -> list[Row]:
    """Runs one unit in a process of its own."""
    mode, names = unit
    words = ["--here", "--mode", mode, "--fault", *names, "--repeats", str(given.repeats)]
    words += ["--seed", str(given.seed), "--domain", str(domain_id)]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=False)
    try:
        return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])["rows"]]
    except (IndexError, ValueError, KeyError) as error:
        rows = [new_row(name, mode) for name in names]
        for row in rows:
            row.failures.append(f"the campaign itself ended with {done.returncode}: {error!r}")
        return rows


class Results:
    """Rows as they are finished; in a file too, if one is given."""

    def __init__(self, path: Path | None, repeats: int) -> None:
        self._path = path
        self.rows: dict[tuple[str, str], Row] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                row = Row(**json.loads(line))
                if row.is_good and (row.not_run or row.repeats >= repeats):
                    self.rows[row.mode, row.fault] = row

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows[row.mode, row.fault] = row
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")


def run_all(given: argparse.Namespace) -> list[Row]:
    """Runs all units, some at a time, each process with the bytecode that the first ones left."""
    faults, modes = given.fault or list(FAULTS), given.mode or list(MODES)
    cells = [(mode, fault) for mode in modes for fault in faults]
    if given.quick:
        cells = [(mode, fault) for mode, fault in cells if fault in QUICK[mode]]
        given.repeats = 1
    results = Results(given.out, given.repeats)
    due = [cell for cell in cells if cell not in results.rows]
    domains: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(given.jobs):
        domains.put((os.getpid() + slot) % 100 + 1)
    begun_s, done = time.monotonic(), 0

    def run_unit(unit: Unit) -> tuple[Unit, list[Row]]:
        domain_id = domains.get()
        try:
            return unit, run_apart(unit, given, domain_id)
        finally:
            domains.put(domain_id)

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with (
        tempfile.TemporaryDirectory(prefix="robot-rl-pyc-") as cache,
        watched(Path(cache)),
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        os.environ["PYTHONPYCACHEPREFIX"] = os.environ[_STILL] = cache
        os.chmod(cache, 0o755)
        for (mode, _), rows in pool.map(run_unit, list(units_of(due))):
            results.add(rows)
            done += len(rows)
            for row in rows:
                mark = "NOT RUN" if row.not_run else "ok" if row.is_good else f"{len(row.failures)} failures"
                print(f"  {mode:<10} {row.fault:<20} {row.seconds:5.1f} s each: {mark}", file=sys.stderr)
            print(f"{done} of {len(due)} in {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    return [results.rows[cell] for cell in cells]


def parse(words: list[str] | None) -> argparse.Namespace:
    """Returns the settings of the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--fault", choices=FAULTS, nargs="+", help="only these")
    parser.add_argument("--mode", choices=MODES, nargs="+", help="only these")
    parser.add_argument("--quick", action="store_true", help="each fault in one or two modes, once")
    parser.add_argument("--jobs", type=int, default=1, help="chains at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keeps finished rows; good ones are not run again")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--domain", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def end_with_parent() -> None:
    """Ends this unit, and its chain, when it is asked to or the campaign is gone."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything was not as it has to be."""
    given = parse(words)
    if given.here:
        end_with_parent()
        print(json.dumps({"rows": [asdict(row) for row in run_here(given)]}))
        return 0
    rows = run_all(given)
    if not given.json:
        print(table(rows))
    for row in rows:
        if row.not_run:
            print(f"NOT RUN: {row.fault}, {row.mode}: {row.not_run}", file=sys.stderr)
        for failure in row.failures:
            print(f"FAILED {row.fault}, {row.mode}: {failure}", file=sys.stderr)
    total = sum(row.repeats for row in rows)
    bad = sum(not row.is_good for row in rows)
    left_out = sum(bool(row.not_run) for row in rows)
    print(
        f"{total} repeats of {len(rows)} fault x mode: {bad} not good, {left_out} not run, "
        f"{sum(row.beyond_limits for row in rows)} commands beyond limits, "
        f"{sum(row.steps_lost for row in rows)} steps lost; "
        f"{sum(row.busy for row in rows)} times the machine stood still",
        file=sys.stderr if given.json else sys.stdout,
    )
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0 if not bad else 1


if __name__ == "__main__":
    sys.exit(main())
