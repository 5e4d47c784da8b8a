"""What is written is read back; what was written stays, whatever happens to the writer."""

import dataclasses
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import replace_file
from robot_rl.data.episode import Episode, Feature
from robot_rl.data.lerobot.encode import VideoCodec, VideoFile
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetWriter

Made = Callable[..., Episode]

CODEC_ERROR = 3.0
"""Mean absolute difference of a smooth picture after h264 crf 23 or AV1 crf 30, of 255; measured below 2.
The next picture of the same camera differs by 5."""
FIELDS = (
    "action",
    "base_action",
    "reward",
    "terminated",
    "truncated",
    "success",
    "source",
    "policy_version",
    "stamp_ns",
    "device",
    "meta",
)


def opened(folder: Path, episode: Episode, **options: Any) -> DatasetWriter:
    return DatasetWriter(folder, episode.meta, episode.features(), **options)


def assert_same(read: Episode, written: Episode, tolerance: float = 0.0) -> None:
    for name in FIELDS:
        got, want = getattr(read, name), getattr(written, name)
        assert np.array_equal(got, want), name
        assert not isinstance(want, np.ndarray) or got.dtype == want.dtype, name
    assert read.obs.keys() == written.obs.keys()
    for key, values in written.obs.items():
        got = read.obs[key][np.arange(len(written))]
        assert got.dtype == values.dtype
        assert got.shape == values.shape
        worst = max(np.abs(a.astype(float) - b).mean() for a, b in zip(got, values, strict=True))
        assert worst <= (tolerance if key.endswith(".rgb") else 0.0), f"{key} differs by {worst}"
    for key, values in written.final_obs.items():
        assert np.array_equal(read.final_obs[key], values), key
    for key, stamps in written.picture_stamp_ns.items():
        assert np.array_equal(read.picture_stamp_ns[key], stamps)


@pytest.mark.parametrize(
    ("images", "codec", "tolerance"),
    [("png", "h264", 0.0), ("video", "h264", CODEC_ERROR), ("video", "av1", CODEC_ERROR)],
)
def test_what_is_written_is_read_back(
    tmp_path: Path, made: Made, images: Any, codec: Any, tolerance: float
) -> None:
    episodes = [made(6, depth=True), made(9, seed=1, depth=True, instruction="drop it", success=False)]
    with opened(tmp_path / "d", episodes[0], images=images, codec=codec) as writer:
        assert [writer.write(episode, store_episode=40 + i) for i, episode in enumerate(episodes)] == [0, 1]
    dataset = Dataset(tmp_path / "d", backend="pyav")
    assert dataset.lengths().tolist() == [6, 9]
    assert dataset.instructions == ("pick up the cube", "drop it")
    assert dataset.index.columns["store_episode"] == [40, 41]
    for number, episode in enumerate(episodes):
        assert_same(dataset.read(number), episode, tolerance)


def test_one_file_of_each_kind_for_an_episode(tmp_path: Path, made: Made) -> None:
    old = os.umask(0o022)
    try:
        with opened(tmp_path, made()) as writer:
            writer.write(made())
            writer.write(made(seed=1))
    finally:
        os.umask(old)
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    numbered = {
        f"{kind}/chunk-000/file-00{i}.{end}"
        for i in range(2)
        for kind, end in (
            ("data", "parquet"),
            ("final", "parquet"),
            ("meta/episodes", "parquet"),
            ("videos/observation.images.front", "mp4"),
            ("videos/observation.images.wrist", "mp4"),
        )
    }
    numbered |= {f"meta/checksums/chunk-000/file-00{i}.json" for i in range(2)}
    names = ("info.json", "stats.json", "tasks.parquet", "robot_rl.json", "checksums.json")
    meta = {f"meta/{name}" for name in names}
    assert files == numbered | meta
    # LeRobot 0.6.1 writes videos that only their owner may read.
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in files} == {0o644}


