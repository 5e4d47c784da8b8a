"""Critics of action chunks: the value of doing the first h actions of a chunk, one after another.

With `prefix` they also value every shorter beginning (CO-RFT's critic predicts a sequence of values along
the chunk; ACSAC scores every prefix): later actions are zeroed and flags say which are there, so no
value depends on an action after it. CO-RFT uses a transformer, here it is the same network for all k.
N critics, B batch, F features, H chunk length, h of it that is executed, A action dim, P lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.config.off_policy import ChunkCriticConfig
from robot_rl.algos.critics import Critics
from robot_rl.algos.learner import PolicyModule


class ChunkCritics(nn.Module):
    """N estimates of the value of (features, first h actions); a scorer of `best_of_n`."""

    kind: ClassVar[str] = "critic"

    def __init__(
        self,
        config: ChunkCriticConfig,
        *,
        feature_dim: int,
        action_dim: int,
        steps: int,
        generator: Generator | None = None,
    ) -> None:
        """Draws the weights.

        Args:
            config: sizes.
            feature_dim: F.
            action_dim: A.
            steps: h, the executed actions of a chunk.
            generator: of the weights (None: torch's own).
        """
        super().__init__()
        self.config, self.steps = config, steps
        self.lengths = tuple(range(1, steps + 1)) if config.prefix else (steps,)
        """k of the P values, ascending; the last is h."""
        flags = torch.arange(steps) < torch.tensor(self.lengths)[:, None]
        self.flags = nn.Buffer(flags.float(), persistent=False)
        self.net = Critics(
            feature_dim,
            steps * (action_dim + config.prefix),
            num=config.num,
            width=config.width,
            depth=config.depth,
            layernorm=config.layernorm,
            matmul=config.matmul,
            generator=generator,
        )

    @torch.no_grad()
    def values(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns the estimates (N, B, P) of features (B, F) and chunks (B, H, A), without gradient."""
        rows = self._beginnings(actions, self.flags)
        repeated = features.repeat_interleave(len(self.lengths), dim=0)
        return self.net.q(repeated, rows).unflatten(1, (len(features), -1))

    @torch.no_grad()
    def score(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns the value (B,) of the executed actions of chunks (B, H, A), without gradient."""
        return self._aggregated(self.net.q(features, self._beginnings(actions, self.flags[-1:])))

    def td_gradients(
        self, features: Tensor, actions: Tensor, target_BP: Tensor, counts_BP: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the errors q - target (N, R) of the R values that count, and the gradients of `td_loss`."""
        rows = self._beginnings(actions, self.flags)
        repeated = features.repeat_interleave(len(self.lengths), dim=0)
        target, counts = target_BP.flatten(), counts_BP.flatten()
        if not counts.all():
            rows, repeated, target = rows[counts], repeated[counts], target[counts]
        return self.net.td_gradients(repeated, rows, target)

    def action_gradient(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the value (B,) of the executed actions, and its derivative (B, H, A) by the chunk."""
        rows = self._beginnings(actions, self.flags[-1:])
        value, by_row = self.net.action_gradient(features, rows, self.config.aggregate)
        gradient = torch.zeros_like(actions)
        executed = gradient[:, : self.steps]
        executed.copy_(by_row[:, : executed[0].numel()].view_as(executed))
        return value, gradient

    def spec(self) -> dict[str, Any]:
        return {"config": asdict(self.config), "steps": self.steps}

    @classmethod
    def for_policy(cls, spec: Mapping[str, Any], policy: PolicyModule, *, at: str) -> Self:
        """Builds the critics of a policy's chunks, with weights still to be loaded."""
        steps = spec["steps"]
        if not isinstance(steps, int) or not 1 <= steps <= policy.horizon:
            raise ValueError(f"{at}: steps must be 1 to the policy's horizon {policy.horizon}, got {steps!r}")
        config = ChunkCriticConfig(**spec["config"])
        return cls(config, feature_dim=policy.feature_dim, action_dim=policy.action_dim, steps=steps)

    def _beginnings(self, actions: Tensor, flags: Tensor) -> Tensor:
        """Returns (B P, h A), and with `prefix` the h flags: each chunk's beginnings, row after row."""
        executed = actions[:, : self.steps]
        if not self.config.prefix:
            return executed.flatten(1)
        kept = (executed[:, None] * flags[:, :, None]).flatten(2)
        return torch.cat([kept, flags.expand(len(kept), -1, -1)], dim=-1).flatten(0, 1)

    def _aggregated(self, q_NB: Tensor) -> Tensor:
        return q_NB.mean(dim=0) if self.config.aggregate == "mean" else q_NB.amin(dim=0)
