"""Statistics computed again and instructions renamed in place; a crash leaves the old or the new."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.amend import recompute_stats, rename_tasks, tasks_of_rows
from robot_rl.data.lerobot.checksums import Checksums, record
from robot_rl.data.lerobot.damage import check
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.v21 import read_lines
from robot_rl.data.lerobot.writer import DatasetLock, DatasetWriter
from tests.data.lerobot.shapes import TASKS, annotated, change, change_info, many_tasks, ours, put, version_21

Made = Callable[..., Episode]
Maker = Callable[[Path, Made], Path]


@pytest.mark.parametrize("maker", [ours, many_tasks, version_21])
def test_statistics_are_computed_again(tmp_path: Path, made: Made, maker: Maker) -> None:
    folder = maker(tmp_path / "set", made)
    lies = {"action": {"min": [0, 0], "max": [0, 0], "mean": [9, 9], "std": [1, 1], "count": [1]}}
    if (folder / "meta/stats.json").is_file():
        (folder / "meta/stats.json").write_text(json.dumps(lies))
        if maker is ours:
            assert "meta/stats.json: it does not match its checksum" in check(folder)[0].message
            record(folder)
        assert {problem.kind for problem in check(folder)} == {"wrong-stats"}
        assert "robot-rl replay stats" in check(folder)[0].message
    assert recompute_stats(folder) == 4
    assert check(folder, thorough=True) == []
    dataset = Dataset(folder)
    action = dataset.columns["action"].astype(np.float64)
    np.testing.assert_allclose(dataset.stats["action"]["mean"], action.mean(0), rtol=1e-6)
    lengths = enumerate(dataset.lengths().tolist())
    pictures = np.concatenate([dataset.frames("front.rgb", e, range(n)) for e, n in lengths])
    mean = dataset.stats["front.rgb"]["mean"].ravel()
    np.testing.assert_allclose(mean, pictures.mean((0, 1, 2)) / 255, rtol=1e-6)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("maker", [many_tasks, version_21])
def test_an_instruction_gets_another_text(tmp_path: Path, made: Made, maker: Maker) -> None:
    """Row r of an episode has task (r // 3) % 3; lengths 7, 5, 9, 4: tasks 0, 1, 2 have 12, 9 and 4 rows."""
    folder = maker(tmp_path / "set", made)
    before = {number: of[1:] for number, of in tasks_of_rows(Dataset(folder)).items()}
    assert before == {0: (4, 12), 1: (4, 9), 2: (2, 4)}
    rename_tasks(folder, {0: "touch the cube"})
    found = tasks_of_rows(Dataset(folder))
    assert [of[0] for of in found.values()] == ["touch the cube", *TASKS[1:]]
    assert Dataset(folder).read(0).meta.instruction == "touch the cube"
    with pytest.raises(DatasetError, match=r"another task is 'lift it' already"):
        rename_tasks(folder, {2: "lift it"})
    with pytest.raises(DatasetError, match=r"there is no task 7, allowed: 0, 1, 2\."):
        rename_tasks(folder, {7: "x"})


@pytest.mark.parametrize("maker", [many_tasks, version_21])
def test_several_instructions_change_at_once_or_none_does(tmp_path: Path, made: Made, maker: Maker) -> None:
    """One by one, the first was changed when the second was refused, and no two could change places."""
    folder = maker(tmp_path / "set", made)
    with pytest.raises(DatasetError, match=r"there is no task 7"):
        rename_tasks(folder, {0: "touch the cube", 7: "x"})
    with pytest.raises(DatasetError, match=r"another task is 'x' already"):
        rename_tasks(folder, {0: "x", 2: "x"})
    assert [of[0] for of in tasks_of_rows(Dataset(folder)).values()] == list(TASKS)
    rename_tasks(folder, {0: TASKS[1], 1: TASKS[0]})
    assert [of[0] for of in tasks_of_rows(Dataset(folder)).values()] == [TASKS[1], TASKS[0], TASKS[2]]
    assert Dataset(folder).read(0).meta.instruction == TASKS[1]
    assert check(folder, thorough=True) == []


@pytest.mark.parametrize("maker", [many_tasks, version_21])
def test_of_two_tasks_of_one_text_one_alone_gets_another(tmp_path: Path, made: Made, maker: Maker) -> None:
    """Tasks 0 and 1 are both 'go'; the rows say which of them an episode means."""
    folder = maker(tmp_path / "set", made)
    texts = ["go", "go", TASKS[2]]
    lines = folder / "meta/episodes.jsonl"
    if lines.is_file():
        tasks = [json.dumps({"task_index": n, "task": text}) + "\n" for n, text in enumerate(texts)]
        (folder / "meta/tasks.jsonl").write_text("".join(tasks))
        episodes = [{**e, "tasks": ["go"]} for e in read_lines(folder, "meta/episodes.jsonl")]
        lines.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    else:
        change(folder / "meta/tasks.parquet", lambda t: put(t, "task", pa.array(texts)))
        path = next((folder / "meta/episodes").rglob("*.parquet"))
        change(path, lambda t: put(t, "tasks", pa.array([["go"]] * 4)))
    rename_tasks(folder, {1: "lift\u2028it", 2: "stop"})
    after = ["go", "lift\u2028it", "stop"]
    assert [of[0] for of in tasks_of_rows(Dataset(folder)).values()] == after
    listed_of = (
        [episode["tasks"] for episode in read_lines(folder, "meta/episodes.jsonl")]
        if lines.is_file()
        else pq.read_table(next((folder / "meta/episodes").rglob("*.parquet")))["tasks"].to_pylist()
    )
    assert listed_of == [after, after[:2], after, after[:2]]
    if lines.is_file():  # whoever splits lines where Python does finds whole ones
        assert len((folder / "meta/tasks.jsonl").read_text().splitlines()) == 3


def test_depth_as_video_keeps_its_statistics(tmp_path: Path, made: Made) -> None:
    folder, name = many_tasks(tmp_path / "set", made), "observation.images.front"
    change_info(folder, lambda of: {**of, name: {**of[name], "info": {"is_depth_map": True}}})
    before = json.loads((folder / "meta/stats.json").read_text())[name]
    columns = [pq.read_table(path) for path in (folder / "meta/episodes").rglob("*.parquet")]
    assert Dataset(folder).cameras == ()
    recompute_stats(folder)
    after = json.loads((folder / "meta/stats.json").read_text())[name]
    assert after.keys() == before.keys()
    np.testing.assert_allclose(after["mean"], before["mean"], rtol=1e-6)
    path = next((folder / "meta/episodes").rglob("*.parquet"))
    assert pq.read_table(path)[f"stats/{name}/max"] == columns[0][f"stats/{name}/max"]


def test_depth_as_video_of_version_21_keeps_its_statistics(tmp_path: Path, made: Made) -> None:
    folder, name = version_21(tmp_path / "set", made), "observation.images.front"
    recompute_stats(folder)
    before = read_lines(folder, "meta/episodes_stats.jsonl")
    change_info(folder, lambda of: {**of, name: {**of[name], "info": {"is_depth_map": True}}})
    recompute_stats(folder)
    assert read_lines(folder, "meta/episodes_stats.jsonl") == before


def test_statistics_kept_for_the_whole_dataset_alone_stay(tmp_path: Path, made: Made) -> None:
    folder, name = many_tasks(tmp_path / "set", made), "observation.images.front"
    change_info(folder, lambda of: {**of, name: {**of[name], "info": {"is_depth_map": True}}})
    path = next((folder / "meta/episodes").rglob("*.parquet"))
    change(path, lambda t: t.drop_columns([n for n in t.column_names if n.startswith("stats/")]))
    before = json.loads((folder / "meta/stats.json").read_text())[name]
    recompute_stats(folder)
    assert json.loads((folder / "meta/stats.json").read_text())[name] == before


@pytest.mark.parametrize("maker", [many_tasks, ours])
def test_what_a_kill_left_of_a_commit_is_passed_over(tmp_path: Path, made: Made, maker: Maker) -> None:
    """meta/info.json counts four episodes; the file of the next four is there already."""
    folder = maker(tmp_path / "set", made)
    path = next((folder / "meta/episodes").rglob("*.parquet"))
    torn = path.with_name("file-001.parquet")
    torn.write_bytes(path.read_bytes())
    change(torn, lambda table: put(table, "episode_index", np.arange(4, 8)))
    if maker is ours:
        record(folder)
    content = torn.read_bytes()
    assert recompute_stats(folder) == 4
    assert torn.read_bytes() == content
    rename_tasks(folder, {0: "touch the cube"})
    assert check(folder) == []


def test_nobody_writes_while_statistics_are_computed(tmp_path: Path, made: Made) -> None:
    folder = many_tasks(tmp_path / "set", made)

    def append(done: int, total: int) -> None:
        with pytest.raises(DatasetError, match="another writer has this dataset open"):
            DatasetLock(folder)

    assert recompute_stats(folder, append) == 4


@pytest.mark.parametrize(
    "edit", [recompute_stats, lambda folder: rename_tasks(folder, {0: "touch the cube"})]
)
def test_links_to_folders_stay(tmp_path: Path, made: Made, edit: Callable[[Path], object]) -> None:
    """Videos on another disk: an empty folder took the place of the link."""
    folder = many_tasks(tmp_path / "set", made)
    (folder / "videos").rename(tmp_path / "big")
    (folder / "videos").symlink_to(Path("../big"))
    before = Dataset(folder).frames("front.rgb", 0, [3])
    edit(folder)
    assert (folder / "videos").readlink() == Path("../big")
    assert (Dataset(folder).frames("front.rgb", 0, [3]) == before).all()


def test_metadata_behind_a_link_is_refused(tmp_path: Path, made: Made) -> None:
    folder = many_tasks(tmp_path / "set", made)
    (folder / "meta/episodes").rename(tmp_path / "episodes")
    (folder / "meta/episodes").symlink_to(tmp_path / "episodes")
    content = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(DatasetError, match=r"meta/episodes: a link to .* Put that folder itself here"):
        rename_tasks(folder, {0: "touch the cube"})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == content


def test_a_failure_leaves_the_dataset_as_it_was(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = many_tasks(tmp_path / "set", made)
    content = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("robot_rl.data.lerobot.amend.sync_tree", killed)
    with pytest.raises(KeyboardInterrupt):
        rename_tasks(folder, {0: "touch the cube"})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == content
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_what_is_amended_has_new_checksums_and_the_rest_its_own(tmp_path: Path, made: Made) -> None:
    """A bit of a video turns over: an edit that does not look at videos must not make it sound."""
    folder = ours(tmp_path / "set", made)
    video = next((folder / "videos").rglob("*.mp4"))
    content = bytearray(video.read_bytes())
    content[len(content) // 2] ^= 1
    video.write_bytes(content)
    name = video.relative_to(folder).as_posix()
    before = Checksums(folder).recorded("meta/info.json")
    rename_tasks(folder, {0: "touch the cube"})
    assert Dataset(folder).read(0).meta.instruction == "touch the cube"
    assert Checksums(folder).recorded("meta/info.json") == before
    assert [found for found, _ in Checksums(folder).problems(0)] == [name]
    one = made(size=(16, 24))
    with pytest.raises(DatasetError, match=r"does not match its checksum"):
        recompute_stats(folder)
    with DatasetWriter(folder, one.meta, one.features()) as writer:  # appends to what was amended
        assert len(writer) == 4


def test_statistics_are_the_same_bytes_whatever_was_there_before(tmp_path: Path, made: Made) -> None:
    path = annotated(tmp_path / "set", made) / "meta/stats.json"
    recompute_stats(tmp_path / "set")
    before = path.read_bytes()
    path.write_text("{")
    recompute_stats(tmp_path / "set")
    assert path.read_bytes() == before


def test_statistics_that_a_turned_bit_spoiled_are_computed_again(tmp_path: Path, made: Made) -> None:
    folder = ours(tmp_path / "set", made)
    path = folder / "meta/stats.json"
    path.write_text(path.read_text().replace("0", "1"))
    assert [problem.kind for problem in check(folder)] == ["missing-metadata"]
    recompute_stats(folder)
    assert check(folder, thorough=True) == []
