"""Noise: what acts where nothing has been learned yet, and what came of looking at the observations.

B envs, H chunk length, A action dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.encoded import EncodedPolicy
from robot_rl.policies.processes import normal_like
from robot_rl.policies.spec import check_chunk, check_mode


@dataclass(frozen=True, kw_only=True)
class NoisePolicyConfig:
    """How many actions it draws at once."""

    horizon: int = 1
    cameras: ClassVar[tuple[str, ...]] = ()
    """It sees nothing."""

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"noise horizon must be at least 1, got {self.horizon}")


class NoisePolicy(EncodedPolicy):
    """Every action is even over [-1, 1]; its normaliser is of the observations that noise came to.

    It is the base of methods that learn from nothing: they take the scale of the state from it.
    """

    kind: ClassVar[str] = "noise"
    config_class: ClassVar[type[Any]] = NoisePolicyConfig

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A): the share of a normal distribution below `z`, from -1 to 1.

        Raises:
            ValueError: a chain is asked for; there is none to score.
        """
        check_mode(mode)
        if record:
            raise ValueError("sample: noise has no chain to record. Use a gaussian or flow policy.")
        features = encoded["features"]
        shape = (len(features), self.horizon, self.action_dim)
        if z is None:
            z = normal_like(torch.zeros(shape, device=features.device), generator)
        check_chunk("sample", "z", z, shape)
        return ChunkSample(torch.erf(z / math.sqrt(2.0)))

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Refuses: there is no chain to score."""
        raise ValueError("log_prob: noise has no chains. Use a gaussian or flow policy.")

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Refuses: nothing of it learns."""
        raise ValueError("bc_loss: noise learns nothing. Clone a gaussian or flow policy.")
