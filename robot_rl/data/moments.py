"""Mean and variance of all rows so far: scales that follow what is collected.

N rows, D elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RunningMoments:
    """Mean and variance of each element over all rows, on their device, in float64.

    Welford's recursion, a set of rows at a time (Chan, Golub and LeVeque 1983). Nothing is read back from
    the device.
    """

    def __init__(self, mean: Tensor, variance: Tensor, count: float = 0.0) -> None:
        """Begins as if `count` rows had had that mean and variance, (D,) each."""
        self.mean = mean.detach().to(torch.float64, copy=True)
        self._count = torch.tensor(float(count), dtype=torch.float64, device=mean.device)
        self._square = variance.detach().to(torch.float64) * count
        """Sum of squared distances from the mean."""

    @torch.no_grad()
    def add(self, rows: Tensor) -> None:
        """Takes rows (N, D); N is at least 1."""
        rows = rows.to(torch.float64)
        count, mean = len(rows), rows.mean(dim=0)
        total, apart = self._count + count, mean - self.mean
        self._square += (rows - mean).square().sum(dim=0) + apart.square() * (self._count * count / total)
        self.mean += apart * (count / total)
        self._count = total

    @property
    def std(self) -> Tensor:
        """Standard deviation of each element, (D,); 0 while nothing varies."""
        return (self._square / self._count.clamp_min(1.0)).sqrt()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "square": self._square.clone(), "count": self._count.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._count.copy_(state["count"])
