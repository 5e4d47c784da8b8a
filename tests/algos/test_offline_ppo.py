"""PPO on the states of data: critics first, the first ratio, the gate, a bandit, exact resume."""

from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from robot_rl.algos.chain_ppo import ChainPPO, ChainPPOConfig
from robot_rl.algos.chunk_critics import ChunkCriticConfig
from robot_rl.algos.config.on_policy import GateConfig
from robot_rl.algos.gate import Gate
from robot_rl.algos.iql import IQL, IQLConfig
from robot_rl.algos.offline_ppo import OfflinePPO, OfflinePPOConfig
from robot_rl.core.errors import ConfigError
from robot_rl.data.transitions import ChunkBatch, Prefixes
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy, ProcessConfig

ROWS = 64


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def batch(seed: int) -> ChunkBatch:
    """One decision ends the task; the reward is minus the distance of the first action from the state."""
    state = torch.rand(ROWS, 1, generator=seeded(seed)) - 0.5
    action = torch.rand(ROWS, 2, 1, generator=seeded(seed + 1000)) * 2 - 1
    reward = -(action[:, 0] - state).abs()
    ends = Prefixes(
        reward, torch.zeros(ROWS, 1), torch.ones(ROWS, 1, dtype=torch.bool), {"state": state[:, None]}
    )
    return ChunkBatch(
        {"state": state}, action, torch.ones(ROWS, 2, dtype=torch.bool), reward[:, 0], torch.zeros(ROWS),
        {"state": state}, torch.zeros(ROWS, dtype=torch.uint8), prefix=ends,
    )  # fmt: skip


def build(*, score: Any = None, margin: float | None = 0.05, seed: int = 3, **options: Any) -> Any:
    config = ChunkPolicyConfig(horizon=2, width=32, depth=2, time_dim=8, steps=4)
    base = FlowPolicy(config, state_dim=1, action_dim=1, generator=seeded())
    process = ProcessConfig(process="flow_sde", stochastic_steps="all", scored=1)
    policy = base.with_process(process, generator=seeded(1))
    usual: dict[str, Any] = {"critic_updates": 5, "updates": 100, "gate": GateConfig(every=4)}
    cfg = OfflinePPOConfig(**(usual | options))
    critics = ChunkCriticConfig(width=32, depth=2, aggregate="min", matmul="fp32")
    iql = IQL(IQLConfig(critics=critics, lr=3e-3, tau=0.05), feature_dim=1, action_dim=1, steps=1, seed=seed)
    learner = ChainPPO(
        policy,
        ChainPPOConfig(reduction="per_step", actor_lr=1e-3, width=8, depth=1, target_kl=cfg.target_kl),
        seed,
    )
    parts = {"policy": policy, "optimiser": learner.actor_optimiser}
    gate = Gate(parts, score or (lambda: worth(policy)), margin=margin)
    return OfflinePPO(policy, learner, iql, gate, cfg, seed)


@torch.no_grad()
def worth(policy: Any) -> float:
    state = torch.rand(500, 1, generator=seeded(9)) - 0.5
    z = torch.randn(500, 2, 1, generator=seeded(8))
    return -float((policy.sample(policy.encode({"state": state}), z=z).actions[:, 0] - state).abs().mean())


