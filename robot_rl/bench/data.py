"""Samples per second of our loader, compared with LeRobot's dataset and DataLoader on the same files.

Both take turns in one process, over the same rows in the same order, with the same number of workers. Pixels,
actions and padding are compared first. Both decode two pictures for every sample. Rows with `kept` show the
gain from decoded pictures in memory, rows with `uint8` LeRobot's gain without float pictures.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.bench.peers import cache_folder
from robot_rl.bench.store import measure
from robot_rl.bench.trials import Rate, Stopwatch, median_ratio
from robot_rl.core.errors import RobotRLError
from robot_rl.data.episode import Episode
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.pictures import PictureCache
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetWriter
from robot_rl.data.loader import ChunkLoader
from robot_rl.data.pool import EpisodePool

Array = NDArray[Any]

CAMERAS = ("front", "wrist")
BATCH, CHUNK, FPS, WIDTH = 32, 16, 20, 14
FORMAT = 1
"""Version of the generated datasets: a new number makes them again."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One dataset to read."""

    name: str
    images: Literal["png", "video"]
    size: tuple[int, int]
    episodes: int
    steps: int
    goal: float
    """Ratio to LeRobot that should be reached, without decoded pictures in memory."""


CASES = {
    "image96": Case(name="png 96x96", images="png", size=(96, 96), episodes=20, steps=200, goal=20.0),
    "video96": Case(name="h264 96x96", images="video", size=(96, 96), episodes=20, steps=200, goal=5.0),
    "video640": Case(name="h264 640x480", images="video", size=(480, 640), episodes=4, steps=200, goal=1.5),
}


Reader = Callable[[int], dict[str, Array]]
"""Number of the batch -> `front`, `wrist` (B, h, w, 3), `action` (B, H, A), `valid` (B, H)."""


def run(
    cases: tuple[str, ...] = ("image96", "video96", "video640"),
    rounds: int = 5,
    batches: int = 6,
    workers: int = 0,
    recording_s: float = 20.0,
    folder: str = "",
) -> dict[str, Any]:
    """Measures everything and returns the tables of `robot-rl bench data`.

    Args:
        cases: of `image96`, `video96`, `video640`.
        rounds: turns of each reader; the result is the median ratio of the rounds.
        batches: of 32 samples in a round; with workers, use many more than the 4 that are decoded ahead.
        workers: processes of both loaders; with workers only wall-clock time is measured.
        recording_s: seconds of recording into a store; 0: no recording.
        folder: for the datasets, which are kept; empty: the user's cache.
    """
    unknown = sorted(set(cases) - set(CASES))
    if unknown or rounds < 1 or batches < 1 or workers < 0:
        raise ValueError(
            f"bench data: got cases {list(cases)}, rounds {rounds}, batches {batches}, workers {workers}; "
            f"allowed: {', '.join(CASES)}; 1 or more rounds and batches; 0 or more workers"
        )
    at = Path(folder) if folder else cache_folder("bench")
    peer = importlib.util.find_spec("lerobot") is not None
    rows: list[dict[str, Any]] = []
    ratios: dict[str, dict[str, float]] = {}
    notes = [
        f"2 cameras, batch {BATCH}, chunks of {CHUNK} actions, {workers} workers; median of {rounds} "
        f"alternating rounds of {batches} batches, the same rows for all; cpu_samples_per_s is per second "
        "of processor time, all threads together",
        "pixels, actions and padding: equal to LeRobot's" if peer else "ours alone: no package lerobot here",
    ]
    for name in cases:
        found, ratio, missed = _case(at, CASES[name], rounds, batches, workers, peer)
        rows += found
        notes += missed
        ratios[name] = ratio
    return {
        "title": f"Reading datasets: samples per second, {os.cpu_count()} cores",
        "rows": rows,
        "ratio_to_lerobot": ratios,
        "opening": [_opening(at, CASES[name]) for name in cases],
        "replay": [_replay()],
        "recording": [measure(seconds=recording_s)] if recording_s else [],
        "notes": notes,
    }


