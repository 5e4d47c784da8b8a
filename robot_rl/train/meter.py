"""Running means of what the learner and the sources report, between two rows of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Meter:
    """Adds up metrics without waiting for the device; its place is part of the checkpoint."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        for name, value in metrics.items():
            number = torch.as_tensor(value).detach().to(torch.float64)
            self._sums[name] = self._sums[name] + number if name in self._sums else number
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """Returns the means since the last call and starts anew."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
