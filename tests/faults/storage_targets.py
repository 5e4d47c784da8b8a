"""What the storage campaign runs: for each part that writes, a workload, and a check of what it promised.

A workload acknowledges what it was told is on the disk. An acknowledgement holds the whole promise, so
the last one counts. `check` opens what a fault or a power cut left, in a process that did not write it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from campaign import FEATURES, META, Lanes, Template, compare, damage

from robot_rl.core.errors import RobotRLError
from robot_rl.data.collecting import collecting, is_published, remove
from robot_rl.data.episode import Episode, EpisodeSource, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.keep import Facts
from robot_rl.data.lerobot import edit
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.upgrade import upgrade
from robot_rl.data.lerobot.writer import DatasetWriter
from robot_rl.data.store.check import repair, verify
from robot_rl.data.store.journal import segment_path
from robot_rl.data.store.layout import STORE_JSON
from robot_rl.data.store.reader import StoreReader, open_source
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.writer import StoreWriter

T = TypeVar("T")
Promise = dict[str, Any]

FORMAT_1 = Path(__file__).parents[1] / "data/format_1"


class LostError(AssertionError):
    """Something that was acknowledged is gone."""


class WrongError(AssertionError):
    """Something is there that nobody wrote."""


class Run:
    """What a workload says while it runs."""

    def __init__(self, promised: Promise, send: Callable[[str], None] = lambda text: None) -> None:
        self.promised = dict(promised)
        self.errors: list[BaseException] = []
        """That our own calls raised."""
        self.repaired = 0
        """How often a message asked for `robot-rl replay repair`, and got it."""
        self._send = send

    def ack(self, **promise: Any) -> None:
        """Says that something is on the disk from now on."""
        self.promised |= promise
        self._send(json.dumps(self.promised) + "\n")

    def attempt(self, act: Callable[[], T]) -> T:
        """Calls something of ours; what it raises is noted, and it is called once more."""
        try:
            return act()
        except Exception as error:
            self.errors.append(error)
        return act()

    def mending(self, store: Path, act: Callable[[], T]) -> T:
        """Calls something of ours; where the message asks for a repair of the store, that is done first."""
        try:
            return act()
        except RobotRLError as error:
            if "replay repair" not in str(error):
                raise
        self.repaired += 1
        repair(store)
        return act()


class Target(Protocol):
    """One part that writes to the disk."""

    def prepare(self, folder: Path) -> Promise:
        """Makes what is there before, and returns what is promised of it."""
        ...

    def work(self, folder: Path, run: Run) -> None:
        """Does what a user does, also where an earlier one was cut short."""
        ...

    def check(self, folder: Path, run: Run) -> None:
        """Raises `LostError` or `WrongError` where the folder is not as promised."""
        ...


# --- the episode store ---------------------------------------------------------------------------------


class Store:
    """Appends and flushes; marks, and goes back to the mark."""

    def prepare(self, folder: Path) -> Promise:
        return {"steps": {}}

    def work(self, folder: Path, run: Run) -> None:
        store = folder / "runs/store"
        known = run.promised["steps"]
        writer = run.attempt(lambda: run.mending(store, lambda: open_store(store)))
        lanes = Lanes(writer)

        def flush() -> None:
            run.attempt(writer.flush)
            run.ack(steps=known | {str(episode): steps for episode, steps in lanes.appended.items()})

        for _ in range(3):
            take_turns(lanes, 8)
            flush()
        mark = run.attempt(writer.mark)
        flush()
        inside, appended, promised = dict(lanes._episode), dict(lanes.appended), run.promised["steps"]
        take_turns(lanes, 8)
        flush()
        run.attempt(writer.close)
        run.ack(steps=promised)  # what came after the mark is to be given up
        writer = run.attempt(lambda: open_store(store))
        run.attempt(lambda: writer.rewind(mark))
        lanes = Lanes(writer)
        lanes._episode, lanes.appended = inside, appended
        take_turns(lanes, 12)
        flush()
        run.attempt(writer.close)
        known = run.promised["steps"]
        writer = run.attempt(lambda: open_store(store))  # and goes on behind what is there
        lanes = Lanes(writer)
        take_turns(lanes, 4)
        flush()
        run.attempt(writer.close)

    def check(self, folder: Path, run: Run) -> None:
        check_store(folder / "runs/store", run)


class Seal:
    """Seals a store by itself, and while it is being written."""

    def prepare(self, folder: Path) -> Promise:
        with open_store(folder / "store") as writer:
            return {"steps": short_episodes(writer, 1)}

    def work(self, folder: Path, run: Run) -> None:
        store, options = folder / "store", SealOptions(images="png")
        run.attempt(lambda: run.mending(store, lambda: seal(store, options)))
        run.ack(sealed=True)
        writer = run.attempt(lambda: open_store(store))
        known = run.promised["steps"]
        appended = short_episodes(writer, 1)
        run.attempt(writer.flush)
        run.ack(steps=known | appended)
        run.attempt(lambda: writer.seal(options))
        run.attempt(writer.close)

    def check(self, folder: Path, run: Run) -> None:
        check_store(folder / "store", run)


class Repair:
    """Repairs a store that is damaged in the middle and at the end."""

    def prepare(self, folder: Path) -> Promise:
        template = Template(folder / "store", 5)
        first, last = min(template.sizes), max(template.sizes)
        byte, end = template.sizes[first] // 2, template.sizes[last]
        damage(segment_path(folder / "store/journal", first), byte, 4)
        damage(segment_path(folder / "store/journal", last), end - 7, 0)
        whole = template.untouched(first, byte, byte + 1) & template.untouched(last, end - 7, end)
        return {"rows": sorted(whole), "steps": {}}

    def work(self, folder: Path, run: Run) -> None:
        run.attempt(lambda: repair(folder / "store"))
        run.ack(repaired=True)

    def check(self, folder: Path, run: Run) -> None:
        store = folder / "store"
        if run.promised.get("repaired"):
            left = verify(store).problems
            if left:
                raise WrongError(f"repaired, and still: {left[0]}")
        if not (store / STORE_JSON).is_file():
            repair(store)
        check_store(store, run, check_all=True)


def open_store(store: Path) -> StoreWriter:
    return StoreWriter(store, META, FEATURES, flush_s=1e6, segment_bytes=4000, picture="png")


def take_turns(lanes: Lanes, count: int) -> None:
    for i in range(count):
        lanes.append(i % 3)


def short_episodes(writer: StoreWriter, count: int) -> dict[str, int]:
    """Appends episodes of up to 4 steps and the beginning of another; returns the steps of each."""
    lanes = Lanes(writer)
    while len(lanes.appended) <= count:
        lanes.append(0)
        if 0 in lanes._episode and lanes.appended[lanes._episode[0]] == 4 and len(lanes.appended) <= count:
            writer.end_episode(0)
            del lanes._episode[0]
    return {str(episode): steps for episode, steps in lanes.appended.items()}


def check_store(store: Path, run: Run, *, check_all: bool = False) -> None:
    """Compares every row that a store returns with what was appended, and looks for those promised."""
    promised = {(int(e), step) for e, steps in run.promised["steps"].items() for step in range(steps)}
    promised |= {(episode, step) for episode, step in run.promised.get("rows", ())}
    if not promised and not (store / STORE_JSON).exists():
        return

    def read() -> set[tuple[int, int]]:
        reader = StoreReader(store, check_all=check_all)
        present: set[tuple[int, int]] = set()
        for i in range(len(reader)):
            episode, number, first = reader.read(i), reader.store_episode(i), reader.first_step(i)
            for row in range(len(episode)):
                at = (number, first + row)
                if at in present:
                    raise WrongError(f"episode {number}, step {first + row} is there twice")
                compare(episode, row, *at, f"episode {number}, step {first + row}", check_all)
                present.add(at)
        return present

    if not store.exists():
        raise LostError("the whole store")
    missing = promised - run.mending(store, read)
    if missing:
        raise LostError(f"{len(missing)} of {len(promised)} steps, first {min(missing)}")


# --- LeRobotDataset ------------------------------------------------------------------------------------

SET_META = EpisodesMeta(
    task="reach",
    robot="so101",
    control_hz=20.0,
    instruction="reach",
    state_names=("pan", "lift"),
    action_names=("x", "y"),
)


def episode_of(number: int, *, pictures: bool = True) -> Episode:
    """Returns an episode that its number determines; the brightness of a picture says the step."""
    rng = np.random.default_rng(number)
    steps = 3 + number % 3
    level = (40 + 23 * number + 11 * np.arange(steps + 1)) % 200
    obs: dict[str, Any] = {"state": rng.normal(size=(steps + 1, 2)).astype(np.float32)}
    if pictures:
        flat = np.broadcast_to(level[:, None, None, None], (steps + 1, 32, 48, 3))
        depth = np.random.default_rng(number).random((steps + 1, 8, 8), dtype=np.float32)
        obs |= {"front.rgb": flat.astype(np.uint8), "front.depth": depth}
    last = np.arange(steps) == steps - 1
    return Episode(
        meta=SET_META,
        obs={key: values[:-1] for key, values in obs.items()},
        final_obs={key: values[-1] for key, values in obs.items()},
        action=rng.normal(size=(steps, 2)).astype(np.float32),
        base_action=rng.normal(size=(steps, 2)).astype(np.float32),
        reward=rng.normal(size=steps).astype(np.float32),
        terminated=last,
        truncated=last & False,
        success=last,
        source=rng.integers(0, 4, steps).astype(np.uint8),
        policy_version=rng.integers(0, 100, steps),
        stamp_ns=np.cumsum(rng.integers(45, 60, steps)) * 1_000_000,
        device="arm_2",
    )


SET_FEATURES: dict[str, Feature] = episode_of(0).features()


def check_episodes(
    source: EpisodeSource, wanted: Sequence[int], *, at_least: int, pictures: bool = True
) -> None:
    """Compares the episodes of a dataset with what was written: `wanted` in order, and no others."""
    if len(source) < at_least:
        raise LostError(f"{at_least - len(source)} of {at_least} episodes")
    if len(source) > len(wanted):
        raise WrongError(f"{len(source)} episodes, {len(wanted)} were written")
    for i in range(len(source)):
        check_episode(source.read(i), episode_of(wanted[i], pictures=pictures), f"episode {i}")


def check_episode(got: Episode, want: Episode, at: str) -> None:
    for name, values in (*want.obs.items(), *vars(want).items()):
        if not isinstance(values, np.ndarray) or name.endswith("stamp_ns"):
            continue
        found = np.asarray(got.obs[name] if name in want.obs else getattr(got, name))
        if name == "front.rgb":  # by a codec that loses a little
            is_same = found.shape == values.shape and bool(
                (abs(found.astype(int) - values).mean((1, 2, 3)) < 4).all()
            )
        else:
            is_same = np.array_equal(found, values)
        if not is_same:
            raise WrongError(f"{at}: {name} is not what was written")


class Writer:
    """Adds episodes one by one and many at once."""

    def prepare(self, folder: Path) -> Promise:
        return {"episodes": 0}

    def work(self, folder: Path, run: Run) -> None:
        writer = run.attempt(lambda: DatasetWriter(folder / "data/set", SET_META, SET_FEATURES))
        for _ in range(2):
            run.attempt(lambda: writer.write(episode_of(len(writer))))
            run.ack(episodes=len(writer))
        run.attempt(lambda: writer.write_all(episode_of(n) for n in range(len(writer), len(writer) + 2)))
        run.ack(episodes=len(writer))
        writer.close()

    def check(self, folder: Path, run: Run) -> None:
        info = folder / "data/set/meta/info.json"
        if run.promised["episodes"] or (info.exists() and json.loads(info.read_text())["total_episodes"]):
            check_episodes(Dataset(folder / "data/set"), range(100), at_least=run.promised["episodes"])


class Compact:
    """Joins the files of a store that has sealed episodes and others."""

    def prepare(self, folder: Path) -> Promise:
        fill_set(folder / "set", range(3))
        with StoreWriter(folder / "set", SET_META, SET_FEATURES, flush_s=1e6, picture="png") as writer:
            append_episode(writer, episode_of(3))
        return {}

    def work(self, folder: Path, run: Run) -> None:
        run.attempt(lambda: compact(folder / "set"))
        run.ack(compacted=True)

    def check(self, folder: Path, run: Run) -> None:
        check_episodes(StoreReader(folder / "set"), range(4), at_least=4)
        files = len(list((folder / "set/data").rglob("*.parquet")))
        if run.promised.get("compacted") and files > 1:
            raise LostError(f"compacted, and {files} data files are there")


MADE = {"merged": (0, 1, 0, 1), "first": (0,), "second": (1,), "good": (1,)}
"""Dataset that `Edit` makes -> numbers of its episodes."""


class Edit:
    """Merges, splits and filters; of numbers alone, since `Writer` writes pictures."""

    def prepare(self, folder: Path) -> Promise:
        fill_set(folder / "set", range(2), pictures=False)
        return {}

    def work(self, folder: Path, run: Run) -> None:
        source, out = Dataset(folder / "set"), folder / "out"

        def acknowledge(*names: str) -> None:
            run.ack(**dict.fromkeys(names, True))

        if not (out / "merged").exists():
            run.attempt(lambda: edit.merge([source, source], out / "merged", images="png"))
        acknowledge("merged")
        parts: dict[str | Path, Any] = {out / "first": [0], out / "second": [1]}
        missing = {path: which for path, which in parts.items() if not Path(path).exists()}

        def split() -> None:
            todo = {path: which for path, which in missing.items() if not Path(path).exists()}
            if todo:
                edit.split(source, todo)

        run.attempt(split)
        acknowledge("first", "second")
        if not (out / "good").exists():
            run.attempt(lambda: edit.filter(source, out / "good", episodes=[1]))
        acknowledge("good")

    def check(self, folder: Path, run: Run) -> None:
        check_episodes(Dataset(folder / "set"), range(2), at_least=2, pictures=False)
        for name, numbers in MADE.items():
            path = folder / "out" / name
            if path.exists():
                check_episodes(Dataset(path), numbers, at_least=len(numbers), pictures=False)
            elif run.promised.get(name):
                raise LostError(f"{name}, which was made")


COLLECTED = (0, 1, 3)
"""Numbers of the episodes that `Collect` publishes, of the four that it keeps."""


class Collect:
    """Keeps two batches of episodes, and publishes three of the four; a batch is not collected twice."""

    def __init__(self) -> None:
        self.settings = {"seed": 0}

    def prepare(self, folder: Path) -> Promise:
        return {"kept": 0}

    def work(self, folder: Path, run: Run) -> None:
        run.attempt(lambda: self._collect(folder / "demos/set", run))

    def _collect(self, out: Path, run: Run) -> None:
        if is_published(out, self.settings):
            remove(out)
        if not out.exists():
            with collecting(out, self.settings) as into:
                for number in range(len(into.batches), 2):
                    facts = Facts(np.ones(2, bool), np.array([3, 4]), np.array([0.1, number]))
                    into.add(facts, [episode_of(2 * number), episode_of(2 * number + 1)])
                    run.ack(kept=into.num_kept)
                into.publish(COLLECTED, {"settings": self.settings})
                run.ack(whole=True)

    def check(self, folder: Path, run: Run) -> None:
        out = folder / "demos/set"
        if out.exists():
            check_episodes(Dataset(out), COLLECTED, at_least=len(COLLECTED))
        elif run.promised.get("whole"):
            raise LostError("the dataset, which was in its place")
        elif run.promised["kept"]:
            with collecting(out, self.settings) as into:
                if into.num_kept < run.promised["kept"]:
                    raise LostError(f"{run.promised['kept'] - into.num_kept} episodes that were kept")
                check_episodes(Dataset(into.folder / "episodes"), range(4), at_least=into.num_kept)


class Upgrade:
    """Brings a dataset of LeRobot 2.1 to version 3, and one of our format 1 to the present one."""

    def prepare(self, folder: Path) -> Promise:
        fill_set(folder / "set", range(2))
        as_version_2(folder / "set", folder / "old")
        shutil.rmtree(folder / "set")
        shutil.copytree(FORMAT_1, folder / "one")
        return {}

    def work(self, folder: Path, run: Run) -> None:
        if not (folder / "new").exists():
            run.attempt(lambda: upgrade(folder / "old", folder / "new"))
        run.ack(new=True)
        source = Dataset(FORMAT_1)
        run.attempt(lambda: StoreWriter(folder / "one", source.meta, source.features, flush_s=1e6)).close()
        run.ack(one=True)

    def check(self, folder: Path, run: Run) -> None:
        self._same(Dataset(folder / "old"), None)
        if (folder / "new").exists():
            self._same(Dataset(folder / "new"), None)
        elif run.promised.get("new"):
            raise LostError("new, which was made")
        original = folder / "one.format-1"
        if run.promised.get("one") and not original.exists():
            raise LostError("the original of format 1")
        self._same(open_source(folder / "one"), Dataset(FORMAT_1))

    @staticmethod
    def _same(got: EpisodeSource, want: EpisodeSource | None) -> None:
        number = 2 if want is None else len(want)
        if len(got) != number:
            raise LostError(f"{number - len(got)} of {number} episodes")
        for i in range(number):
            one, other = got.read(i), episode_of(i) if want is None else want.read(i)
            for name, found, wanted in (
                ("action", one.action, other.action),
                ("state", one.obs["state"], other.obs["state"]),
            ):
                if not np.array_equal(found, wanted):
                    raise WrongError(f"episode {i}: {name} is not what was there")


def fill_set(folder: Path, numbers: Sequence[int], *, pictures: bool = True) -> None:
    features = episode_of(0, pictures=pictures).features()
    with DatasetWriter(folder, SET_META, features) as writer:
        for number in numbers:
            writer.write(episode_of(number, pictures=pictures))


def append_episode(writer: StoreWriter, episode: Episode) -> None:
    columns = ("action", "base_action", "reward", "terminated", "success")
    columns += ("source", "policy_version", "stamp_ns")
    for t in range(len(episode)):
        writer.append_lanes(
            np.array([0]),
            obs={key: np.asarray(values[t : t + 1]) for key, values in episode.obs.items()},
            final_obs={key: np.asarray(value)[None] for key, value in episode.final_obs.items()},
            **{name: getattr(episode, name)[t : t + 1] for name in columns},
        )


def as_version_2(new: Path, old: Path) -> None:
    """Lays a dataset out as LeRobot 2.1 does, numbers only."""
    import pyarrow.parquet as pq

    info = json.loads((new / "meta/info.json").read_text())
    clock = ("timestamp", "frame_index", "episode_index", "index", "task_index")
    kept = ("observation.state", "action", *clock)
    info |= {
        "codebase_version": "v2.1",
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
        "features": {name: info["features"][name] for name in kept},
    }
    (old / "meta").mkdir(parents=True)
    (old / "data/chunk-000").mkdir(parents=True)
    (old / "meta/info.json").write_text(json.dumps(info))
    lines: list[str] = []
    for number in range(info["total_episodes"]):
        table = pq.read_table(new / f"data/chunk-000/file-{number:03d}.parquet").select(list(kept))
        pq.write_table(table, old / info["data_path"].format(episode_chunk=0, episode_index=number))
        lines.append(json.dumps({"episode_index": number, "tasks": ["reach"], "length": len(table)}) + "\n")
    (old / "meta/episodes.jsonl").write_text("".join(lines))
    (old / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "reach"}) + "\n")
