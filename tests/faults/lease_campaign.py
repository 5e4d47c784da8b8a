"""Lease races between processes, while the wall clock jumps by an hour: nobody may hold a device twice.

    python tests/faults/lease_campaign.py --races 10000

In each round the device is held, contenders with random priorities line up, the wall clock is stepped to
+1 h, 0 or -1 h of the real one, and the device is let go: it has to go from one to the next in the order
of the line, stepped again at random while they wait and hold. A race is a device that is free with two or
more in line. Whoever holds it locks a file of its own beside the lease file: two of them are noticed
without a word of the leases. Several devices are raced for at once, each with a lease file of its own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from wall_clock import WallClock, set_clock

from robot_rl.core.errors import LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched import leases
from robot_rl.sched.leases import LeaseStore

ARM = DeviceSpec(name="arm", kind="robot")
HOUR_S = 3600
WAIT_S = 60.0
"""Far longer than a place in the line takes, on a busy machine."""
_POLL_S = 0.02
"""Contenders ask five times as often as usual, for the campaign's sake."""
_FORK = multiprocessing.get_context("fork")
COUNTS = ("double holders", "priority inversions", "lost waiters")


@dataclass(frozen=True, kw_only=True)
class Granted:
    """A contender has the device."""

    contender: int
    at_ns: int
    alone: bool
    """Whether nobody else had the witness."""
    shift_h: int
    """How far its wall clock was off, in hours."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What was asked of one device, and what came of it."""

    asked: Sequence[tuple[int, int]]
    """(contender, priority), in the order in which they lined up."""
    granted: Sequence[Granted]
    holder_alone: bool
    """Whether nobody else had the witness when the round began."""


def judge(round: Round) -> Counter[str]:
    """Returns what went wrong in a round, and how many races it had."""
    line = [contender for contender, _ in sorted(round.asked, key=lambda row: -row[1])]
    found = Counter({"lost waiters": len(line) - len(round.granted), "races": 0})
    found["double holders"] += not round.holder_alone
    for granted in sorted(round.granted, key=lambda it: it.at_ns):
        found["races"] += len(line) > 1
        found["priority inversions"] += granted.contender != line[0]
        found["double holders"] += not granted.alone
        found["off by an hour"] += granted.shift_h != 0
        line.remove(granted.contender)
    return found


class Witness:
    """A file that only one process can lock; it knows nothing of leases."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)

    def take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def drop(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


# Processes


def contend(folder: Path, number: int, orders: Connection) -> None:
    """A contender: asks for the device when it is told to, and holds it for a moment."""
    store, witness = LeaseStore(folder / "leases.db"), Witness(folder / "witness")
    true_s = time.time() - time.monotonic()
    while (order := orders.recv()) is not None:
        priority, hold_s = order
        try:
            lease = store.acquire(ARM, holder=f"contender {number}", priority=priority, wait_s=WAIT_S)
        except LeaseError:
            orders.send(None)
            continue
        at_ns = time.monotonic_ns()
        alone = witness.take()
        shift_h = round((time.time() - time.monotonic() - true_s) / HOUR_S)
        orders.send(Granted(contender=number, at_ns=at_ns, alone=alone, shift_h=shift_h))
        time.sleep(hold_s)
        if alone:
            witness.drop()
        store.release(lease)


class Referee:
    """One device, its contenders, and the round after round that they race for it."""

    def __init__(self, folder: Path, clock: Path, contenders: int, seed: int) -> None:
        folder.mkdir()
        self._folder, self._clock = folder, clock
        self._rng = random.Random(seed)
        self._store, self._witness = LeaseStore(folder / "leases.db"), Witness(folder / "witness")
        self._orders: list[Connection] = []
        self.steps = 0
        self._shift_s = 0
        for number in range(contenders):
            ours, theirs = _FORK.Pipe()
            _FORK.Process(target=contend, args=(folder, number, theirs), daemon=True).start()
            self._orders.append(ours)

    def play(self) -> Round:
        """Plays a round."""
        lease = self._store.acquire(ARM, holder="referee", wait_s=WAIT_S)
        alone = self._witness.take()
        asked = self._line_up()
        self._step()
        time.sleep(self._rng.uniform(0.0, 2.0) * _POLL_S)  # some look at the line in the new time
        if alone:
            self._witness.drop()
        self._store.release(lease)
        return Round(asked=asked, granted=self._watch(), holder_alone=alone)

    def close(self) -> None:
        for orders in self._orders:
            orders.send(None)

    def _line_up(self) -> list[tuple[int, int]]:
        numbers = self._rng.sample(range(len(self._orders)), len(self._orders))
        asked = [(number, self._rng.randrange(4)) for number in numbers]
        for place, (number, priority) in enumerate(asked, start=1):
            self._orders[number].send((priority, self._rng.uniform(0.5, 1.5) * _POLL_S))
            until_s = time.monotonic() + WAIT_S / 2
            while self._waiting() < place and time.monotonic() < until_s:
                time.sleep(0.005)
            if self._rng.random() < 0.2:
                self._step()
        return asked

    def _waiting(self) -> int:
        rows = sqlite3.connect(f"file:{self._folder / 'leases.db'}?mode=ro", uri=True, timeout=WAIT_S)
        try:
            return int(rows.execute("SELECT count(*) FROM waiting").fetchone()[0])
        finally:
            rows.close()

    def _watch(self) -> list[Granted]:
        """Returns who was granted the device, once all had it or gave up."""
        granted: list[Granted] = []
        left = list(self._orders)
        while left:
            ready = wait(left, timeout=2 * WAIT_S)
            assert ready, "the contenders say nothing"
            for orders in left:
                if orders in ready:
                    left = [other for other in left if other is not orders]
                    found = orders.recv()
                    granted += [] if found is None else [found]
            if self._rng.random() < 0.5:
                self._step()
        return granted

    def _step(self) -> None:
        self._shift_s = self._rng.choice([s for s in (-HOUR_S, 0, HOUR_S) if s != self._shift_s])
        set_clock(self._clock, self._shift_s)
        self.steps += 1


def race(folder: Path, clock: Path, races: int, contenders: int, seed: int, result: Connection) -> None:
    """One device's races; sends what went wrong, after each round."""
    leases._POLL_S = _POLL_S
    referee, done = Referee(folder, clock, contenders, seed), 0
    while done < races:
        found = judge(referee.play())
        found["steps"], referee.steps = referee.steps, 0
        done += found["races"]
        result.send(found)
    referee.close()
    result.send(None)


