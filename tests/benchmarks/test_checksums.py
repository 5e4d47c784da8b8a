"""What comparing checksums costs a reader: the same files with and without, by turns, in CPU time."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.data.episode import Episode
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetWriter

pytestmark = pytest.mark.benchmark

EPISODES, STEPS, SIZE, DIM, ROUNDS = 6, 200, 96, 14, 41
META = EpisodesMeta(
    task="bench",
    robot="panda",
    control_hz=20.0,
    instruction="pick up the cube",
    state_names=tuple(f"joint_{i}" for i in range(DIM)),
    action_names=tuple(f"joint_{i}" for i in range(DIM)),
)


def _episode(number: int, cameras: tuple[str, ...]) -> Episode:
    rng = np.random.default_rng(number)
    last = np.arange(STEPS) == STEPS - 1
    scene = np.kron(rng.integers(40, 200, (SIZE // 8, SIZE // 8, 3)), np.ones((8, 8, 1)))
    pictures = np.repeat(scene[None], STEPS, axis=0) + rng.normal(0, 2, (STEPS, SIZE, SIZE, 3))
    numbers = rng.normal(size=(STEPS, DIM)).astype(np.float32)
    return Episode(
        meta=META,
        obs={"state": numbers} | dict.fromkeys(cameras, pictures.clip(0, 255).astype(np.uint8)),
        final_obs={},
        action=numbers,
        base_action=numbers,
        reward=last.astype(np.float32),
        terminated=last,
        truncated=~last & last,
        success=last,
        source=np.zeros(STEPS, np.uint8),
        policy_version=np.zeros(STEPS, np.int64),
        stamp_ns=np.arange(STEPS) * 50_000_000,
    )


def _read(folder: Path) -> None:
    """Opens a dataset and reads every number and every picture once, as an epoch does."""
    dataset = Dataset(folder)
    for number in range(len(dataset)):
        for values in dataset.read(number).obs.values():
            np.asarray(values[np.arange(STEPS)])


@contextmanager
def _unchecked() -> Generator[None]:
    """Neither files nor pages are compared."""
    opened: Any = pq.ParquetFile

    def trusting(*args: Any, page_checksum_verification: bool = False, **how: Any) -> Any:
        return opened(*args, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checksums, "require", lambda sums, name: None)
        patch.setattr(pq, "ParquetFile", trusting)
        yield


def _spent_s(read: Callable[[Path], None], folder: Path) -> float:
    began = time.process_time()
    read(folder)
    return time.process_time() - began


@pytest.mark.parametrize("joined", [False, True], ids=["a file each", "joined"])
@pytest.mark.parametrize(
    ("kind", "images", "cameras"),
    [("video", "video", ("front.rgb",)), ("png", "png", ("front.rgb",)), ("numbers", "png", ())],
)
def test_reading_with_checksums_costs_five_percent_at_most(
    tmp_path: Path, record_property: Any, kind: str, images: Any, cameras: tuple[str, ...], joined: bool
) -> None:
    episodes = [_episode(number, cameras) for number in range(EPISODES if cameras else 4 * EPISODES)]
    with DatasetWriter(tmp_path, META, episodes[0].features(), images=images) as writer:
        for episode in episodes:
            writer.write(episode)
    if joined:
        compact(tmp_path)
    _read(tmp_path)
    ratios: list[float] = []
    for _ in range(ROUNDS):
        with _unchecked():
            before = _spent_s(_read, tmp_path)
        checked = _spent_s(_read, tmp_path)
        with _unchecked():
            after = _spent_s(_read, tmp_path)
        ratios.append(2 * checked / (before + after))
    record_property("cost", {kind: ratios})
    assert np.median(ratios) <= 1.05, ratios
