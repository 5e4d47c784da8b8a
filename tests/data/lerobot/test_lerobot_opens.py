"""LeRobot's own package opens what we write: after appending, after joining, after a kill -9."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.files import replace_file
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.layout import INFO
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetWriter

pytestmark = pytest.mark.slow

Made = Callable[..., Episode]

CODEC_ERROR = 3.0
"""Mean absolute difference of a smooth picture, of 255; its neighbours in time differ by 5."""


@pytest.fixture(scope="module")
def lerobot(lerobot_datasets: Any) -> Any:
    return lerobot_datasets


def pixels(value: Any) -> Any:
    """Returns LeRobot's picture (3, h, w) in [0, 1] as (h, w, 3) of 255."""
    return np.asarray(value).transpose(1, 2, 0) * 255.0


def assert_lerobot_reads(lerobot: Any, folder: Path, episodes: Sequence[Episode], tolerance: float) -> None:
    """Every number of every row; first, last and a middle picture of every episode; windows."""
    windows = {"action": [0.0, 0.05, 0.1], "observation.images.front": [-0.05, 0.0]}
    dataset = lerobot.LeRobotDataset("ours/made", root=folder, delta_timestamps=windows, video_backend="pyav")
    assert dataset.num_episodes == len(episodes)
    assert len(dataset) == sum(len(episode) for episode in episodes)
    columns = dataset.hf_dataset.with_format("numpy")[:]
    start = 0
    for number, episode in enumerate(episodes):
        rows, steps = slice(start, start + len(episode)), len(episode)
        for name, want in (
            ("observation.state", episode.obs["state"]),
            ("action", episode.action),
            ("base_action", episode.base_action),
            ("next.reward", episode.reward),
            ("next.terminated", episode.terminated),
            ("next.truncated", episode.truncated),
            ("next.success", episode.success),
            ("source", episode.source),
            ("stamp_ns", episode.stamp_ns),
            ("camera_stamp_ns.wrist", episode.picture_stamp_ns["wrist.rgb"]),
            ("episode_index", [number] * steps),
            ("frame_index", range(steps)),
        ):
            assert np.array_equal(columns[name][rows], want), name
        assert np.allclose(columns["timestamp"][rows], np.arange(steps) / 20)
        for step in {0, steps // 2, steps - 1}:
            item = dataset[start + step]
            assert item["task"] == episode.meta.instruction
            follows = np.minimum(step + np.arange(3), steps - 1)
            assert np.array_equal(item["action"], episode.action[follows])
            assert item["action_is_pad"].tolist() == [step + i >= steps for i in range(3)]
            for key, picture, at in (
                ("front", item["observation.images.front"][1], step),
                ("front", item["observation.images.front"][0], max(0, step - 1)),
                ("wrist", item["observation.images.wrist"], step),
            ):
                assert np.abs(pixels(picture) - episode.obs[f"{key}.rgb"][at]).mean() <= tolerance
        start += steps


@pytest.mark.parametrize(
    ("images", "codec", "tolerance"),
    [("png", "h264", 1e-4), ("video", "h264", CODEC_ERROR), ("video", "av1", CODEC_ERROR)],
)
def test_lerobot_reads_it_appended_and_joined(
    lerobot: Any, tmp_path: Path, made: Made, images: Any, codec: Any, tolerance: float
) -> None:
    episodes = [made(5), made(8, seed=1, instruction="drop it"), made(4, seed=2), made(7, seed=3)]
    meta, features = made().meta, made().features()
    with DatasetWriter(tmp_path, meta, features, images=images, codec=codec) as writer:
        writer.write(episodes[0])
        writer.write(episodes[1])
    assert_lerobot_reads(lerobot, tmp_path, episodes[:2], tolerance)
    with DatasetWriter(tmp_path, meta, features, images=images, codec=codec) as writer:
        writer.write_all(episodes[2:])
    assert_lerobot_reads(lerobot, tmp_path, episodes, tolerance)
    compact(tmp_path)
    assert_lerobot_reads(lerobot, tmp_path, episodes, tolerance)


def test_lerobots_statistics_are_ours(lerobot: Any, tmp_path: Path, made: Made) -> None:
    from lerobot.datasets.compute_stats import aggregate_stats, get_feature_stats, sample_indices

    episodes = [made(400, size=(16, 24)), made(900, seed=1, size=(16, 24))]
    with DatasetWriter(tmp_path, made().meta, episodes[0].features(), images="png") as writer:
        for episode in episodes:
            writer.write(episode)
    stats = lerobot.LeRobotDatasetMetadata("ours/made", root=tmp_path).stats
    parts: list[dict[str, Any]] = []
    for episode in episodes:
        pictures = episode.obs["front.rgb"][sample_indices(len(episode))].transpose(0, 3, 1, 2)
        of_pictures = get_feature_stats(pictures, axis=(0, 2, 3), keepdims=True)
        scaled = {key: v if key == "count" else v[0] / 255 for key, v in of_pictures.items()}
        state = get_feature_stats(episode.obs["state"].astype(np.float64), axis=0, keepdims=False)
        parts.append({"observation.images.front": scaled, "observation.state": state})
    for name, theirs in aggregate_stats(parts).items():
        ours, width = stats[name], theirs["max"] - theirs["min"]
        assert ours.keys() == theirs.keys()
        for key in ("count", "min", "max", "mean", "std"):  # LeRobot sums squares of bytes in 32 bits
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-3, err_msg=f"{name} {key}")
        for key in ("q01", "q10", "q50", "q90", "q99"):
            # LeRobot takes one of the values, by a histogram; we go between two, as numpy does.
            assert (np.abs(ours[key] - theirs[key]) < width / 20).all(), f"{name} {key}"