def weights(policy: Any) -> list[Tensor]:
    return [value.clone() for value in policy.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_the_critics_learn_first_and_then_stay() -> None:
    learner = build(critic_updates=3)
    base, fresh = weights(learner._policy), weights(learner._iql.critics)
    for seed in range(3):
        assert "loss" not in learner.update(batch(seed))
    assert same(weights(learner._policy), base)
    learned = weights(learner._iql.critics)
    assert not same(learned, fresh)
    metrics = learner.update(batch(3))
    assert "loss" in metrics
    assert not same(weights(learner._policy), base)
    assert same(weights(learner._iql.critics), learned)


def test_the_ratio_is_against_the_policy_that_sampled() -> None:
    learner = build(critic_updates=0, margin=None)
    kls = [float(learner.update(batch(seed))["kl"]) for seed in range(8)]
    # 1 at the first update, and again after the gate has taken the candidate over.
    assert kls[0] == pytest.approx(0.0, abs=1e-9)
    assert kls[4] == pytest.approx(0.0, abs=1e-9)
    assert min(kls[1:4] + kls[5:]) > 1e-8


def test_the_advantage_is_that_of_the_executed_actions() -> None:
    learner = build(critic_updates=0)
    seen: dict[str, Tensor] = {}
    judge = learner._iql.advantage

    def advantage(features: Tensor, actions: Tensor) -> Tensor:
        seen.update(features=features, actions=actions)
        return judge(features, actions)

    learner._iql.advantage = advantage
    metrics = learner.update(batch(0))
    obs = batch(0).obs
    chain = learner._behaviour.sample(
        learner._behaviour.encode(obs), mode="explore", record=True, generator=seeded(3)
    )
    assert torch.equal(seen["actions"], chain.actions)
    assert torch.equal(seen["features"], learner._origin.encode(obs)["features"])
    assert float(metrics["advantage"]) == pytest.approx(float(judge(**seen).mean()))


def test_a_candidate_that_is_no_better_is_reverted_with_what_samples() -> None:
    scores = iter([1.0, 1.2, 0.1])  # the base, the first candidate, the second
    learner = build(critic_updates=0, score=lambda: next(scores))
    for seed in range(4):
        learner.update(batch(seed))
    first = weights(learner._policy)
    assert same(weights(learner._behaviour), first)
    moments = learner._learner.actor_optimiser.state_dict()["mean"]
    for seed in range(4, 7):
        learner.update(batch(seed))
    assert not same(weights(learner._policy), first)
    assert learner.update(batch(7))["gate_accepted"] == 0.5
    assert same(weights(learner._policy), first)
    assert same(weights(learner._behaviour), first)
    assert same(learner._learner.actor_optimiser.state_dict()["mean"], moments)


def test_the_last_updates_are_judged_as_well() -> None:
    # Every 4 of 6 updates, and the last 2: the base, two candidates; the second is worse.
    scores = iter([1.0, 1.2, 0.1])
    learner = build(critic_updates=0, updates=6, score=lambda: next(scores))
    for seed in range(4):
        learner.update(batch(seed))
    first = weights(learner._policy)
    learner.update(batch(4))
    assert not same(weights(learner._policy), first)
    assert learner.update(batch(5))["gate_score"] == 0.1
    assert same(weights(learner._policy), first)


def test_a_policy_that_went_too_far_waits_for_the_gate() -> None:
    learner = build(critic_updates=0, margin=None, target_kl=1e-12)
    moved: list[bool] = []
    for seed in range(6):
        before = weights(learner._policy)
        learner.update(batch(seed))
        moved.append(not same(weights(learner._policy), before))
    assert moved == [True, False, False, False, True, False]


def test_it_improves_on_data_whose_actions_are_random() -> None:
    learner = build(critic_updates=400, margin=0.01, gate=GateConfig(every=50), target_kl=None)
    before = worth(learner._policy)
    for seed in range(800):
        learner.update(batch(seed))
    assert learner._gate.state_dict()["accepted"] > 0
    assert worth(learner._policy) > 0.8 * before > before  # nearer by a fifth at least


def test_a_resumed_learner_is_the_unbroken_one() -> None:
    def updated(learner: OfflinePPO, first: int, last: int) -> Any:
        for seed in range(first, last):
            learner.update(batch(seed))
        return learner

    whole = updated(build(critic_updates=3), 0, 13)
    for cut in (2, 5, 9):
        first, second = updated(build(critic_updates=3), 0, cut), build(critic_updates=3, seed=4)
        second.load_state_dict(first.state_dict())
        assert same(weights(updated(second, cut, 13)._policy), weights(whole._policy))
        assert second._gate.state_dict()["best"] == whole._gate.state_dict()["best"]


def test_a_resumed_learner_is_held_to_what_it_was_held_to() -> None:
    # RL-100 goes online from what its offline phase came to; a resumed run builds the learner from the base.
    policy, base = build()._policy, build()._policy
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    cfg = ChainPPOConfig(reduction="per_step", width=8, depth=1, regulariser="w2", target_kl=None)
    learner, resumed = (ChainPPO(module, cfg, 3) for module in (policy, base))
    resumed.load_state_dict(learner.state_dict())
    obs = batch(0).obs
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded()).chain
    for _ in range(2):
        distances = [
            one.update_policy(obs, chain, obs["state"][:, 0])["distance"] for one in (learner, resumed)
        ]
        assert distances[0] == distances[1]


def test_bad_settings_are_named() -> None:
    wrong: dict[str, Any] = {"critic_updates": -1, "updates": -1, "batch": 1, "actor_lr": 0.0, "clip": 1.0}
    wrong["target_kl"] = 0.0
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"offline\.{name}: got {value!r}"):
            OfflinePPOConfig(**{name: wrong[name]})
    assert OfflinePPOConfig(critic_updates=7, updates=5).total_updates == 12
    assert OfflinePPOConfig(critic_updates=7, updates=0).total_updates == 0
