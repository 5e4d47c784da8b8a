"""The loader draws what it promises, goes on exactly where it was, and no worker or cache changes it."""

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.core.language import decode_text
from robot_rl.core.policy import DemoBatch
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.pictures import PictureCache, PictureReader
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.loader import ChunkLoader


def loader(folder: Path, **options: Any) -> ChunkLoader:
    settings: dict[str, Any] = {"horizon": 4, "batch": 5, "seed": 1, **options}
    return ChunkLoader(Dataset(folder), **settings)


def assert_equal(one: DemoBatch, two: DemoBatch) -> None:
    assert one.obs.keys() == two.obs.keys()
    for key, values in one.obs.items():
        assert torch.equal(values, two.obs[key]), key
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(one.valid, two.valid)


def test_a_window_is_the_observation_and_what_was_done_from_there(
    png_dataset: Path, recorded: list[Episode]
) -> None:
    batches = list(loader(png_dataset).batches())
    assert [len(batch.actions) for batch in batches] == [5, 5, 5, 5, 2]
    for batch in batches:
        assert batch.obs["front.rgb"].dtype == torch.uint8
        texts = decode_text(batch.obs["instruction"].numpy())
        for row, (number, step) in enumerate(zip(batch.source["episode"], batch.source["step"], strict=True)):
            one = recorded[number]
            steps = np.minimum(step + np.arange(4), len(one) - 1)
            np.testing.assert_array_equal(batch.actions[row], one.action[steps])
            assert batch.valid[row].tolist() == [step + i < len(one) for i in range(4)]
            np.testing.assert_array_equal(batch.obs["state"][row], one.obs["state"][step])
            np.testing.assert_array_equal(batch.obs["wrist.rgb"][row], one.obs["wrist.rgb"][step])
            assert texts[row] == f"instruction {number % 2}"


def test_an_epoch_has_every_window_once(png_dataset: Path) -> None:
    draws = loader(png_dataset, batch=11, keys=("state",))  # 22 windows: two batches an epoch
    assert len(draws) == 22
    seen: list[list[tuple[int, int]]] = []
    for _ in range(4):
        batch = draws.sample()
        seen.append(list(zip(batch.source["episode"].tolist(), batch.source["step"].tolist(), strict=True)))
    assert max(Counter(seen[0] + seen[1]).values()) == 1
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3])
    assert seen[0] + seen[1] != seen[2] + seen[3]


def test_resumes_exactly(png_dataset: Path) -> None:
    draws = loader(png_dataset)
    for _ in range(6):
        draws.sample()
    state = draws.state_dict()
    expected = [draws.sample() for _ in range(3)]
    again = loader(png_dataset)
    again.load_state_dict(state)
    for batch in expected:
        assert_equal(again.sample(), batch)
    with pytest.raises(CheckpointError, match="the checkpoint has seed 1, this run has 2"):
        loader(png_dataset, seed=2).load_state_dict(state)


def test_only_the_chosen_episodes(png_dataset: Path) -> None:
    draws = loader(png_dataset, episodes=[2])
    assert set(draws.sample().source["episode"].tolist()) == {2}
    assert [batch.source["step"].tolist() for batch in draws.batches(steps_stride=2)] == [[0, 2, 4]]
    with pytest.raises(DatasetError, match="episode 3 is unknown, allowed 0 to 2"):
        loader(png_dataset, episodes=[3])
    with pytest.raises(DatasetError, match="no steps to draw from"):
        loader(png_dataset, episodes=[])


def test_pictures_behind_the_first_step_are_not_decoded(video_dataset: Path) -> None:
    draws = loader(video_dataset, keys=("state", "front.rgb"))
    draws.sample()
    assert draws._pictures.counts == {"memory": 0, "disk": 0, "decoded": 5}


def test_observations_of_several_steps(png_dataset: Path, recorded: list[Episode]) -> None:
    draws = loader(png_dataset, deltas={"state": [-1, 0], "front.rgb": [-1, 0]}, keys=())
    batch = next(draws.batches())
    assert batch.obs["front.rgb"].shape == (5, 2, 48, 64, 3)
    assert batch.obs["state_is_pad"].tolist() == [[True, False]] + [[False, False]] * 4
    np.testing.assert_array_equal(batch.obs["front.rgb"][3], recorded[0].obs["front.rgb"][2:4])


