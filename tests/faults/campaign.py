"""Kills writers at random times and cuts their files at random bytes; says what was left.

    python tests/faults/campaign.py --kills 200 --truncations 200 --flips 200 --seed 0

A killed writer is a forked child: it appends with random timing on several lanes, flushes now and
then, and says through a pipe what `flush` had acknowledged when it returned. What a step holds
follows from its episode and number, so the parent can compare every byte of what it finds. Ten
rounds share one store: what one crash left, the next writer goes on with.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.cli import replay
from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.check import repair, verify
from robot_rl.data.store.journal import segment_numbers, segment_path
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.writer import StoreWriter

ROUNDS = 10
LANES = 3
META = EpisodesMeta(
    task="Crash",
    robot="gantry",
    control_hz=100.0,
    instruction="survive",
    state_names=tuple(f"q{i}" for i in range(6)),
    action_names=("dx", "dy"),
)
FEATURES = {
    "state": Feature("float32", (6,)),
    "torque": Feature("float64", (3,)),
    "front.rgb": Feature("uint8", (6, 8, 3)),
}

Step = tuple[int, int]
"""Episode, number of the step in it."""


def step_of(episode: int, step: int) -> dict[str, Any]:
    """Returns everything that a step holds."""
    rng = np.random.default_rng((episode, step))
    return {
        "obs": {"state": rng.normal(size=6).astype(np.float32), "torque": rng.normal(size=3)},
        "action": rng.normal(size=2).astype(np.float32),
        "base_action": rng.normal(size=2).astype(np.float32),
        "reward": float(np.float32(rng.normal())),
        "success": bool(rng.integers(2)),
        "policy_version": int(rng.integers(1 << 40)),
        "stamp_ns": 10_000_000 * step + int(rng.integers(1000)),
    }


def length_of(episode: int) -> int:
    """Returns the steps after which an episode ends."""
    return int(np.random.default_rng(episode).integers(1, 60))


def picture_of(episode: int, step: int) -> Any:
    """Returns the picture that a camera took at a step; it is slower than the control loop."""
    return np.random.default_rng((episode, step, 7)).integers(0, 256, (6, 8, 3), dtype=np.uint8)


class Lanes:
    """Appends to several lanes by turns, and knows what was appended."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._episode: dict[int, int] = {}
        self.appended: dict[int, int] = {}

    def append(self, lane: int) -> None:
        """Appends one step; an episode ends by itself, every fifth one by being cut short."""
        if lane not in self._episode:
            self._episode[lane] = self._writer.begin_episode(lane)
            self.appended[self._episode[lane]] = 0
        episode = self._episode[lane]
        number = self.appended[episode]
        step = step_of(episode, number)
        if number % 3 == 0:
            step["obs"]["front.rgb"] = picture_of(episode, number)
        is_last = number + 1 == length_of(episode)
        self._writer.append(lane=lane, terminated=is_last and episode % 5 > 0, **step)
        self.appended[episode] += 1
        if is_last:
            self._writer.end_episode(lane)
            del self._episode[lane]


def write_until_killed(folder: Path, seed: int, pipe: int) -> None:
    """Is the child: appends for ever, and reports what was flushed."""
    rng = np.random.default_rng(seed)
    writer = StoreWriter(
        folder,
        META,
        FEATURES,
        flush_s=float(rng.uniform(0.001, 0.05)),
        segment_bytes=int(rng.integers(4_000, 100_000)),
        picture="png",
    )
    lanes = Lanes(writer)
    while True:
        for _ in range(int(rng.integers(1, 40))):
            lanes.append(int(rng.integers(LANES)))
            if rng.random() < 0.05:
                time.sleep(float(rng.uniform(0, 0.004)))
        writer.flush()
        os.write(pipe, (json.dumps(lanes.appended) + "\n").encode())


