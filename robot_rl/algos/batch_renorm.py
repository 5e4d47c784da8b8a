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

    read: Tensor
    """(B, W), or (N, B, W): what was normalised."""
    unit: Tensor
    """As `read`, of mean 0 and variance 1 over the batch."""
    v: Tensor
    """As `read`, or (N, B, W): before scale and shift."""
    rate: Tensor
    """(1, W) or (N, 1, W), r / std."""


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

    def forward(self, x: Tensor) -> tuple[Tensor, Renormed]:
        """Normalises (B, W), the same for all networks, or (N, B, W) in training; notes the statistics."""
        mean = x.mean(dim=-2, keepdim=True)
        unit = x - mean
        variance = unit.square().mean(dim=-2, keepdim=True)
        rstd = (variance + _EPS).rsqrt()
        unit *= rstd
        v, rate = unit, rstd
        if int(self.batches[0]) >= self._warmup:
            average_rstd = (self.variance + _EPS).rsqrt().unsqueeze(1)
            r = (average_rstd / rstd).clamp_(1.0 / _MOST_R, _MOST_R)
            d = ((mean - self.mean.unsqueeze(1)) * average_rstd).clamp_(-_MOST_D, _MOST_D)
            v, rate = torch.addcmul(d, unit, r), rstd * r
        self.mean.lerp_(mean.squeeze(-2).expand_as(self.mean), _RATE)
        self.variance.lerp_(variance.squeeze(-2).expand_as(self.variance), _RATE)
        self.batches += 1
        return torch.addcmul(_rows(self.shift), v, _rows(self.scale)), Renormed(x, unit, v, rate)

    def backward(self, grad: Tensor, kept: Renormed, to_scale: Tensor, to_shift: Tensor) -> Tensor:
        """Returns the gradient (N, B, W) by the input, given that by the output; r and d count as constants.

        Writes those of scale and shift to `to_scale` and `to_shift`.
        """
        torch.sum(grad * kept.v, 1, out=to_scale)
        torch.sum(grad, 1, out=to_shift)
        grad = grad * _rows(self.scale)
        through_unit = (grad * kept.unit).mean(dim=1, keepdim=True)
        return (grad - grad.mean(dim=1, keepdim=True)).sub_(kept.unit * through_unit).mul_(kept.rate)

    def rescale(self, factor_NW: Tensor) -> None:
        """Follows what it reads to (N, W) times as much: its averages of that scale as well."""
        self.mean *= factor_NW
        self.variance *= factor_NW.square()

    def folded(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the linear layers that do what this one and (weight, bias) after it do, untrained."""
        rate = (self.variance + _EPS).rsqrt() * self.scale.detach()
        offset = self.shift.detach() - self.mean * rate
        return weight * rate[:, :, None], bias + torch.bmm(offset[:, None], weight)[:, 0]


def _rows(parameter: Tensor) -> Tensor:
    """Returns a parameter (N, W) for every row of (N, B, W)."""
    return parameter.detach().unsqueeze(1)
