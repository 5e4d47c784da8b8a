"""A sum tree: draws of leaves in proportion to their weight, all rows of a batch at once.

Node 1 is the root, nodes 2i and 2i + 1 are the children of node i, the leaves are the last `width`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class SumTree:
    """Non-negative weights of `size` leaves; drawing and changing n of them costs n log(size)."""

    def __init__(self, size: int) -> None:
        self._width = 1 << max(0, (size - 1).bit_length())
        self._levels = self._width.bit_length() - 1
        self._sums = np.zeros(2 * self._width)
        self.size = size

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes

    @property
    def total(self) -> float:
        return float(self._sums[1])

    def get(self, leaves: Array | slice) -> Array:
        """Returns the weights of leaves."""
        return self._sums[self._width : self._width + self.size][leaves]

    def set(self, leaves: Array, weights: Array | float) -> None:
        """Sets the weights of leaves, (n,); of a leaf named twice, the last stands."""
        nodes = leaves + self._width
        self._sums[nodes] = weights
        for _ in range(self._levels):
            nodes = nodes >> 1
            left = nodes << 1
            self._sums[nodes] = self._sums.take(left) + self._sums.take(left + 1)

    def set_range(self, start: int, stop: int, weights: Array | float) -> None:
        """Sets the weights of leaves `start` to `stop` - 1."""
        first, last = start + self._width, stop - 1 + self._width
        if last < first:
            return
        self._sums[first : last + 1] = weights
        for _ in range(self._levels):
            first, last = first >> 1, last >> 1
            children = self._sums[2 * first : 2 * last + 2]
            self._sums[first : last + 1] = children[::2] + children[1::2]

    def find(self, mass: Array) -> Array:
        """Returns the leaves in which cumulative weights `mass` (n,), within [0, total), fall."""
        nodes = np.ones(len(mass), np.int64)
        for _ in range(self._levels):
            left = nodes << 1
            weight = self._sums.take(left)
            # Rounding may leave a little mass at the end: never follow it to a leaf of weight 0.
            right = (mass >= weight) & (self._sums.take(left + 1) > 0)
            mass = mass - weight * right
            nodes = left + right
        return nodes - self._width
