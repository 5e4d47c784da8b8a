"""Selects episodes to learn from: by limits, and by shares of those within them.

T control steps, A action dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import require


@dataclass(frozen=True, kw_only=True)
class KeepConfig:
    """Keeps the episodes within the limits, and of these the best shares, in this order."""

    success: bool | None = None
    """Only episodes that succeed; None: yes for a policy, no for an expert."""
    max_steps: int | None = None
    """Longest episode, in control steps; any if None."""
    max_roughness: float | None = None
    """Largest mean squared change of the action from one control step to the next; any if None."""
    fastest: float = 1.0
    """Share of the rest: the episodes with the fewest control steps."""
    smoothest: float = 1.0
    """Share of the rest after that: the episodes with the least roughness."""

    def __post_init__(self) -> None:
        steps, rough = self.max_steps, self.max_roughness
        require(steps is None or steps >= 1, "keep.max_steps", steps, "1 or more, or null")
        require(rough is None or rough > 0, "keep.max_roughness", rough, "above 0, or null")
        require(0 < self.fastest <= 1, "keep.fastest", self.fastest, "above 0, at most 1")
        require(0 < self.smoothest <= 1, "keep.smoothest", self.smoothest, "above 0, at most 1")

    @property
    def takes_all(self) -> bool:
        """Whether no episode can be refused."""
        limits = self.success or self.max_steps is not None or self.max_roughness is not None
        return not limits and self.fastest == self.smoothest == 1.0


@dataclass(frozen=True)
class Facts:
    """The measures of n episodes that limits and shares use."""

    success: NDArray[np.bool_]
    """(n,) reached at any step."""
    steps: NDArray[np.int64]
    """(n,)"""
    roughness: NDArray[np.float64]
    """(n,)"""

    def __len__(self) -> int:
        return len(self.steps)

    def to_json(self) -> dict[str, Any]:
        """Returns the share of successes, and the 10, 50 and 90 % points of steps and roughness."""
        points = {
            name: [float(point) for point in np.quantile(getattr(self, name), (0.1, 0.5, 0.9))]
            for name in ("steps", "roughness")
        }
        return {"episodes": len(self), "success": float(self.success.mean()), **points}


def roughness(action: NDArray[Any]) -> float:
    """Returns the mean squared change of actions (T, A) from one step to the next; 0 for a single step."""
    return float(np.mean(np.square(np.diff(action, axis=0), dtype=np.float64))) if len(action) > 1 else 0.0


def together(parts: Sequence[Facts]) -> Facts:
    """Returns the facts of all episodes, part after part."""
    return Facts(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Facts)))


def sift(facts: Facts, keep: KeepConfig) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Returns the episodes that pass, ascending, and how many each setting refused; the first one counts."""
    left, refused = np.arange(len(facts)), dict[str, int]()
    limits = {
        "success": facts.success | (not keep.success),
        "max_steps": facts.steps <= (math.inf if keep.max_steps is None else keep.max_steps),
        "max_roughness": facts.roughness <= (math.inf if keep.max_roughness is None else keep.max_roughness),
    }
    for name, passes in limits.items():
        refused[name] = int((~passes[left]).sum())
        left = left[passes[left]]
    shares = {"fastest": (facts.steps, keep.fastest), "smoothest": (facts.roughness, keep.smoothest)}
    for name, (measure, share) in shares.items():
        count = math.ceil(share * len(left) - 1e-9)  # rounding must not give 4 for 0.3 * 10
        refused[name] = len(left) - count
        left = np.sort(left[np.argsort(measure[left], kind="stable")[:count]])
    return left, refused


def describe_refused(refused: Mapping[str, int], started: int) -> str:
    """Returns `refused 12 of 50: success 10, fastest 2`."""
    reasons = ", ".join(f"{name} {count:,}" for name, count in refused.items() if count)
    return f"refused {sum(refused.values()):,} of {started:,}" + (f": {reasons}" if reasons else "")
