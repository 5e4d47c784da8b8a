"""Policies around another policy.

B envs, H chunk length, A action dim, F feature dim.
"""

from __future__ import annotations

from typing import ClassVar, Self, cast

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import Chain, ChunkSample, ContinuingPolicy, DemoBatch, Encoded, Mode
from robot_rl.policies.spec import SavedPolicy


class PolicyAdapter(nn.Module):
    """Does what its base does; an adapter overrides what it changes."""

    def __init__(self, base: nn.Module) -> None:
        """Wraps `base`, a policy (`SavedPolicy`) that is a module as well."""
        super().__init__()
        self.base = base
        self.horizon: int = self.policy.horizon
        self.action_dim: int = self.policy.action_dim
        self.feature_dim: int = self.policy.feature_dim

    @property
    def policy(self) -> SavedPolicy:
        """The base, seen as a policy."""
        return cast("SavedPolicy", self.base)

    @property
    def refines(self) -> bool:
        return self.policy.refines

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        return self.policy.encode(obs)

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        return self.policy.sample(encoded, z=z, mode=mode, record=record, generator=generator)

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        return self.policy.log_prob(encoded, chain)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        return self.policy.bc_loss(batch, generator)

    def refine(
        self, encoded: Encoded, action: Tensor, *, mode: Mode = "ode", generator: Generator | None = None
    ) -> Tensor:
        return self.policy.refine(encoded, action, mode=mode, generator=generator)


class FrozenBaseAdapter(PolicyAdapter):
    """An adapter whose base never learns: it stays in evaluation mode, and encodes without gradient.

    So the encoding of an observation stays the same, and a replay can keep it in the place of pictures.
    """

    learns_from: ClassVar[tuple[str, ...] | None] = None
    """Names in the encoding that its learner reads, and a replay keeps; None: all."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base.requires_grad_(False).eval())

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns what the frozen base makes of observations, without gradient; an encoding as it is."""
        if "features" in obs:
            return Encoded(obs)
        with torch.no_grad():
            return self.policy.encode(obs)

    def train(self, mode: bool = True) -> Self:
        """Switches all but the base."""
        super().train(mode)
        self.base.eval()
        return self


def refuse_continuing(base: nn.Module, kind: str, remedy: str) -> None:
    """Refuses a base whose chunks continue each other: the adapter would change them."""
    if isinstance(base, ContinuingPolicy):
        raise ValueError(
            f"{kind}: the base is {type(base).__name__}, whose chunks would no longer continue each other. "
            f"{remedy}"
        )
