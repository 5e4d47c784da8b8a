"""Actors over features, with their backward passes: a squashed Gaussian, and a deterministic one.

B batch, F features, A action dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.config.off_policy import LOG_STD_RANGE
from robot_rl.algos.critics import EnsembleMLP, Path

_MOST_DEMONSTRATED = 0.999  # of an action's range: beyond, atanh has no bound


class Squashed(NamedTuple):
    """A sample of the actor, and what its backward pass needs."""

    action: Tensor
    """(B, A) in (-1, 1)."""
    log_prob: Tensor
    """(B,)"""
    noise: Tensor
    std: Tensor
    within: Tensor
    """Where the log std was inside its range, and moves with its network."""
    path: Path

    def rows(self, rows: slice) -> Squashed:
        """Returns some rows of a sample without batch norm."""
        return Squashed._make([*(part[rows] for part in self[:-1]), self.path.rows(rows)])


def squashed_log_prob(action: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """Returns the log-probability (B,) of actions tanh(mean + std noise), (B, A) in (-1, 1)."""
    # log N(u; mean, std) - log(1 - tanh(u)^2), summed over A; 1e-6 keeps the log finite.
    log_prob = (1.0 + 1e-6 - action.square()).log_().add_(log_std).addcmul_(noise, noise, value=0.5)
    constant = 0.5 * math.log(2 * math.pi) * action.shape[-1]
    return log_prob.sum(dim=-1).add_(constant).neg_()


class TanhGaussian(nn.Module):
    """An actor: Gaussian, squashed to (-1, 1)."""

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        *,
        log_std_range: tuple[float, float] = LOG_STD_RANGE,
        **network: Any,
    ) -> None:
        """Args: network: width, depth, norms, matmul, generator: see `EnsembleMLP`."""
        super().__init__()
        self.net = EnsembleMLP(feature_dim, 2 * action_dim, **network)
        self._log_std_range = log_std_range

    @torch.no_grad()
    def mean(self, features: Tensor) -> Tensor:
        """Returns the action (B, A) without noise."""
        return self.net.answer(features)[0][0].chunk(2, dim=-1)[0].tanh()

    def sample(
        self, features: Tensor, generator: Generator | None = None, *, trains: bool = False
    ) -> Squashed:
        """Draws actions: a = tanh(mean + std noise); `trains` as in `EnsembleMLP.answer`."""
        out_NBO, path = self.net.answer(features, trains=trains)
        mean, raw_log_std = out_NBO[0].chunk(2, dim=-1)
        log_std = raw_log_std.clamp(*self._log_std_range)
        std = log_std.exp()
        noise = torch.empty_like(std).normal_(generator=generator)
        action = torch.addcmul(mean, std, noise).tanh_()
        log_prob = squashed_log_prob(action, log_std, noise)
        return Squashed(action, log_prob, noise, std, log_std == raw_log_std, path)

    def gradients(self, sample: Squashed, to_action: Tensor, to_log_prob: Tensor) -> list[Tensor]:
        """Returns the gradients of the parameters, in their order.

        Args:
            sample: what `sample` returned.
            to_action: the loss's derivative by the action, (B, A).
            to_log_prob: its derivative by the log-probability, the same for all rows.
        """
        # u = mean + std noise: da/du = 1 - a^2; d log_prob / du = 2 a, and -1 more by log std.
        to_u = to_action * (1.0 - sample.action.square()) + sample.action * (2.0 * to_log_prob)
        to_log_std = (to_u * sample.noise).mul_(sample.std).sub_(to_log_prob).mul_(sample.within)
        return self.net.gradients(torch.cat([to_u, to_log_std], dim=-1).unsqueeze(0), sample.path)

    def cloning_gradients(self, features: Tensor, action: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss of behaviour cloning, and the gradients of the parameters.

        It is the negative log-likelihood of atanh(action), a mean over batch and elements, without
        its constants.
        """
        out_NBO, path = self.net.answer(features, trains=True)
        mean, raw_log_std = out_NBO[0].chunk(2, dim=-1)
        log_std = raw_log_std.clamp(*self._log_std_range)
        u = action.clamp(-_MOST_DEMONSTRATED, _MOST_DEMONSTRATED).atanh_()
        deviation = (u - mean) * (-log_std).exp_()
        loss = (0.5 * deviation.square() + log_std).mean()
        to_mean = deviation * (-log_std).exp_() * (-1.0 / u.numel())
        to_log_std = (1.0 - deviation.square()) * (log_std == raw_log_std) / u.numel()
        return loss, self.net.gradients(torch.cat([to_mean, to_log_std], dim=-1).unsqueeze(0), path)


class Point(NamedTuple):
    """An action of the deterministic actor, and its path."""

    action: Tensor
    """(B, A) in (-1, 1)."""
    path: Path


class Deterministic(nn.Module):
    """An actor without noise: a = tanh(network)."""

    def __init__(self, feature_dim: int, action_dim: int, **network: Any) -> None:
        """Args: network: width, depth, norms, matmul, generator: see `EnsembleMLP`."""
        super().__init__()
        self.net = EnsembleMLP(feature_dim, action_dim, **network)

    @torch.no_grad()
    def mean(self, features: Tensor) -> Tensor:
        """Returns the action (B, A)."""
        return self.net.answer(features)[0][0].tanh_()

    def sample(self, features: Tensor, *, trains: bool = False) -> Point:
        """Returns the action with its path; `trains` as in `EnsembleMLP.answer`."""
        out_NBO, path = self.net.answer(features, trains=trains)
        return Point(out_NBO[0].tanh_(), path)

    def gradients(self, sample: Point, to_action: Tensor) -> list[Tensor]:
        """Returns the gradients of the parameters, given the loss's derivative (B, A) by the action."""
        to_u = to_action * (1.0 - sample.action.square())
        return self.net.gradients(to_u.unsqueeze(0), sample.path)

    def cloning_gradients(self, features: Tensor, action: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the squared error to demonstrated actions (B, A), a mean, and its gradients."""
        sample = self.sample(features, trains=True)
        error = sample.action - action
        return error.square().mean(), self.gradients(sample, error * (2.0 / error.numel()))
