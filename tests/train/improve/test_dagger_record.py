"""What a DAgger run records: the expert's labels for a clone, what was executed for a replay."""

import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.names import EXECUTED_ACTION, PRIVILEGED
from robot_rl.data.demos import load_episodes
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.pool import EpisodePool
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.seal import seal
from robot_rl.policies.checkpoint import load_policy
from robot_rl.train import phases
from robot_rl.train.finetune.past import Past
from robot_rl.train.recorded import DemosConfig, ReplayConfig
from tests.runs import folder_of, killed_after, undisturbed
from tests.train.improve.test_dagger import tiny

LABEL_GAIN, STEP_M = 1.5, 0.05
"""Of the expert of `reach`: it asks for 1.5 times the way to the goal, in units of the largest step."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The folder of a run of 90 steps in 3 envs, whose episodes have at most 14 steps."""
    out = tmp_path_factory.mktemp("labelled")
    with undisturbed(out / "state"):
        yield Path(phases.run(tiny(out)).run)


def recorded(run: Path) -> list[Episode]:
    source = StoreReader(run / "experience")
    return [source.read(number) for number in range(len(source))]


def test_all_steps_are_recorded_and_the_budget_ends_the_last_episodes(finished: Path) -> None:
    # 30 steps an env are episodes of 14, 14 and 2 steps, of which the last are cut by the end of the run.
    episodes = recorded(finished)
    assert [len(episode) for episode in episodes] == [14] * 6 + [2] * 3
    assert all(episode.truncated[-1] and episode.final_obs for episode in episodes)
    assert not any(episode.truncated[:-1].any() for episode in episodes)


def test_the_recorded_action_is_what_the_expert_does_in_that_state(finished: Path) -> None:
    for episode in recorded(finished):
        tool, goal = episode.obs["state"][:, 9:12], episode.obs[PRIVILEGED][:, 3:6]
        wanted = np.clip(LABEL_GAIN * (goal - tool) / STEP_M, -1.0, 1.0)
        np.testing.assert_allclose(episode.action[:, :3], wanted, atol=1e-4)
        assert (episode.action[:, 3] == 1.0).all()  # an open gripper


def test_what_the_policy_did_is_kept_apart(finished: Path) -> None:
    base, _ = load_policy(finished / "policy/base")  # acts in the first step of each env
    for episode in recorded(finished)[:3]:
        seen = {"state": torch.from_numpy(episode.obs["state"][:1])}
        acted = base.sample(base.encode(seen), mode="ode").actions[:, 0].detach().numpy()
        np.testing.assert_allclose(episode.obs[EXECUTED_ACTION][:1], acted.clip(-1, 1), atol=1e-6)
        assert np.array_equal(episode.as_executed().action, episode.obs[EXECUTED_ACTION])
        assert not np.allclose(episode.action, episode.obs[EXECUTED_ACTION], atol=0.1)


@pytest.mark.usefixtures("whole_runs")
def test_sealed_it_is_a_dataset_of_labels_that_a_run_clones(finished: Path, tmp_path: Path) -> None:
    labels = np.concatenate([episode.action for episode in recorded(finished)])
    executed = np.concatenate([episode.obs[EXECUTED_ACTION] for episode in recorded(finished)])
    dataset = shutil.copytree(finished / "experience", tmp_path / "experience")
    seal(dataset)
    found = load_episodes(dataset)
    assert np.array_equal(found.action, labels)
    assert set(found.obs) == {"state", PRIVILEGED}  # no policy reads what was executed
    assert np.array_equal(load_episodes(dataset, as_executed=True).action, executed)
    read = Dataset(dataset)
    assert [name for name in read.info["features"] if name.startswith("observation.")] == [
        "observation.state"
    ]
    past = Past(read, lags=()).at(np.arange(14)).last_action  # of a policy that sees its last action
    np.testing.assert_array_equal(past[1:], executed[:13])
    config = replace(
        tiny(tmp_path / "clone", stages=["demos", "clone", "evaluate"]), demos=DemosConfig(path=str(dataset))
    )
    summary = phases.run(config)
    assert summary.demo_env_steps == 90
    assert (Path(summary.run) / "policy/base/policy.safetensors").is_file()


def test_a_replay_of_earlier_runs_draws_what_was_executed(finished: Path) -> None:
    source = StoreReader(finished / "experience")
    batch = EpisodePool([source], capacity=200, keys=("state",)).sample(
        64, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0)
    )
    every = [source.read(number) for number in range(len(source))]
    state = np.concatenate([episode.obs["state"] for episode in every])
    executed = np.concatenate([episode.obs[EXECUTED_ACTION] for episode in every])
    rows = [int(np.abs(state - row).sum(axis=1).argmin()) for row in batch.obs["state"].numpy()]
    np.testing.assert_array_equal(batch.action.numpy(), executed[rows])


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("saves", [12, 25])
def test_a_run_that_is_killed_records_each_label_once(finished: Path, tmp_path: Path, saves: int) -> None:
    with killed_after(saves):
        phases.run(tiny(tmp_path))
    killed = folder_of(tmp_path)
    phases.resume(killed)
    for got, wanted in zip(recorded(killed), recorded(finished), strict=True):
        for name in ("action", "truncated", "stamp_ns", "policy_version"):
            assert np.array_equal(getattr(got, name), getattr(wanted, name)), name
        for key, values in wanted.obs.items():
            assert np.array_equal(got.obs[key], values), key


@pytest.mark.usefixtures("whole_runs")
def test_without_a_record_there_is_none(tmp_path: Path) -> None:
    config: Any = replace(tiny(tmp_path), replay=ReplayConfig(record=False))
    run = Path(phases.run(config).run)
    assert not (run / "experience").exists()
