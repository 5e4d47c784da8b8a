"""Names that are not LeRobot's are found at once and can be given; episodes and cameras can be chosen."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.damage import check, lines
from robot_rl.data.lerobot.edit import merge
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.reading import pairs, spans_of
from tests.data.lerobot.shapes import LENGTHS, RENAME, change, many_tasks, odd, ours, plain

Made = Callable[..., Episode]

MAPPING = ",".join(f"{old}:{new}" for old, new in RENAME.items())


def test_all_odd_names_are_in_one_list_with_a_mapping(tmp_path: Path, made: Made) -> None:
    folder = odd(tmp_path / "set", made)
    with pytest.raises(DatasetError) as refused:
        Dataset(folder)
    said = str(refused.value).splitlines()
    assert said[1:5] == [
        "  actions: there is no column 'action'; taken for 'action'?",
        "  state: there is no column 'observation.state'; taken for 'observation.state'?",
        "  cam_high: pictures outside 'observation.images.'; taken for 'observation.images.cam_high'?",
        "  video: there is no folder 'videos'; taken for 'videos'?",
    ]
    assert f"rename={MAPPING}, or write it so: robot-rl replay rename {folder} actions=action" in said[5]
    assert len(lines(check(folder))) == 1


def test_what_the_proposal_says_reads_everything(tmp_path: Path, made: Made) -> None:
    """The mapping that the error proposes gives the same as the dataset with LeRobot's names."""
    folder = odd(tmp_path / "set", made)
    even = Dataset(tmp_path / "set-even")
    dataset = Dataset(folder, rename=pairs(MAPPING.split(","), "rename"))
    assert dataset.cameras == ("cam_high.rgb",)
    for number in range(len(LENGTHS)):
        one, two = dataset.read(number), even.read(number)
        np.testing.assert_array_equal(one.action, two.action)
        np.testing.assert_array_equal(one.obs["state"], two.obs["state"])
        np.testing.assert_array_equal(one.obs["cam_high.rgb"][:], two.obs["front.rgb"][:])
    written = Dataset(merge([dataset], tmp_path / "new"))
    assert check(written.folder, thorough=True) == []
    assert {"action", "observation.state", "observation.images.cam_high", "note"} <= set(
        written.info["features"]
    )
    np.testing.assert_array_equal(written.columns["action"], even.columns["action"])
    np.testing.assert_array_equal(written.read(2).obs["cam_high.rgb"][:], even.read(2).obs["front.rgb"][:])


def test_a_column_that_only_the_files_name_otherwise(tmp_path: Path, made: Made) -> None:
    """meta/info.json declares observation.state, the files have `state`: it was dropped in silence."""
    folder = plain(tmp_path / "set", made)
    want = Dataset(folder).columns["state"]
    path = folder / "data/chunk-000/file-000.parquet"
    names = {"observation.state": "state"}
    change(path, lambda t: t.rename_columns([names.get(n, n) for n in t.column_names]))
    with pytest.raises(DatasetError, match=r"no column 'observation.state', which meta/info.json declares"):
        Dataset(folder)
    dataset = Dataset(folder, rename={"state": "observation.state"})
    np.testing.assert_array_equal(dataset.columns["state"], want)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"actons": "action"}, r"rename: there is no 'actons'\. Did you mean 'action"),
        ({"action": "observation.state"}, r"rename: 'observation.state' is there already"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(
    tmp_path: Path, made: Made, rename: dict[str, str], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        Dataset(many_tasks(tmp_path / "set", made), rename=rename)


def test_only_these_episodes_and_cameras(tmp_path: Path, made: Made) -> None:
    folder = ours(tmp_path / "set", made)
    dataset = Dataset(folder, episodes=[3, 0], cameras=["wrist"])
    assert dataset.lengths().tolist() == [7, 4]
    assert dataset.cameras == ("wrist.rgb",)
    out = Dataset(merge([dataset], tmp_path / "out"))
    assert (len(out), out.cameras) == (2, ("wrist.rgb",))
    assert "camera_stamp_ns.front" in out.info["features"]  # numbers stay
    assert check(out.folder, thorough=True) == []
    with pytest.raises(DatasetError, match=r"cameras: there is no 'frnt'\. Did you mean 'front'"):
        Dataset(folder, cameras=["frnt"])
    with pytest.raises(DatasetError, match=r"episodes: there is no 4, allowed 0 to 3"):
        Dataset(folder, episodes=[4])


def test_a_damaged_file_of_a_strangers_dataset_is_left_out(
    copied: Callable[[Path], Path], video_dataset: Path
) -> None:
    """Its names are looked up in the first file that can be read; each of three episodes has one."""
    folder = copied(video_dataset)
    (folder / "meta/robot_rl.json").unlink()
    (folder / "data/chunk-000/file-000.parquet").write_bytes(b"PAR1 and no more")
    dataset = Dataset(folder, on_damage="skip")
    assert dataset.index.episode.tolist() == [1, 2]
    assert {problem.kind for problem in dataset.skipped if problem.is_fatal} == {"unreadable-rows"}


def test_damage_outside_what_is_read_is_no_matter(tmp_path: Path, video_dataset: Path) -> None:
    """Three episodes in a file each; a bit of the first one's data and of the second's front video turned."""
    folder = Path(shutil.copytree(video_dataset, tmp_path / "set"))
    for name in ("data/chunk-000/file-000.parquet", "videos/observation.images.front/chunk-000/file-001.mp4"):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    assert Dataset(folder, on_damage="skip").index.episode.tolist() == [2]
    part = Dataset(folder, on_damage="skip", episodes=[1, 2], cameras=["wrist"])
    assert part.index.episode.tolist() == [1, 2]
    assert part.skipped == []


def test_a_camera_that_is_left_out_may_be_missing(tmp_path: Path, made: Made) -> None:
    folder = ours(tmp_path / "set", made)
    (next((folder / "videos/observation.images.front").rglob("*.mp4"))).unlink()
    assert len(Dataset(folder, on_damage="skip")) == 0
    assert len(Dataset(folder, on_damage="skip", cameras=["wrist"])) == 4


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: spans_of("0-a", "episodes"), "episodes: got 'a', allowed: a whole number"),
        (lambda: spans_of("80-", "episodes"), "episodes: got '', allowed: a whole number"),
        (lambda: spans_of("0-3,9-5", "episodes"), "episodes: got '9-5', allowed: .* first, 5-9"),
        (lambda: spans_of("0-3,2", "episodes"), "episodes: got 2 twice in '0-3,2'"),
        (lambda: pairs(["a:b", "a:c"], "rename"), "rename: got 'a' twice"),
        (
            lambda: pairs(["actions"], "rename"),
            "rename: got 'actions', allowed: <name there>:<LeRobot's name>",
        ),
        (lambda: pairs(["a:b:c"], "rename"), "rename: got 'a:b:c', allowed"),
    ],
)
def test_words_that_do_not_say_it_are_refused(read: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read()
    assert spans_of("0-2,7", "episodes") == [0, 1, 2, 7]
    assert pairs(["actions: action"], "rename") == {"actions": "action"}