def test_lerobot_reads_past_a_commit_that_was_cut_short(
    lerobot: Any, tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of the third episode has its name; only meta/info.json does not count it yet."""
    episodes = [made(5), made(8, seed=1)]
    with DatasetWriter(tmp_path, made().meta, made().features()) as writer:
        for episode in episodes:
            writer.write(episode)

        def killed(path: Path, content: Any) -> None:
            if path == tmp_path / INFO:
                raise KeyboardInterrupt
            replace_file(path, content)

        monkeypatch.setattr("robot_rl.data.lerobot.checksums.replace_file", killed)
        monkeypatch.setattr(DatasetWriter, "_give_up", lambda writer, batch: None)
        with pytest.raises(KeyboardInterrupt):
            writer.write(made(4, seed=2, instruction="another"))
    assert len(list((tmp_path / "data").rglob("*.parquet"))) == 3
    assert_lerobot_reads(lerobot, tmp_path, episodes, CODEC_ERROR)


_ENDLESS = """
import sys
sys.path.insert(0, {tests!r})
from conftest import _made
from robot_rl.data.lerobot.writer import DatasetWriter
episode = _made()
with DatasetWriter({folder!r}, episode.meta, episode.features()) as writer:
    for seed in range(100_000):
        print(writer.write(_made(5 + seed % 4, seed=seed, instruction="task %d" % (seed % 3))), flush=True)
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.013])
def test_lerobot_reads_what_a_killed_writer_left(
    lerobot: Any, tmp_path: Path, made: Made, wait_s: float
) -> None:
    script = _ENDLESS.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "4":
            break
    time.sleep(wait_s)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    sealed = len(Dataset(tmp_path, backend="pyav"))
    assert sealed >= 5
    episodes = [made(5 + n % 4, seed=n, instruction=f"task {n % 3}") for n in range(sealed)]
    assert_lerobot_reads(lerobot, tmp_path, episodes, CODEC_ERROR)
    with DatasetWriter(tmp_path, made().meta, made().features()) as writer:
        assert writer.write(made(9, seed=999)) == sealed
    assert_lerobot_reads(lerobot, tmp_path, [*episodes, made(9, seed=999)], CODEC_ERROR)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a dataset by the command line, pictures as video."""
    from robot_rl.cli.main import main

    out = tmp_path_factory.mktemp("collected") / "demos"
    words = ["task=pick_cube", "episodes=2", "num_envs=2", "cameras=[front]", "images=video", f"out={out}"]
    with redirect_stdout(io.StringIO()):
        assert main(["collect", *words]) == 0
    return out


def test_lerobots_viewer_shows_a_collected_dataset(lerobot: Any, collected: Path, tmp_path: Path) -> None:
    """What `lerobot-dataset-viz` reads; the viewer itself where rerun is installed (lerobot[viz])."""
    import torch
    from lerobot.scripts import lerobot_dataset_viz as viewer

    dataset = lerobot.LeRobotDataset("ours/collected", root=collected, episodes=[1], video_backend="pyav")
    names = viewer.get_feature_names(dataset, "observation.state")
    assert len(names) == dataset.features["observation.state"]["shape"][0]
    assert not any(re.fullmatch(r"observation.state_\d+", name) for name in names)
    ours, shown = Dataset(collected, backend="pyav"), 0
    pictures = ours.frames("front.rgb", 1, range(int(ours.lengths()[1])))
    for batch in torch.utils.data.DataLoader(dataset, num_workers=0, batch_size=32):
        for row in range(len(batch["index"])):
            picture = viewer.to_hwc_uint8_numpy(batch["observation.images.front"][row])
            assert np.abs(picture.astype(int) - pictures[shown]).max() <= 1  # 255 times k / 255, cut off
            assert batch["action"][row].isfinite().all()
            shown += 1
    assert shown == len(pictures)
    if _has_rerun():
        saved = viewer.visualize_dataset(dataset, 1, save=True, output_dir=tmp_path)
        assert saved is not None
        assert saved.stat().st_size > pictures.nbytes / 2


def _has_rerun() -> bool:
    import importlib.util

    return importlib.util.find_spec("rerun") is not None
