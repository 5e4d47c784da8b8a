"""Every kind of policy keeps the rules of the contract, and each rule is seen to be broken."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded
from robot_rl.core.registry import TABLE
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.conformance import ConformanceError, check_policy
from robot_rl.policies.gaussian import GaussianPolicy
from tests.kinds import ADAPTERS, META, PROCESSES, make, normaliser, observe, seeded

KINDS: dict[str, Callable[[], Any]] = {name: partial(make, name) for name in PROCESSES} | ADAPTERS
IN_UNITS = ("small_vla", "linear")
"""Made for a dataset: their actions are in its units."""
ELSEWHERE = {"lerobot", "lerobot_diffusion", "lerobot_flow", "given", "onnx"}
"""Held to LeRobot's own numbers in tests/policies/vla: their noise is as wide as the VLA pads it, not as the
action, and pi0 learns what is not valid. A graph of ONNX, and `given` around it:
tests/policies/test_onnx_policy.py."""


@pytest.mark.parametrize("name", KINDS)
def test_every_policy_conforms(name: str, tmp_path: Path) -> None:
    in_units = name.startswith(IN_UNITS)
    check_policy(KINDS[name], observe, save=(tmp_path / "policy", META), bounded=not in_units)


def test_no_kind_of_policy_is_left_out() -> None:
    assert {KINDS[name]().kind for name in KINDS} == set(TABLE["policy"]) - ELSEWHERE


class Broken(GaussianPolicy):
    """A policy whose samples pass through `spoil`, which its children override."""

    def sample(self, encoded: Any, **options: Any) -> ChunkSample:
        return self.spoil(super().sample(encoded, **options), encoded)

    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        return sample


class TooFar(Broken):
    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        return ChunkSample(3.0 * sample.actions, sample.chain)


class NanAction(Broken):
    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        sample.actions[-1, -1, -1] = torch.nan
        return sample


class OneActionShort(Broken):
    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        return ChunkSample(sample.actions[:, 1:], sample.chain)


class OtherNoise(Broken):
    """Draws from torch's global generator."""

    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        return ChunkSample((sample.actions + 0.01 * torch.rand(())).clamp(-1, 1), sample.chain)


class NoiseBeside(Broken):
    """Draws more noise than the noise that it was given."""

    def sample(self, encoded: Any, *, generator: Any = None, **options: Any) -> ChunkSample:
        sample = super().sample(encoded, generator=generator, **options)
        more = 0.01 * torch.rand(sample.actions.shape, generator=generator)
        return ChunkSample((sample.actions + more).clamp(-1, 1), sample.chain)


class RowsMeet(Broken):
    """Looks at the mean of the batch, as batch norm in training mode does."""

    def encode(self, obs: Any) -> Encoded:
        return super().encode({"state": obs["state"] - obs["state"].mean(0)})


class WritesObs(Broken):
    def encode(self, obs: Any) -> Encoded:
        obs["state"][0] += 1.0
        return super().encode({"state": torch.zeros_like(obs["state"])})


class WritesEncoded(Broken):
    """Changes what the critics are still to read."""

    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        encoded["features"][0] += 1.0
        return sample


class LooksAgain(Broken):
    """Keeps the observation, and encodes it anew to sample from it."""

    def encode(self, obs: Any) -> Encoded:
        self._seen = obs
        return super().encode(obs)

    def sample(self, encoded: Any, **options: Any) -> ChunkSample:
        return super().sample(super().encode(self._seen), **options)


class CorrectsUnasked(Broken):
    """Corrects actions, and says that it does not: nobody would ask it."""

    def refine(self, encoded: Any, action: torch.Tensor, **options: Any) -> torch.Tensor:
        return 0.5 * action


class AlwaysRecords(Broken):
    def sample(self, encoded: Any, *, record: bool = False, **options: Any) -> ChunkSample:
        return super().sample(encoded, record=True, **options)


class ClampedChain(Broken):
    """Scores what was executed, where it drew something else."""

    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        if sample.chain is not None:
            sample.chain.x.clamp_(-0.5, 0.5)
        return sample


class OldDensity(Broken):
    """Returns the recorded log-probability, whatever the weights are."""

    def log_prob(self, encoded: Any, chain: Chain) -> tuple[torch.Tensor, torch.Tensor]:
        return chain.log_prob, chain.log_prob


class ShortFeatures(Broken):
    def encode(self, obs: Any) -> Encoded:
        return Encoded({"features": super().encode(obs)["features"][:, :1]})


class RefinesBeyond(Broken):
    def refine(self, encoded: Any, action: torch.Tensor, **options: Any) -> torch.Tensor:
        return action + 1.0


class ClonesPadding(Broken):
    def bc_loss(self, batch: DemoBatch, generator: Any = None) -> torch.Tensor:
        everywhere = torch.ones_like(batch.valid)
        return super().bc_loss(DemoBatch(batch.obs, batch.actions, everywhere), generator)


class LossOfANumber(Broken):
    def bc_loss(self, batch: DemoBatch, generator: Any = None) -> torch.Tensor:
        return super().bc_loss(batch, generator).detach()


class LearnsNothing(Broken):
    """Has a loss, and a gradient, that do not depend on what is demonstrated."""

    def bc_loss(self, batch: DemoBatch, generator: Any = None) -> torch.Tensor:
        return sum((parameter.square().sum() for parameter in self.parameters()), torch.zeros(()))


class ForgetsItself(Broken):
    """Keeps a weight that no checkpoint holds."""

    def spoil(self, sample: ChunkSample, encoded: Any) -> ChunkSample:
        moved = getattr(self, "_moved", 0.0)
        return ChunkSample((sample.actions + moved).clamp(-1, 1), sample.chain)


BROKEN: dict[type[Broken], str] = {
    TooFar: r"sample, mode ode: actions",
    NanAction: r"sample, mode ode: actions",
    OneActionShort: r"sample, mode ode: shape",
    OtherNoise: r"sample, mode \w+: twice with the same generator",
    NoiseBeside: r"sample: the same noise with another generator",
    RowsMeet: r"sample: row 0 alone and among 24",
    WritesObs: r"encode: observation 'state'",
    WritesEncoded: r"sample, mode ode: 'features': got changed",
    LooksAgain: r"encode: once in a control step, but sample runs",
    CorrectsUnasked: r"refine, mode ode: actions, though it `refines` not",
    AlwaysRecords: r"sample, mode ode: chain without record",
    ClampedChain: r"log_prob of a recorded chain",
    OldDensity: r"log_prob after the weights have moved",
    ShortFeatures: r"encode: shape of features",
    RefinesBeyond: r"refine, mode ode: actions",
    ClonesPadding: r"bc_loss: other actions in rows that are not valid",
    LossOfANumber: r"bc_loss: gradient",
    LearnsNothing: r"bc_loss: other actions: got the same loss",
    ForgetsItself: r"saved and loaded: actions",
}


def broken(kind: type[Broken]) -> Broken:
    config = GaussianPolicyConfig(width=16, depth=1, horizon=8)
    policy = kind(config, state_dim=4, action_dim=3, normaliser=normaliser(), generator=seeded())
    policy._moved = 0.1  # pyright: ignore
    return policy


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_rule_is_named(kind: type[Broken], tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match=BROKEN[kind]):
        check_policy(partial(broken, kind), observe, save=(tmp_path / "policy", META))


def test_the_broken_ones_are_broken_in_nothing_else(tmp_path: Path) -> None:
    check_policy(partial(broken, Broken), observe, save=(tmp_path / "policy", META))
