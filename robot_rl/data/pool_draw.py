"""How a pool draws its steps: uniformly, by priority, or in given shares of their kind.

B rows of a batch, R rows of a pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError, nearest, require
from robot_rl.data.sum_tree import SumTree
from robot_rl.data.transitions import exact_counts

Array = NDArray[Any]

_EPSILON = 1e-6  # added to every priority, so that no step is lost for ever


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Every step alike."""


@dataclass(frozen=True, kw_only=True)
class Prioritised:
    """By priority (Schaul et al. 2016, proportional variant); new steps have the largest seen so far."""

    alpha: float = 0.6
    """Exponent of the priority, 0 (uniform) to 1 (proportional)."""
    beta: float = 0.4
    """How much of the bias the importance weights take back, 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            require(0 <= getattr(self, name) <= 1, f"prioritised.{name}", getattr(self, name), "0 to 1")


@dataclass(frozen=True, kw_only=True)
class Stratified:
    """In fixed shares of each batch, uniformly within a stratum."""

    by: Literal["source", "success", "instruction", "policy_version"]
    """What divides the steps; `success` is that of the whole episode: `success` or `failure`."""
    shares: Mapping[str, float] | None = None
    """Share by name of the stratum, summing to 1; None gives each stratum that there is the same."""

    def __post_init__(self) -> None:
        allowed = ("source", "success", "instruction", "policy_version")
        require(self.by in allowed, "stratified.by", self.by, ", ".join(allowed))
        if self.shares is not None:
            shares = self.shares.values()
            fits = bool(shares) and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6
            require(fits, "stratified.shares", dict(self.shares), "none below 0, summing to 1")


class Priorities:
    """Priorities of R rows, and the draws that follow them."""

    def __init__(self, rows: int, config: Prioritised) -> None:
        self._tree = SumTree(rows)
        self._config = config
        self.largest = 1.0
        """The largest priority that anybody set."""

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def begin(self, start: int, stop: int) -> None:
        """Gives new rows the largest priority."""
        self._tree.set_range(start, stop, self.largest**self._config.alpha)

    def forget(self, start: int, stop: int) -> None:
        self._tree.set_range(start, stop, 0.0)

    def leaves(self, start: int, stop: int) -> Array:
        """Returns a copy of priority^alpha of rows `start` to `stop` - 1."""
        return self._tree.get(slice(start, stop)).copy()

    def restore(self, start: int, leaves: Array) -> None:
        """Puts back what `leaves` returned."""
        self._tree.set_range(start, start + len(leaves), leaves)

    def state_dict(self, used: int) -> dict[str, Any]:
        """Returns the priorities of the first `used` rows."""
        return {"leaves": self.leaves(0, used), "largest": self.largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restore(0, state["leaves"])
        self.largest = float(state["largest"])

    def update(self, rows: Array, priority: Array) -> None:
        """Sets priorities, such as absolute TD errors.

        Raises:
            DatasetError: one is negative or no number.
        """
        if not (np.isfinite(priority).all() and (priority >= 0).all()):
            bad = priority[~(np.isfinite(priority) & (priority >= 0))][0]
            raise DatasetError(
                f"pool: got priority {bad}, allowed: finite, 0 or more. Give absolute TD errors, and look "
                "for the cause if they are NaN."
            )
        if len(rows):
            priority = priority.astype(np.float64) + _EPSILON
            self.largest = max(self.largest, float(priority.max()))
            self._tree.set(rows, priority**self._config.alpha)

    def draw(self, batch: int, steps: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Returns rows (B,), one from each B-th of the sum, and their importance weights (B,) float32.

        The weights are (N P)^-beta over the largest of the batch.
        """
        total = self._tree.total
        rows = self._tree.find((np.arange(batch) + rng.random(batch)) * (total / batch))
        weight = (self._tree.get(rows) * (steps / total)) ** -self._config.beta
        return rows, (weight / weight.max()).astype(np.float32)


class Strata:
    """Runs of rows of one kind, and draws from them in shares."""

    def __init__(self, code_R: Array, names: Mapping[int, str], config: Stratified) -> None:
        """Indexes the rows; an index holds until rows change.

        Args:
            code_R: the stratum of every row; -1 where there is no step.
            names: of the strata.
            config: what the shares are.

        Raises:
            DatasetError: a share was asked of a stratum that has no steps.
        """
        edges = np.flatnonzero(np.diff(code_R)) + 1
        starts = np.concatenate([[0], edges])
        lengths = np.diff(np.concatenate([starts, [len(code_R)]]))
        codes = code_R[starts]
        order = np.argsort(codes, kind="stable")
        order = order[codes[order] >= 0]
        self._starts, self._codes = starts[order], codes[order]
        self._upper = np.cumsum(lengths[order])
        self._before = self._upper - lengths[order]
        present = {names[int(code)]: int(code) for code in np.unique(self._codes)}
        shares = config.shares or dict.fromkeys(present, 1 / len(present))
        for name, share in shares.items():
            if share > 0 and name not in present:
                raise DatasetError(
                    f"pool: {share:.0%} of each batch is to be of {config.by} {name!r}, and no step is."
                    f"{nearest(name, present)} Change the shares, or add such episodes."
                )
        chosen = {name: share for name, share in shares.items() if share > 0}
        self._shares = list(chosen.values())
        wanted = np.array([present[name] for name in chosen])
        first = np.searchsorted(self._codes, wanted, side="left")
        last = np.searchsorted(self._codes, wanted, side="right") - 1
        self._low, self._high = self._before[first], self._upper[last]

    def draw(self, batch: int, rng: np.random.Generator) -> Array:
        """Returns rows (B,), stratum after stratum."""
        stratum = np.repeat(np.arange(len(self._shares)), exact_counts(self._shares, batch))
        place = rng.integers(self._low[stratum], self._high[stratum])
        run = np.searchsorted(self._upper, place, side="right")
        return self._starts[run] + (place - self._before[run])
