"""Batch renormalisation (Ioffe 2017) of an ensemble's layers, forward and backward, as in CrossQ.

    training: v = (x - batch mean) / batch std * r + d;  otherwise: (x - mean) / std, of the averages
    y = v * scale + shift

r and d carry the batch's statistics over to the averages, within limits, and are 1 and 0 at first.
The linear layer that follows could do what scale and shift do, but not as fast: v has no mean over a batch,
so that of a critic's values would be its last bias alone, which Adam moves by its rate at each update.
N networks, B batch, W width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_EPS = 1e-3
_RATE = 0.01  # share of the way that the averages follow
_MOST_R, _MOST_D = 3.0, 5.0


class Renormed(NamedTuple):
    """What the backward pass needs."""

    unit: Tensor
    """(B, W), of mean 0 and variance 1 over the batch."""
    v: Tensor
    """(B, W), before scale and shift."""
    rate: Tensor
    """(W,), r / std."""
    scale: Tensor
    """(W,)"""


class BatchRenorm(nn.Module):
    """Normalises one layer of N networks by what its batch is like."""

    def __init__(self, num: int, width: int, *, warmup: int) -> None:
        """Args: warmup: batches until the averages are trusted, during which r is 1 and d is 0."""
        super().__init__()
        self._warmup = warmup
        self.mean = nn.Buffer(torch.zeros(num, width))
        self.variance = nn.Buffer(torch.ones(num, width))
        self.batches = nn.Buffer(torch.zeros(num, dtype=torch.int64))
        self.scale = nn.Parameter(torch.ones(num, width))
        self.shift = nn.Parameter(torch.zeros(num, width))

    def forward(self, x: Tensor, n: int) -> tuple[Tensor, Renormed]:
        """Normalises (B, W) of network n in training, and notes its statistics."""
        mean = x.mean(dim=0)
        unit = x - mean
        variance = unit.square().mean(dim=0)
        rstd = (variance + _EPS).rsqrt()
        unit *= rstd
        v, rate, scale = unit, rstd, self.scale[n].detach()
        if int(self.batches[n]) >= self._warmup:
            average_rstd = (self.variance[n] + _EPS).rsqrt()
            r = (average_rstd / rstd).clamp_(1.0 / _MOST_R, _MOST_R)
            d = ((mean - self.mean[n]) * average_rstd).clamp_(-_MOST_D, _MOST_D)
            v, rate = torch.addcmul(d, unit, r), rstd * r
        self.mean[n].lerp_(mean, _RATE)
        self.variance[n].lerp_(variance, _RATE)
        self.batches[n] += 1
        return torch.addcmul(self.shift[n].detach(), v, scale), Renormed(unit, v, rate, scale)

    @staticmethod
    def backward(grad: Tensor, kept: Renormed, to_scale: Tensor, to_shift: Tensor) -> Tensor:
        """Returns the gradient by the input, given that by the output; r and d count as constants.

        Writes those of scale and shift to `to_scale` and `to_shift`.
        """
        torch.sum(grad * kept.v, 0, out=to_scale)
        torch.sum(grad, 0, out=to_shift)
        grad = grad * kept.scale
        through_unit = (grad * kept.unit).mean(dim=0)
        return (grad - grad.mean(dim=0)).sub_(kept.unit * through_unit).mul_(kept.rate)

    def folded(self, n: int, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the linear layer that does what this one and (weight, bias) after it do, untrained."""
        rate = (self.variance[n] + _EPS).rsqrt() * self.scale[n].detach()
        return weight * rate[:, None], bias + (self.shift[n].detach() - self.mean[n] * rate) @ weight
