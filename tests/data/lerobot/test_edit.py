"""Merged, split and filtered datasets hold the right episodes; what does not fit is named."""

import dataclasses
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.damage import check
from robot_rl.data.lerobot.edit import filter as filter_episodes
from robot_rl.data.lerobot.edit import merge, new_folder, split
from robot_rl.data.lerobot.reader import Dataset
from tests.data.lerobot.shapes import plain

Made = Callable[..., Episode]


class InMemory:
    """A source of episodes that counts what is asked of it."""

    def __init__(self, episodes: Sequence[Episode], **meta: Any) -> None:
        self.episodes = episodes
        self.meta = dataclasses.replace(episodes[0].meta, **meta)
        self.features = episodes[0].features()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.episodes)

    def lengths(self) -> Any:
        return np.array([len(episode) for episode in self.episodes])

    def read(self, episode: int) -> Episode:
        self.asked.append(episode)
        return self.episodes[episode]

    def refresh(self) -> None: ...


def actions(folder: Path) -> list[Any]:
    dataset = Dataset(folder)
    return [dataset.read(number).action.tolist() for number in range(len(dataset))]


@pytest.fixture
def source(made: Made) -> InMemory:
    """Ten episodes of 2 to 11 steps; the odd ones fail and are told to drop it."""
    return InMemory(
        [
            made(n + 2, seed=n, cameras=(), success=n % 2 == 0, instruction="drop it" if n % 2 else "pick it")
            for n in range(10)
        ]
    )


def test_merged_in_order_with_new_statistics(tmp_path: Path, made: Made, source: InMemory) -> None:
    other = InMemory([made(5, seed=20), made(4, seed=21)])
    first = InMemory([made(3, seed=22)])
    out = merge([first, other], tmp_path / "out", images="png")
    dataset = Dataset(out)
    assert dataset.lengths().tolist() == [3, 5, 4]
    assert np.array_equal(dataset.read(2).obs["front.rgb"][3], other.episodes[1].obs["front.rgb"][3])
    state = np.concatenate([e.obs["state"] for e in (*first.episodes, *other.episodes)])
    np.testing.assert_allclose(dataset.stats["state"]["mean"], state.mean(0, dtype=np.float64))
    assert dataset.meta.task == "pick_cube"
    assert other.asked == [0, 1]