def kill_one(folder: Path, seed: int) -> dict[int, int]:
    """Lets a child write, kills it at a random time, and returns what it had reported as flushed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            write_until_killed(folder, seed, writing)
        finally:
            os._exit(1)
    os.close(writing)
    time.sleep(float(np.random.default_rng(seed + 1).uniform(0.002, 0.12)))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as lines:
        # A line that the kill cut short reports nothing.
        said = [line for line in lines.read().splitlines(keepends=True) if line.endswith("\n")]
    if not os.WIFSIGNALED(status):
        raise AssertionError(f"seed {seed}: the child ended by itself, status {status}")
    return {int(episode): steps for episode, steps in json.loads(said[-1]).items()} if said else {}


class Outcome:
    """Counts of one part of the campaign."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.counts: Counter[str] = Counter({"flushed steps lost": 0, "corrupted": 0})
        self.stores: list[Path] = []
        """That are verified once more by the command."""

    @contextmanager
    def case(self, at: str, store: Path) -> Generator[str]:
        """Runs one case; what is wrong in it is said and counted."""
        self.counts[self.what] += 1
        try:
            yield at
        except (AssertionError, DatasetError) as error:
            self.counts["corrupted"] += 1
            print(f"FAILED {error or at} (kept: {store})")

    def compare(self, store: Path, flushed: set[Step], at: str, *, check_all: bool = False) -> None:
        """Counts the flushed steps that are gone; raises where one is not what was appended."""
        reader = StoreReader(store, check_all=check_all)
        present: set[Step] = set()
        for i in range(len(reader)):
            episode, number, first = reader.read(i), reader.store_episode(i), reader.first_step(i)
            for row in range(len(episode)):
                where = f"{at}: episode {number}, step {first + row}"
                compare(episode, row, number, first + row, where, check_all)
                present.add((number, first + row))
        missing = sorted(flushed - present)
        self.counts["flushed steps lost"] += len(missing)
        self.counts["steps compared"] += len(present)
        if missing:
            print(f"FAILED {at}: {len(missing)} flushed steps are gone, first {missing[0]} (kept: {store})")

    @property
    def is_good(self) -> bool:
        return not (self.counts["flushed steps lost"] or self.counts["corrupted"])

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in self.counts.items())


def compare(episode: Any, row: int, number: int, step: int, at: str, is_damaged: bool) -> None:
    """Raises unless a step holds what was appended, bit by bit."""
    wanted = step_of(number, step)
    for name, value in (*wanted.pop("obs").items(), *wanted.items()):
        got = episode.obs[name][row] if name in episode.obs else getattr(episode, name)[row]
        if np.asarray(got).tobytes() != np.asarray(value, np.asarray(got).dtype).tobytes():
            raise AssertionError(f"{at}: {name} is {got}, {value} was appended")
    try:
        seen = episode.obs["front.rgb"][row]
    except DatasetError:
        if is_damaged:
            return
        raise
    taken = int(episode.picture_stamp_ns["front.rgb"][row]) // 10_000_000
    # The picture is one that was taken, its stamp says when, and it is the newest unless that was lost.
    if taken % 3 or not np.array_equal(seen, picture_of(number, taken)):
        raise AssertionError(f"{at}: the picture is not the one that its stamp names")
    if not is_damaged and not 0 <= step - taken <= 2:
        raise AssertionError(f"{at}: the step sees the picture of step {taken}")


def steps_of(flushed: dict[int, int]) -> set[Step]:
    """Returns the steps of episodes from their counts."""
    return {(episode, step) for episode, steps in flushed.items() for step in range(steps)}


def kills(folder: Path, count: int, seed: int) -> Outcome:
    """Kills `count` writers; every one begins where the one before was killed."""
    outcome = Outcome("kills")
    known: dict[Path, set[Step]] = {}
    for i in range(count):
        store = folder / f"killed-{i // ROUNDS:03d}"
        flushed = known.setdefault(store, set())
        with outcome.case(f"kill {i}, seed {seed + i}", store) as at:
            flushed |= steps_of(kill_one(store, 1000 * (seed + i)))
            if not (store / "meta/store.json").exists():
                outcome.counts["before the store was made"] += 1
                continue
            found = verify(store).problems
            if any(problem.kind != "torn" for problem in found):
                raise AssertionError(f"{at}: {found}")
            outcome.counts["writes cut in two"] += len(found)
            outcome.compare(store, flushed, at)
            if i % ROUNDS == ROUNDS - 1 or i == count - 1:
                go_on_and_repair(outcome, store, flushed, at)
                outcome.stores.append(store)
    return outcome


def go_on_and_repair(
    outcome: Outcome, folder: Path, flushed: set[Step], at: str, *, check_all: bool = False
) -> None:
    """Appends after the damage, repairs, and verifies that nothing is wrong any more."""
    with StoreWriter(folder, META, FEATURES, flush_s=10, picture="png") as writer:
        lanes = Lanes(writer)
        for _ in range(5):
            lanes.append(0)
        writer.flush()
    flushed = flushed | steps_of(lanes.appended)
    outcome.compare(folder, flushed, f"{at}, appended", check_all=check_all)
    repair(folder)
    left = verify(folder).problems
    if left:
        raise AssertionError(f"{at}, repaired: {left}")
    outcome.compare(folder, flushed, f"{at}, repaired", check_all=check_all)


