"""Who sees success in a predicted state."""

from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robot_rl.core.errors import ConfigError
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.worlds.config import WorldSettings
from robot_rl.worlds.history import History
from robot_rl.worlds.outcome import ClassifierOutcome, PredicateOutcome, agreement, outcome_of, state_of
from robot_rl.worlds.saved import World, load_world


@pytest.mark.parametrize("task", ["reach", "push_cube", "gantry_peg"])
def test_the_predicate_says_of_an_observed_state_what_the_task_says(task: str) -> None:
    env = SimVectorEnv(EnvConfig(task=task), 8, autoreset="disabled")
    predicate = PredicateOutcome(env.task, env.robot, env.state_names)
    env.reset(seed=0)
    expert, found = env.expert(), 0
    live = np.ones(8, bool)
    for _ in range(env.horizon):
        obs, _, terminated, truncated, infos = env.step_masked(expert.act(), live)
        said, _ = predicate.judge(obs["state"])
        assert (said[live] == infos["success"][live]).all()
        found += int(infos["success"].sum())
        live &= ~(terminated | truncated)
        if not live.any():
            break
    env.close()
    assert found > 0


def test_a_state_without_what_success_reads_has_no_predicate() -> None:
    env = SimVectorEnv(EnvConfig(task="push_cube", state=("joint", "tool")), 1)
    with pytest.raises(ConfigError, match="needs what is not observed"):
        PredicateOutcome(env.task, env.robot, env.state_names)
    with pytest.raises(ConfigError, match="no task of ours"):
        PredicateOutcome("Hopper-v5", "Hopper-v5", ("x",))
    env.close()


def test_classifiers_learn_success_from_recorded_states(history: History) -> None:
    found = outcome_of(history, None)  # the point is no task of ours
    assert found.kind == "classifier"
    judged = agreement(found, history)
    assert judged["precision"] > 0.8
    assert judged["recall"] > 0.9


@pytest.mark.parametrize("channels", [0, 2])
def test_classifiers_of_one_seed_are_the_same_and_leave_the_global_generator_alone(channels: int) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = ClassifierOutcome(4, channels, seed=3)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    same, other = (state_of(ClassifierOutcome(4, channels, seed=seed)) for seed in (3, 4))
    for name, value in state_of(first).items():
        assert same[name].equal(value), name
        assert other[name].equal(value) == (not name.startswith("networks")), name


def test_an_outcome_repeats(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassifierOutcome, "fit", partialmethod(ClassifierOutcome.fit, updates=3))
    first, same, other = (state_of(outcome_of(history, None, seed=seed)) for seed in (3, 3, 4))
    assert all(same[name].equal(value) for name, value in first.items())
    assert not all(other[name].equal(value) for name, value in first.items())


class Line(nn.Module):
    """Sees success where the first element of the state is above a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, state: Tensor, codes: Tensor | None) -> Tensor:
        return state[:, 0] - self.limit


@pytest.mark.parametrize(("vote", "first"), [(0.2, 1), (0.6, 3), (0.7, 4), (0.8, 4), (1.0, 5)])
def test_a_share_of_the_classifiers_must_see_success(vote: float, first: int) -> None:
    found = ClassifierOutcome(4, vote=vote)
    found.networks = nn.ModuleList(Line(limit) for limit in (0.5, 1.5, 2.5, 3.5, 4.5))
    states = np.zeros((6, 4), np.float32)
    states[:, 0] = np.arange(6)  # as many of the five see success
    assert found.judge(states)[0].tolist() == [seen >= first for seen in range(6)]


def test_a_saved_vote_is_kept_and_older_models_have_the_usual_one(world: World, tmp_path: Path) -> None:
    world.outcome = ClassifierOutcome(4, vote=0.8)
    world.save(tmp_path / "point")
    assert float(state_of(load_world(tmp_path / "point").outcome)["vote"]) == 0.8
    path = tmp_path / "point" / "outcome.safetensors"
    older = {name: value for name, value in load_file(path).items() if name != "vote"}
    save_file(older, path)
    assert float(state_of(load_world(tmp_path / "point").outcome)["vote"]) == 0.6
    with pytest.raises(ConfigError, match=r"outcome_vote: got 0"):
        WorldSettings(outcome_vote=0.0)


def test_without_a_success_there_is_nothing_to_learn(history: History) -> None:
    never = replace(history, success=np.zeros_like(history.success))
    with pytest.raises(ConfigError, match=r"of \d+ recorded states 0 are successes"):
        ClassifierOutcome(4).fit(never, updates=1)