def test_two_tasks_are_a_mix(tmp_path: Path, source: InMemory) -> None:
    out = merge([source, InMemory(source.episodes, task="reach")], tmp_path / "out")
    assert (Dataset(out).meta.task, len(Dataset(out))) == ("mixed", 20)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (
            {"robot": "ur5"},
            r"source 1 does not fit the first: .*robot 'ur5', not 'panda'\. .*keep them apart",
        ),
        ({"control_hz": 50.0}, r"it was recorded at 50 Hz, not 20 Hz\. .*collect both at one rate"),
        (
            {"action_names": ("x", "wrist")},
            r"its joints \(action\) differ: it has wrist and lacks gripper\. .*keep them apart",
        ),
        (
            {"state_names": ("joint_1", "joint_3", "joint_2")},
            r"its state elements are in another order: joint_3, joint_2",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, source: InMemory, meta: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        merge([source, InMemory(source.episodes, **meta)], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_datasets_of_another_rate_are_merged_at_one(tmp_path: Path, made: Made) -> None:
    def made_fast(*args: Any, **how: Any) -> Episode:
        episode = made(*args, **how)
        return dataclasses.replace(episode, meta=dataclasses.replace(episode.meta, control_hz=40.0))

    slow, fast = plain(tmp_path / "slow", made), plain(tmp_path / "fast", made_fast)
    with pytest.raises(DatasetError, match=r"at 40 Hz, not 20 Hz\. Give all one rate: fps=20"):
        merge([Dataset(slow), Dataset(fast)], tmp_path / "out")
    both = Dataset(merge([Dataset(slow), Dataset(fast)], tmp_path / "out", fps=20, images="png"))
    assert (both.index.fps, both.lengths().tolist()) == (20.0, [7, 5, 9, 4, 4, 3, 5, 2])
    before, after = Dataset(fast).read(2), both.read(6)
    np.testing.assert_array_equal(after.action, before.action[::2])
    for key in ("state", "front.rgb"):
        np.testing.assert_array_equal(after.obs[key][:], before.obs[key][::2])
    assert check(both.index.folder, thorough=True) == []


def test_actions_that_are_steps_of_a_period_keep_their_rate(tmp_path: Path, source: InMemory) -> None:
    with pytest.raises(DatasetError, match=r"episodes of pick_cube have 20 Hz\. .*how far to move"):
        merge([source], tmp_path / "out", fps=10)


def test_nothing_is_written_into_what_is_copied(tmp_path: Path, made: Made) -> None:
    folder = plain(tmp_path / "one", made)
    before = sorted(folder.rglob("*"))
    with pytest.raises(DatasetError, match=r"one/half: lies within .*/one, which is copied"):
        split(Dataset(folder), {folder / "half": [0, 1]})
    with pytest.raises(DatasetError, match="which is copied"):
        merge([Dataset(folder)], tmp_path / "x" / ".." / "one" / "again", fps=10)
    assert sorted(folder.rglob("*")) == before


def test_another_camera_is_named(tmp_path: Path, made: Made) -> None:
    one, two = (
        InMemory([made(cameras=("front.rgb",))]),
        InMemory([made(cameras=("front.rgb",), size=(16, 16))]),
    )
    with pytest.raises(DatasetError, match=r"'front.rgb' is uint8 \(16, 16, 3\), not uint8 \(32, 48"):
        merge([one, two], tmp_path / "out")
    with pytest.raises(DatasetError, match=r"'front.rgb' is missing, not uint8"):
        merge([one, InMemory([made(cameras=())])], tmp_path / "out")


def test_split_by_shares_and_by_lists(tmp_path: Path, source: InMemory) -> None:
    train, held = split(source, {tmp_path / "train": 0.75, tmp_path / "held": 0.25})
    # 0.75 of 10 is 7.5, rounded to the even 8.
    assert (len(Dataset(train)), len(Dataset(held))) == (8, 2)
    assert actions(held) == [e.action.tolist() for e in source.episodes[8:]]
    (part,) = split(source, {tmp_path / "part": [7, 1]})
    assert actions(part) == [source.episodes[7].action.tolist(), source.episodes[1].action.tolist()]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": 0.9, "b": 0.2}, r"allowed: a list of episodes .* each above 0 and together at most 1"),
        ({"a": 0.5, "b": [1]}, r"a list of episodes for every folder, or a share for every"),
        ({"a": [3, 10]}, r"split: episode 10 is unknown, allowed 0 to 9"),
        (
            {"a": [0, 3, 4, 5, 7], "b": [9], "c": range(3, 8)},
            r"episodes 3-5,7 in .*a and in .*c\. Give every",
        ),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(
    tmp_path: Path, source: InMemory, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        split(source, {tmp_path / name: part for name, part in parts.items()})


def test_an_existing_part_is_kept(tmp_path: Path, source: InMemory) -> None:
    (tmp_path / "held").mkdir()
    with pytest.raises(DatasetError, match=r"held: exists already\. Choose another"):
        split(source, {tmp_path / "train": 0.5, tmp_path / "held": 0.5})
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize(
    ("test", "kept"),
    [
        ({"success": True}, [0, 2, 4, 6, 8]),
        ({"success": False, "min_steps": 7}, [5, 7, 9]),
        ({"instruction": "drop it", "episodes": [1, 2, 3]}, [1, 3]),
        ({"keep": lambda episode: len(episode) in (2, 11)}, [0, 9]),
    ],
)
def test_filtered_by_every_test(
    tmp_path: Path, source: InMemory, test: dict[str, Any], kept: list[int]
) -> None:
    out = filter_episodes(source, tmp_path / "out", **test)
    assert actions(out) == [source.episodes[number].action.tolist() for number in kept]


def test_filtered_by_who_acted(tmp_path: Path, source: InMemory) -> None:
    for number, episode in enumerate(source.episodes):
        episode.source[:] = 3 if number in (2, 5) else 0
    source.episodes[5].source[0] = 1  # a policy began, a human took over
    out = filter_episodes(source, tmp_path / "out", by=["human"])
    assert actions(out) == [source.episodes[2].action.tolist()]
    both = filter_episodes(source, tmp_path / "both", by=["human", "sim"])
    assert actions(both) == [source.episodes[number].action.tolist() for number in (2, 5)]
    with pytest.raises(DatasetError, match=r"no source named 'humans'\. Did you mean 'human'"):
        filter_episodes(source, tmp_path / "no", by=["humans"])


def test_a_filter_that_keeps_nothing_says_so(tmp_path: Path, source: InMemory) -> None:
    with pytest.raises(DatasetError, match=r"out: no episode to write\. Choose other episodes"):
        filter_episodes(source, tmp_path / "out", min_steps=100)
    assert not list(tmp_path.iterdir())


def test_an_episode_that_has_not_begun_is_passed_over(tmp_path: Path, made: Made) -> None:
    empty = made(1, cameras=())
    empty = dataclasses.replace(
        empty, action=empty.action[:0], obs={key: values[:0] for key, values in empty.obs.items()}
    )
    live = InMemory([made(3, cameras=()), empty])
    assert len(Dataset(merge([live], tmp_path / "out"))) == 1


def test_a_new_folder_is_on_the_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was written is synced before the rename, and the folders that hold the new name after it."""
    done: list[int] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        done.append(os.fstat(handle).st_ino)
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        done.append(-1)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    with new_folder(tmp_path / "new/out") as folder:
        (folder / "data").mkdir()
        (folder / "data/rows").write_text("written without a sync")
    at = done.index(-1)
    before = [".", "new", "new/out", "new/out/data", "new/out/data/rows"]
    assert {(tmp_path / path).stat().st_ino for path in before} <= set(done[:at])
    assert done[at + 1 :] == [(tmp_path / "new").stat().st_ino]


def test_a_full_disk_is_told_of_the_new_folder(
    tmp_path: Path, source: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Dataset(merge([source], tmp_path / "made"))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = rf"^{tmp_path}/new: the disk is full .* What it is made of is whole\. Make room, then"
    with pytest.raises(DatasetError, match=said):
        filter_episodes(made, tmp_path / "new", episodes=[0])
