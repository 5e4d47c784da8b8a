"""A Gaussian MLP policy: the mean from a network, one learned standard deviation per action.

There is no tanh: the density is that of the unclamped action, and only the output is clamped.
Its chain has one step: x_0 is noise that does not matter, x_1 the action in the normaliser's scale.
B envs, H chunk length, A action dim.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.encoded import EncodedPolicy, valid_mean
from robot_rl.policies.networks import MLP, initialise
from robot_rl.policies.processes import TimeGrid, gaussian_entropy, gaussian_log_prob, normal_like
from robot_rl.policies.spec import check_chunk, check_mode

GRID = TimeGrid("Gaussian()", (1.0, 0.0), {})
"""One step, whose standard deviation is learned and so no column of the grid."""


class GaussianPolicy(EncodedPolicy):
    """Draws a chunk from a Gaussian with a learned mean and a learned, state-independent std."""

    kind: ClassVar[str] = "gaussian"
    config_class: ClassVar[type[Any]] = GaussianPolicyConfig

    def __init__(
        self,
        config: GaussianPolicyConfig,
        *,
        state_dim: int,
        action_dim: int,
        normaliser: Normaliser | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Builds the networks; `generator` draws their first weights (None: torch's own)."""
        super().__init__(config, state_dim=state_dim, action_dim=action_dim, normaliser=normaliser)
        self.grid = GRID
        self.net = MLP(
            self.encoder.dim,
            config.horizon * action_dim,
            width=config.width,
            depth=config.depth,
            layernorm=config.layernorm,
            residual=config.residual,
        )
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(config.initial_std)))
        initialise(self, generator)

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A): a draw in mode `explore`, otherwise the mean whatever `z`."""
        check_mode(mode)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not record):
            mean, std = self.moments(encoded)
            if z is not None:
                check_chunk("sample", "z", z, tuple(mean.shape))
            explore = mode == "explore"
            x = mean + std * normal_like(mean, generator) if explore else mean
            chain = self._chain(torch.zeros_like(x) if z is None else z, x, mean, explore)
        return ChunkSample(self.executed(x), chain if record else None)

    def moments(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Returns the mean (B, H, A), in the normaliser's scale, and the standard deviation (A,)."""
        return self._mean(encoded["features"]), self._std()

    def executed(self, drawn: Tensor) -> Tensor:
        """Returns the actions, in [-1, 1], of draws (..., A) in the normaliser's scale."""
        return self.normaliser.unaction(drawn.clamp(-1.0, 1.0)).clamp(-1.0, 1.0)

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Returns log-probability and entropy of the chunk, (B, 1) each.

        Raises:
            ValueError: the chain is of another policy, or was not sampled in mode `explore`.
        """
        if chain.grid != GRID:
            raise ValueError(
                f"log_prob: the chain was sampled by {chain.grid.process}, this policy is Gaussian. "
                "Score it with the policy that made it."
            )
        if chain.index.shape[1] == 0:
            raise ValueError("log_prob: the chain has no stochastic step. Sample with mode='explore'.")
        mean, std = self.moments(encoded)
        log_prob = gaussian_log_prob(chain.x[:, 1], mean, std)
        return log_prob[:, None], gaussian_entropy(std, like=mean)[:, None]

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the mean negative log-likelihood per action element over valid steps."""
        features, actions = self._demonstration(batch, generator)
        std = self._std()
        deviation = (actions - self._mean(features)) / std
        nll = 0.5 * deviation.square() + std.log() + 0.5 * math.log(2.0 * math.pi)
        return valid_mean(nll, batch.valid) + self.guess_loss(features, batch.obs)

    def _mean(self, features: Tensor) -> Tensor:
        return self.net(features).view(-1, self.horizon, self.action_dim)

    def _std(self) -> Tensor:
        low, high = math.log(self.config.min_std), math.log(self.config.max_std)
        return self.log_std.clamp(low, high).exp()

    def _chain(self, z: Tensor, x: Tensor, mean: Tensor, explore: bool) -> Chain:
        scored = 1 if explore else 0
        index = torch.zeros((len(x), scored), dtype=torch.long, device=x.device)
        log_prob = gaussian_log_prob(x, mean, self._std())[:, None].expand(-1, 1)[:, :scored]
        return Chain(x=torch.stack([z, x], dim=1), index=index, log_prob=log_prob, grid=GRID)
