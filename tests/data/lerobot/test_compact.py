"""Joined files hold what the many held: pixels, numbers, metadata; a crash leaves one or the other."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.checksums import record
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetLock, DatasetWriter
from robot_rl.data.store.writer import StoreWriter

Made = Callable[..., Episode]

FORMAT_1 = Path(__file__).parents[1] / "format_1"
LENGTHS = (5, 8, 3, 6)


def opened(folder: Path, made: Made, **options: Any) -> DatasetWriter:
    episode = made(depth=True)
    return DatasetWriter(folder, episode.meta, episode.features(), **options)


def written(folder: Path, made: Made, **options: Any) -> Path:
    with opened(folder, made, **options) as writer:
        for seed, steps in enumerate(LENGTHS):
            writer.write(made(steps, seed=seed, depth=True), store_episode=seed)
    return folder


def content(folder: Path) -> list[dict[str, Any]]:
    """Returns everything that can be read, pictures decoded."""
    dataset = Dataset(folder, backend="pyav")
    rows: list[dict[str, Any]] = []
    for number in range(len(dataset)):
        episode = dataset.read(number)
        row: dict[str, Any] = dict(vars(episode))
        for key, values in row.pop("obs").items():
            row[key] = np.array(values[np.arange(len(episode))])
        rows.append(row)
    return rows


def assert_equal(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want)
    for one, two in zip(got, want, strict=True):
        for name, value in two.items():
            np.testing.assert_equal(one[name], value)


def files(folder: Path, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(pattern))


@pytest.mark.parametrize("options", [{"images": "png"}, {"codec": "h264"}, {"codec": "av1"}])
def test_nothing_changes_but_the_files(tmp_path: Path, made: Made, options: dict[str, Any]) -> None:
    folder = written(tmp_path / "d", made, **options)
    before = content(folder)
    compact(folder)
    assert files(folder, "*.parquet") == [
        "data/chunk-000/file-000.parquet",
        "final/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/tasks.parquet",
    ]
    assert len(files(folder, "*.mp4")) == (0 if "images" in options else 2)
    assert_equal(content(folder), before)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    compact(folder)  # again: nothing to do, nothing lost
    with opened(folder, made, **options) as writer:
        assert writer.last_store_episode == 3
        assert writer.write(made(4, seed=9, depth=True)) == 4
    assert_equal(content(folder)[:4], before)
    assert np.array_equal(content(folder)[4]["action"], made(4, seed=9, depth=True).action)


def test_nothing_of_format_1_is_lost(tmp_path: Path) -> None:
    """Its depth and final observations are in one file for all episodes."""
    folder = Path(shutil.copytree(FORMAT_1, tmp_path / "d"))
    before = content(folder)
    assert "front.depth" in before[0]["final_obs"]
    compact(folder)
    assert_equal(content(folder), before)


def test_an_episode_keeps_its_row_group(tmp_path: Path, made: Made) -> None:
    folder = written(tmp_path, made)
    compact(folder)
    metadata = pq.ParquetFile(folder / "data/chunk-000/file-000.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == list(LENGTHS)


def test_files_stop_at_their_size(tmp_path: Path, made: Made) -> None:
    folder = written(tmp_path, made)
    before = content(folder)
    rows = pq.ParquetFile(folder / "data/chunk-000/file-001.parquet").metadata.row_group(0)
    columns = [rows.column(i).total_compressed_size for i in range(rows.num_columns)]
    # Three of the four episodes are smaller than the second: two fill more than 1.1 times its size.
    compact(folder, data_mb=1.1 * sum(columns) / (1 << 20))
    assert len(files(folder, "data/*/*.parquet")) == 2
    assert len(files(folder, "arrays/*/*/*.npy")) == 2
    assert len(files(folder, "*.mp4")) == 2
    assert_equal(content(folder), before)


def test_videos_of_another_codec_are_not_joined(tmp_path: Path, made: Made) -> None:
    written(tmp_path / "one", made, codec="h264")
    folder = written(tmp_path / "two", made, codec="av1")
    video = "videos/observation.images.front/chunk-000/file-002.mp4"
    (tmp_path / "one" / video).replace(folder / video)
    record(folder)
    before = content(folder)
    compact(folder)
    assert len(files(folder, "videos/observation.images.front/*/*.mp4")) == 3
    assert_equal(content(folder), before)


def test_what_is_not_the_datasets_stays(tmp_path: Path, made: Made) -> None:
    folder = written(tmp_path / "d", made)
    (folder / "journal/lane-0").mkdir(parents=True)
    (folder / "journal/lane-0/000.seg").write_bytes(b"not sealed yet")
    (folder / "meta/store.json").write_text("{}")
    inode = (folder / "journal/lane-0/000.seg").stat().st_ino
    compact(folder)
    assert (folder / "meta/store.json").read_text() == "{}"
    # The same file, not a copy: a lock on it holds.
    assert (folder / "journal/lane-0/000.seg").stat().st_ino == inode


@pytest.mark.parametrize("at", ["_write", "sync_tree", "exchange_folder"])
def test_a_crash_leaves_the_old_files(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder = written(tmp_path / "d", made)
    before = content(folder)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"robot_rl.data.lerobot.compact.{at}", killed)
        with pytest.raises(KeyboardInterrupt):
            compact(folder)
    assert_equal(content(folder), before)
    compact(folder)
    assert_equal(content(folder), before)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_somebody_who_writes_meanwhile_is_noticed(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "d", made)
    (folder / "journal").mkdir()
    monkeypatch.setattr(
        "robot_rl.data.lerobot.compact.sync_tree", lambda _: (folder / "journal/1.seg").write_text("new")
    )
    with pytest.raises(DatasetError, match=r"another process writes to it\. Close that writer"):
        compact(folder)
    assert len(files(folder, "*.mp4")) == 8


def test_an_episode_of_the_last_moment_is_joined_too(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer adds one after compaction looked at the folder and before it took the lock."""
    folder = written(tmp_path / "d", made)

    def late(path: Path) -> DatasetLock:
        with opened(folder, made) as writer:
            writer.write(made(7, seed=9, depth=True))
        return DatasetLock(path)

    monkeypatch.setattr("robot_rl.data.lerobot.compact.DatasetLock", late)
    compact(folder)
    assert Dataset(folder).lengths().tolist() == [*LENGTHS, 7]