def _case(
    at: Path, case: Case, rounds: int, batches: int, workers: int, peer: bool
) -> tuple[list[dict[str, Any]], dict[str, float], list[str]]:
    """Returns rows, ratios and missed goals of one dataset."""
    folder = dataset(at, case)
    kept = PictureCache(ram_bytes=1 << 33)
    opened = {
        "ours": lambda: _ours(folder, workers, PictureCache()),
    }
    if not workers:  # with workers it takes several epochs until each has kept its pictures
        opened["ours, pictures kept"] = lambda: _ours(folder, 0, kept)
    if peer:
        order = _order(folder, (1 + 2 * rounds) * batches)
        opened["LeRobot"] = lambda: _lerobot(folder, case, order, workers, is_uint8=False)
        if case.images == "video":  # LeRobot always turns PNG pictures into floats
            opened["LeRobot, uint8"] = lambda: _lerobot(folder, case, order, workers, is_uint8=True)
    readers = {who: make() for who, make in opened.items()}
    rates: dict[str, list[Rate]] = {who: [] for who in readers}
    try:
        _warm(readers, batches)
        for turn in range(rounds):
            for who, (read, _) in readers.items():
                rates[who].append(_rate(read, range((1 + turn) * batches, (2 + turn) * batches)))
    finally:
        for _, close in readers.values():
            close()
    rows = [
        {
            "dataset": case.name,
            "reader": who,
            "samples_per_s": statistics.median(r.wall for r in found),
            "cpu_samples_per_s": None if workers else statistics.median(r.cpu for r in found),
        }
        for who, found in rates.items()
    ]
    ratio = _ratios(rates, has_cpu=not workers) if peer else {}
    judged = ratio.get("cpu", ratio.get("wall", case.goal))
    missed = [f"MISSED: {case.name} reached {judged:.2f}x LeRobot, the goal is {case.goal:g}x"]
    return rows, {**ratio, "goal": case.goal}, missed if judged < case.goal else []


def _ratios(rates: dict[str, list[Rate]], *, has_cpu: bool) -> dict[str, float]:
    """Returns median ratios, ours to theirs, of neighbouring rounds."""

    def median(mine: str, theirs: str, what: str) -> float:
        return round(median_ratio(rates[mine], rates[theirs], what), 2)

    found: dict[str, float] = {}
    for what in ("wall", "cpu") if has_cpu else ("wall",):
        found[what] = median("ours", "LeRobot", what)
        if "ours, pictures kept" in rates:
            found[f"{what}_pictures_kept"] = median("ours, pictures kept", "LeRobot", what)
        if "LeRobot, uint8" in rates:
            found[f"{what}_to_uint8"] = median("ours", "LeRobot, uint8", what)
    return found


def _rate(read: Reader, numbers: range) -> Rate:
    watch = Stopwatch()
    for number in numbers:
        read(number)
    return watch.rate(BATCH * len(numbers))


def _warm(readers: dict[str, tuple[Reader, Callable[[], None]]], batches: int) -> None:
    """Reads the batches of the first round with every reader; refuses readers that differ."""
    for number in range(batches):
        found = {who: read(number) for who, (read, _) in readers.items()}
        for who, batch in found.items():
            for key, values in found["ours"].items():
                if not np.array_equal(batch[key], values):
                    raise RobotRLError(
                        f"bench data: {key!r} of {who!r} differs from ours in batch {number}, allowed: "
                        "equal. One of the readers is wrong; the rates would mean nothing."
                    )


def _order(folder: Path, batches: int) -> list[int]:
    """Returns the rows that our loader draws, as LeRobot counts them."""
    with _loader(folder, 0, PictureCache(), keys=("state",)) as loader:
        starts = loader.dataset.episode_starts
        drawn = [loader.sample().source for _ in range(batches)]
    return np.concatenate([starts[d["episode"]] + d["step"] for d in drawn]).tolist()


def _loader(folder: Path, workers: int, cache: PictureCache, keys: Any = None) -> ChunkLoader:
    dataset = Dataset(folder)
    return ChunkLoader(
        dataset, horizon=CHUNK, batch=BATCH, seed=0, num_workers=workers, cache=cache, keys=keys
    )


def _ours(folder: Path, workers: int, cache: PictureCache) -> tuple[Reader, Callable[[], None]]:
    loader = _loader(folder, workers, cache)
    if cache.ram_bytes:  # an epoch, after which every picture is kept
        for _ in loader.batches():
            pass

    def read(number: int) -> dict[str, Array]:
        batch = loader.sample()
        pictures = {camera: batch.obs[f"{camera}.rgb"].numpy() for camera in CAMERAS}
        return {**pictures, "action": batch.actions.numpy(), "valid": batch.valid.numpy()}

    return read, loader.close


def _lerobot(
    folder: Path, case: Case, order: list[int], workers: int, *, is_uint8: bool
) -> tuple[Reader, Callable[[], None]]:
    """LeRobot's own dataset under torch's DataLoader; videos by torchcodec, its default."""
    datasets: Any = importlib.import_module("lerobot.datasets")
    source = datasets.LeRobotDataset(
        "robot-rl/bench",
        root=folder,
        delta_timestamps={"action": [step / FPS for step in range(CHUNK)]},
        video_backend="torchcodec" if case.images == "video" else None,
        return_uint8=is_uint8,
    )
    loader: Any = torch.utils.data.DataLoader
    batches: Iterator[Any] = iter(loader(source, batch_size=BATCH, sampler=order, num_workers=workers))
    scale = 1 if is_uint8 and case.images == "video" else 255

    def read(number: int) -> dict[str, Array]:
        batch = next(batches)
        # Lazy: the conversion back from floats is only for the comparison and must not be timed.
        return _Lazy(batch, scale)

    return read, lambda: None


