"""Small datasets to read and to damage, and the real one where it lies."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.data.episode import Episode
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.writer import DatasetWriter

LENGTHS = (7, 9, 6)


@pytest.fixture
def g1_bottle() -> Path:
    """20 episodes of a humanoid, version 2.1, which lie beside the repository; too large to be in it."""
    for parent in Path(__file__).resolve().parents:
        folder = parent / "shared/data/g1_bottle"
        if folder.is_dir():
            return folder
    pytest.skip("the real dataset shared/data/g1_bottle is not beside this repository")


def episode(number: int, steps: int) -> Episode:
    """Returns an episode whose pictures and numbers can be told apart."""
    rng = np.random.default_rng(number)
    column, row = np.arange(64)[None, :, None], np.arange(48)[:, None, None]
    moving = np.stack([(column + 2 * row + 9 * t + 40 * number) % 256 for t in range(steps)])
    pictures = np.broadcast_to(moving, (steps, 48, 64, 3)) // np.array([1, 2, 3])
    last = np.zeros(steps, bool)
    last[-1] = True
    action = rng.uniform(-1, 1, (steps, 3)).astype(np.float32)
    meta = EpisodesMeta(
        task="reach",
        robot="so101",
        control_hz=20.0,
        instruction=f"instruction {number % 2}",
        state_names=("pan", "lift"),
        action_names=("x", "y", "grip"),
    )
    return Episode(
        meta=meta,
        obs={
            "state": rng.normal(size=(steps, 2)).astype(np.float32),
            "front.rgb": pictures.astype(np.uint8),
            "wrist.rgb": (255 - pictures).astype(np.uint8),
        },
        final_obs={"state": np.full(2, number, np.float32)},
        action=action,
        base_action=action / 2,
        reward=np.arange(steps, dtype=np.float32),
        terminated=last if number == 1 else ~last & False,
        truncated=last if number != 1 else ~last & False,
        success=last,
        source=np.full(steps, 3, np.uint8),
        policy_version=np.full(steps, 5),
        stamp_ns=np.arange(steps) * 50_000_000 + 123,
        picture_stamp_ns={"front.rgb": np.arange(steps) * 50_000_000 + 23},
        device="arm-0",
    )


@pytest.fixture(scope="session")
def recorded() -> list[Episode]:
    """What the small datasets were written from."""
    return [episode(number, steps) for number, steps in enumerate(LENGTHS)]


def _write(folder: Path, recorded: list[Episode], **options: Any) -> Path:
    with DatasetWriter(folder, recorded[0].meta, recorded[0].features(), **options) as writer:
        for one in recorded:
            writer.write(one)
    return folder


@pytest.fixture(scope="session")
def video_dataset(tmp_path_factory: pytest.TempPathFactory, recorded: list[Episode]) -> Path:
    """Version 3, one video for each episode; not to be changed."""
    return _write(tmp_path_factory.mktemp("datasets") / "video", recorded)


@pytest.fixture(scope="session")
def png_dataset(tmp_path_factory: pytest.TempPathFactory, recorded: list[Episode]) -> Path:
    """Version 3, pictures without loss in the table; not to be changed."""
    return _write(tmp_path_factory.mktemp("datasets") / "png", recorded, images="png")


@pytest.fixture(scope="session")
def old_dataset(tmp_path_factory: pytest.TempPathFactory, video_dataset: Path) -> Path:
    """The video dataset as version 2.1 lays it out, with what LeRobot records and no more."""
    folder = tmp_path_factory.mktemp("datasets") / "v21"
    info = json.loads((video_dataset / "meta/info.json").read_text())
    pictures = ("observation.images.front", "observation.images.wrist")
    clock = ("timestamp", "frame_index", "episode_index", "index", "task_index")
    kept = ("observation.state", *pictures, "action", *clock)
    info |= {
        "codebase_version": "v2.1",
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": {name: info["features"][name] for name in kept},
    }
    info["features"]["action"]["names"] = [info["features"]["action"]["names"]]  # version 2 nests them
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info))
    lines, stats = [], []
    for number, length in enumerate(LENGTHS):
        table = pq.read_table(video_dataset / f"data/chunk-000/file-{number:03d}.parquet")
        target = folder / info["data_path"].format(episode_chunk=0, episode_index=number)
        target.parent.mkdir(parents=True, exist_ok=True)
        table = table.select([name for name in kept if name in table.column_names])
        pq.write_table(table, target)
        for name in pictures:
            video = folder / info["video_path"].format(episode_chunk=0, video_key=name, episode_index=number)
            video.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(video_dataset / f"videos/{name}/chunk-000/file-{number:03d}.mp4", video)
        lines.append({"episode_index": number, "tasks": [f"instruction {number % 2}"], "length": length})
        stats.append({"episode_index": number, "stats": _stats_of(table)})
    tasks = [{"task_index": number, "task": f"instruction {number}"} for number in range(2)]
    for name, content in (("episodes", lines), ("episodes_stats", stats), ("tasks", tasks)):
        text = "".join(json.dumps(line) + "\n" for line in content)
        (folder / f"meta/{name}.jsonl").write_text(text)
    return folder


def _stats_of(table: Any) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for name in ("observation.state", "action"):
        values = np.asarray(table[name].to_pylist())
        found = {key: getattr(values, key)(0).tolist() for key in ("min", "max", "mean", "std")}
        stats[name] = {**found, "count": [len(values)]}
    return stats


def without_checksums(folder: Path) -> Path:
    """Makes a dataset one of an earlier version: what is wrong with it must be seen from what it holds."""
    (folder / "meta/checksums.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "meta/checksums", ignore_errors=True)
    own = folder / "meta/robot_rl.json"
    if own.is_file():
        own.write_text(own.read_text().replace('"checksums": true,', ""))
    return folder


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a dataset to where it may be damaged; as one of others, whose files have no checksums."""

    def copy(folder: Path) -> Path:
        return without_checksums(Path(shutil.copytree(folder, tmp_path / folder.name)))

    return copy
