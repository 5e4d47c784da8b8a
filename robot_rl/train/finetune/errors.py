"""How far predicted chunks are from what the demonstrator did, on episodes that nobody learned from.

The error is the mean absolute difference over the valid steps of a chunk and over the joints, each
divided by the standard deviation of that joint's actions in the training episodes: 1 is as wrong
as the mean action would be, roughly. Beside it stands the same in the dataset's own units
(radians, where these are joint positions), by group of joints.
B chunks, H chunk length, A action dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.policy import DemoBatch

Array = NDArray[Any]
Predict = Callable[[DemoBatch], Array]
"""Returns chunks (B, >= H, A) in the dataset's units for a batch."""

STD_FLOOR = 1e-3
"""Smallest standard deviation divided by, in the dataset's units: joints that never moved."""


@dataclass(frozen=True)
class Errors:
    """Of one predictor."""

    normalised: float
    """Mean absolute error in standard deviations of the training actions."""
    groups: dict[str, float]
    """The same by group of joints."""
    units: dict[str, float]
    """In the dataset's own units by group of joints."""
    chunks: int
    """How many chunks were compared."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Ruler:
    """Measures predictions in the training actions' standard deviations."""

    def __init__(self, action_std: Array, action_names: Sequence[str]) -> None:
        """Args: action_std: (A,), of the training episodes alone."""
        self.std = np.maximum(np.asarray(action_std, np.float64).reshape(-1), STD_FLOOR)
        self.groups = joint_groups(action_names)

    def measure(self, batches: Iterable[DemoBatch], predict: Predict) -> Errors:
        """Returns the errors of a predictor over all batches."""
        total, steps, chunks = np.zeros(len(self.std)), 0, 0
        for batch in batches:
            actions, valid = batch.actions.cpu().numpy(), batch.valid.cpu().numpy()
            predicted = predict(batch)[:, : actions.shape[1]]
            total += (np.abs(predicted - actions) * valid[..., None]).sum(axis=(0, 1), dtype=np.float64)
            steps, chunks = steps + int(valid.sum()), chunks + len(actions)
        return self.errors(total / max(1, steps), chunks)

    def errors(self, absolute: Array, chunks: int) -> Errors:
        """Returns the errors behind the mean absolute differences (A,)."""
        scaled = absolute / self.std
        return Errors(
            normalised=float(scaled.mean()),
            groups={name: float(scaled[joints].mean()) for name, joints in self.groups.items()},
            units={name: float(absolute[joints].mean()) for name, joints in self.groups.items()},
            chunks=chunks,
        )


def joint_groups(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns group -> indices of the action, by the words that the names begin with.

    `kLeftHandPinky` and `left_hand_thumb` are in `left hand`, `shoulder_pan.pos` is in `shoulder`.
    """
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
        words = words[1:] if len(words) > 1 and words[0] == "k" else words
        kept = words[: 2 if words[:1] in (["left"], ["right"]) else 1]
        groups.setdefault(" ".join(kept) or name, []).append(index)
    return groups