class _Lazy(dict[str, Any]):
    """LeRobot's batch, converted to ours on access."""

    def __init__(self, batch: dict[str, Any], scale: int) -> None:
        super().__init__(batch)
        self._scale = scale

    def __getitem__(self, key: str) -> Array:
        if key == "valid":
            return ~super().__getitem__("action_is_pad").numpy()
        if key == "action":
            return super().__getitem__("action").numpy()
        pictures = super().__getitem__(f"observation.images.{key}")
        return (pictures * self._scale).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def _opening(at: Path, case: Case) -> dict[str, Any]:
    """Returns milliseconds until the first batch can be drawn."""
    began = time.perf_counter()
    opened = Dataset(dataset(at, case))
    opened_s, began = time.perf_counter() - began, time.perf_counter()
    rows = len(opened.columns["action"])
    return {
        "dataset": case.name,
        "episodes": len(opened),
        "rows": rows,
        "open_ms": 1e3 * opened_s,
        "numbers_ms": 1e3 * (time.perf_counter() - began),
    }


def _replay() -> dict[str, Any]:
    """Returns state transitions per second that the pool draws: batch 256, chunks of 8."""
    pool = EpisodePool([_Memory()], capacity=250_000)
    rng = np.random.default_rng(0)
    rates: list[float] = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(100):
            pool.sample_chunks(256, horizon=8, gamma_step=0.99, rng=rng)
        rates.append(100 * 256 / (time.perf_counter() - began))
    return {
        "what": "state chunks of 8, batch 256",
        "samples_per_s": statistics.median(rates),
        "goal": 300_000,
    }


class _Memory:
    """1000 episodes of 200 steps without pictures."""

    def __init__(self) -> None:
        self._one = _episode(0, 200, None)
        self.meta, self.features = self._one.meta, self._one.features()

    def __len__(self) -> int:
        return 1000

    def lengths(self) -> NDArray[np.int64]:
        return np.full(1000, 200)

    def read(self, episode: int) -> Episode:
        return self._one

    def refresh(self) -> None:
        pass


def dataset(at: Path, case: Case) -> Path:
    """Returns a dataset for both readers, which our writer makes on first use."""
    key = json.dumps([FORMAT, case.images, case.size, case.episodes, case.steps])
    folder = at / case.name.replace(" ", "-")
    mark = folder.with_suffix(".json")
    if not mark.is_file() or mark.read_text() != key:
        shutil.rmtree(folder, ignore_errors=True)
        first = _episode(0, 2, case.size)
        with DatasetWriter(folder, first.meta, first.features(), images=case.images) as writer:
            writer.write_all(_episode(number, case.steps, case.size) for number in range(case.episodes))
        mark.write_text(key)
    return folder


def _episode(number: int, steps: int, size: tuple[int, int] | None) -> Episode:
    """Returns an episode of a moving scene with the noise of a camera."""
    rng = np.random.default_rng(number)
    last = np.arange(steps) == steps - 1
    obs: dict[str, Any] = {"state": rng.normal(size=(steps, WIDTH)).astype(np.float32)}
    for camera in CAMERAS if size else ():
        obs[f"{camera}.rgb"] = _scene(rng, steps, size or (0, 0))
    action = rng.uniform(-1, 1, (steps, WIDTH)).astype(np.float32)
    names = tuple(f"joint_{i}" for i in range(WIDTH))
    meta = EpisodesMeta(
        task="bench",
        robot="two_arms",
        control_hz=FPS,
        instruction="fold the cloth",
        state_names=names,
        action_names=names,
    )
    return Episode(
        meta=meta,
        obs=obs,
        final_obs={key: values[-1] for key, values in obs.items()},
        action=action,
        base_action=action,
        reward=np.zeros(steps, np.float32),
        terminated=~last & False,
        truncated=last,
        success=last,
        source=np.zeros(steps, np.uint8),
        policy_version=np.zeros(steps, np.int64),
        stamp_ns=np.arange(steps) * 50_000_000,
    )


def _scene(rng: np.random.Generator, steps: int, size: tuple[int, int]) -> Array:
    """Returns (T, h, w, 3): a textured table, three things that move over it, and noise."""
    height, width = size
    table = rng.integers(60, 200, (-(-height // 16), -(-width // 16), 3)).repeat(16, 0).repeat(16, 1)
    table = table[:height, :width].astype(np.int16)
    noise = rng.normal(0, 2, (4, height, width, 3)).astype(np.int16)
    speed, colour = rng.uniform(-3, 3, (3, 2)) * height / 96, rng.integers(0, 255, (3, 3))
    begin, side = rng.uniform(0, 1, (3, 2)) * size, height // 6
    pictures = np.empty((steps, height, width, 3), np.uint8)
    for step in range(steps):
        picture = table + noise[step % 4]
        for thing in range(3):
            y, x = ((begin[thing] + step * speed[thing]) % (np.array(size) - side)).astype(int)
            picture[y : y + side, x : x + side] = colour[thing]
        pictures[step] = picture.clip(0, 255)
    return pictures
