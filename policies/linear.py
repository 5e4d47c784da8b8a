"""A policy whose chunk is a linear map of the state: ridge regression, or one element held.

Nothing trains it by gradients: its weights are solved for, as `robot_rl.train.finetune.baselines` does.
B envs, H chunk length, A action dim, S state dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.spec import check_chunk, check_mode, read_size


class LinearPolicy(nn.Module):
    """chunk = state weight + offset, in the units of the data that it was solved for."""

    kind: ClassVar[str] = "linear"
    refines = False

    def __init__(self, weight: Tensor, offset: Tensor) -> None:
        """Takes weight (S, H, A) and offset (H, A); both are kept in double precision."""
        super().__init__()
        self.state_dim, self.horizon, self.action_dim = weight.shape
        self.feature_dim = self.state_dim
        check_chunk("linear", "offset", offset, (self.horizon, self.action_dim))
        self.weight: Tensor
        self.offset: Tensor
        self.register_buffer("weight", weight.double())
        self.register_buffer("offset", offset.double())

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the state as it is, (B, S), as `features`."""
        return Encoded({"features": obs["state"]})

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the chunk (B, H, A), the same in every mode and whatever `z`.

        Raises:
            ValueError: a chain is asked for; there is none to score.
        """
        check_mode(mode)
        if record:
            raise ValueError("sample: a linear policy has no chain to record. Use a gaussian or flow policy.")
        chunk = torch.tensordot(encoded["features"].double(), self.weight, dims=1) + self.offset
        if z is not None:
            check_chunk("sample", "z", z, tuple(chunk.shape))
        return ChunkSample(chunk.float())

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Refuses: there is no chain to score."""
        raise ValueError("log_prob: a linear policy has no chains. Use a gaussian or flow policy.")

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Refuses: nothing of it learns by gradients."""
        raise ValueError("bc_loss: a linear policy is solved for. Clone a gaussian or flow policy.")

    def refine(
        self,
        encoded: Encoded,
        action: Tensor,
        *,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> Tensor:
        """Returns the chunk's action as it is."""
        return action

    def spec(self) -> dict[str, Any]:
        return {"state_dim": self.state_dim, "horizon": self.horizon, "action_dim": self.action_dim}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        sizes = [read_size(spec, name, at=at) for name in ("state_dim", "horizon", "action_dim")]
        return cls(torch.zeros(sizes), torch.zeros(sizes[1:]))