def test_metadata_says_what_the_format_asks_for(tmp_path: Path, made: Made) -> None:
    with opened(tmp_path, made(), codec=VideoCodec(name="h264", crf=30, preset="medium")) as writer:
        writer.write_all([made(6), made(4, seed=1, instruction="drop it")])
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["total_episodes"]) == ("v3.0", 20, 2)
    assert (info["total_frames"], info["total_tasks"], info["splits"]) == (10, 2, {"train": "0:2"})
    video = info["features"]["observation.images.front"]
    assert (video["dtype"], video["shape"]) == ("video", [32, 48, 3])
    said = ("video.codec", "video.pix_fmt", "video.g", "video.crf", "video.preset", "is_depth_map")
    assert [video["info"][name] for name in said] == ["h264", "yuv420p", 2, 30, "medium", False]
    assert info["features"]["base_action"]["names"] == ["x", "gripper"]
    rows = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["tasks"] for row in rows] == [["pick up the cube"], ["drop it"]]
    assert [row["dataset_to_index"] for row in rows] == [6, 10]
    # At 20 Hz six frames are 0.3 s: there the second episode begins in the video of both.
    spans = [(row["videos/observation.images.front/from_timestamp"]) for row in rows]
    assert spans == pytest.approx([0, 0.3])
    steps = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    assert steps["timestamp"].to_pylist() == pytest.approx(
        [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0, 0.05, 0.1, 0.15]
    )
    assert steps["task_index"].to_pylist() == [0] * 6 + [1] * 4


def test_a_dataset_goes_on(tmp_path: Path, made: Made) -> None:
    with opened(tmp_path, made()) as writer:
        writer.write(made(), store_episode=3)
    with opened(tmp_path, made()) as writer:
        assert (len(writer), writer.last_store_episode) == (1, 3)
        writer.write_all([made(4, seed=1), made(5, seed=2)])
    with opened(tmp_path, made()) as writer:
        assert writer.write(made(7, seed=3)) == 3
    dataset = Dataset(tmp_path, backend="pyav")
    assert dataset.lengths().tolist() == [6, 4, 5, 7]
    for number, episode in enumerate((made(), made(4, seed=1), made(5, seed=2), made(7, seed=3))):
        assert_same(dataset.read(number), episode, CODEC_ERROR)
    rows = dataset.columns["state"].astype(float)
    np.testing.assert_allclose(dataset.stats["state"]["mean"], rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(dataset.stats["state"]["std"], rows.std(0), rtol=1e-9)
    assert dataset.stats["front.rgb"]["count"].tolist() == [22]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"robot": "ur5"}, r"cannot append: robot_type is panda there, ur5 here\."),
        ({"control_hz": 10.0}, r"fps is 20 there, 10 here"),
        ({"task": "reach"}, r"task is pick_cube there, reach here"),
        ({"action_names": ("x", "y")}, r"feature 'action' is .*'gripper'.* there, .*'y'.* here"),
        ({"images": "png"}, r"feature 'observation.images.front' is .*'video'.* there, .*'image'.* here"),
        ({"codec": "av1"}, r"feature 'observation.images.front' is .*h264.* there, .*av1.* here"),
        ({"features": {"force": Feature("float32", (3,))}}, r"feature 'observation.force' is None there"),
    ],
)
def test_episodes_of_something_else_are_not_appended(
    tmp_path: Path, made: Made, change: dict[str, Any], message: str
) -> None:
    episode = made()
    with opened(tmp_path, episode) as writer:
        writer.write(episode)
    options = {key: change.pop(key) for key in ("images", "codec") if key in change}
    features = {**episode.features(), **change.pop("features", {})}
    with pytest.raises(DatasetError, match=message):
        DatasetWriter(tmp_path, dataclasses.replace(episode.meta, **change), features, **options)
    with opened(tmp_path, episode):  # the refused writer left no lock behind
        pass


class Killed(BaseException):
    """The process ends here: nothing that follows happens, no cleaning up either."""


