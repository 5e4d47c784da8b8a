"""Implicit Q-learning over action chunks (Kostrikov et al. 2022): critics of data, from that data alone.

    V follows the expectile of Q'(s, a) over the actions of the data     |tau - 1(u < 0)| u^2,  u = Q' - V
    Q follows  y = sum_{i<m} gamma^i r_{t+i} + gamma^m V(s_{t+m})        0 in place of V where the task ended

No action outside of the data is valued. `advantage` = Q' - V is how much better the executed actions of a
chunk are than the data's usual ones; RL-100 improves its policy by it. Deviation: narrower networks.
B batch, F features, H chunk length, A action dim, P lengths that have a value (one without `prefix`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from robot_rl.algos.chunk_critics import ChunkCritics
from robot_rl.algos.config.on_policy import IQLConfig
from robot_rl.algos.critics import EnsembleMLP, Path
from robot_rl.algos.learner import Learner
from robot_rl.algos.losses import expectile_weight
from robot_rl.algos.optim import METRICS_EVERY, Optimiser, follow
from robot_rl.algos.returns import td_target
from robot_rl.data.transitions import ChunkBatch


class IQL(Learner):
    """Learns Q of (features, executed actions) and V of features, whose encoder is not learned here."""

    def __init__(
        self, cfg: IQLConfig, *, feature_dim: int, action_dim: int, steps: int, seed: int, device: str = "cpu"
    ) -> None:
        """Draws the weights; `steps` are the executed actions of a chunk."""
        super().__init__()
        self._cfg, sizes = cfg, cfg.critics
        generator = Generator().manual_seed(seed)
        self.critics = ChunkCritics(
            sizes, feature_dim=feature_dim, action_dim=action_dim, steps=steps, generator=generator
        ).to(device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self._value = EnsembleMLP(
            feature_dim,
            1,
            width=sizes.width,
            depth=sizes.depth,
            layernorm=sizes.layernorm,
            matmul=sizes.matmul,
            generator=generator,
        ).to(device)
        rates = {"lr": cfg.lr, "grad_clip": cfg.grad_clip}
        self._critic_optimiser = Optimiser(self.critics.parameters(), **rates)
        self._value_optimiser = Optimiser(self._value.parameters(), **rates)

    @torch.no_grad()
    def update(self, features: Tensor, batch: ChunkBatch, next_features: Tensor) -> Mapping[str, Tensor]:
        """Takes a step of V, then one of Q.

        Args:
            features: of the observations, (B, F).
            batch: drawn with `prefixes=critics.lengths`.
            next_features: of what the beginnings led to, (B, P, F).
        """
        ends = batch.prefix
        assert ends is not None, "draw with prefixes=critics.lengths"
        # A chunk that the newest step of its lane cuts short is no action of the data yet.
        whole_B = ends.is_whole[:, -1]
        value_B, path = self._valued(features)
        error_B = (self.target_critics.score(features, batch.action) - value_B) * whole_B
        weight_B = expectile_weight(error_B, self._cfg.expectile)
        to_value = (-2.0 / len(batch)) * weight_B * error_B
        self._value_optimiser.apply(self._value.gradients(to_value.view(1, -1, 1), path))
        next_value_BP = self.value(next_features.flatten(0, 1)).view_as(ends.reward)
        target_BP = td_target(ends.reward, ends.bootstrap, next_value_BP)
        error, gradients = self.critics.td_gradients(features, batch.action, target_BP, ends.is_whole)
        self._critic_optimiser.apply(gradients)
        follow(self.target_critics.parameters(), self.critics.parameters(), self._cfg.tau)
        self._updates += 1
        if self._updates % METRICS_EVERY:
            return {}
        return {
            "critic_loss": error.square().mean(dim=1).sum(),
            "value_loss": (weight_B * error_B.square()).mean(),
            "value": value_B.mean(),
        }

    @torch.no_grad()
    def value(self, features: Tensor) -> Tensor:
        """Returns V (B,) of features (B, F)."""
        return self._valued(features)[0]

    def advantage(self, features: Tensor, actions: Tensor) -> Tensor:
        """Returns Q' - V (B,) of the executed actions of chunks (B, H, A)."""
        return self.target_critics.score(features, actions) - self.value(features)

    def _parts(self) -> Mapping[str, Any]:
        return {
            "critics": self.critics,
            "target_critics": self.target_critics,
            "value": self._value,
            "critic_optimiser": self._critic_optimiser,
            "value_optimiser": self._value_optimiser,
        }

    def _valued(self, features: Tensor) -> tuple[Tensor, Path]:
        out_NBO, path = self._value.answer(features)
        return out_NBO.flatten(), path
