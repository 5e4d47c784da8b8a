"""Every kind of damage is found by name, refused when read, and left out on request."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.damage import Problem, check
from robot_rl.data.lerobot.reader import Dataset
from tests.data.lerobot.shapes import ours

Copied = Callable[[Path], Path]
VIDEO = "videos/observation.images.front/chunk-000/file-001.mp4"
TABLE = "data/chunk-000/file-001.parquet"


def only(problems: list[Problem], kind: str, episode: int | None = 1) -> str:
    """Returns the message of the one problem there is."""
    assert [(p.kind, p.episode) for p in problems] == [(kind, episode)], problems
    return problems[0].message


def rewrite(path: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Changes one column of a parquet file."""
    table = pq.read_table(path)
    column = table.column_names.index(name)
    values = change(np.asarray(table[name].to_pylist()))
    pq.write_table(
        table.set_column(column, table.schema[column], pa.array(values.tolist(), table.schema[column].type)),
        path,
    )


def reencode(path: Path, *, frames: int, rate: int = 20) -> None:
    """Puts another video in a file's place."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            picture = np.full((48, 64, 3), 9 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_at(row: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values[row] = value
        return values

    return change


def test_sound_datasets_have_no_problems(video_dataset: Path, png_dataset: Path, old_dataset: Path) -> None:
    for folder in (video_dataset, png_dataset, old_dataset):
        assert check(folder) == []


def test_missing_video(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    (folder / VIDEO).unlink()
    assert "file-001.mp4: this video file is missing. Copy it again" in only(check(folder), "missing-video")
    dataset = Dataset(folder)
    assert dataset.frames("front.rgb", 0, [0]).shape == (1, 48, 64, 3)
    with pytest.raises(DatasetError, match="this video file is missing"):
        dataset.frames("front.rgb", 1, [0])


def test_video_shorter_than_its_rows(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    reencode(folder / VIDEO, frames=8)
    message = only(check(folder), "short-video")
    assert "episode 1: has 8 frames of 'observation.images.front', its parquet rows need 9" in message
    dataset = Dataset(folder)
    dataset.frames("front.rgb", 1, [7])
    with pytest.raises(
        DatasetError, match="frame 8 is not in this video: it is shorter than the parquet rows"
    ):
        dataset.frames("front.rgb", 1, [8])


def test_video_of_another_rate(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    reencode(folder / VIDEO, frames=9, rate=30)
    assert "the video has 30 fps, meta/info.json says 20" in only(check(folder), "wrong-fps")


def test_rows_of_another_rate(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    rewrite(folder / TABLE, "timestamp", lambda stamps: stamps * 20 / 15)
    message = "row 8 has timestamp 0.533 s, at 20 fps it should be 0.400 s"
    assert message in only(check(folder), "wrong-fps")
    with pytest.raises(DatasetError, match="episode 1: wrong-fps: row 8"):
        Dataset(folder).read(1)


def test_unreadable_video(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    content = (folder / VIDEO).read_bytes()
    (folder / VIDEO).write_bytes(content[: len(content) // 2].replace(b"moov", b"free"))
    assert "cannot be read as video" in only(check(folder), "unreadable-video")


def test_unknown_codec(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    content = (folder / VIDEO).read_bytes()
    assert b"avc1" in content
    (folder / VIDEO).write_bytes(content.replace(b"avc1", b"zzz9").replace(b"avcC", b"zzzC"))
    message = only(check(folder), "unknown-codec")
    assert "no decoder for its codec" in message
    assert "Encode the video again" in message


def test_duplicated_index(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    rewrite(folder / TABLE, "index", set_at(4, 10))
    assert "row 4 has index 10 after 10, allowed 11" in only(check(folder), "duplicate-index")
    with pytest.raises(DatasetError, match="episode 1: duplicate-index: row 4 has index 10 after 10"):
        Dataset(folder).read(1)


def test_a_joint_that_is_not_finite(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    rewrite(
        folder / TABLE, "observation.state", lambda state: np.where(np.arange(9)[:, None] == 3, np.nan, state)
    )
    message = only(check(folder), "not-finite")
    assert "feature 'observation.state' is NaN or infinite in row 3, element 0 (pan)" in message
    with pytest.raises(DatasetError, match=r"not-finite.*row 3, element 0 \(pan\)"):
        Dataset(folder).facts()


def test_statistics_that_do_not_match(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    edit_json(folder / "meta/stats.json", lambda stats: stats["action"]["mean"].__setitem__(2, 7.0))
    problem = check(folder)[0]
    assert not problem.is_fatal  # the rows themselves are sound
    assert "feature 'action': mean of element 2 (grip) is 7, of the rows it is" in only(
        [problem], "wrong-stats", None
    )
    assert len(Dataset(folder, on_damage="skip")) == 3


def test_statistics_of_version_2_that_do_not_match(old_dataset: Path, copied: Copied) -> None:
    folder = copied(old_dataset)
    path = folder / "meta/episodes_stats.jsonl"
    path.write_text(path.read_text().replace('"count": [9]', '"count": [8]', 1))
    assert "count is 8, of the rows it is 9" in only(check(folder), "wrong-stats")


def test_truncated_table(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    content = (folder / TABLE).read_bytes()
    (folder / TABLE).write_bytes(content[:-200])
    assert "no readable parquet file" in only(check(folder), "unreadable-rows")


def test_fewer_rows_than_the_metadata_says(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    pq.write_table(pq.read_table(folder / TABLE).slice(0, 5), folder / TABLE)
    message = only(check(folder), "unreadable-rows")
    assert "has 5 rows, meta/ says that an episode lies in rows 0 to 8" in message


def test_rows_of_another_episode(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    rewrite(folder / TABLE, "episode_index", lambda numbers: numbers + 1)
    assert "row 0 has episode_index 2, allowed 1" in only(check(folder), "unequal-lengths")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("meta/info.json", "no meta/info.json in it, so it is no LeRobot dataset"),
        ("meta/tasks.parquet", "no meta/tasks.parquet, so no instruction is known"),
        (
            "meta/episodes/chunk-000/file-001.parquet",
            "meta/episodes lists 2 episodes, meta/info.json counts 3; episode 1",
        ),
    ],
)
def test_missing_metadata(video_dataset: Path, copied: Copied, removed: str, message: str) -> None:
    folder = copied(video_dataset)
    (folder / removed).unlink()
    assert message in only(check(folder), "missing-metadata", None)
    with pytest.raises(DatasetError, match=message):
        Dataset(folder, on_damage="skip")


def test_an_episode_that_is_listed_twice(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    listed = folder / "meta/episodes/chunk-000"
    (listed / "file-009.parquet").write_bytes((listed / "file-001.parquet").read_bytes())
    message = only(check(folder), "missing-metadata", None)
    assert "lists episode 1 more than once" in message


def test_metadata_cut_short(video_dataset: Path, old_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    (folder / "meta/info.json").write_text('{"fps": 2')
    assert "meta/info.json: no JSON" in only(check(folder), "missing-metadata", None)
    folder = copied(old_dataset)
    path = folder / "meta/episodes.jsonl"
    path.write_text(path.read_text()[:-20])
    assert "meta/episodes.jsonl: line 3 is no JSON" in only(check(folder), "missing-metadata", None)


def test_damaged_episodes_are_left_out_on_request(video_dataset: Path, copied: Copied) -> None:
    folder = copied(video_dataset)
    (folder / VIDEO).unlink()
    dataset = Dataset(folder, on_damage="skip")
    assert [(p.kind, p.episode) for p in dataset.skipped] == [("missing-video", 1)]
    assert dataset.lengths().tolist() == [7, 6]
    whole = Dataset(video_dataset)
    np.testing.assert_array_equal(dataset.read(1).action, whole.read(2).action)
    np.testing.assert_array_equal(dataset.frames("front.rgb", 1, [5]), whole.frames("front.rgb", 2, [5]))
    assert dataset.read(1).final_obs["state"].tolist() == [2, 2]
    assert dataset.columns["episode_index"].tolist() == [0] * 7 + [2] * 6


def test_the_real_dataset_is_sound_until_it_is_damaged(g1_bottle: Path, tmp_path: Path) -> None:
    assert check(g1_bottle) == []
    for path in g1_bottle.glob("meta/*"):
        (tmp_path / "meta").mkdir(exist_ok=True)
        (tmp_path / "meta" / path.name).write_bytes(path.read_bytes())
    for name in ("data", "videos"):  # links are enough: what is damaged is replaced, not written to
        for path in (p for p in (g1_bottle / name).rglob("*") if p.is_file()):
            link = tmp_path / path.relative_to(g1_bottle)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    (tmp_path / "videos/chunk-000/observation.images.cam_high/episode_000003.mp4").unlink()
    table = tmp_path / "data/chunk-000/episode_000007.parquet"
    content = pq.read_table(table)
    table.unlink()
    pq.write_table(content, table)
    rewrite(table, "action", lambda action: np.where(np.arange(len(action))[:, None] == 11, np.nan, action))
    assert [(p.kind, p.episode) for p in check(tmp_path)] == [("not-finite", 7), ("missing-video", 3)]
    assert len(Dataset(tmp_path, on_damage="skip")) == 18


def test_where_no_episode_is_read_none_is_checked(tmp_path: Path, made: Callable[..., Episode]) -> None:
    folder = ours(tmp_path / "set", made, cameras=())
    next((folder / "data").rglob("*.parquet")).write_bytes(b"no parquet")
    assert Dataset(folder, episodes=[], on_damage="skip").skipped == []
