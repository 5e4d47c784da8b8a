"""What policies around another policy share: all that they leave to it.

B envs, H chunk length, A action dim, F feature dim.
"""

from __future__ import annotations

from typing import cast

from torch import Generator, Tensor, nn

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Mode
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

    def sample(
        self,
        obs: dict[str, Tensor],
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        return self.policy.sample(obs, z=z, mode=mode, record=record, generator=generator)

    def log_prob(self, obs: dict[str, Tensor], chain: Chain) -> tuple[Tensor, Tensor]:
        return self.policy.log_prob(obs, chain)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        return self.policy.bc_loss(batch, generator)

    def features(self, obs: dict[str, Tensor]) -> Tensor:
        return self.policy.features(obs)

    def refine(
        self,
        obs: dict[str, Tensor],
        action: Tensor,
        *,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> Tensor:
        return self.policy.refine(obs, action, mode=mode, generator=generator)
