"""What imagined episodes and trust need of the picture part of a world model, whatever it is made of.

    Images        a small autoencoder, and flows in its codes, in this process (`model`)
    ServedImages  those of a model of others, in a process of another Python (`served`)

Pictures go on as codes. The model keeps nothing between two questions: all that the next codes follow from is
given with each. So imagined episodes are copied and resumed with their pictures, and the history keeps codes.
B rows, M members, C channels over all cameras, h x w cells, S state elements, A action dim, k control steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.worlds.calibration import gate_at
from robot_rl.worlds.history import Array

STD_FLOOR = 1e-4
_AT_ONCE = 256
"""Pictures that are coded together."""
_MOST_CHANGES = 4096


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What the next codes follow from, at B moments."""

    now: Array
    """(B, C, h, w): codes."""
    past: Array
    """(B, C, h, w): a stride before; `now` where the episode is younger."""
    reference: Array
    """(B, C, h, w): of each episode's first picture."""
    state: Array
    """(B, S)"""
    after: Array
    """(B, S): the state that is predicted for the next code, by the model of the state."""
    actions: Array
    """(B, k, A)"""
    steps: Array
    """(B,): m, how many of the actions are executed."""


class Pictures(nn.Module, ABC):
    """The picture part of a world model; see the module."""

    def __init__(
        self,
        cameras: Sequence[str],
        size: tuple[int, int],
        *,
        stride: int,
        members: int,
        code_shape: tuple[int, int, int],
    ) -> None:
        """Args: size: height and width in pixels, of all cameras; stride: k; code_shape: C, h, w."""
        super().__init__()
        self.cameras, self.size, self.stride, self.num_members = tuple(cameras), size, stride, members
        self.register_buffer("rest", torch.ones(code_shape[0], 1, 1))
        self.rest: Tensor
        """(C, 1, 1): deviation of the change of a code in a stride."""
        self.depths: Array = np.ones(1)
        """(D,): strides after which `gate` was measured."""
        self.gate: Array = np.full(1, np.inf)
        """(D,): the largest disagreement that is believed; infinite of one member."""
        self.codes: Array = np.zeros((0, *code_shape), np.float16)
        """(N, C, h, w): those of the history behind the model."""

    @abstractmethod
    def encode(self, pictures: Mapping[str, Array]) -> Array:
        """Returns the codes (B, C, h, w) of pictures: camera -> (B, height, width, 3) uint8."""

    @abstractmethod
    def decode(self, codes: Array) -> dict[str, Array]:
        """Returns the pictures of codes (B, C, h, w)."""

    @abstractmethod
    def means(self, at: Moments) -> tuple[Array, Array]:
        """Returns the codes that each member expects (M, B, C, h, w), and their `disagreement` (B,)."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns what it is made from again, but its weights and codes."""

    def kept_codes(self, pictures: Mapping[str, Array]) -> Array:
        """Returns the codes (B, C, h, w) of pictures as `codes` keeps them: float16."""
        count = len(next(iter(pictures.values())))
        parts = [
            self.encode({name: shown[at : at + _AT_ONCE] for name, shown in pictures.items()})
            for at in range(0, count, _AT_ONCE)
        ]
        return np.concatenate([part.astype(np.float16) for part in parts])

    def fit_rest(self, rows: Array) -> None:
        """Measures the changes of `codes` in a stride, from these rows (n,) of the history on."""
        some = rows[:: max(1, len(rows) // _MOST_CHANGES)]
        change = self.codes[some + self.stride].astype(np.float32) - self.codes[some].astype(np.float32)
        rest = units_of(np.sqrt((change**2).mean(axis=(0, 2, 3))))
        self.rest.copy_(torch.from_numpy(rest)[:, None, None])

    def limit(self, depth: Array) -> Array:
        """Returns the largest disagreement that is believed at each depth (B,), in strides."""
        return gate_at(depth, self.depths, self.gate)

    def arrays(self) -> dict[str, Array]:
        """Returns all but the weights: what was measured, and codes."""
        return {"codes": self.codes, "depths": self.depths, "gate": self.gate}


def units_of(deviations: Array) -> Array:
    """Returns the units in which channels are compared, from their deviations (C,).

    A channel that never varied has that of those that do, or 1: in a unit of its own, near 0, the least grain
    in it would be more than all that happens in the others.
    """
    varies = deviations >= STD_FLOOR
    common = np.sqrt((deviations[varies] ** 2).mean()) if varies.any() else 1.0
    return np.where(varies, deviations, common).astype(np.float32)


def disagreement(changes: Array) -> Array:
    """Returns how far members are apart (B,), of the changes (M, B, C, h, w) that they expect.

    It is the root of the mean square, over a code, of the members' deviation; 0 of one member. Changes are in
    units of `rest`.
    """
    if len(changes) == 1:
        return np.zeros(changes.shape[1], changes.dtype)
    spread = changes.std(axis=0, ddof=1)
    return np.sqrt((spread**2).mean(axis=(1, 2, 3)))
