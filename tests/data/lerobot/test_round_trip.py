"""Whatever a dataset holds comes out of an edit as it went in: values, tasks, subtasks, unknown columns."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.collecting import COLLECTED
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.damage import check
from robot_rl.data.lerobot.edit import filter as filter_episodes
from robot_rl.data.lerobot.edit import merge, split
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.upgrade import upgrade
from tests.data.lerobot.shapes import (
    LENGTHS,
    SHAPES,
    SUBTASKS,
    TASKS,
    annotated,
    assert_same,
    change,
    change_info,
    contents,
    many_tasks,
    ours,
    texts_of,
    version_21,
)

Made = Callable[..., Episode]


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, made: Made) -> Path:
    """A dataset of each shape; not to be changed."""
    return SHAPES[request.param](tmp_path_factory.mktemp("shapes") / "set", made)


def test_filtered_split_and_merged_again(shape: Path, tmp_path: Path) -> None:
    want = contents(shape)
    assert len(want) == 4
    filtered = filter_episodes(Dataset(shape), tmp_path / "filtered", episodes=[3, 1])
    assert_same(contents(filtered), [want[3], want[1]])
    first, second = split(Dataset(shape), {tmp_path / "first": [0, 2], tmp_path / "second": [1, 3]})
    assert_same(contents(first), [want[0], want[2]])
    both = merge([Dataset(first), Dataset(second), Dataset(filtered)], tmp_path / "both")
    assert_same(contents(both), [want[number] for number in (0, 2, 1, 3, 3, 1)])
    assert [*check(filtered), *check(second), *check(both, thorough=True)] == []


def test_compacted(shape: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    if (shape / "meta/tasks.jsonl").is_file():
        with pytest.raises(DatasetError, match=r"Upgrade it first.*: robot-rl replay upgrade .*set out="):
            compact(shape)
        upgrade(shape, folder)
    else:
        shutil.copytree(shape, folder)
    want = contents(folder)
    compact(folder)
    assert_same(contents(folder), want)
    assert check(folder, thorough=True) == []


def test_upgraded_from_numbers_that_do_not_begin_at_0(tmp_path: Path, made: Made) -> None:
    shape = SHAPES["version 2.1"](tmp_path / "old", made)
    new = upgrade(shape, tmp_path / "new")
    assert check(new, thorough=True) == []
    assert_same(contents(new), contents(shape))
    rows = Dataset(new).columns
    assert rows["index"].tolist() == list(range(sum(LENGTHS)))
    assert rows["episode_index"].tolist() == np.repeat(range(4), LENGTHS).tolist()
    assert Dataset(new).info["splits"] == {"train": "0:4"}


def test_instructions_that_nothing_names_are_left_out(tmp_path: Path, made: Made) -> None:
    """Episode 3 has 4 rows: three of task 0, one of task 1; task 2 is not in it."""
    folder = many_tasks(tmp_path / "set", made)
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[3])
    assert texts_of(out, "task") == {0: TASKS[0], 1: TASKS[1]}
    assert pq.read_table(out / "meta/episodes")["tasks"].to_pylist() == [[*TASKS[:2]]]
    assert Dataset(out).info["total_tasks"] == 2


def test_an_instruction_inside_an_episode_is_found(tmp_path: Path, made: Made) -> None:
    """Rows 6 and on have task 2: episodes of 7 and 9 rows."""
    folder = many_tasks(tmp_path / "set", made)
    out = filter_episodes(Dataset(folder), tmp_path / "out", instruction=TASKS[2])
    assert Dataset(out).lengths().tolist() == [7, 9]


def test_texts_of_two_datasets_are_numbered_together(tmp_path: Path, made: Made) -> None:
    one = many_tasks(tmp_path / "one", made)
    two = many_tasks(tmp_path / "two", made)
    texts = ("push it", TASKS[1], TASKS[0])
    from tests.data.lerobot.shapes import words

    change(two / "meta/tasks.parquet", lambda t: words("task", texts))
    both = merge([Dataset(one), Dataset(two)], tmp_path / "both")
    named = texts_of(both, "task")
    numbers = Dataset(both).columns["task_index"]
    # Row r of an episode has number (r // 3) % 3 in its own table.
    row = Dataset(both).columns["frame_index"]
    want = [TASKS[(r // 3) % 3] for r in row[:25]] + [texts[(r // 3) % 3] for r in row[25:]]
    assert [named[number] for number in numbers.tolist()] == want
    assert sorted(named.values()) == sorted({*TASKS, "push it"})


def test_a_task_without_a_text_is_refused(tmp_path: Path, made: Made) -> None:
    folder = many_tasks(tmp_path / "set", made)
    change(folder / "meta/tasks.parquet", lambda t: t.slice(0, 2))
    with pytest.raises(
        DatasetError, match=r"episode 0: task_index is 2, allowed: \[0, 1\], which have a text"
    ):
        filter_episodes(Dataset(folder), tmp_path / "out", episodes=[0])
    assert not (tmp_path / "out").exists()


def test_a_camera_is_filtered_without_encoding(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ours(tmp_path / "set", made)
    want = contents(folder)
    monkeypatch.setattr("robot_rl.data.lerobot.encode.VideoFile.__init__", None)
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[1, 2])
    assert_same(contents(out), want[1:3])


@pytest.mark.parametrize(
    "name", ["data", "videos", "meta/episodes", "meta/subtasks.parquet", "meta/annotations.jsonl"]
)
def test_nothing_is_made_of_a_file_that_changed(name: str, tmp_path: Path, made: Made) -> None:
    """A bit in the middle of any file that is copied turns over; files of others have checksums too."""
    folder = filter_episodes(Dataset(annotated(tmp_path / "set", made)), tmp_path / "ours", episodes=[0, 2])
    source = Dataset(folder)
    path = next(path for path in sorted((folder / name).rglob("*.*")) or [folder / name] if path.is_file())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"{path.name}: it does not match its checksum"):
        merge([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [problem.kind for problem in check(folder, source.index)][:1] == ["changed-file"]


# --- what cannot be kept ---------------------------------------------------------------------------


def test_what_a_recording_has_no_place_for_is_named(tmp_path: Path, made: Made) -> None:
    folder = annotated(tmp_path / "set", made)
    lost = (
        "subtask_index,note,observation.comment,language_persistent,quality,undeclared,operator,README.md,"
        "masks/episode_000000.bin,masks/episode_000001.bin,masks/episode_000002.bin,masks/episode_000003.bin,"
        "meta/annotations.jsonl,meta/grades.parquet,meta/modality.json,task_index"
    )
    with pytest.raises(
        DatasetError, match=r"all instructions but the first of episodes 0-3.*drop="
    ) as refused:
        filter_episodes(Dataset(folder), tmp_path / "out", images="png")
    assert str(refused.value).endswith(f"drop={lost}")
    assert not (tmp_path / "out").exists()
    out = filter_episodes(Dataset(folder), tmp_path / "out", images="png", drop=lost.split(","))
    assert len(Dataset(out)) == 4


def test_a_column_of_one_of_two_is_named(tmp_path: Path, made: Made) -> None:
    one, two = many_tasks(tmp_path / "one", made), annotated(tmp_path / "two", made)
    with pytest.raises(
        DatasetError, match=r"only .*two has column 'language_persistent'\. .*drop=language_per"
    ):
        merge([Dataset(one), Dataset(two)], tmp_path / "out")
    drop = ["language_persistent", "note", "observation.comment", "quality", "subtask_index"]
    out = merge([Dataset(one), Dataset(two)], tmp_path / "out", drop=drop)
    assert Dataset(out).lengths().tolist() == [*LENGTHS, *LENGTHS]
    assert not set(drop) & set(Dataset(out).index.features)
    # The column that no file of the first has is empty there.
    assert [row["operator"] for row in contents(out)] == [None] * 4 + list("abcd")


def test_files_that_differ_are_named(tmp_path: Path, made: Made) -> None:
    one, two = annotated(tmp_path / "one", made), annotated(tmp_path / "two", made)
    (two / "README.md").write_text("Recorded in Paris.")
    with pytest.raises(DatasetError, match=r"one/README.md and .*two/README.md differ.*drop=README.md"):
        merge([Dataset(one), Dataset(two)], tmp_path / "out")
    out = merge([Dataset(one), Dataset(two)], tmp_path / "out", drop=["README.md"])
    assert not (out / "README.md").exists()


def test_only_what_is_there_can_be_dropped(tmp_path: Path, made: Made) -> None:
    folder = annotated(tmp_path / "set", made)
    with pytest.raises(
        DatasetError, match=r"drop: there is no 'notes' that could be left out\. Did you mean 'note'"
    ):
        filter_episodes(Dataset(folder), tmp_path / "out", drop=["notes"])
    with pytest.raises(DatasetError, match=r"drop: there is no 'action' that could be left out"):
        filter_episodes(Dataset(folder), tmp_path / "out", drop=["action"])


def test_a_camera_can_be_dropped(tmp_path: Path, made: Made) -> None:
    folder = ours(tmp_path / "set", made)
    out = filter_episodes(Dataset(folder), tmp_path / "out", drop=["observation.images.wrist"])
    assert Dataset(out).cameras == ("front.rgb",)
    assert [path.name for path in (out / "videos").iterdir()] == ["observation.images.front"]
    assert check(out, thorough=True) == []


def test_splits_follow_their_episodes(tmp_path: Path, made: Made) -> None:
    import json

    folder = many_tasks(tmp_path / "set", made)
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "splits": {"train": "0:3", "val": "3:4"}}))
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[1, 2, 3])
    assert Dataset(out).info["splits"] == {"train": "0:2", "val": "2:3"}
    change_info(out, lambda f: f)  # the file is whole


# --- LeRobot's own commands ------------------------------------------------------------------------


@pytest.mark.slow  # LeRobot takes 10 s to load
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHAPES)
def test_through_lerobots_own_edits(name: str, tmp_path: Path, made: Made, lerobot_datasets: Any) -> None:
    """Ours -> LeRobot deletes, splits, merges -> ours; what it edits is as it was, files of others included.

    LeRobot encodes pictures again, keeps the numbers of subtasks without their texts, and leaves out files.
    """
    from lerobot.datasets.dataset_tools import delete_episodes, merge_datasets, split_dataset

    folder = SHAPES[name](tmp_path / "set", made)
    if name == "version 2.1":
        folder = upgrade(folder, tmp_path / "upgraded")
    typeless = ["language_persistent", "undeclared"]  # LeRobot takes no type it does not know
    drop = typeless if name in ("annotated", "version 2.1") else []
    want = [{key: value for key, value in row.items() if key not in drop} for row in contents(folder)]
    out = filter_episodes(Dataset(folder), tmp_path / "filtered", episodes=[0, 1, 3], drop=drop)

    def opened(path: Path) -> Any:
        return lerobot_datasets.LeRobotDataset(f"robot-rl/{path.name}", root=path, video_backend="pyav")

    delete_episodes(opened(out), [1], output_dir=tmp_path / "deleted", repo_id="robot-rl/deleted")
    _assert_kept(contents(tmp_path / "deleted"), [want[0], want[3]])
    parts = split_dataset(opened(out), {"a": [0], "b": [1, 2]}, output_dir=tmp_path / "parts")
    merge_datasets([parts["a"], parts["b"]], "robot-rl/merged", output_dir=tmp_path / "merged")
    merged = contents(tmp_path / "merged")
    _assert_kept(merged, [want[0], want[1], want[3]])
    assert_same(contents(out), [want[0], want[1], want[3]])
    assert check(out, thorough=True) == []
    back = filter_episodes(Dataset(tmp_path / "merged"), tmp_path / "back", episodes=[2, 0])
    assert_same(contents(back), [merged[2], merged[0]])
    both = merge([Dataset(tmp_path / "deleted"), Dataset(back)], tmp_path / "both")
    _assert_kept(contents(both), [want[n] for n in (0, 3, 3, 0)])
    compact(both)
    _assert_kept(contents(both), [want[n] for n in (0, 3, 3, 0)])
    assert check(both, thorough=True) == []
    item = opened(both)[LENGTHS[0]]
    assert item["task"] == want[3]["task_index"][0]


def _assert_kept(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """Compares what LeRobot keeps: all numbers and texts of rows, and pictures as well as a codec does.

    The brightness of a picture says its step, 5 of 255 for each: less than half of that is the same step.
    """
    lost = ("annotations", "files", "operator", "depth", "final")

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        subtasks = [SUBTASKS.index(s) if isinstance(s, str) else s for s in row.get("subtask_index", ())]
        rest = {key: value for key, value in row.items() if key not in (*lost, "pictures")}
        return rest | ({"subtask_index": subtasks} if subtasks else {})

    assert_same([kept(row) for row in got], [kept(row) for row in want])
    for one, two in zip(got, want, strict=True):
        assert one["pictures"].keys() == two["pictures"].keys()
        for camera, pictures in two["pictures"].items():
            assert one["pictures"][camera].shape == pictures.shape
            far = np.abs(one["pictures"][camera].astype(float) - pictures).mean((1, 2, 3))
            assert far.max() < 2.5, camera


def test_files_of_others_behind_a_link_are_copied(tmp_path: Path, made: Made) -> None:
    folder = annotated(tmp_path / "set", made)
    (folder / "masks").rename(tmp_path / "masks")
    (folder / "masks").symlink_to(tmp_path / "masks")
    new = filter_episodes(Dataset(folder), tmp_path / "new", episodes=[2])
    assert not (new / "masks").is_symlink()
    assert [path.name for path in (new / "masks").iterdir()] == ["episode_000000.bin"]
    assert (new / "masks/episode_000000.bin").read_bytes() == bytes([2] * 5)


def test_how_episodes_were_collected_is_not_said_of_others(tmp_path: Path, made: Made) -> None:
    """Each collection has a file of its own about all its episodes: they differ, and no merge is refused."""
    one, two = (ours(tmp_path / name, made, cameras=()) for name in ("one", "two"))
    for folder in (one, two):
        (folder / COLLECTED).write_text(json.dumps({"out": folder.name, "kept": 4}))
    for new in (
        merge([Dataset(one), Dataset(two)], tmp_path / "both"),
        filter_episodes(Dataset(one), tmp_path / "some", episodes=[1]),
        *split(Dataset(one), {tmp_path / "a": 0.5, tmp_path / "b": 0.5}),
    ):
        assert not (new / COLLECTED).exists()
    assert len(Dataset(tmp_path / "both")) == 8


def test_entries_that_only_some_lines_of_version_21_have(tmp_path: Path, made: Made) -> None:
    """The columns were those of the first line: what only later episodes have was lost in silence."""
    folder = version_21(tmp_path / "set", made)
    path = folder / "meta/episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["scene"] = "kitchen"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    upgrade(folder, tmp_path / "new")
    (table,) = [pq.read_table(path) for path in (tmp_path / "new/meta/episodes").rglob("*.parquet")]
    assert table["scene"].to_pylist() == [None, None, "kitchen", None]
    lines[3]["scene"] = 3
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DatasetError, match=r"episodes.jsonl: entry 'scene' has values of several types"):
        upgrade(folder, tmp_path / "newer")


def test_the_number_of_an_instruction_is_left_out_of_no_copy(tmp_path: Path, made: Made) -> None:
    """Where episodes are recorded anew, drop=task_index keeps the first instruction; a copy keeps all."""
    dataset = Dataset(many_tasks(tmp_path / "set", made))
    with pytest.raises(DatasetError, match=r"drop: there is no 'task_index' that could be left out"):
        filter_episodes(dataset, tmp_path / "new", drop=["task_index"])
    new = filter_episodes(dataset, tmp_path / "new", drop=["task_index"], images="png")
    assert Dataset(new).instructions == TASKS[:1]
