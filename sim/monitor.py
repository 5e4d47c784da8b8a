"""Follows a formula over B simulations at once: success, failure and reward come from the same automaton.

Per simulation: which stage it is in, for how many control steps in a row that stage's condition has held, and
whether something that the formula avoids has happened. One control step ends at most one stage, so what
follows `then` holds later than what precedes it. The start of an episode is not looked at, only what control
steps lead to, as with a task's own success. Arrays are numpy's or tensors, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from robot_rl.core.arrays import Array, copied, like
from robot_rl.sim.formula import Formula

NAMES = ("formula.stage", "formula.hold")
"""Elements of the state: stages done as a share of all, and how much of the present stage's hold is done."""


class Monitor:
    """The automaton of a formula; B simulations, S stages."""

    num_columns = 3
    """Columns of `rows`: stage, control steps held, violated."""

    def __init__(self, formula: Formula, num_sims: int, *, control_hz: float, xp: Any, device: Any) -> None:
        self._formula, self._xp = formula, xp
        self.steps = tuple(stage.steps(control_hz) for stage in formula.stages)
        """Control steps in a row that end each stage (S,)."""
        needed = [*self.steps, 1]
        self._needed = xp.asarray(needed, dtype=xp.int64, device=device)  # 1: what is complete divides by it
        self._stage = xp.zeros(num_sims, dtype=xp.int64, device=device)
        self._held = xp.zeros(num_sims, dtype=xp.int64, device=device)
        self._violated = xp.zeros(num_sims, dtype=xp.bool, device=device)
        self._gained = xp.zeros(num_sims, dtype=xp.float64, device=device)

    @property
    def complete(self) -> Array:
        """(B,) bool: all stages are done, and nothing that is avoided has happened."""
        return (self._stage == len(self.steps)) & ~self._violated

    @property
    def violated(self) -> Array:
        """(B,) bool: something that the formula avoids has happened in this episode."""
        return copied(self._violated)

    @property
    def progress(self) -> Array:
        """(B,) in [0, 1]: each stage counts 1 / S, a hold counts by the control steps that it has lasted."""
        return self._done() + self._share() / len(self.steps)

    @property
    def gained(self) -> Array:
        """(B,) in [-1, 1]: how much progress the last control step made; a broken hold loses what it had."""
        return self._gained

    def advance(self, value_of: Callable[[str], Array], active: Array) -> None:
        """Reads the states at the end of a control step.

        Args:
            value_of: gives a predicate's values (B,) bool by its name.
            active: (B,) bool; the others stay as they are, with nothing gained.
        """
        xp, before = self._xp, self.progress
        values = {name: value_of(name) for name in self._formula.names()}
        goes_on = active & ~self._violated & (self._stage < len(self.steps))
        for avoided in self._formula.avoid:
            self._violated = self._violated | (goes_on & avoided.holds(values.__getitem__))
        goes_on = goes_on & ~self._violated
        holds = xp.zeros_like(goes_on)
        for number, stage in enumerate(self._formula.stages):
            holds = holds | ((self._stage == number) & stage.condition.holds(values.__getitem__))
        held = xp.where(holds, self._held + 1, 0)
        ends = goes_on & (held >= self._needed[self._stage])
        self._held = xp.where(goes_on, xp.where(ends, 0, held), self._held)
        self._stage = self._stage + xp.astype(ends, xp.int64)
        self._gained = xp.where(goes_on, self.progress - before, 0.0)

    def reset(self, ids: Array) -> None:
        """Begins new episodes."""
        for array in (self._stage, self._held, self._violated, self._gained):
            array[ids] = 0

    def observed(self, ids: Array) -> Array:
        """Returns the elements `NAMES` of some simulations, (b, 2) in [0, 1]."""
        return self._xp.stack([self._done(), self._share()], axis=1)[ids]

    def rows(self) -> Array:
        """Returns all that the future depends on, (B, num_columns) float64."""
        xp, columns = self._xp, (self._stage, self._held, self._violated)
        return xp.stack([xp.astype(column, xp.float64) for column in columns], axis=1)

    def put(self, ids: Array, rows: Array) -> None:
        """Goes on from rows (b, num_columns) of `rows`."""
        self._gained[ids] = 0.0
        for column, array in enumerate((self._stage, self._held, self._violated)):
            array[ids] = like(rows[:, column], array)

    def _done(self) -> Array:
        return self._xp.astype(self._stage, self._xp.float64) / len(self.steps)

    def _share(self) -> Array:
        return self._xp.astype(self._held, self._xp.float64) / self._needed[self._stage]
