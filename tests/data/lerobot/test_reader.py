"""The reader gives back what was recorded, whoever laid it out, and decodes only what is looked at."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.decode import Decoders
from robot_rl.data.lerobot.pictures import PictureReader, resize_pictures
from robot_rl.data.lerobot.reader import Dataset, key_of
from robot_rl.data.lerobot.tables import flat_names
from robot_rl.data.lerobot.upgrade import upgrade
from robot_rl.data.lerobot.windows import Windows
from robot_rl.data.lerobot.writer import DatasetWriter

Copied = Callable[[Path], Path]


def decoded(path: Path) -> np.ndarray:
    """Decodes a video from its beginning, one frame after the other."""
    frames: list[np.ndarray] = []
    with av.open(str(path)) as container:
        frames += [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames)


def long_video(path: Path, group: int, frames: int = 40) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=20, options={"g": str(group), "bf": "2"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(frames):
            picture = np.full((32, 32, 3), 6 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_an_episode_comes_back_with_every_column(png_dataset: Path, recorded: list[Episode]) -> None:
    dataset = Dataset(png_dataset)
    assert len(dataset) == 3
    assert dataset.lengths().tolist() == [7, 9, 6]
    for number, wrote in enumerate(recorded):
        read = dataset.read(number)
        assert read.meta == wrote.meta
        assert read.device == "arm-0"
        for key in ("action", "base_action", "reward", "terminated", "truncated", "success", "source"):
            np.testing.assert_array_equal(getattr(read, key), getattr(wrote, key), key)
            assert getattr(read, key).dtype == getattr(wrote, key).dtype
        np.testing.assert_array_equal(read.policy_version, wrote.policy_version)
        np.testing.assert_array_equal(read.stamp_ns, wrote.stamp_ns)
        np.testing.assert_array_equal(read.picture_stamp_ns["front.rgb"], wrote.picture_stamp_ns["front.rgb"])
        np.testing.assert_array_equal(read.obs["state"], wrote.obs["state"])
        for camera in ("front.rgb", "wrist.rgb"):
            np.testing.assert_array_equal(read.obs[camera][np.arange(len(wrote))], wrote.obs[camera])
        np.testing.assert_array_equal(read.final_obs["state"], wrote.final_obs["state"])
        assert read.is_complete


def test_compacted_files_read_as_the_single_ones(video_dataset: Path, copied: Copied) -> None:
    single, together = Dataset(video_dataset), copied(video_dataset)
    compact(together)
    joined = Dataset(together)
    assert len(joined.spans("front.rgb").files) == 1
    for number in range(3):
        for camera in single.cameras:
            steps = [5, 0, 5, 3]
            frames = joined.frames(camera, number, steps)
            np.testing.assert_array_equal(frames, single.frames(camera, number, steps))
        np.testing.assert_array_equal(joined.read(number).action, single.read(number).action)
        np.testing.assert_array_equal(joined.read(number).final_obs["state"], [number, number])


def test_frames_are_those_of_decoding_from_the_beginning(video_dataset: Path) -> None:
    dataset = Dataset(video_dataset)
    whole = decoded(video_dataset / "videos/observation.images.wrist/chunk-000/file-001.mp4")
    assert len(whole) == 9
    lazy = dataset.read(1).obs["wrist.rgb"]
    np.testing.assert_array_equal(lazy[:], whole)
    np.testing.assert_array_equal(lazy[4], whole[4])
    np.testing.assert_array_equal(lazy[np.array([8, 2, 2])], whole[[8, 2, 2]])
    assert len(lazy[5:5]) == 0


@pytest.mark.parametrize("group", [1, 2, 7, 40])
def test_seeks_find_the_frame_at_any_distance_of_key_frames(tmp_path: Path, group: int) -> None:
    path = long_video(tmp_path / "long.mp4", group)
    whole, decoders = decoded(path), Decoders("pyav")
    rng = np.random.default_rng(0)
    for count in (1, 2, 5, 20):
        numbers = rng.integers(0, 40, count)
        np.testing.assert_array_equal(decoders.frames(path, numbers, 20.0), whole[numbers])


def test_one_pass_decodes_each_group_of_pictures_once(tmp_path: Path) -> None:
    path = long_video(tmp_path / "long.mp4", 40)
    decoders = Decoders("pyav")
    decoders.frames(path, [39], 20.0)  # from now on the distance of key frames is known
    decoder: Any = decoders._open[path][0]
    seeks: list[int] = []
    seek = decoder._seek
    decoder._seek = lambda number: (seeks.append(number), seek(number))
    decoders.frames(path, [30, 3, 17, 25, 9], 20.0)
    assert seeks == [3]


@pytest.mark.slow  # loading torchcodec, and torch with it, takes seconds
def test_torchcodec_gives_the_same_pixels(video_dataset: Path) -> None:
    either: Any = (ImportError, RuntimeError)  # the latter without FFmpeg's libraries
    pytest.importorskip("torchcodec", exc_type=either)
    ours, theirs = Dataset(video_dataset), Dataset(video_dataset, backend="torchcodec")
    steps = [8, 0, 3, 3]
    for camera in ours.cameras:
        np.testing.assert_array_equal(ours.frames(camera, 1, steps), theirs.frames(camera, 1, steps))


def test_opening_reads_metadata_alone(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    shutil.rmtree(folder / "data")
    shutil.rmtree(folder / "videos")
    dataset = Dataset(folder)
    assert dataset.features["front.rgb"].shape == (48, 64, 3)
    assert dataset.meta.action_names == ("x", "y", "grip")
    with pytest.raises(DatasetError, match="this parquet file is missing"):
        dataset.read(0)


def test_version_2_is_read_as_it_lies(old_dataset: Path, video_dataset: Path) -> None:
    old, new = Dataset(old_dataset), Dataset(video_dataset)
    assert old.meta == dataclasses.replace(new.meta, task="")  # LeRobot has no place for the task
    assert old.instructions == ("instruction 0", "instruction 1")
    for number in range(3):
        one, two = old.read(number), new.read(number)
        assert one.meta.instruction == two.meta.instruction
        np.testing.assert_array_equal(one.action, two.action)
        np.testing.assert_array_equal(one.obs["front.rgb"][:], two.obs["front.rgb"][:])
    np.testing.assert_allclose(old.stats["action"]["mean"], old.columns["action"].mean(0), rtol=1e-5)
    np.testing.assert_allclose(old.stats["action"]["std"], old.columns["action"].std(0), rtol=1e-5)


def test_what_lerobot_lacks_has_the_documented_values(old_dataset: Path) -> None:
    read = Dataset(old_dataset).read(0)
    assert not read.reward.any()
    assert not read.success.any()
    assert not read.terminated.any()
    assert read.truncated.tolist() == [False] * 6 + [True]
    np.testing.assert_array_equal(read.base_action, read.action)
    np.testing.assert_array_equal(read.source, np.zeros(7))
    np.testing.assert_allclose(read.stamp_ns, np.arange(7) * 50_000_000, atol=100)
    assert read.final_obs == {}


def test_upgrade_copies_videos_and_keeps_every_number(old_dataset: Path, tmp_path: Path) -> None:
    new = Dataset(upgrade(old_dataset, tmp_path / "new"))
    old = Dataset(old_dataset)
    assert new.info["codebase_version"] == "v3.0"
    assert new.meta == old.meta
    for key, values in old.columns.items():
        np.testing.assert_array_equal(new.columns[key], values, key)
    for one, two in zip(old.spans("front.rgb").files, new.spans("front.rgb").files, strict=True):
        assert (old.folder / one).read_bytes() == (new.folder / two).read_bytes()
    with pytest.raises(DatasetError, match=r"codebase_version 'v3\.0', allowed: 'v2\.1'"):
        upgrade(tmp_path / "new", tmp_path / "newer")


def test_refresh_takes_in_what_was_written_since(tmp_path: Path, recorded: list[Episode]) -> None:
    with DatasetWriter(tmp_path / "live", recorded[0].meta, recorded[0].features(), images="png") as writer:
        writer.write(recorded[0])
        dataset = Dataset(tmp_path / "live")
        assert len(dataset.columns["action"]) == 7
        writer.write(recorded[1])
        assert len(dataset) == 1
        dataset.refresh()
    assert dataset.lengths().tolist() == [7, 9]
    assert len(dataset.columns["action"]) == 16
    np.testing.assert_array_equal(dataset.read(1).obs["front.rgb"][8], recorded[1].obs["front.rgb"][8])


def test_windows_stop_at_the_ends_of_episodes(png_dataset: Path, recorded: list[Episode]) -> None:
    dataset = Dataset(png_dataset)
    deltas = {"action": [-1, 0, 3], "front.rgb": [-1, 0]}
    windows = Windows(dataset, deltas, keys=("state", "front.rgb"))
    pictures = PictureReader(dataset)
    # Row 0 begins episode 0, row 6 ends it, row 7 begins episode 1.
    batch = windows.read(np.array([0, 6, 7]), pictures.read)
    action = [one.action for one in recorded]
    expected = [action[0][[0, 0, 3]], action[0][[5, 6, 6]], action[1][[0, 0, 3]]]
    np.testing.assert_array_equal(batch["action"], np.stack(expected))
    padding = [[True, False, False], [False, False, True], [True, False, False]]
    assert batch["action_is_pad"].tolist() == padding
    assert batch["front.rgb"].shape == (3, 2, 48, 64, 3)
    np.testing.assert_array_equal(batch["front.rgb"][1], recorded[0].obs["front.rgb"][5:7])
    assert sorted(batch) == ["action", "action_is_pad", "front.rgb", "front.rgb_is_pad", "state"]
    assert pictures.counts["decoded"] == 6  # those of `front` alone, and none for the actions' steps


def test_windows_in_seconds(png_dataset: Path) -> None:
    dataset = Dataset(png_dataset)
    windows = Windows(dataset, {"action": [0.0, 0.05, 0.1]}, unit="seconds", keys=())
    assert windows.offsets["action"].tolist() == [0, 1, 2]
    with pytest.raises(
        DatasetError, match=r"deltas of 'action': 0\.06 lies between two steps; allowed: whole"
    ):
        Windows(dataset, {"action": [0.06]}, unit="seconds")
    with pytest.raises(DatasetError, match=r"no column or camera 'actoin'. Did you mean 'action'"):
        Windows(dataset, {"actoin": [0]})


def test_facts_are_of_the_chosen_episodes_alone(png_dataset: Path, recorded: list[Episode]) -> None:
    facts = Dataset(png_dataset).facts([0, 2], resize=(24, 32))
    action = np.concatenate([recorded[0].action, recorded[2].action])
    np.testing.assert_allclose(facts.stats["action"]["mean"], action.mean(0), rtol=1e-5)
    np.testing.assert_allclose(facts.stats["action"]["q99"], np.quantile(action, 0.99, axis=0), rtol=1e-5)
    assert facts.stats["action"]["count"].tolist() == [13]
    pictures = np.concatenate([recorded[0].obs["front.rgb"], recorded[2].obs["front.rgb"]]) / 255
    mean = facts.stats["front.rgb"]["mean"]
    assert mean.shape == (3, 1, 1)
    np.testing.assert_allclose(mean.ravel(), pictures.mean((0, 1, 2)), rtol=1e-6)
    assert facts.features["front.rgb"].shape == (24, 32, 3)
    assert facts.cameras == ("front", "wrist")


def test_names_are_flat_however_they_were_nested() -> None:
    assert flat_names({"names": [["a", "b"]]}) == ("a", "b")
    assert flat_names({"names": {"motors": ["a", "b"]}}) == ("a", "b")
    assert flat_names({"names": {"a": 0, "b": 1}}) == ("a", "b")
    assert flat_names({"names": None}) == ()


def test_lerobots_names_become_ours() -> None:
    assert key_of("observation.images.front") == "front.rgb"
    assert key_of("observation.image") == "image.rgb"
    assert key_of("observation.state") == "state"


def test_resizing_is_antialiased() -> None:
    # A pattern of alternate black and white columns: without a filter, every second one gives 0 or 255.
    pictures = np.zeros((1, 64, 64, 3), np.uint8)
    pictures[:, :, ::2] = 255
    small = resize_pictures(pictures, (16, 16))
    assert small.shape == (1, 16, 16, 3)
    assert np.abs(small[:, 2:-2, 2:-2].astype(int) - 128).max() <= 8
    assert resize_pictures(pictures, (64, 64)) is pictures


def test_another_version_is_refused_by_name(png_dataset: Path, copied: Copied) -> None:
    folder = copied(png_dataset)
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v1.6"}))
    with pytest.raises(DatasetError, match=r"codebase_version 'v1\.6', allowed: 'v2\.1' and 'v3\.\*'"):
        Dataset(folder)


def test_an_unknown_backend_is_refused(png_dataset: Path) -> None:
    unknown: Any = "gpu"
    with pytest.raises(DatasetError, match="got 'gpu', allowed: 'pyav', 'torchcodec'"):
        Dataset(png_dataset, backend=unknown)


def test_the_real_dataset(g1_bottle: Path) -> None:
    dataset = Dataset(g1_bottle)
    assert (len(dataset), int(dataset.lengths().sum())) == (20, 6452)
    assert dataset.meta.state_names[:2] == ("kLeftShoulderPitch", "kLeftShoulderRoll")
    assert dataset.instructions == ("Pick up the yellow bottle on the table.",)
    read = dataset.read(19)
    assert read.action.shape == (int(dataset.lengths()[19]), 26)
    whole = decoded(g1_bottle / dataset.spans("cam_high.rgb").files[19])
    np.testing.assert_array_equal(read.obs["cam_high.rgb"][[0, 200, 7]], whole[[0, 200, 7]])
    assert dataset.columns["action"].shape == (6452, 26)
    np.testing.assert_allclose(dataset.stats["action"]["mean"], dataset.columns["action"].mean(0), atol=1e-4)