class Template:
    """A store that was closed well, and which bytes of it hold which steps."""

    def __init__(self, folder: Path, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.folder = folder
        self.parts: list[tuple[int, int, int, set[Step]]] = []
        """Segment, first byte, byte after the last, steps: of every flush."""
        sizes: dict[int, int] = {}
        known: set[Step] = set()
        size = int(rng.integers(6_000, 60_000))
        with StoreWriter(folder, META, FEATURES, flush_s=1e6, segment_bytes=size, picture="png") as writer:
            lanes = Lanes(writer)
            for _ in range(12):
                for _ in range(int(rng.integers(1, 40))):
                    lanes.append(int(rng.integers(LANES)))
                writer.flush()
                steps = steps_of(lanes.appended)
                for number in segment_numbers(folder / "journal"):
                    now = segment_path(folder / "journal", number).stat().st_size
                    if now > sizes.get(number, 0):
                        self.parts.append((number, sizes.get(number, 0), now, steps - known))
                        sizes[number] = now
                known = steps
        self.sizes = sizes

    def untouched(self, segment: int, first: int, end: int) -> set[Step]:
        """Returns the steps of all flushes that bytes `first` to `end` of a segment do not touch."""
        return {
            step
            for number, begin, after, steps in self.parts
            if number != segment or after <= first or begin >= end
            for step in steps
        }


def cuts(folder: Path, count: int, seed: int, *, flip: bool) -> Outcome:
    """Cuts a segment at a random byte, or turns one bit over."""
    what = "flip" if flip else "truncation"
    outcome = Outcome(f"{what}s")
    template: Template | None = None
    for i in range(count):
        rng = np.random.default_rng((seed + i, int(flip)))
        if template is None or i % ROUNDS == 0:
            template = Template(folder / f"{what}-{i // ROUNDS:03d}-before", seed + i)
        store = folder / f"{what}-{i:03d}"
        shutil.copytree(template.folder, store)
        last = max(template.sizes)
        number = last if rng.random() < 0.6 else int(rng.choice(list(template.sizes)))
        byte = int(rng.integers(template.sizes[number]))
        with outcome.case(f"{what} at byte {byte} of segment {number}, seed {seed + i}", store) as at:
            damage(segment_path(store / "journal", number), byte, 1 << int(rng.integers(8)) if flip else 0)
            end = byte + 1 if flip else template.sizes[number]
            expected = template.untouched(number, byte, end)
            found = verify(store).problems
            if flip and not found:
                raise AssertionError(f"{at}: not noticed")
            outcome.counts["problems named"] += len(found)
            outcome.compare(store, expected, at, check_all=True)
            go_on_and_repair(outcome, store, expected, at, check_all=True)
            if i % ROUNDS:
                shutil.rmtree(store)
            else:
                outcome.stores.append(store)
    return outcome


def damage(path: Path, byte: int, bit: int) -> None:
    """Turns a bit of a byte over; without a bit, cuts the file there."""
    if not bit:
        os.truncate(path, byte)
        return
    content = bytearray(path.read_bytes())
    content[byte] ^= bit
    path.write_bytes(content)


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything was lost or corrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--truncations", type=int, default=200)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    logging.getLogger("robot_rl").setLevel(logging.ERROR)  # every recovery warns, as it should
    folder = Path(tempfile.mkdtemp(prefix="robot-rl-faults-"))
    parts = (
        lambda: kills(folder, given.kills, given.seed),
        lambda: cuts(folder, given.truncations, given.seed, flip=False),
        lambda: cuts(folder, given.flips, given.seed, flip=True),
    )
    outcomes: list[Outcome] = []
    for part in parts:
        began = time.monotonic()
        outcomes.append(part())
        print(f"seed {given.seed}: {outcomes[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    stores = [store for outcome in outcomes for store in outcome.stores]
    damaged = sum(replay.run(["verify", str(store)]) != 0 for store in stores)
    print(f"{len(stores)} stores verified by `robot-rl replay verify`: {damaged} damaged")
    is_good = not damaged and all(outcome.is_good for outcome in outcomes)
    if is_good:
        shutil.rmtree(folder)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
