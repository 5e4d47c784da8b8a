"""The gate: the rule by hand, revert bit for bit, what the critics' score is, exact resume."""

import math
from typing import Any

import pytest
import torch
from torch import Generator, nn

from robot_rl.algos.chunk_critics import ChunkCriticConfig, ChunkCritics
from robot_rl.algos.config.on_policy import GateConfig
from robot_rl.algos.gate import CriticScore, Gate
from robot_rl.algos.optim import Optimiser
from robot_rl.core.errors import ConfigError
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy


class Learner:
    """A weight that `learn` moves by AdamW; its score is minus its distance from 1."""

    def __init__(self, margin: float | None = 0.05) -> None:
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.optimiser = Optimiser(self.net.parameters(), lr=0.1)
        self.scored: list[float] = []
        self.gate = Gate({"net": self.net, "optimiser": self.optimiser}, self.score, margin=margin)

    def score(self) -> float:
        self.scored.append(1.0 - abs(float(self.net.weight.detach()) - 1.0))
        return self.scored[-1]

    def learn(self, steps: int, towards: float) -> None:
        for _ in range(steps):
            self.optimiser.step((self.net.weight - towards).square().sum())

    def state(self) -> list[torch.Tensor]:
        state = self.optimiser.state_dict()
        return [self.net.weight.detach().clone(), *state["mean"], *state["square"], *state["steps"]]


@pytest.mark.parametrize(
    ("incumbent", "enough", "too_little"),
    [
        (1.0, 1.05, 1.049),  # 1 + 0.05 * 1
        (0.4, 0.4201, 0.4199),  # 0.4 + 0.05 * 0.4
        (-1.0, -0.95, -0.951),  # of its size: -1 + 0.05 * 1
        (0.0, 0.0, -1e-9),
        (0.4, math.inf, math.nan),
    ],
)
def test_the_papers_rule(incumbent: float, enough: float, too_little: float) -> None:
    gate = Learner().gate
    assert gate.judge(enough, incumbent)
    assert not gate.judge(too_little, incumbent)
    assert Learner(margin=None).gate.judge(-1.0, 1.0)


def test_a_candidate_that_collapses_is_reverted_bit_for_bit() -> None:
    learner = Learner()
    learner.learn(5, towards=1.0)
    metrics = learner.gate.decide()
    assert metrics["gate_accepted"] == 1.0
    good, best = learner.state(), metrics["gate_best"]
    assert best == learner.scored[-1] > learner.scored[0] == 0.0  # the first incumbent is scored once
    learner.learn(50, towards=-3.0)
    assert not learner.state()[0].equal(good[0])
    metrics = learner.gate.decide()
    assert metrics["gate_score"] < best == metrics["gate_best"]
    assert metrics["gate_accepted"] == 0.5
    assert all(ours.equal(theirs) for ours, theirs in zip(learner.state(), good, strict=True))
    # Weights that are no numbers are no better than anything.
    nn.init.constant_(learner.net.weight, math.nan)
    learner.gate.decide()
    assert all(ours.equal(theirs) for ours, theirs in zip(learner.state(), good, strict=True))


def test_without_a_margin_everything_is_accepted() -> None:
    learner = Learner(margin=None)
    learner.learn(50, towards=-3.0)
    bad = learner.state()
    assert learner.gate.decide()["gate_accepted"] == 1.0
    assert all(ours.equal(theirs) for ours, theirs in zip(learner.state(), bad, strict=True))


def test_what_is_kept_is_no_view_of_what_learns() -> None:
    learner = Learner()
    learner.learn(5, towards=1.0)
    learner.gate.decide()
    state = learner.gate.state_dict()
    kept = state["kept"]["net"]["weight"].clone()
    learner.learn(5, towards=-3.0)
    assert state["kept"]["net"]["weight"].equal(kept)
    resumed = Learner()
    resumed.gate.load_state_dict(state)
    resumed.learn(5, towards=-3.0)
    resumed.gate.decide()
    assert resumed.net.weight.detach().equal(kept)
    assert resumed.scored == [resumed.scored[0]]  # the incumbent's score came with the state


def test_the_critics_score_is_the_mean_q_of_the_policys_own_actions() -> None:
    config = ChunkPolicyConfig(horizon=4, width=16, depth=1, time_dim=8, steps=2)
    policy = FlowPolicy(config, state_dim=1, action_dim=1, generator=Generator().manual_seed(0)).eval()
    critics: Any = ChunkCritics(ChunkCriticConfig(width=8), feature_dim=1, action_dim=1, steps=2)
    critics.score = lambda features, actions: features[:, 0] + actions[:, :2].sum(dim=(1, 2))
    obs = {"state": torch.randn(6, 1, generator=Generator().manual_seed(1))}
    z = torch.randn(6, 4, 1, generator=Generator().manual_seed(2))
    score = CriticScore(policy, critics, obs, policy.encode(obs)["features"], z)
    actions = policy.sample(policy.encode(obs), z=z).actions.detach()
    by_hand = obs["state"].mean() + 2 * actions[:, :2].mean()
    assert score() == score() == pytest.approx(float(by_hand), rel=1e-5)


def test_bad_settings_are_named() -> None:
    wrong: dict[str, Any] = {"every": 0, "margin": -0.1, "scorer": "coin", "states": 0, "episodes": 0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"gate\.{name}: got {value!r}"):
            GateConfig(**{name: value})


def test_a_gate_that_asks_a_world_model_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"gate.world: got None, allowed: the folder of a world model"):
        GateConfig(scorer="world")
    with pytest.raises(ConfigError, match=r"gate.world: got 'here', allowed: none but with scorer=world"):
        GateConfig(world="here")
