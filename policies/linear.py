"""A policy whose chunk is a linear map of the state: ridge regression, or one element held.

Its weights are solved for, not learned by gradients: see `robot_rl.train.finetune.baselines`.
B envs, H chunk length, A action dim, S state dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.spec import Chainless, check_chunk, read_size


class LinearPolicy(Chainless, nn.Module):
    """chunk = state weight + offset, in the units of the data that it was solved for."""

    kind: ClassVar[str] = "linear"
    name: ClassVar[str] = "a linear policy"

    def __init__(self, weight: Tensor, offset: Tensor) -> None:
        """Takes weight (S, H, A) and offset (H, A); both are kept in double precision."""
        super().__init__()
        self.state_dim, self.horizon, self.action_dim = weight.shape
        self.feature_dim = self.state_dim
        check_chunk("linear", "offset", offset, (self.horizon, self.action_dim))
        self.weight = nn.Buffer(weight.double())
        self.offset = nn.Buffer(offset.double())

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the state as it is, (B, S), as `features`."""
        return Encoded({"features": obs["state"]})

    def _decide(
        self, features: Tensor, z: Tensor | None, mode: Mode, generator: Generator | None
    ) -> ChunkSample:
        """Returns the chunk, the same in every mode and whatever `z`."""
        return ChunkSample((torch.tensordot(features.double(), self.weight, dims=1) + self.offset).float())

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Refuses: it does not learn by gradients."""
        raise ValueError("bc_loss: a linear policy is solved for. Clone a gaussian or flow policy.")

    def spec(self) -> dict[str, Any]:
        return {"state_dim": self.state_dim, "horizon": self.horizon, "action_dim": self.action_dim}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        sizes = [read_size(spec, name, at=at) for name in ("state_dim", "horizon", "action_dim")]
        return cls(torch.zeros(sizes), torch.zeros(sizes[1:]))