def run(folder: Path, clock: Path, given: argparse.Namespace) -> Counter[str]:
    """Races on all devices; returns the sums."""
    results: list[Any] = []
    for number in range(given.devices):
        ours, theirs = _FORK.Pipe(duplex=False)
        share = given.races // given.devices + (number < given.races % given.devices)
        words = (folder / f"device-{number}", clock, share, given.contenders, given.seed + number, theirs)
        _FORK.Process(target=race, args=words).start()
        theirs.close()
        results.append(ours)
    total: Counter[str] = Counter()
    while results:
        ready = wait(results)
        for result in [it for it in results if it in ready]:
            found = result.recv()  # EOFError: a referee broke down, and its error was printed
            if found is None:
                results.remove(result)
            else:
                total.update(found)
    return total


def table(total: Counter[str], seconds_s: float) -> str:
    """Returns head and row for docs/results.md."""
    head = ("lease races", "clock steps", "granted off by an hour", *COUNTS, "time")
    row = [total["races"], total["steps"], total["off by an hour"], *(total[name] for name in COUNTS)]
    cells = [*(f"{number:,}" for number in row), f"{seconds_s:.0f} s"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), cells))


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything went wrong, or if no step reached a contender."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--races", type=int, default=10_000)
    parser.add_argument("--quick", dest="races", action="store_const", const=200, help="200 races")
    parser.add_argument("--devices", type=int, default=4, help="raced for at the same time")
    parser.add_argument("--contenders", type=int, default=5, help="processes for each device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args(words)
    if "WALL_CLOCK" not in os.environ:
        return _run_on_stepped_clock(sys.argv[1:] if words is None else words)
    clock = Path(os.environ["WALL_CLOCK"])
    began_s = time.monotonic()
    total = run(clock.parent, clock, given)
    seconds_s = time.monotonic() - began_s
    print(table(total, seconds_s))
    if given.json:
        print(json.dumps({**total, "seconds": round(seconds_s, 1)}))
    return int(any(total[name] for name in COUNTS) or not total["off by an hour"])


def _run_on_stepped_clock(words: list[str]) -> int:
    # In memory, where there is such a folder: clocks are raced here, not disks.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="robot-rl-leases-", dir=memory))
    try:
        clock = WallClock(folder)
        command = [sys.executable, str(Path(__file__).resolve()), *words]
        return subprocess.run(command, env={**os.environ, **clock.environment}, check=False).returncode
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
