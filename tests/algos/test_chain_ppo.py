"""ChainPPO: hand-computed advantages and values, the first ratio, who learns when, exact resume, a bandit."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.algos.chain_ppo import ChainPPO, ChainPPOConfig
from robot_rl.algos.config.on_policy import GRPOConfig
from robot_rl.algos.losses import chain_ratio, clip_schedule, ppo_loss
from robot_rl.algos.returns import ReturnScale
from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.policy import Chain
from robot_rl.data.normalize import Normaliser
from robot_rl.data.rollout import EpisodeRollout, PPOBatch, Rollout
from robot_rl.policies.chunk import ChunkPolicyConfig, DiffusionPolicy, FlowPolicy, ProcessConfig
from robot_rl.train.rollouts import RolloutExperience
from tests.read_back import reads_back

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flow_sde": ({"process": "flow_sde"}, {"reduction": "single"}),
    "dppo": (
        {"process": "ddpm", "tuned_steps": 4},
        {"reduction": "per_step", "denoising_discount": 0.9, "clip": 0.1, "clip_first": 0.01},
    ),
    "reinflow": (
        {"process": "flow_noise"},
        {"reduction": "joint", "entropy_weight": 0.01, "regulariser": "w2"},
    ),
    "fpo": ({"process": "flow_cfm", "pairs": 4}, {"reduction": "joint", "regulariser": "bc"}),
}
SMALL: dict[str, Any] = {"width": 16, "depth": 1, "batch": 64, "critic_warmup": 0}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_policy(name: str) -> Any:
    options = METHODS[name][0]
    kind = "diffusion" if name == "dppo" else "flow"
    sizes: dict[str, Any] = {"horizon": 2, "width": 32, "depth": 2, "time_dim": 8, "train_steps": 8}
    steps = 8 if name == "dppo" else 4
    base_class = DiffusionPolicy if name == "dppo" else FlowPolicy
    base = base_class(
        ChunkPolicyConfig(kind=kind, steps=steps, **sizes), state_dim=2, action_dim=1, generator=seeded()
    )
    return base.with_process(ProcessConfig(**options), generator=seeded(1))


def make_learner(policy: Any, name: str, **options: Any) -> ChainPPO:
    return ChainPPO(policy, ChainPPOConfig(**{**SMALL, **METHODS[name][1], **options}), 3)


def bandit(policy: Any, generator: torch.Generator, *, rows: int = 32, decisions: int = 8) -> Rollout:
    """Returns decisions that end at once; the first action should be the first element of the state."""
    obs = {"state": torch.rand(rows, decisions, 2, generator=generator) - 0.5}
    flat = {"state": obs["state"].flatten(0, 1)}
    sample = policy.sample(policy.encode(flat), mode="explore", record=True, generator=generator)
    assert sample.chain is not None
    reward = -(sample.actions[:, 0, 0] - flat["state"][:, 0]).square().view(rows, decisions)
    ended = torch.ones(rows, decisions, dtype=torch.bool)
    ones = torch.ones(rows, decisions, dtype=torch.long)
    return Rollout(obs, sample.chain, reward, torch.zeros(rows, decisions), obs, ended, ones)


@torch.no_grad()
def worth(policy: Any) -> float:
    state = torch.rand(2000, 2, generator=seeded(9)) - 0.5
    actions = policy.sample(policy.encode({"state": state}), generator=seeded(8)).actions
    return -float((actions[:, 0, 0] - state[:, 0]).square().mean())


def four_epochs(learner: ChainPPO, batch: PPOBatch, generator: torch.Generator) -> None:
    for _ in range(4):
        for rows in torch.randperm(256, generator=generator).split(64):
            learner.update(batch.rows(rows))


@pytest.mark.parametrize("name", METHODS)
def test_the_first_ratio_is_one_and_kl_zero(name: str) -> None:
    policy = make_policy(name)
    learner = make_learner(policy, name)
    batch = learner.prepare(bandit(policy, seeded(4))).rows(torch.randperm(256, generator=seeded(5))[:50])
    ratio = chain_ratio(
        policy.log_prob(policy.encode(batch.obs), batch.chain)[0],
        batch.chain.log_prob,
        learner._cfg.reduction,
    )
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    assert float(learner.update(batch)["kl"]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_it_learns_a_bandit(name: str) -> None:
    policy = make_policy(name)
    learner = make_learner(
        policy, name, actor_lr=3e-3, critic_lr=3e-3, clip=0.1, target_kl=None, regulariser="none"
    )
    before, generator = worth(policy), seeded(4)
    for _ in range(12):
        batch = learner.prepare(bandit(policy, generator))
        four_epochs(learner, batch, generator)
    assert worth(policy) > 0.6 * before  # which is below zero: 40 % of the error is gone


@pytest.mark.parametrize("regulariser", ["w2", "bc"])
def test_a_regulariser_holds_the_policy_where_it_began(regulariser: str) -> None:
    def moved(weight: float) -> float:
        policy = make_policy("fpo")
        began, generator = copy.deepcopy(policy), seeded(4)
        learner = make_learner(
            policy, "fpo", regulariser=regulariser, regulariser_weight=weight, actor_lr=1e-3, target_kl=None
        )
        for _ in range(10):
            batch = learner.prepare(bandit(policy, generator))
            for rows in torch.randperm(256, generator=generator).repeat(4).split(64):
                learner.update(batch.rows(rows))
        obs = {"state": torch.rand(500, 2, generator=seeded(7)) - 0.5}
        z = torch.randn(500, 2, 1, generator=seeded(6))
        with torch.no_grad():
            return float(
                (
                    policy.sample(policy.encode(obs), z=z).actions
                    - began.sample(began.encode(obs), z=z).actions
                )
                .square()
                .mean()
            )

    assert moved(100.0) < 0.5 * moved(0.0)


class Tabled(ChainPPO):
    """Looks values up."""

    table: dict[float, float]

    def _values(self, features: Tensor) -> Tensor:
        return torch.tensor([self.table[round(float(x), 1)] for x in features[:, 0]])


def learner_with_values(values: dict[float, float], **options: Any) -> ChainPPO:
    """Returns a learner whose value of a state is looked up by its first element."""
    settings = {**SMALL, **METHODS["flow_sde"][1], **options}
    learner = Tabled(make_policy("flow_sde"), ChainPPOConfig(**settings), 3)
    learner.table = values
    return learner


def line(states: list[float]) -> dict[str, Tensor]:
    return {"state": torch.tensor([[[state, 0.0] for state in states]])}


def rollout(reward: list[float], bootstrap: list[float], ended: list[bool], steps: list[int]) -> Rollout:
    chain = Chain(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1), None)
    return Rollout(
        obs=line([0.1, 0.2]),
        chain=chain,
        reward=torch.tensor([reward]),
        bootstrap=torch.tensor([bootstrap]),
        next_obs=line([0.2, 0.3]),
        ended=torch.tensor([ended]),
        steps=torch.tensor([steps]),
    )


def test_advantages_by_hand() -> None:
    # Values 1, 2, 4 of states 0.1, 0.2, 0.3; gamma 0.5 a control step, chunks of 2 and 1 steps, lambda 0.5.
    # Second: 3 + 0.5 * 4 - 2 = 3. First: 1 + 0.25 * 2 - 1 = 0.5, and 0.25 * 0.5 * 3 of the second.
    learner = learner_with_values({0.1: 1.0, 0.2: 2.0, 0.3: 4.0}, gamma_step=0.5, lam=0.5)
    batch = learner.prepare(rollout([1.0, 3.0], [0.25, 0.5], [False, False], [2, 1]))
    assert batch.advantage.tolist() == pytest.approx([0.875, 3.0])
    assert batch.target.tolist() == pytest.approx([1.875, 5.0])


def test_truncation_bootstraps_and_termination_does_not() -> None:
    values = {0.1: 1.0, 0.2: 2.0, 0.3: 4.0}
    learner = learner_with_values(values, gamma_step=0.5, lam=0.5)
    # Truncated after the first: gamma^2 of the final observation's value, and nothing of the next episode.
    cut = learner.prepare(rollout([1.0, 3.0], [0.25, 0.5], [True, False], [2, 1]))
    assert cut.advantage.tolist() == pytest.approx([1 + 0.25 * 2 - 1, 3.0])
    over = learner.prepare(rollout([1.0, 3.0], [0.0, 0.5], [True, False], [2, 1]))
    assert over.advantage.tolist() == pytest.approx([1 - 1, 3.0])


def test_a_stale_rollout_is_weighed_from_the_present_weights_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # The weights that acted gave probabilities whose logs are 0; the present ones have made the two decisions
    # 1.5 and 20 times as probable. Weights 1.5 and, limited, 5; the first ratio is 1, of the present weights.
    learner = learner_with_values({0.1: 1.0, 0.2: 2.0, 0.3: 4.0}, gamma_step=0.5, lam=0.5, stale_limit=5.0)
    policy: Any = learner._policy
    present = torch.tensor([1.5, 20.0]).log().view(2, 1)
    any_weight = next(p for p in policy.parameters() if p.requires_grad)
    policy.log_prob = lambda encoded, chain: (
        present[chain.index[:, 0]] + 0.0 * any_weight.sum(),
        torch.zeros(len(chain.index), 1),
    )
    stale = rollout([1.0, 3.0], [0.25, 0.5], [False, False], [2, 1])
    stale.chain.index = torch.tensor([[0], [1]])
    fresh = learner.prepare(stale)
    assert fresh.weight.tolist() == [[1.0], [1.0]]
    assert torch.equal(fresh.chain.log_prob, stale.chain.log_prob)
    batch = learner.prepare(stale, is_stale=True)
    assert batch.weight.flatten().tolist() == pytest.approx([1.5, 5.0])
    assert torch.equal(batch.chain.log_prob, present)
    assert torch.equal(batch.advantage, fresh.advantage)
    assert stale.chain.log_prob.tolist() == [[0.0], [0.0]]  # what was collected stays as it is
    losses = list[float]()

    def step(loss: Tensor, *, skips: Tensor | None) -> None:
        losses.append(loss.item())

    monkeypatch.setattr(learner.actor_optimiser, "step", step)
    metrics = learner.update(batch)
    assert float(metrics["kl"]) == 0.0
    # Standardised, two advantages are -0.7071 and 0.7071: -(1.5 * -0.7071 + 5 * 0.7071) / 2.
    assert losses == [pytest.approx(-3.5 * 0.5**0.5 / 2, abs=1e-5)]


def test_the_value_goes_first_for_whole_turns_however_many_sources_there_are() -> None:
    policy, generator = make_policy("flow_sde"), seeded(4)
    learner = make_learner(policy, "flow_sde", critic_warmup=1)
    learned = list[bool]()
    for _ in range(2):
        batches = [learner.prepare(bandit(policy, generator)) for _ in range(3)]
        learned.append("loss" in learner.update(PPOBatch.joined(batches).rows(torch.arange(64))))
        learner.update(batches[0])
    assert learned == [False, True]


def test_the_return_of_each_source_is_its_own() -> None:
    # Two sources with discount 0.5: 1, then 0.5 + 3 in the first; 2, then 1 + 1 in the second.
    scale, half, goes_on = ReturnScale(), torch.full((1, 1), 0.5), torch.zeros(1, 1, dtype=torch.bool)
    for reward, actor in ((1.0, 0), (2.0, 1), (3.0, 0), (1.0, 1)):
        found = scale.add(torch.full((1, 1), reward), half, goes_on, actor=actor)
    seen = torch.tensor([1.0, 2.0, 3.5, 2.0])
    assert found == pytest.approx(float(seen.std(correction=0)))
    resumed = ReturnScale()
    resumed.load_state_dict(copy.deepcopy(scale.state_dict()))
    for one in (scale, resumed):  # the first goes on, the second begins again
        one.add(torch.ones(1, 1), half, goes_on, actor=0)
        again = one.add(torch.ones(1, 1), half, goes_on, actor=1, begins=True)
        more = torch.tensor([*seen, 2.75, 1.0])
        assert again == pytest.approx(float(more.std(correction=0)))


def test_rewards_are_scaled_by_the_spread_of_the_return() -> None:
    # Returns so far with discounts 0.5: env 0: 1, 0.5 + 3; the end forgets; env 1: 0, 0.
    scale = ReturnScale()
    reward = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    discount, ended = torch.full((2, 2), 0.5), torch.tensor([[False, True], [False, False]])
    values = torch.tensor([1.0, 3.5, 0.0, 0.0])
    assert scale.add(reward, discount, ended) == pytest.approx(float(values.std(correction=0)))
    more = torch.tensor([2.0, 4.0, 1.0, 0.5])  # env 0 begins at 0 again
    again = scale.add(torch.tensor([[2.0, 3.0], [1.0, 0.0]]), discount, torch.zeros(2, 2, dtype=torch.bool))
    assert again == pytest.approx(float(torch.cat([values, more]).std(correction=0)))
    assert ReturnScale().add(torch.zeros(1, 3), torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.bool)) == 1.0


def test_the_clip_rises_with_the_steps() -> None:
    # (e^(3 s) - 1) / (e^3 - 1) at s = 0, 1/2, 1: 0, 0.182426, 1; from 0.01 to 0.11.
    assert clip_schedule(0.01, 0.11, 3).tolist() == pytest.approx([0.01, 0.0282426, 0.11], abs=1e-6)
    assert clip_schedule(0.1, 0.3, 3, rate=0.0).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert clip_schedule(0.01, 0.11, 1).tolist() == pytest.approx([0.11])
    # Ratio 1.5 in both steps, clipped at 1.1 and 1.3; advantage 2: -(2.2 + 2.6) / 2.
    new = torch.full((1, 2), 1.5).log()
    loss = ppo_loss(new, torch.zeros(1, 2), torch.tensor([2.0]), clip_low=torch.tensor([0.1, 0.3]))
    assert loss.item() == pytest.approx(-2.4)


def test_value_clip_stops_what_has_moved_far_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # Values 0 before; now 1.0 and 0.1, targets 3 and 3, limit 0.5. The first has left the range on its
    # way to the target: clipped 0.5, whose error 2.5 > 2 is the larger. The second has not.
    learner = make_learner(make_policy("flow_sde"), "flow_sde", value_clip=0.5)
    towards: list[Tensor] = []

    def answer(features: Tensor) -> tuple[Tensor, list[Any]]:
        return torch.tensor([1.0, 0.1]).view(1, 2, 1), []

    def gradients(to_out: Tensor, paths: list[Any]) -> list[Tensor]:
        towards.append(to_out)
        return [torch.zeros_like(parameter) for parameter in learner._value.in_order]

    monkeypatch.setattr(learner._value, "answer", answer)
    monkeypatch.setattr(learner._value, "gradients", gradients)
    chain = Chain(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1), None)
    two = torch.zeros(2)
    learner._update_value(
        PPOBatch({}, chain, torch.zeros(2, 2), two, two, torch.tensor([3.0, 3.0]), torch.ones(2, 1))
    )
    assert towards[0].flatten().tolist() == pytest.approx([0.0, 0.1 - 3.0])


def test_a_value_clip_that_nothing_reaches_changes_nothing() -> None:
    # 0.1 + (v - 0.1) is not v to the last bit, which must not count as clipped.
    learned: list[dict[str, Tensor]] = []
    for limit in (None, 100.0):
        learner = make_learner(make_policy("flow_sde"), "flow_sde", value_clip=limit)
        batch = learner.prepare(bandit(learner._policy, seeded(4)))
        learner._update_value(replace(batch, value=torch.full((256,), 0.1)))
        learned.append(learner._value.state_dict())
    assert all(torch.equal(value, learned[1][name]) for name, value in learned[0].items())


def test_a_single_decision_counts_as_it_is() -> None:  # one advantage has no spread to be divided by
    learner = make_learner(make_policy("flow_sde"), "flow_sde")
    one = learner.prepare(bandit(learner._policy, seeded(4))).rows(torch.tensor([3]))
    assert float(learner.update(replace(one, advantage=torch.tensor([0.7])))["loss"]) == pytest.approx(-0.7)


def test_value_alone_learns_at_first() -> None:
    policy = make_policy("flow_sde")
    learner = make_learner(policy, "flow_sde", critic_warmup=1, critic_lr=1e-2)
    before = copy.deepcopy(policy.state_dict())
    rollout = bandit(policy, seeded(4))
    rollout.reward = rollout.obs["state"][..., 0]  # of the state alone: a value can explain all of it
    batch = learner.prepare(rollout)
    unexplained = [float(learner.update(batch)["unexplained"]) for _ in range(100)]
    assert unexplained[-1] < 0.01 < unexplained[0]
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    assert "loss" in learner.update(learner.prepare(bandit(policy, seeded(5))))
    assert any(not torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_a_value_that_reads_the_privileged_state_explains_what_the_policy_cannot_see() -> None:
    unexplained: dict[bool, float] = {}
    for reads in (False, True):
        policy, rollout = make_policy("flow_sde"), bandit(make_policy("flow_sde"), seeded(4))
        hidden = torch.rand(32, 8, 1, generator=seeded(6)) - 0.5
        rollout.obs[PRIVILEGED] = rollout.next_obs[PRIVILEGED] = hidden
        rollout.reward = hidden[..., 0]
        scale = Normaliser.fit({PRIVILEGED: hidden.flatten(0, 1).numpy()}, np.zeros((256, 1), np.float32))
        options: dict[str, Any] = {**SMALL, **METHODS["flow_sde"][1], "critic_lr": 1e-2}
        privileged = scale if reads else None
        learner = ChainPPO(policy, ChainPPOConfig(**options), 3, privileged=privileged)
        batch = learner.prepare(rollout)
        unexplained[reads] = [float(learner.update(batch)["unexplained"]) for _ in range(100)][-1]
    assert unexplained[True] < 0.01
    assert unexplained[False] > 0.2


def test_beyond_the_kl_the_policy_waits_for_the_next_rollout() -> None:
    policy = make_policy("flow_sde")
    learner = make_learner(policy, "flow_sde", actor_lr=0.05, target_kl=1e-4)
    batch = learner.prepare(bandit(policy, seeded(4)))
    waits = [learner.update(batch)["waits"] for _ in range(6)]
    assert (waits[0], waits[-1]) == (0.0, 1.0)
    assert waits == sorted(waits)
    stopped = copy.deepcopy(policy.state_dict())
    learner.update(batch)
    assert all(torch.equal(stopped[name], value) for name, value in policy.state_dict().items())
    assert learner.update(learner.prepare(bandit(policy, seeded(5))))["waits"] == 0.0


@pytest.mark.parametrize("name", METHODS)
def test_a_device_that_is_not_waited_for_learns_the_same(name: str) -> None:
    found: list[Any] = []
    for reads_values in (True, False):
        policy = make_policy(name)
        learner = make_learner(policy, name, actor_lr=0.02, target_kl=1e-4)
        learner._reads = reads_values  # as on a CPU, and as on any other device
        # All decisions end their episodes, so that the same rows are encoded.
        rollout = bandit(policy, seeded(4))
        rollout.num_steps = rollout.cost
        experience = RolloutExperience(learner, batch=128, epochs=4, seed=0)
        with reads_back() as reads:
            experience.add(rollout)
            metrics = [learner.update(experience.sample()) for _ in range(experience.owed())]
        waits = [float(row["waits"]) for row in metrics]
        found.append((reads, waits, policy.state_dict(), learner.actor_optimiser.state_dict()))
    (_, ours, weights, state), (reads, theirs, same, moments) = found
    assert reads == []
    assert ours == theirs
    assert (ours[0], ours[-1]) == (0.0, 1.0)
    assert all(torch.equal(same[key], value) for key, value in weights.items())
    for key, values in state.items():
        assert all(map(torch.equal, values, moments[key])), key


def test_where_nothing_is_read_the_value_of_every_next_observation_is_computed() -> None:
    # As by hand in `test_advantages_by_hand`, where only the last row led elsewhere.
    learner = learner_with_values({0.1: 1.0, 0.2: 2.0, 0.3: 4.0}, gamma_step=0.5, lam=0.5)
    learner._reads = False
    batch = learner.prepare(rollout([1.0, 3.0], [0.25, 0.5], [False, False], [2, 1]))
    assert batch.advantage.tolist() == pytest.approx([0.875, 3.0])


@pytest.mark.parametrize("name", METHODS)
def test_resume_is_exact(name: str) -> None:
    def learn(learner: ChainPPO, policy: Any, generator: torch.Generator, rollouts: int) -> None:
        for _ in range(rollouts):
            batch = learner.prepare(bandit(policy, generator))
            for rows in torch.randperm(256, generator=generator).split(64):
                learner.update(batch.rows(rows))

    policy, generator = make_policy(name), seeded(4)
    learner = make_learner(policy, name, scale_reward=True)
    learn(learner, policy, generator, 2)
    state, place = copy.deepcopy(learner.state_dict()), generator.get_state()
    learn(learner, policy, generator, 2)
    again = make_policy(name)
    resumed = make_learner(again, name, scale_reward=True)
    resumed.load_state_dict(state)
    generator.set_state(place)
    learn(resumed, again, generator, 2)
    assert all(torch.equal(policy.state_dict()[key], value) for key, value in again.state_dict().items())


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"method\.algorithm.clip_first: got 0\.01, allowed: null without"):
        ChainPPOConfig(reduction="joint", clip_first=0.01)
    with pytest.raises(ConfigError, match=r"method\.algorithm.clip: got 1\.5, allowed: above 0, below 1"):
        ChainPPOConfig(clip=1.5)
    with pytest.raises(
        ConfigError, match=r"method\.algorithm.target_kl: got 0\.0, allowed: above 0, or null"
    ):
        ChainPPOConfig(target_kl=0.0)


def compared(policy: Any, group: int, **options: Any) -> ChainPPO:
    """Returns a learner without a value."""
    return ChainPPO(policy, GRPOConfig(**{**SMALL, **options}), 3, group=group)


def test_every_decision_of_an_episode_has_the_advantage_of_the_episode() -> None:
    # Two groups of two: scores 1 and 0, +-0.5 / 0.7071 = +-0.7071; 0.2 and 0.6 the other way round.
    valid = torch.tensor([[True, True, False], [True, True, True], [True, False, False], [True, True, False]])
    number = torch.arange(12.0).view(4, 3)
    chain = Chain(torch.zeros(12, 1, 1, 1), torch.zeros(12, 1, dtype=torch.long), number.view(12, 1), None)
    state = {"state": number.unsqueeze(-1).expand(4, 3, 2)}
    solved, score = torch.tensor([True, False, False, False]), torch.tensor([1.0, 0.0, 0.2, 0.6])
    episodes = EpisodeRollout(
        state, chain, number, number, state, ~valid, valid.long(), valid=valid, success=solved, score=score
    )
    batch = compared(make_policy("flow_sde"), 2).prepare(episodes)
    # 2, 3, 1 and 2 decisions, 2 on average: each episode weighs the same, its decisions together.
    root = 0.5**0.5
    expected = [root, root, *[-root * 2 / 3] * 3, -root * 2, root, root]
    assert batch.advantage.tolist() == pytest.approx(expected, abs=1e-4)
    assert float(batch.advantage.sum()) == pytest.approx(0.0, abs=1e-4)
    # Only decisions that were made, each with its own chain and observation.
    assert batch.chain.log_prob[:, 0].tolist() == [0, 1, 3, 4, 5, 6, 9, 10]
    assert batch.obs["state"][:, 0].tolist() == [0, 1, 3, 4, 5, 6, 9, 10]


def alike(policy: Any, generator: torch.Generator, *, starts: int = 32, group: int = 8) -> EpisodeRollout:
    """Returns episodes of one decision, `group` of them from each start, that succeed if they come near."""
    state = (torch.rand(starts, 1, 2, generator=generator) - 0.5).repeat_interleave(group, dim=0)
    sample = policy.sample(
        policy.encode({"state": state[:, 0]}), mode="explore", record=True, generator=generator
    )
    error = (sample.actions[:, 0, 0] - state[:, 0, 0]).abs()
    near = error < error.view(starts, group).median(dim=1).values.repeat_interleave(group)
    ones, zeros = torch.ones(len(state), 1, dtype=torch.bool), torch.zeros(len(state), 1)
    obs = {"state": state}
    return EpisodeRollout(
        obs, sample.chain, zeros, zeros, obs, ones, ones.long(), valid=ones, success=near, score=near.float()
    )


@pytest.mark.parametrize("name", METHODS)
def test_groups_learn_a_bandit_without_a_value(name: str) -> None:
    policy = make_policy(name)
    options = {key: METHODS[name][1][key] for key in ("reduction",)}
    learner = compared(policy, 8, actor_lr=3e-3, clip=0.1, clip_high=0.15, **options)
    first, value = worth(policy), copy.deepcopy(learner._value.state_dict())
    generator = seeded(4)
    for _ in range(12):
        batch = learner.prepare(alike(policy, generator))
        for _ in range(4):
            for rows in torch.randperm(256, generator=generator).split(64):
                metrics = learner.update(batch.rows(rows))
                assert "value_loss" not in metrics
    assert worth(policy) > 0.6 * first
    assert all(torch.equal(value[key], part) for key, part in learner._value.state_dict().items())


def test_the_clip_is_wider_above_and_advantages_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ratios 1.5, 1.5, 0.5, 0.5 with advantages 2, -2, 2, -2, clipped at 0.8 and 1.28:
    # min(3, 2.56), min(-3, -2.56), min(1, 1.6), min(-1, -1.6): 2.56 - 3 + 1 - 1.6 = -1.04, negated, of 4.
    policy = make_policy("flow_sde")
    learner = compared(policy, 2)
    new = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().view(4, 1)
    any_weight = next(p for p in policy.parameters() if p.requires_grad)
    policy.log_prob = lambda encoded, chain: (new + 0.0 * any_weight.sum(), torch.zeros(4, 1))
    monkeypatch.setattr(learner.actor_optimiser, "step", lambda loss, skips: None)
    chain = Chain(torch.zeros(4, 1, 1, 1), torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, 1), None)
    advantage, none = torch.tensor([2.0, -2.0, 2.0, -2.0]), torch.zeros(4)
    batch = PPOBatch(
        {"state": torch.zeros(4, 2)}, chain, torch.zeros(4, 0), advantage, none, none, torch.ones(4, 1)
    )
    metrics = learner.update(batch)
    assert torch.as_tensor(metrics["loss"]).item() == pytest.approx(0.26)
    assert float(metrics["clipped"]) == 1.0
    new = torch.tensor([1.25, 1.25, 0.85, 0.85]).log().view(4, 1)  # all inside
    assert float(learner.update(batch)["clipped"]) == 0.0


def test_whole_episodes_with_a_value_leave_out_what_was_not_made() -> None:
    # Values 1, 2, 4 as above. Env 0 ends after one decision; env 1 goes on to the time limit.
    learner = learner_with_values({0.1: 1.0, 0.2: 2.0, 0.3: 4.0}, gamma_step=0.5, lam=0.5)
    two = rollout([1.0, 0.0], [0.0, 0.0], [True, True], [2, 0])
    other = rollout([1.0, 3.0], [0.25, 0.5], [False, True], [2, 1])
    joined: dict[str, Any] = {
        name: torch.cat([getattr(two, name), getattr(other, name)])
        for name in ("reward", "bootstrap", "ended", "steps")
    }
    obs, after = line([0.1, 0.2])["state"].repeat(2, 1, 1), line([0.2, 0.3])["state"].repeat(2, 1, 1)
    chain = Chain(torch.zeros(4, 1, 1, 1), torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, 1), None)
    valid, flags = torch.tensor([[True, False], [True, True]]), torch.zeros(2, dtype=torch.bool)
    episodes = EpisodeRollout(
        obs={"state": obs},
        chain=chain,
        next_obs={"state": after},
        valid=valid,
        success=flags,
        score=flags.float(),
        **joined,
    )
    batch = learner.prepare(episodes)
    # Terminated: 1 - 1. Then 0.5 + 0.25 * 0.5 * 3 and 3 + 0.5 * 4 - 2, as by hand above.
    assert batch.advantage.tolist() == pytest.approx([0.0, 0.875, 3.0])


def test_settings_of_groups_are_checked() -> None:
    with pytest.raises(
        ConfigError, match=r"method\.algorithm.clip_high: got 1\.5, allowed: above 0, below 1"
    ):
        GRPOConfig(clip_high=1.5)
    with pytest.raises(
        ConfigError, match=r"method\.algorithm.clip_high: got 0\.28, allowed: null with clip_first"
    ):
        GRPOConfig(reduction="per_step", clip_first=0.01)