def test_a_writer_keeps_compaction_out(tmp_path: Path, made: Made) -> None:
    folder = written(tmp_path / "d", made)
    with opened(folder, made), pytest.raises(DatasetError, match="another writer has this dataset open"):
        compact(folder)


def test_a_recorder_keeps_compaction_out(tmp_path: Path, made: Made) -> None:
    """Also from Python: its journal would be in the old folder, which is removed."""
    folder = written(tmp_path / "d", made)
    dataset = Dataset(folder)
    with (
        StoreWriter(folder, dataset.meta, dataset.features),
        pytest.raises(DatasetError, match=r"is writing to this store, and a store has one writer"),
    ):
        compact(folder)
    assert len(files(folder, "data/*/*.parquet")) == len(LENGTHS)
    compact(folder)
    assert len(files(folder, "data/*/*.parquet")) == 1


def test_metadata_that_does_not_add_up_is_refused(tmp_path: Path, made: Made) -> None:
    folder = written(tmp_path / "d", made)
    (folder / "meta/episodes/chunk-000/file-001.parquet").unlink()
    with pytest.raises(DatasetError, match=r"lists 3 episodes, meta/info.json counts 4; episode 1"):
        compact(folder)
    info = (folder / "meta/info.json").read_text()
    (folder / "meta/info.json").write_text(info.replace("v3.0", "v2.1"))
    record(folder)
    with pytest.raises(DatasetError, match=r"version v2.1, allowed: v3.0\."):
        compact(folder)
    assert len(files(folder, "*.mp4")) == 8


def test_without_the_exchange_three_renames_do(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "d", made)
    before = content(folder)
    monkeypatch.setattr("robot_rl.core.files._RENAME_EXCHANGE", 1 << 30)  # EINVAL, as elsewhere
    compact(folder)
    assert_equal(content(folder), before)
    assert len(files(folder, "*.mp4")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_missing_file_is_named(tmp_path: Path, made: Made) -> None:
    folder = written(tmp_path / "d", made)
    (folder / "videos/observation.images.wrist/chunk-000/file-001.mp4").unlink()
    with pytest.raises(DatasetError, match=r"wrist/chunk-000/file-001.mp4: this file is missing\. .*Nothing"):
        compact(folder)


def test_links_to_folders_of_others_stay(tmp_path: Path, made: Made) -> None:
    folder = written(tmp_path / "set", made, images="png")
    (tmp_path / "masks").mkdir()
    (folder / "masks").symlink_to(Path("../masks"))
    compact(folder)
    assert (folder / "masks").readlink() == Path("../masks")
