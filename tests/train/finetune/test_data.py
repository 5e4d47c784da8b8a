"""Which episodes are learned from, and what must fit before anything is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.config import build
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.data.episode import Feature
from robot_rl.data.lerobot.pictures import PictureCache
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.store.seal import seal
from robot_rl.data.store.writer import StoreWriter
from robot_rl.policies.vla.scale import relative_indices
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.data import DemoData, PolicyPast, in_journal
from robot_rl.train.finetune.split import Split, check_robot, open_data, split_episodes


def test_the_last_episodes_are_held_out() -> None:
    split = split_episodes(20, 4, at="data")
    assert split.heldout == (16, 17, 18, 19)
    assert split.train == tuple(range(16))
    assert split.text() == "training on episodes 0-15 (16), held out: 16-19 (4)"


def test_settings_are_chosen_inside_the_training_episodes() -> None:
    inner = split_episodes(20, 4, at="data").inner()
    assert inner == Split(tuple(range(12)), (12, 13, 14, 15))
    assert split_episodes(4, 2, at="data").inner() == Split((0,), (1,))


def test_too_few_episodes() -> None:
    with pytest.raises(DatasetError, match="data: 5 episodes, heldout=4 leaves 1 to learn from, needed: 2"):
        split_episodes(5, 4, at="data")


def test_a_chunk_longer_than_every_episode(dataset: Path) -> None:
    text = r"the longest episode has 20 control steps, .*. Use horizon=20 or less\."
    with pytest.raises(DatasetError, match=text):
        open_data(FinetuneConfig(dataset=str(dataset), horizon=21))


def test_all_that_is_too_small_is_said_at_once(dataset: Path) -> None:
    text = r"heldout=100 leaves 0 to learn from(.|\n)*longest episode has 20 control steps"
    with pytest.raises(DatasetError, match=text):
        open_data(FinetuneConfig(dataset=str(dataset), horizon=21, heldout=100))


def test_the_robot_has_other_joints(dataset: Path) -> None:
    text = (
        "robot: 'so_arm100' does not fit .*: so_arm100 lacks left_shoulder, right_shoulder; the dataset lacks"
    )
    with pytest.raises(ConfigError, match=text):
        open_data(FinetuneConfig(dataset=str(dataset), robot="so_arm100"))


def test_a_robot_fits_its_own_joints_and_every_tool_command() -> None:
    joints = [f"joint{number}" for number in range(1, 8)]
    check_robot("panda", [*(f"{joint}.pos" for joint in joints), "gripper.pos"], at="data")
    check_robot("panda", [f"{joint}.delta" for joint in joints], at="data")
    check_robot("panda", ["tool.dx", "tool.dy", "tool.dz", "gripper"], at="data")
    with pytest.raises(ConfigError, match="panda lacks joint8"):
        check_robot("panda", [*joints, "joint8"], at="data")
    with pytest.raises(ConfigError, match="the dataset lacks joint7"):
        check_robot("panda", joints[:6], at="data")


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset: no folder '.*none'. Give a LeRobotDataset, or make one"):
        FinetuneConfig(dataset=str(tmp_path / "none"))
    with pytest.raises(DatasetError, match=r"meta/info\.json"):
        open_data(FinetuneConfig(dataset=str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heldout": 0}, "heldout: got 0, allowed: 1 or more"),
        ({"updates": 0}, "updates: got 0, allowed: 1 or more, or null"),
        ({"minutes": 0.0}, "minutes: got 0.0, allowed: above 0"),
        ({"minutes": 2.0, "updates": 5}, "minutes: got 2 with updates=5, allowed: one of the two"),
        ({"accumulate": 0}, "accumulate: got 0, allowed: 1 or more"),
        ({"history": -1}, "history: got -1, allowed: 0 or more, or a list of different numbers from 1"),
        ({"history": [1, 1]}, r"history: got \(1, 1\), allowed: 0 or more, or a list"),
        ({"lr": -1.0}, "lr: got -1.0, allowed: above 0"),
        ({"precision": "fp16"}, "precision: got 'fp16' with device=cpu, allowed: fp32, bf16."),
        ({"device": "cuda:9"}, "device: got 'cuda:9', allowed on this machine: cpu"),
        ({"robot": "pandda"}, "robot: no robot and no file named 'pandda'. Did you mean 'panda'?"),
        ({"picture": [4, 4]}, r"picture: got \(4, 4\), allowed: height and width, 8 or more"),
    ],
)
def test_values_out_of_range(dataset: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(FinetuneConfig, {"dataset": str(dataset), **change})


def test_statistics_are_of_the_training_episodes_alone(make_dataset: Callable[..., Path]) -> None:
    dataset = Dataset(make_dataset([0, 1, 2]))
    some, all_ = dataset.facts(episodes=[0, 1]), dataset.facts()
    assert some.stats["action"]["count"] == 40
    assert all_.stats["action"]["count"] == 60
    bare = dataset.facts(episodes=[0, 1], decode=False)
    assert dataset.cameras
    assert bare.stats.keys() == some.stats.keys() - set(dataset.cameras)
    np.testing.assert_array_equal(bare.stats["action"]["mean"], some.stats["action"]["mean"])


def test_the_change_of_the_state_stands_behind_it(dataset: Path) -> None:
    split = Split((0, 1), (2,))
    read = Dataset(dataset)
    past = PolicyPast(read, lags=(3,), last_action=False)
    data = DemoData(read, split, picture=None, device="cpu", cache=PictureCache(), past=past)
    (batch,) = data.batches([1], horizon=4, stride=1)
    state = Dataset(dataset).read(1).obs["state"]
    np.testing.assert_array_equal(batch.obs["state"][:, :2], state)
    np.testing.assert_allclose(batch.obs["state"][3:, 2:], state[3:] - state[:-3])
    np.testing.assert_allclose(batch.obs["state"][:3, 2:], state[:3] - state[0])  # nothing before the first
    facts = data.facts()
    assert facts.meta.state_names == (
        *("left_shoulder", "right_shoulder"),
        *("left_shoulder.change_3", "right_shoulder.change_3"),
    )
    assert facts.features["state"].shape == (4,)
    batches = torch.cat([b.obs["state"] for e in split.train for b in data.batches([e], horizon=4, stride=1)])
    np.testing.assert_allclose(facts.stats["state"]["mean"], batches.mean(0), atol=1e-6)


def test_history_is_a_number_or_several(dataset: Path) -> None:
    def lags(**given: Any) -> tuple[int, ...]:
        return build(FinetuneConfig, {"dataset": str(dataset), **given}).lags

    assert (lags(), lags(history=0), lags(history=3), lags(history=[1, 4])) == ((), (), (3,), (1, 4))


def test_the_last_action_stands_behind_it_too(dataset: Path) -> None:
    split, read = Split((0, 1), (2,)), Dataset(dataset)
    past = PolicyPast(read, lags=(1,), last_action=True)
    data = DemoData(read, split, picture=None, device="cpu", cache=PictureCache(), past=past)
    names = data.facts().meta.state_names
    assert names[2:] == (
        *("left_shoulder.change_1", "right_shoulder.change_1"),
        *("left_shoulder.last_action", "right_shoulder.last_action"),
        *("left_shoulder.last_action.change_1", "right_shoulder.last_action.change_1"),
    )
    (batch,) = data.batches([1], horizon=4, stride=1)
    episode = read.read(1)
    action, state = np.asarray(episode.action), np.asarray(episode.obs["state"])
    last, change = batch.obs["state"].numpy()[:, 4:6], batch.obs["state"].numpy()[:, 6:]
    np.testing.assert_array_equal(last, [state[0], *action[:-1]])  # at first the present joints
    np.testing.assert_allclose(change[2:], action[1:-1] - action[:-2])
    # A policy's chunks are distances from it, so an untrained one repeats the last action, nearly.
    assert relative_indices(names, read.meta.action_names) == (4, 5)


def test_what_is_in_the_journal_alone_is_not_learned_from(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    features = {"state": Feature("float32", (2,))}

    def record() -> None:
        with StoreWriter(folder, Dataset(dataset).meta, features) as store:
            for step in range(30):
                store.append(obs={"state": np.zeros(2)}, action=np.zeros(2), truncated=step % 10 == 9)

    record()
    config = FinetuneConfig(dataset=str(folder), heldout=1, horizon=4)
    text = "is a store whose 3 episodes are in its journal; .* Seal it first: robot-rl replay seal "
    with pytest.raises(DatasetError, match=text):
        open_data(config)
    seal(folder)
    assert (len(open_data(config)[0]), in_journal(folder)) == (3, 0)
    record()
    assert (len(open_data(config)[0]), in_journal(folder)) == (3, 3)
