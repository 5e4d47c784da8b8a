"""A residual on a frozen base: a small correction at every control step (ResFiT).

action = clip(base + scale tanh(head(features, base)), -1, 1). The base plans chunks, the residual
closes the loop. With the head's last layer at zero the policy is its base, bit for bit.
B envs, H chunk length, A action dim, F feature dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.adapter import FrozenBaseAdapter, refuse_continuing
from robot_rl.policies.config import ResidualHeadConfig
from robot_rl.policies.networks import MLP, initialise, zero_last_layer
from robot_rl.policies.processes import normal_like
from robot_rl.policies.spec import build_module, check_demonstration, full_spec, read_config


class ResidualPolicy(FrozenBaseAdapter):
    """Corrects a frozen base policy; only `head` learns. Chains, and their scores, are the base's."""

    kind: ClassVar[str] = "residual"
    learns_from: ClassVar[tuple[str, ...] | None] = ("features",)

    def __init__(
        self,
        base: nn.Module,
        head_config: ResidualHeadConfig,
        scale: float = 0.1,
        *,
        generator: Generator | None = None,
    ) -> None:
        """Freezes `base` and puts a head on its features.

        Args:
            base: a policy (`SavedPolicy`) that is a module as well.
            head_config: the correcting network.
            scale: the largest correction, as a share of the env's [-1, 1], in (0, 1].
            generator: draws the first weights (None: torch's own).
        """
        if not 0 < scale <= 1:
            raise ValueError(f"residual scale must be in (0, 1], got {scale}")
        if isinstance(base, ResidualPolicy):
            raise ValueError(
                "residual: the base is a residual itself, whose correction would be skipped. "
                "Train that one further, or take its base."
            )
        remedy = "Put the residual on its base, and the adapter around the residual."
        refuse_continuing(base, self.kind, remedy)
        super().__init__(base)
        self.head_config = head_config
        self.scale = scale
        inputs = self.feature_dim + self.action_dim
        size: dict[str, Any] = {"width": head_config.width, "depth": head_config.depth}
        self.head = MLP(inputs, self.action_dim, **size, layernorm=head_config.layernorm)
        initialise(self.head, generator)
        zero_last_layer(self.head)

    @property
    def refines(self) -> bool:
        return True

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the base's chunk. Exploration belongs to `refine`: the base stays as it is."""
        base_mode: Mode = "ode" if mode == "explore" else mode
        return self.policy.sample(encoded, z=z, mode=base_mode, record=record, generator=generator)

    def refine(
        self, encoded: Encoded, action: Tensor, *, mode: Mode = "ode", generator: Generator | None = None
    ) -> Tensor:
        """Returns the corrected action (B, A); mode `explore` adds clipped Gaussian noise."""
        corrected = action + self.residual(encoded["features"], action)
        if mode == "explore":
            noise = self.head_config.explore_std * normal_like(action, generator)
            corrected = corrected + noise.clamp(-self.head_config.noise_clip, self.head_config.noise_clip)
        return corrected.clamp(-1.0, 1.0)

    def residual(self, obs_features: Tensor, base_action: Tensor) -> Tensor:
        """Returns the correction (..., A) in [-scale, scale]; gradients reach the head.

        Args:
            obs_features: the base's `features`, (..., F).
            base_action: the base's action, (..., A).
        """
        return self.scale * self.head(torch.cat([obs_features, base_action], dim=-1)).tanh()

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the squared error of the first corrected action of each chunk."""
        check_demonstration(batch, self.horizon, self.action_dim)
        encoded = self.encode(batch.obs)
        with torch.no_grad():
            base_action = self.policy.sample(encoded, generator=generator).actions[:, 0]
        error = (self.refine(encoded, base_action) - batch.actions[:, 0]).square().mean(dim=-1)
        weight = batch.valid[:, 0].to(error.dtype)
        return (error * weight).sum() / weight.sum().clamp_min(1.0)

    def spec(self) -> dict[str, Any]:
        head = asdict(self.head_config)
        return {"base": full_spec(self.policy), "head": head, "scale": self.scale}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        head = read_config(ResidualHeadConfig, spec["head"], at=at)
        return cls(build_module(spec, "base", at=at), head, float(spec["scale"]))
