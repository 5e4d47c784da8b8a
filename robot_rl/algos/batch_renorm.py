"""Batch renormalisation (Ioffe 2017) of an ensemble's layers, both ways, as CrossQ has it.

    training: y = (x - batch mean) / batch std * r + d;  otherwise: (x - mean) / std, of the averages

r and d carry the batch's statistics over to the averages, within limits, and are 1 and 0 at first.
There is no scale and shift: the linear layer that follows has them. N networks, B batch, W width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_EPS = 1e-3
_RATE = 0.01  # share of the way that the averages follow
_MOST_R, _MOST_D = 3.0, 5.0


class Renormed(NamedTuple):
    """What the way back needs."""

    unit: Tensor
    """(B, W), of mean 0 and variance 1 over the batch."""
    scale: Tensor
    """(W,), r / std."""


class BatchRenorm(nn.Module):
    """Normalises one layer of N networks by what its batch is like."""

    def __init__(self, num: int, width: int, *, warmup: int) -> None:
        """Args: warmup: batches until the averages are trusted, during which r is 1 and d is 0."""
        super().__init__()
        self._warmup = warmup
        self.register_buffer("mean", torch.zeros(num, width))
        self.register_buffer("variance", torch.ones(num, width))
        self.register_buffer("batches", torch.zeros(num, dtype=torch.int64))
        self.mean: Tensor
        self.variance: Tensor
        self.batches: Tensor

    def forward(self, x: Tensor, n: int) -> tuple[Tensor, Renormed]:
        """Normalises (B, W) of network n in training, and notes its statistics."""
        mean = x.mean(dim=0)
        unit = x - mean
        variance = unit.square().mean(dim=0)
        rstd = (variance + _EPS).rsqrt()
        unit *= rstd
        y, scale = unit, rstd
        if int(self.batches[n]) >= self._warmup:
            average_rstd = (self.variance[n] + _EPS).rsqrt()
            r = (average_rstd / rstd).clamp_(1.0 / _MOST_R, _MOST_R)
            d = ((mean - self.mean[n]) * average_rstd).clamp_(-_MOST_D, _MOST_D)
            y, scale = torch.addcmul(d, unit, r), rstd * r
        self.mean[n].lerp_(mean, _RATE)
        self.variance[n].lerp_(variance, _RATE)
        self.batches[n] += 1
        return y, Renormed(unit, scale)

    @staticmethod
    def back(grad: Tensor, kept: Renormed) -> Tensor:
        """Returns the gradient by the input, given that by the output; r and d count as constants."""
        through_unit = (grad * kept.unit).mean(dim=0)
        return (grad - grad.mean(dim=0)).sub_(kept.unit * through_unit).mul_(kept.scale)

    def folded(self, n: int, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the linear layer that does what this one and (weight, bias) after it do, untrained."""
        rstd = (self.variance[n] + _EPS).rsqrt()
        return weight * rstd[:, None], bias - (self.mean[n] * rstd) @ weight