@pytest.mark.parametrize("images", ["video", "png"])
def test_a_writer_may_be_killed_at_any_instant(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, images: Any
) -> None:
    """Stops the writer before each change of a name on the disk, and once in the middle of an episode."""
    episode, second, third = made(depth=True), made(5, seed=1, depth=True), made(7, seed=2, depth=True)
    instants = 0
    while True:
        folder, left = tmp_path / str(instants), [instants]
        with opened(folder, episode, images=images) as writer:
            writer.write(episode)
        with monkeypatch.context() as patch:
            replace = Path.replace

            def counted(path: Path, target: Any, left: list[int] = left, replace: Any = replace) -> Any:
                if not left[0]:
                    raise Killed
                left[0] -= 1
                return replace(path, target)

            writer = opened(folder, episode, images=images)
            patch.setattr(Path, "replace", counted)
            patch.setattr(DatasetWriter, "_give_up", lambda writer, batch: None)
            try:
                writer.write(dataclasses.replace(second, meta=made(instruction="other").meta))
            except Killed:
                was_killed = True
            else:
                was_killed = False
            writer.close()
        dataset = Dataset(folder, backend="pyav")
        assert len(dataset) == (1 if was_killed else 2)
        assert_same(dataset.read(0), episode, CODEC_ERROR)
        with opened(folder, episode, images=images) as writer:
            assert not list(folder.rglob("*.part"))
            assert writer.write(third) == (1 if was_killed else 2)
        dataset = Dataset(folder, backend="pyav")
        assert_same(dataset.read(len(dataset) - 1), third, CODEC_ERROR)
        assert dataset.stats["index"]["count"][0] == dataset.lengths().sum()
        if not was_killed:
            break
        instants += 1
    # Checksums, files of the episode (data, depth, final, meta/episodes, 2 videos), then those of the next
    # three, tasks, stats, info.
    assert instants == (11 if images == "video" else 9)


class Camera:
    """Pictures that exist only when they are asked for."""

    def __init__(self, pictures: Any) -> None:
        self.asked: list[Any] = []
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, step: Any) -> Any:
        self.asked.append(step)
        return self._pictures[step]


@pytest.mark.parametrize("images", ["video", "png"])
def test_pictures_are_asked_for_one_at_a_time(tmp_path: Path, made: Made, images: Any) -> None:
    episode = made(8, cameras=("front.rgb",))
    camera = Camera(episode.obs["front.rgb"])
    with opened(tmp_path, episode, images=images) as writer:
        writer.write(dataclasses.replace(episode, obs={**episode.obs, "front.rgb": camera}))
    assert camera.asked == list(range(8))


