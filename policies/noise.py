"""A policy of noise, which acts before anything is learned, and the scale of what it observed.

B envs, H chunk length, A action dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from robot_rl.core.errors import require_fields
from robot_rl.core.policy import ChunkSample, DemoBatch, Mode
from robot_rl.policies.chain import initial_noise
from robot_rl.policies.encoded import EncodedPolicy
from robot_rl.policies.spec import Chainless


@dataclass(frozen=True, kw_only=True)
class NoisePolicyConfig:
    """How many actions it draws at once."""

    horizon: int = 1
    cameras: ClassVar[tuple[str, ...]] = ()
    """It sees nothing."""

    def __post_init__(self) -> None:
        require_fields(self, "noise ", "1 or more", "horizon")


class NoisePolicy(Chainless, EncodedPolicy):
    """Every action is uniform over [-1, 1]; its normaliser is that of the observations made by noise.

    It is the base of methods that learn from nothing: they take the scale of the state from it.
    """

    kind: ClassVar[str] = "noise"
    name: ClassVar[str] = "noise"
    config_class: ClassVar[type[Any]] = NoisePolicyConfig

    def _decide(
        self, features: Tensor, z: Tensor | None, mode: Mode, generator: Generator | None
    ) -> ChunkSample:
        """Returns the share of a normal distribution below `z`, from -1 to 1."""
        return ChunkSample(torch.erf(initial_noise(self, features, z, "ode", generator) / math.sqrt(2.0)))

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Refuses: it has nothing to learn."""
        raise ValueError("bc_loss: noise learns nothing. Clone a gaussian or flow policy.")
