"""Chunked critics: targets by hand, the prefix critic, what acts, and exact resume."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.chunk_critics import ChunkCriticConfig, ChunkCritics
from robot_rl.algos.chunk_q import BestOf, ChunkQ, ChunkQConfig
from robot_rl.core.errors import ConfigError
from robot_rl.data.replay import ReplayBuffer, StepBatch
from robot_rl.data.transitions import ChunkBatch
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.one_step import OneStepPolicy

GAMMA = 0.5


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def replay() -> ReplayBuffer:
    """Rewards = observations: 1 2 3 ends the task, 11 12 is cut by the clock, 21 22 goes on."""
    buffer = ReplayBuffer(40, 1, {"state": ((1,), np.float32)}, 1)
    for value in (1, 2, 3, 11, 12, 21, 22):
        one = np.array([[value]], np.float32)
        buffer.add(
            StepBatch(
                obs={"state": one},
                base_action=one,
                action=one / 100,
                reward=one[0],
                terminated=np.array([value == 3]),
                truncated=np.array([value == 12]),
                next_obs={"state": one + 1},
                next_base_action=one,
            )
        )
    return buffer


def chunks(lengths: tuple[int, ...], *, horizon: int = 4) -> ChunkBatch:
    """Every chunk of the replay once, in the order of its first observation."""
    batch = replay().sample_chunks(
        300, horizon=horizon, gamma_step=GAMMA, rng=np.random.default_rng(0), prefixes=lengths
    )
    first = batch.obs["state"][:, 0].tolist()
    rows = [first.index(value) for value in sorted(set(first))]
    assert len(rows) == 7
    assert batch.prefix is not None
    batch.prefix = type(batch.prefix)(
        batch.prefix.reward[rows],
        batch.prefix.bootstrap[rows],
        batch.prefix.is_whole[rows],
        {"state": batch.prefix.next_obs["state"][rows]},
    )
    batch.obs, batch.action, batch.valid = (
        {"state": batch.obs["state"][rows]},
        batch.action[rows],
        batch.valid[rows],
    )
    return batch


def flow(**changes: Any) -> FlowPolicy:
    options: dict[str, Any] = {"horizon": 4, "width": 32, "depth": 2, "time_dim": 8, "steps": 2}
    config = ChunkPolicyConfig(**(options | changes))
    return FlowPolicy(config, state_dim=1, action_dim=1, generator=seeded()).eval()


def critics(steps: int, *, seed: int = 1, **changes: Any) -> ChunkCritics:
    options: dict[str, Any] = {"width": 16, "depth": 2}
    config = ChunkCriticConfig(**(options | changes))
    return ChunkCritics(config, feature_dim=1, action_dim=1, steps=steps, generator=seeded(seed))


def build(steps: int, actor: Any = "fql", *, seed: int = 0, prefix: bool = False, **changes: Any) -> ChunkQ:
    base = flow()
    cfg = ChunkQConfig(actor=actor, gamma_step=GAMMA, candidates=3, **changes)
    return ChunkQ(
        base,
        critics(steps, prefix=prefix),
        cfg,
        seed,
        student=OneStepPolicy.student_of(base) if actor == "fql" else None,
    )


class Echo(nn.Module):
    """Target critics whose value is ten times the observation: where a target leads to is in the number."""

    def score(self, features: Tensor, actions: Tensor) -> Tensor:
        return 10.0 * features[:, 0]


def targets(learner: Any, batch: ChunkBatch) -> tuple[Tensor, Tensor]:
    learner._target_critics = Echo()
    return learner._target(batch)


# --- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ["fql", "best_of_n"])
def test_targets_by_hand(actor: str) -> None:
    found, counts = targets(build(2, actor), chunks((2,)))
    expected = {
        1: 1 + 2 / 2 + 30 / 4,  # a full chunk: 10 * 3 from where it led to
        2: 2 + 3 / 2,  # a full chunk whose end is the task's
        3: 3.0,  # terminated inside: nothing after
        11: 11 + 12 / 2 + 130 / 4,  # the clock, at its end: the value goes on from the final observation
        12: 12 + 130 / 2,  # truncated inside, after one step
        21: 21 + 22 / 2 + 230 / 4,
        22: 22 + 230 / 2,  # stops at the newest step: does not count
    }
    assert found[:, 0].tolist() == pytest.approx(list(expected.values()))
    assert counts[:, 0].tolist() == [True] * 6 + [False]


def test_one_step_is_ordinary_td() -> None:
    plain = replay().sample(300, n_step=1, gamma_step=GAMMA, rng=np.random.default_rng(0))
    one = replay().sample_chunks(
        300, horizon=4, gamma_step=GAMMA, rng=np.random.default_rng(0), prefixes=(1,)
    )
    found, counts = targets(build(1), one)
    td = plain.reward + plain.bootstrap * 10.0 * plain.next_obs["state"][:, 0]
    assert torch.equal(one.obs["state"], plain.obs["state"])
    assert torch.equal(found[:, 0], td)
    assert counts.all()
    # And the critic reads what an ordinary one would: the first action alone.
    assert torch.equal(critics(1)._beginnings(one.action, critics(1).flags), plain.action)


def test_targets_of_every_prefix_by_hand() -> None:
    learner = build(3, prefix=True)
    found, counts = targets(learner, chunks((1, 2, 3)))
    assert found[0].tolist() == pytest.approx([1 + 20 / 2, 1 + 1 + 30 / 4, 1 + 1 + 3 / 4])
    assert found[1].tolist() == pytest.approx([2 + 30 / 2, 2 + 3 / 2, 2 + 3 / 2])
    assert found[3].tolist() == pytest.approx([11 + 120 / 2, 11 + 6 + 130 / 4, 11 + 6 + 130 / 4])
    assert counts[:5].all()
    assert counts[5].tolist() == [True, True, False]
    assert counts[6].tolist() == [True, False, False]


# --- critics -------------------------------------------------------------------------------------


def test_a_prefix_is_blind_to_what_follows_it() -> None:
    judge = critics(3, prefix=True)
    features, actions = torch.randn(5, 1, generator=seeded()), torch.randn(5, 4, 1, generator=seeded(2))
    before = judge.values(features, actions)
    changed = actions.clone()
    changed[:, 1] += 1.0
    after = judge.values(features, changed)
    assert before.shape == (2, 5, 3)
    assert torch.equal(before[..., 0], after[..., 0])
    assert (before[..., 1:] != after[..., 1:]).all()
    changed = actions.clone()
    changed[:, 3] += 1.0  # is not executed
    assert torch.equal(before, judge.values(features, changed))
    # A zero action is not a missing one; the whole chunk's value is what scores.
    zeros = judge.values(features, torch.zeros_like(actions))
    assert (zeros[..., 0] != zeros[..., 2]).all()
    assert torch.equal(judge.score(features, actions), before[..., 2].mean(dim=0))
    least = critics(3, prefix=True, aggregate="min")
    assert torch.equal(least.score(features, actions), before[..., 2].amin(dim=0))


@pytest.mark.parametrize("prefix", [False, True])
def test_gradients_are_autograds_over_the_values_that_count(prefix: bool) -> None:
    judge = critics(3, prefix=prefix, matmul="fp32")
    features, actions = torch.randn(5, 1, generator=seeded()), torch.randn(5, 4, 1, generator=seeded(2))
    target = torch.randn(5, len(judge.lengths), generator=seeded(3))
    counts = torch.rand(target.shape, generator=seeded(4)) > 0.3
    counts[0, -1] = False
    error, gradients = judge.td_gradients(features, actions, target, counts)
    rows = judge._beginnings(actions, judge.flags)
    inputs = torch.cat([features.repeat_interleave(len(judge.lengths), dim=0), rows], dim=1)
    values = judge.net(inputs).squeeze(-1).unflatten(1, (5, -1))
    wrong = (values - target).square()[:, counts]
    assert error.shape == (2, int(counts.sum()))
    loss = wrong.mean(dim=1).sum()
    for ours, theirs in zip(gradients, torch.autograd.grad(loss, list(judge.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        value, gradient = judge.action_gradient(features, actions)
    moved = actions.clone().requires_grad_(True)
    last = judge._beginnings(moved, judge.flags[-1:])
    scored = judge.net(torch.cat([features, last], dim=1)).mean(dim=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(scored.sum(), moved)[0])
    torch.testing.assert_close(value, scored[:, 0].detach())
    assert (gradient[:, 3] == 0).all()


# --- what acts -----------------------------------------------------------------------------------


class NearThird(ChunkCritics):
    """Values chunks by how near the mean of their executed actions is to 0.3."""

    def score(self, features: Tensor, actions: Tensor) -> Tensor:
        return -(actions[:, : self.steps].mean(dim=(1, 2)) - 0.3).abs()


def test_the_chunk_that_is_valued_most_is_proposed() -> None:
    base = flow()
    judge = NearThird(ChunkCriticConfig(width=8), feature_dim=1, action_dim=1, steps=2)
    obs = {"state": torch.randn(6, 1, generator=seeded())}
    proposed = BestOf(base, judge, 5).propose(obs, base.encode(obs), seeded(7))
    repeated = {"state": obs["state"].repeat_interleave(5, dim=0)}
    z = torch.empty(30, 4, 1).normal_(generator=seeded(7))
    candidates = base.sample(base.encode(repeated), z=z).actions.view(6, 5, 4, 1)
    best = (candidates[:, :, :2, 0].mean(dim=2) - 0.3).abs().argmin(dim=1)
    assert len(best.unique()) > 1
    assert torch.equal(proposed, candidates[torch.arange(6), best])


def updated(learner: ChunkQ, first: int, last: int) -> ChunkQ:
    for seed in range(first, last):
        batch = replay().sample_chunks(
            16,
            horizon=4,
            gamma_step=GAMMA,
            rng=np.random.default_rng(seed),
            prefixes=learner._critics.lengths,
        )
        learner.update(batch)
    return learner


def test_the_flow_follows_the_data_and_acts_as_its_average() -> None:
    learner = build(2, "best_of_n", flow_ema=0.9)
    before = [p.detach().clone() for p in learner._flow.parameters()]
    updated(learner, 0, 1)
    for was, acting, learns in zip(
        before, learner._flow.parameters(), learner._learner.parameters(), strict=True
    ):
        torch.testing.assert_close(acting.detach(), 0.9 * was + 0.1 * learns.detach())
        assert not learns.equal(was)


def test_the_student_is_held_by_the_flow_and_drawn_by_the_critics() -> None:
    # Critics that are linear in the executed actions would like them all to be large.
    found = {}
    for alpha in (0.1, 1000.0):
        learner: Any = build(2, alpha=alpha, student_lr=1e-2, flow_lr=1e-9)
        actor = learner._actor
        obs = {"state": torch.randn(64, 1, generator=seeded(3))}
        encoded = learner._flow.encode(obs)
        learner._critics.action_gradient = _upwards
        metrics: dict[str, Tensor] = {}
        for _ in range(150):
            metrics = actor.update(obs, encoded, learner._generator)
        z = torch.randn(64, 4, 1, generator=seeded(4))
        student: Any = actor.modules[""]
        chunk = student.sample(student.encode(obs), z=z).actions
        found[alpha] = (
            chunk,
            float(metrics["distance"]),
            learner._flow.sample(encoded, z=z).actions,
        )
    drawn, held = found[0.1], found[1000.0]
    assert (drawn[0][:, :2] > 0.9).float().mean() > 0.9
    assert held[1] < 0.02 < drawn[1]
    assert (held[0] - held[2]).abs().mean() < 0.1


def _upwards(features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    gradient = torch.zeros_like(actions)
    gradient[:, :2] = 1.0
    return actions[:, :2].sum(dim=(1, 2)), gradient


@pytest.mark.parametrize(("actor", "prefix"), [("fql", False), ("best_of_n", False), ("fql", True)])
def test_a_resumed_learner_is_the_unbroken_one(actor: str, prefix: bool) -> None:
    whole = updated(build(2, actor, prefix=prefix), 0, 9)
    first = updated(build(2, actor, prefix=prefix), 0, 5)
    second = build(2, actor, prefix=prefix, seed=4)
    second.load_state_dict(first.state_dict())
    updated(second, 5, 9)
    for name in ("flow", "learner", "critics", "target_critics"):
        for key, value in whole.state_dict()[name].items():
            assert value.equal(second.state_dict()[name][key]), (name, key)
    ours, theirs = whole.policy_weights(), second.policy_weights()
    assert all(value.equal(theirs[key]) for key, value in ours.items())
    assert whole.state_dict()["updates"] == second.state_dict()["updates"] == 9


def test_every_tenth_update_reports() -> None:
    learner = updated(build(2), 0, 9)
    batch = replay().sample_chunks(
        16, horizon=4, gamma_step=GAMMA, rng=np.random.default_rng(9), prefixes=(2,)
    )
    assert set(learner.update(batch)) == {"critic_loss", "flow_loss", "target", "distance", "student_q"}
    assert learner.update(batch) == {}


def test_bad_settings_are_named() -> None:
    wrong: dict[str, Any] = {"actor": "sac", "candidates": 0, "alpha": -1.0, "tau": 0.0, "flow_ema": 1.0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"method\.algorithm\.{name}: got {value!r}"):
            ChunkQConfig(**{name: value})
    with pytest.raises(ConfigError, match=r"critics\.num: got 0"):
        ChunkCriticConfig(num=0)
    with pytest.raises(ValueError, match=r"here: steps must be 1 to the policy's horizon 4, got 5"):
        ChunkCritics.for_policy({"config": {}, "steps": 5}, flow(), at="here")
