"""Steering a frozen base by the noise that it decodes (DSRL, Wagenmaker et al. 2025; GR-RL).

    z = bound tanh(mean(features) + std(features) noise),  chunk = base.sample(z=z, mode="ode")

The base is a deterministic decoder, called once per chunk. The noise that it decodes is learned, so every
chunk is one that the base can produce. Until it `steers`, the given noise is decoded as it is: the first
policy is the base itself. B envs, H chunk length, A action dim, F feature dim, L
latent dim: H A, or A where one noise vector serves the whole chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.adapter import FrozenBaseAdapter, refuse_continuing
from robot_rl.policies.chain import initial_noise
from robot_rl.policies.config import LatentActorConfig
from robot_rl.policies.networks import MLP, initialise
from robot_rl.policies.spec import build_module, check_mode, full_spec, read_config

LOG_STD_RANGE = (-20.0, 2.0)
"""Of the actor's Gaussian before the tanh, as in SAC."""


class LatentSteer(FrozenBaseAdapter):
    """Chooses the noise of a frozen base policy; only `actor` learns."""

    kind: ClassVar[str] = "latent"

    def __init__(
        self, base: nn.Module, config: LatentActorConfig, *, generator: Generator | None = None
    ) -> None:
        """Freezes `base` and puts an actor on its features.

        Args:
            base: a policy (`SavedPolicy`) that is a module as well, whose mode `ode` decodes noise.
            config: the actor.
            generator: draws the first weights (None: torch's own).
        """
        refuse_continuing(base, self.kind, "Steer its base, and put the adapter around the steered one.")
        super().__init__(base)
        self.config = config
        self.latent_dim = self.action_dim * (1 if config.repeat else self.horizon)
        size: dict[str, Any] = {"width": config.width, "depth": config.depth}
        self.actor = MLP(self.feature_dim, 2 * self.latent_dim, **size, layernorm=config.layernorm)
        initialise(self.actor, generator)
        self.steers: Tensor = nn.Buffer(torch.tensor(False))
        """Whether the actor chooses the noise; a buffer, so that it is saved with the weights."""

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the chunk (B, H, A) of the chosen noise, which `latent` holds as it was decoded.

        `explore` draws the noise, with `z` as its source of chance, so that an episode repeats as
        that of any policy does; `ode` and `mean` take the actor's mean. The base decodes without
        noise of its own in every mode.
        """
        check_mode(mode)
        features = encoded["features"]
        z = initial_noise(self, features, z, "ode", generator)
        if self.steers:
            noise = self.flat(z) if mode == "explore" else torch.zeros_like(self.flat(z))
            flat = self.config.bound * self.choose(features, noise)[0]
        else:
            flat = torch.zeros_like(self.flat(z)) if mode == "mean" else self.flat(z)
        z = self.unflat(flat)
        found = self.policy.sample(encoded, z=z, mode="ode", record=record, generator=generator)
        return replace(found, latent=z)

    def choose(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the noise to decode as a share of its bound, in (-1, 1), and log std, (B, L) each.

        Args:
            features: the base's `features`, (B, F).
            noise: standard normal, (B, L); zero gives the mean.
        """
        mean, log_std = self.actor(features).chunk(2, dim=-1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        return torch.addcmul(mean, log_std.exp(), noise).tanh(), log_std

    def decode(self, encoded: Encoded, flat: Tensor) -> Tensor:
        """Returns the base's chunks (B, H, A) of latents (B, L), without gradient."""
        with torch.no_grad():
            return self.policy.sample(encoded, z=self.unflat(flat), mode="ode").actions

    def flat(self, z: Tensor) -> Tensor:
        """Returns the latent (B, L) of noise (B, H, A): all of it, or its first vector."""
        return z[:, 0] if self.config.repeat else z.flatten(1)

    def unflat(self, flat: Tensor) -> Tensor:
        """Returns noise (B, H, A) of a latent (B, L)."""
        if self.config.repeat:
            return flat[:, None].expand(-1, self.horizon, -1)
        return flat.unflatten(1, (self.horizon, self.action_dim))

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Refuses: the base is frozen, and the actor chooses noise, which no demonstration shows."""
        raise ValueError("bc_loss: the base of a steered policy is frozen. Clone it before it is steered.")

    def refine(
        self, encoded: Encoded, action: Tensor, *, mode: Mode = "ode", generator: Generator | None = None
    ) -> Tensor:
        """Returns what the base makes of the action; exploration is the latent's alone."""
        base_mode: Mode = "ode" if mode == "explore" else mode
        return self.policy.refine(encoded, action, mode=base_mode, generator=generator)

    def spec(self) -> dict[str, Any]:
        return {"base": full_spec(self.policy), "actor": asdict(self.config)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        config = read_config(LatentActorConfig, spec["actor"], at=at)
        return cls(build_module(spec, "base", at=at), config)