def test_caches_change_nothing_but_the_hit_rate(video_dataset: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"resize": (24, 32), "batch": 11}
    plain = loader(video_dataset, **options)
    frame = 24 * 32 * 3
    memory = loader(video_dataset, cache=PictureCache(ram_bytes=2 * 11 * frame), **options)
    seen: list[tuple[int, int]] = []
    cache = PictureCache(folder=str(tmp_path))
    disk = loader(
        video_dataset, cache=cache, progress=lambda done, total: seen.append((done, total)), **options
    )
    assert seen[-1] == (22, 22)
    for _ in range(4):
        batch = plain.sample()
        assert_equal(memory.sample(), batch)
        assert_equal(disk.sample(), batch)
    assert plain.hit_rate == 0
    assert disk.hit_rate == 1
    # Room for half of the pictures: nothing in the first epoch, half of those of the second.
    assert memory.hit_rate == 0.25


def test_decoded_pictures_are_made_once_and_follow_the_data(
    video_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PictureCache(folder=str(tmp_path))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PictureReader(Dataset(video_dataset), cache=cache, progress=fail)
    assert not list(tmp_path.glob("*.rgb"))  # what a crash leaves does not look complete
    PictureReader(Dataset(video_dataset), cache=cache)
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.rgb")}
    assert len(made) == 2
    PictureReader(Dataset(video_dataset), cache=cache)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.rgb")} == made
    PictureReader(Dataset(video_dataset), cache=cache, resize=(24, 32))
    assert len(list(tmp_path.glob("*.rgb"))) == 4
    assert not list(tmp_path.glob("*.part"))


def test_who_comes_second_waits_for_the_decoded_pictures(video_dataset: Path, tmp_path: Path) -> None:
    cache = PictureCache(folder=str(tmp_path))
    made: list[int] = []

    def open_them(_: int) -> PictureReader:
        return PictureReader(Dataset(video_dataset), cache=cache, progress=lambda done, _: made.append(done))

    with ThreadPoolExecutor(4) as pool:
        readers = list(pool.map(open_them, range(4)))
    assert made == [22, 22]  # once for each camera
    wanted = {"front.rgb": np.arange(22)}
    for reader in readers:
        np.testing.assert_array_equal(reader.read(wanted)["front.rgb"], readers[0].read(wanted)["front.rgb"])


def test_a_full_disk_is_said_before_anything_is_decoded(
    video_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(DatasetError, match=r"decoded pictures of 'front\.rgb' need 0\.0 GB, 0\.0 GB are"):
        PictureReader(Dataset(video_dataset), cache=PictureCache(folder=str(tmp_path)))


def test_workers_change_nothing(video_dataset: Path) -> None:
    alone = loader(video_dataset)
    with loader(video_dataset, num_workers=2) as draws:
        for _ in range(7):
            assert_equal(draws.sample(), alone.sample())
        state = draws.state_dict()
        following = draws.sample()
        draws.load_state_dict(state)  # batches that were on their way are dropped
        assert_equal(draws.sample(), following)


def drain(draws: ChunkLoader) -> None:
    for _ in range(6):
        draws.sample()


def worker_of(draws: ChunkLoader) -> Any:
    assert draws._workers is not None
    return draws._workers._workers[0]


def test_a_worker_that_dies_is_reported(video_dataset: Path) -> None:
    with loader(video_dataset, num_workers=1) as draws:
        os.kill(worker_of(draws)._process.pid, signal.SIGKILL)
        with pytest.raises(
            DatasetError, match=r"worker process ended with status -9 \(killed: out of memory"
        ):
            drain(draws)


def test_an_error_in_a_worker_reaches_the_caller(video_dataset: Path, copied: Any) -> None:
    folder = copied(video_dataset)
    for path in folder.glob("videos/*/*/*.mp4"):
        path.unlink()
    with loader(folder, num_workers=1) as draws, pytest.raises(DatasetError, match="video file is missing"):
        draws.sample()


def test_workers_end_when_their_parent_is_gone(video_dataset: Path) -> None:
    with loader(video_dataset, num_workers=1) as draws:
        draws.sample()
        worker = worker_of(draws)
        worker._connection.close()  # what the system does when the parent is killed
        assert worker._process.wait(10) == 0
