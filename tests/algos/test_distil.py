"""Distillation: the distance by hand, that the student learns the function of the noise, exact resume."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Generator

from robot_rl.algos.distil import DistilConfig, Distillation, distance
from robot_rl.core.errors import ConfigError
from robot_rl.core.policy import ChunkSample
from robot_rl.policies.chunk import ChunkPolicyConfig, DiffusionPolicy, FlowPolicy
from robot_rl.policies.one_step import OneStepPolicy
from tests.plain import Plain


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def flow(**options: Any) -> FlowPolicy:
    usual: dict[str, Any] = {"horizon": 2, "width": 32, "depth": 2, "time_dim": 8, "steps": 4}
    config = ChunkPolicyConfig(**(usual | options))
    return FlowPolicy(config, state_dim=1, action_dim=1, generator=seeded()).eval()


def batch(seed: int) -> Any:
    """What of a batch is read: its states."""
    return SimpleNamespace(obs={"state": torch.randn(128, 1, generator=seeded(seed))})


def far() -> Any:
    return Far()


class Far(Plain):
    """Answers 0.5 to whatever it is asked."""

    def sample(self, encoded: Any, *, z: Any = None) -> ChunkSample:
        return ChunkSample(torch.full_like(z, 0.5))


def test_the_distance_is_in_the_chain() -> None:
    student: Any = OneStepPolicy.student_of(flow())
    student.decode = lambda features, z: torch.full_like(z, 2.0)  # the chain is not clamped
    z = torch.zeros(3, 2, 1)
    assert float(distance(student, far(), {"state": torch.zeros(3, 1)}, z)) == pytest.approx(1.5**2)


def test_the_student_learns_what_the_noise_decides() -> None:
    # A teacher whose chunks are +-0.5 by the sign of the noise: their mean, 0, would be 0.25 away.
    class Sign(Far):
        def sample(self, encoded: Any, *, z: Any = None) -> ChunkSample:
            return ChunkSample(0.5 * torch.tanh(4 * z))

    student = OneStepPolicy.student_of(flow())
    teacher: Any = Sign()
    learner = Distillation(student, teacher, DistilConfig(updates=1200, lr=3e-3), 0)
    found = [float(learner.update(batch(seed))["distance"]) for seed in range(1200)]
    assert found[-1] < 0.01
    z = torch.tensor([[[1.0], [-1.0]]])
    chunk = student.sample(student.encode({"state": torch.zeros(1, 1)}), z=z).actions
    assert chunk.flatten().tolist() == pytest.approx([0.5, -0.5], abs=0.1)


def test_the_rate_falls_as_a_cosine() -> None:
    learner: Any = Distillation(OneStepPolicy.student_of(flow()), far(), DistilConfig(updates=2, lr=0.1), 0)
    rates: list[float] = []
    learner._optimiser.step = lambda loss, lr: rates.append(lr)
    for seed in range(2):
        learner.update(batch(seed))
    assert rates == pytest.approx([0.1, 0.05])  # 0.1 (1 + cos 0) / 2, 0.1 (1 + cos pi/2) / 2


def test_a_policy_with_a_frozen_half_can_teach() -> None:
    config = ChunkPolicyConfig(
        kind="diffusion", horizon=2, width=8, depth=1, time_dim=8, steps=4, train_steps=4
    )
    teacher = DiffusionPolicy(replace(config, tuned_steps=2), state_dim=1, action_dim=1, generator=seeded())
    assert OneStepPolicy.student_of(teacher, generator=seeded()).config.tuned_steps == 0


def test_a_resumed_learner_is_the_unbroken_one() -> None:
    def build() -> Distillation:
        return Distillation(OneStepPolicy.student_of(flow()), flow(), DistilConfig(updates=9), 1)

    def updated(learner: Distillation, first: int, last: int) -> Distillation:
        for seed in range(first, last):
            learner.update(batch(seed))
        return learner

    whole, first, second = updated(build(), 0, 9), updated(build(), 0, 5), build()
    second.load_state_dict(first.state_dict())
    updated(second, 5, 9)
    ours, theirs = whole.policy_weights(), second.policy_weights()
    assert all(value.equal(theirs[key]) for key, value in ours.items())


def test_bad_settings_are_named() -> None:
    wrong: dict[str, Any] = {"updates": -1, "batch": 0, "lr": 0.0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"distil\.{name}: got {value!r}"):
            DistilConfig(**{name: value})
