"""A policy with its adversary: who acts when, and its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from robot_rl.policies.actor import ActorPolicy, ActorPolicyConfig
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.contested import ContestedPolicy


def player(*, pre_tanh: float, log_std: float) -> ActorPolicy:
    """A Gaussian actor of one action that does the same everywhere."""
    policy = ActorPolicy(ActorPolicyConfig(horizon=2, width=4, depth=1), state_dim=3, action_dim=1)
    with torch.no_grad():
        policy.layers[-1].copy_(torch.tensor([pre_tanh, log_std]))
    return policy


def build(*, pre_tanh: float = 0.0, log_std: float = -20.0, bound: float = 0.25) -> ContestedPolicy:
    return ContestedPolicy(
        player(pre_tanh=pre_tanh, log_std=log_std), player(pre_tanh=20.0, log_std=-20.0), bound
    )


STATES: dict[str, Tensor] = {"state": torch.randn(5, 3, generator=Generator().manual_seed(0))}


@pytest.mark.parametrize(
    ("mode", "contested", "pushed"),
    [
        ("ode", False, 0.0),
        ("mean", False, 0.0),
        ("explore", False, 0.25),
        ("ode", True, 0.25),
    ],
)
def test_the_adversary_pushes_while_exploring_or_if_asked(mode: Any, contested: bool, pushed: float) -> None:
    policy = build()
    policy.is_contested = contested
    found = policy.sample(policy.encode(STATES), mode=mode, generator=Generator().manual_seed(1))
    # The actor gives 0, the adversary 1: all of its bound.
    torch.testing.assert_close(found.actions, torch.full((5, 2, 1), pushed), atol=1e-6, rtol=0)
    assert found.n_exec is not None
    assert found.n_exec.tolist() == [1] * 5


def test_what_is_executed_stays_in_range() -> None:
    policy = build(pre_tanh=3.0)
    assert policy.sample(policy.encode(STATES), mode="explore").actions.eq(1.0).all()


def test_a_saved_policy_is_the_same(tmp_path: Path) -> None:
    policy = build(pre_tanh=0.5, bound=0.5)
    meta = PolicyMeta(
        task="reach",
        robot="panda",
        control_hz=20.0,
        state_names=("a", "b", "c"),
        action_names=("x",),
        instruction="",
        n_exec=1,
    )
    save_policy(tmp_path / "policy", policy, meta=meta)
    loaded: Any = load_policy(tmp_path / "policy")[0]
    assert not loaded.is_contested
    for contested in (False, True):
        policy.is_contested = loaded.is_contested = contested
        assert loaded.sample(loaded.encode(STATES)).actions.equal(
            policy.sample(policy.encode(STATES)).actions
        )
