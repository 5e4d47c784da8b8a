"""The game of actor and adversary: temperatures, targets and derivatives by hand, who wins, resume."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.algos.actors import Squashed, TanhGaussian
from robot_rl.algos.config.off_policy import ActorConfig, AdversaryConfig, CriticConfig
from robot_rl.algos.qarl import QARL, QARLConfig
from robot_rl.data.transitions import TransitionBatch


def batch(seed: int, size: int = 64) -> TransitionBatch:
    """One-step episodes, whose reward is the executed action."""
    generator = Generator().manual_seed(seed)
    state, after = torch.randn(2, size, 3, generator=generator)
    action = 2 * torch.rand(size, 1, generator=generator) - 1
    kind = torch.zeros(size, dtype=torch.uint8)
    return TransitionBatch(
        {"state": state}, action, action, action[:, 0], torch.zeros(size), {"state": after}, action, kind
    )


def build(*, seed: int = 0, adversary: dict[str, Any] | None = None, **changes: Any) -> QARL:
    pushes: dict[str, Any] = {"bound": 0.25, "last": 0.01, "curriculum": 0, "width": 32, "lr": 3e-3}
    rates: dict[str, Any] = {"actor_lr": 1e-3, "critic_lr": 5e-3, "initial_temperature": 0.01}
    cfg = QARLConfig(
        actor=ActorConfig(width=32),
        critic=CriticConfig(width=32),
        matmul="fp32",
        target_entropy_per_action=-1.0,
        adversary=AdversaryConfig(**(pushes | (adversary or {}))),
        **(rates | changes),
    )
    return QARL(3, 1, cfg, seed)


def test_the_temperature_falls_by_the_same_factor() -> None:
    schedule = AdversaryConfig(first=1.0, last=0.01, curriculum=100)
    found = [schedule.temperature(updates) for updates in (0, 50, 100, 1000)]
    assert found == pytest.approx([1.0, 0.1, 0.01, 0.01])
    assert AdversaryConfig(first=1.0, last=0.01, curriculum=0).temperature(0) == 0.01


@pytest.mark.parametrize(("temperature", "low", "high"), [(0.002, -1.0, -0.8), (10.0, -0.3, 0.3)])
def test_a_cold_adversary_pushes_back_and_a_hot_one_anywhere(
    temperature: float, low: float, high: float
) -> None:
    learner = build(adversary={"first": temperature, "last": temperature})
    for seed in range(400):
        learner.update(batch(seed))
    states = torch.randn(32, 3, generator=Generator().manual_seed(1000))
    assert learner.act(states, explore=False).min().item() > 0.7
    push = learner.adversary.mean(states)
    assert low <= push.mean().item() <= high
    spread = learner.adversary.sample(states.repeat(50, 1), Generator().manual_seed(0)).action.std().item()
    assert (spread > 0.45) == (temperature > 1)  # a uniform push has 0.58


def copies(learner: QARL) -> tuple[TanhGaussian, TanhGaussian, Generator, Generator]:
    """Returns both players as they are now, and the state of their chance."""
    actor, adversary = (TanhGaussian(3, 1, width=32, matmul="fp32") for _ in range(2))
    actor.load_state_dict(learner.actor.state_dict())
    adversary.load_state_dict(learner.adversary.state_dict())
    draws, pushes = Generator(), Generator()
    draws.set_state(learner._generator.get_state())
    pushes.set_state(learner._pushes.get_state())
    return actor, adversary, draws, pushes


@pytest.mark.parametrize("backup", [True, False])
def test_the_target_is_of_what_comes_of_both(backup: bool) -> None:
    learner, rows = build(entropy_backup=backup, adversary={"first": 0.5, "last": 0.5}), batch(0)
    actor, adversary, draws, pushes = copies(learner)
    with torch.no_grad():
        _, after, bonus = learner._actions(learner._read(rows), with_present=False)
    mine = actor.sample(rows.next_obs["state"], draws)
    push = adversary.sample(rows.next_obs["state"], pushes)
    torch.testing.assert_close(after, (mine.action + 0.25 * push.action).clamp(-1, 1))
    expected = -0.01 * mine.log_prob + 0.5 * push.log_prob if backup else torch.zeros(64)
    torch.testing.assert_close(bonus, expected)


def test_without_a_bound_the_actor_is_left_alone() -> None:
    learner = build(adversary={"bound": 0.0, "first": 0.5, "last": 0.5})
    alone = ActorCritic(3, 1, learner._cfg, 0)
    for seed in range(3):
        rows = replace(batch(seed), bootstrap=torch.full((64,), 0.9))
        learner.update(rows)
        alone.update(rows)
    for ours, theirs in ((learner.actor, alone.actor), (learner.critics, alone.critics)):
        found = theirs.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in ours.state_dict().items())


def test_nothing_is_climbed_where_the_sum_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = build()
    # The critics' slope is 2 everywhere: 2 for the actor along 0.5 + 0.25 d, 0.25 * 2 for the adversary.
    slope = torch.full((2, 1), 2.0)
    monkeypatch.setattr(
        learner.critics, "action_gradient", lambda features, action, how: (action[:, 0], slope)
    )
    push = learner.adversary.sample(torch.zeros(2, 3), Generator().manual_seed(0))
    push = push._replace(action=torch.tensor([[0.8], [0.8]]))
    monkeypatch.setattr(learner.adversary, "sample", lambda features, generator: push)
    told: list[tuple[Tensor, float]] = []
    gradients = learner.adversary.gradients

    def recorded(sample: Squashed, to_action: Tensor, to_log_prob: Tensor) -> list[Tensor]:
        told.append((to_action, to_log_prob.item()))
        return gradients(sample, to_action, to_log_prob)

    monkeypatch.setattr(learner.adversary, "gradients", recorded)
    with torch.no_grad():
        value, by_action = learner._action_value(torch.zeros(2, 3), torch.tensor([[0.5], [0.9]]))
    torch.testing.assert_close(value, torch.tensor([0.7, 1.0]))
    torch.testing.assert_close(by_action, torch.tensor([[2.0], [0.0]]))
    # Loss of the adversary: mean over two rows of value + 0.01 log prob.
    ((to_action, to_log_prob),) = told
    torch.testing.assert_close(to_action, torch.tensor([[0.25], [0.0]]))
    assert to_log_prob == pytest.approx(0.005)


def test_a_resumed_game_is_the_unbroken_one() -> None:
    whole, first, second = (build(seed=seed, adversary={"curriculum": 10}) for seed in (0, 0, 7))
    for seed in range(12):
        whole.update(batch(seed))
    for seed in range(5):
        first.update(batch(seed))
    second.load_state_dict(first.state_dict())
    for seed in range(5, 12):
        second.update(batch(seed))
    for key, value in whole.policy_weights().items():
        assert value.equal(second.policy_weights()[key]), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bound": 1.5}, "adversary.bound: got 1.5, allowed: 0 to 1"),
        ({"first": 0.1, "last": 0.2}, "adversary.first: got 0.1, allowed: at least last, which is 0.2"),
        ({"last": 0.0}, "adversary.last: got 0.0, allowed: above 0"),
        ({"curriculum": -1}, "adversary.curriculum: got -1, allowed: 0 or more"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdversaryConfig(**change)