def test_a_folder_that_cannot_be_listed_costs_no_episode(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dataset that seems to have no episodes every file would be one of a torn commit, to be removed."""
    with opened(tmp_path, made()) as writer:
        writer.write(made())
    before = sorted(tmp_path.rglob("*"))
    scandir = os.scandir

    def refuse(folder: Path) -> Any:
        if Path(folder).name == "episodes":
            raise OSError(5, "Input/output error")
        return scandir(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(DatasetError, match=rf"{tmp_path}: the disk refuses .*Input/output"):
            opened(tmp_path, made())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_commit_makes_few_calls(tmp_path: Path, made: Made) -> None:
    """pyarrow alone writes every column of meta/episodes by two calls: 700 of them for this episode."""
    counter = Path("/proc/self/io")
    if not counter.exists():
        pytest.skip("this system does not count calls")

    def calls() -> int:
        return int(counter.read_text().split("syscw: ")[1].split()[0])

    with opened(tmp_path, made()) as writer:
        before = calls()
        writer.write(made())
        assert calls() - before < 40


def test_an_encoder_that_loses_a_picture_is_noticed(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, made()) as writer:
        writer.write(made())
        with monkeypatch.context() as patch:
            mux = VideoFile._mux
            patch.setattr(VideoFile, "_mux", lambda video, packets: mux(video, packets[video.frames == 3 :]))
            with pytest.raises(DatasetError, match=r"the encoder kept 5 of 6 pictures; nothing was saved"):
                writer.write(made(seed=1))
        assert not list(tmp_path.rglob("*.part"))
        assert writer.write(made(seed=2)) == 1
    assert_same(Dataset(tmp_path, backend="pyav").read(1), made(seed=2), CODEC_ERROR)


def test_a_full_disk_costs_one_episode(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path, made(), images="png") as writer:
        writer.write(made())
        before = sorted(tmp_path.rglob("*"))
        with monkeypatch.context() as patch:
            patch.setattr("robot_rl.data.lerobot.batch.publish", full)
            said = rf"{tmp_path}: the disk is full .*The episodes that `len` counts are whole. Make room"
            with pytest.raises(DatasetError, match=said):
                writer.write(made(seed=1))
        assert sorted(tmp_path.rglob("*")) == before
        assert writer.write(made(seed=2)) == 1
    assert_same(Dataset(tmp_path).read(1), made(seed=2))


def test_a_commit_that_failed_after_it_counted_counts(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, made()) as writer:
        with monkeypatch.context() as patch:

            def interrupted(path: Path, content: Any) -> None:
                replace_file(path, content)
                if path.name == "info.json":
                    raise KeyboardInterrupt

            patch.setattr("robot_rl.data.lerobot.checksums.replace_file", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.write(made())
        assert len(writer) == 1
        assert writer.write(made(seed=1)) == 1
    for number in range(2):
        assert_same(Dataset(tmp_path, backend="pyav").read(number), made(seed=number), CODEC_ERROR)


def test_to_go_on_one_row_of_metadata_is_read(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = made(2, cameras=())
    with opened(tmp_path, episode) as writer:
        for _ in range(12):
            writer.write(episode)
    read: list[str] = []
    file = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda path, **how: read.append(str(path)) or file(path, **how))
    with opened(tmp_path, episode) as writer:
        writer.write(episode)
    assert [path.removeprefix(f"{tmp_path}/meta/") for path in read] == [
        "tasks.parquet",
        "episodes/chunk-000/file-011.parquet",
    ]


def test_files_are_closed_at_lerobots_size(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, made(40)) as writer:
        writer.write(made(40))
        one = (tmp_path / "videos/observation.images.front/chunk-000/file-000.mp4").stat().st_size
        monkeypatch.setattr("robot_rl.data.lerobot.writer._MB", int(1.3 * one))
        writer._info["video_files_size_in_mb"] = 1
        assert writer.write_all([made(40, seed=seed) for seed in range(1, 6)]) == 6
    # The one written alone, then 2, 2 and 1, or 3 and 2: an encoder holds its last pictures for a while.
    assert len(list((tmp_path / "data").rglob("*.parquet"))) in (3, 4)
    dataset = Dataset(tmp_path, backend="pyav")
    for seed in range(6):
        assert_same(dataset.read(seed), made(40, seed=seed), CODEC_ERROR)


def test_gaps_are_kept_but_not_counted(tmp_path: Path, made: Made) -> None:
    episode = made(4, cameras=())
    episode.obs["state"][:, 1] = [np.nan, 1, 3, np.inf]
    with opened(tmp_path, episode) as writer:
        writer.write(episode)
    state = json.loads((tmp_path / "meta/stats.json").read_text())["observation.state"]
    assert [state[name][1] for name in ("min", "max", "mean", "std")] == [1, 3, 2, 1]
    held = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")["observation.state"].to_pylist()
    assert np.isnan(held[0][1])


def test_one_dataset_has_one_writer(tmp_path: Path, made: Made) -> None:
    writer = opened(tmp_path, made())
    with pytest.raises(DatasetError, match=r"another writer has this dataset open\. Close it first"):
        opened(tmp_path, made())
    writer.close()
    opened(tmp_path, made()).close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda e: e.obs.pop("wrist.rgb"), r"episode 0: observation 'wrist.rgb' is in the episode or in"),
        (lambda e: e.obs.update(state=e.obs["state"][:-1]), r"'state' has 5 rows of shape \(3,\), needs 6"),
        (lambda e: e.obs.update(state=e.obs["state"][:, :2]), r"6 rows of shape \(2,\), needs 6 of \(3,\)"),
        (lambda e: setattr(e, "action", e.action[:0]), r"episode 0: the episode has no steps\. Leave it out"),
    ],
)
def test_an_episode_that_does_not_fit_is_refused(
    tmp_path: Path, made: Made, spoil: Any, message: str
) -> None:
    with opened(tmp_path, made()) as writer:
        episode = made()
        spoil(episode)
        with pytest.raises(DatasetError, match=message):
            writer.write(episode)
        assert writer.write(made()) == 0


def test_video_of_odd_size_is_refused(tmp_path: Path, made: Made) -> None:
    episode = made(size=(31, 48))
    with pytest.raises(DatasetError, match=r"'front.rgb' is 48x31: .* needs even sizes\. Use images=png"):
        opened(tmp_path, episode)
    with opened(tmp_path, episode, images="png") as writer:
        writer.write(episode)


def test_an_unknown_codec_is_refused() -> None:
    name: Any = "mpeg2"
    with pytest.raises(DatasetError, match=r"codec: got 'mpeg2', allowed: h264, av1"):
        VideoCodec(name=name)


def test_a_folder_without_its_count_is_refused(tmp_path: Path, made: Made) -> None:
    with opened(tmp_path, made()) as writer:
        writer.write(made())
    (tmp_path / "meta/info.json").unlink()
    with pytest.raises(DatasetError, match=r"has data/ but no meta/info.json\. Restore that file"):
        opened(tmp_path, made())
