"""Clocks of a run: how many updates are owed, what is due; counted in control steps, never in wall-clock.

A `Ratio` pays updates for steps and carries the fraction over; an `Every` fires once per interval.
Both keep their place in a checkpoint, so that a resumed run owes exactly what the unbroken one did.
(The idea is dreamerv3's `when.py`; ours counts from where it was restored and never loses a fraction.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from robot_rl.data.transitions import Segment

UNKNOWN = "unknown"
"""Kind of the control steps that a checkpoint of an earlier version counted."""


@dataclass
class Counters:
    """The progress of a run; every schedule reads it."""

    env_steps: int = 0
    """Control steps of reinforcement learning, over all envs of all sources."""
    updates: int = 0
    """Updates of the leading learner in the current phase."""
    by_source: list[int] = field(default_factory=lambda: list[int]())
    """What each source of the run collected, in their order."""
    by_kind: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    """The bill: control steps by who made them, of `SOURCES`. It has the demonstrations too."""

    def add(self, segment: Segment) -> None:
        """Counts what a source collected."""
        self.by_source += [0] * (segment.actor + 1 - len(self.by_source))
        self.by_source[segment.actor] += segment.cost
        self.env_steps += segment.cost
        self.bill(segment.source, segment.cost)

    def bill(self, kind: str, steps: int) -> None:
        """Adds control steps to the bill."""
        self.by_kind[kind] = self.by_kind.get(kind, 0) + steps

    def of_source(self, source: int) -> int:
        """Returns the control steps that a source has collected."""
        return self.by_source[source] if source < len(self.by_source) else 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.env_steps, self.updates = int(state["env_steps"]), int(state["updates"])
        # Checkpoints of earlier versions name neither the sources nor who made the steps.
        self.by_source = list(state.get("by_source", [self.env_steps]))
        self.by_kind = dict(state.get("by_kind", {UNKNOWN: self.env_steps} if self.env_steps else {}))


class Ratio:
    """Update-to-data ratio: how many updates the steps since the last call have earned."""

    def __init__(
        self,
        updates_per_step: float,
        *,
        after_steps: int = 0,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Owes nothing yet.

        Args:
            updates_per_step: the ratio.
            after_steps: steps before this one earn nothing.
            is_late: whether an arm that does not wait is ahead of the learner. Updates owed then are
                left out, and counted.
        """
        if not (math.isfinite(updates_per_step) and updates_per_step >= 0):
            raise ValueError(f"updates_per_step must be finite and >= 0, got {updates_per_step}")
        self._ratio = updates_per_step
        self._seen = after_steps
        self._credit = 0.0
        self._is_late = is_late
        self.forgone = 0
        """Updates that were left out because the arm does not wait."""

    def owed(self, step: int) -> int:
        """Returns the whole updates due at `step`; steps before `after_steps` earn nothing."""
        if step <= self._seen:
            return 0
        self._credit += (step - self._seen) * self._ratio
        self._seen = step
        whole = math.floor(self._credit + 1e-9)  # 0.1 * 10 is 0.99...: the last bit must not cost an update
        self._credit -= whole
        if whole and self._is_late():
            self.forgone += whole
            return 0
        return whole

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "credit": self._credit, "forgone": self.forgone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen, self._credit = int(state["seen"]), float(state["credit"])
        self.forgone = int(state.get("forgone", 0))


class Always:
    """Owes `block` updates at every turn, whatever was collected."""

    def __init__(self, block: int | Callable[[], int] = 1) -> None:
        """Args: block: updates, or a function that returns how many they are at this turn."""
        self._block = block

    def owed(self, step: int) -> int:
        return self._block() if callable(self._block) else self._block

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Every:
    """Fires when at least `interval` steps have passed since it last fired; 0 means never."""

    def __init__(self, interval: float, *, start: float = 0) -> None:
        if interval < 0:
            raise ValueError(f"interval must be >= 0 (0 means never), got {interval}")
        self._interval = interval
        self._next = start + interval

    def due(self, step: float) -> bool:
        """Returns whether it fires now; missed beats are not made up for."""
        if not self._interval or step < self._next:
            return False
        beats = math.floor((step - self._next) / self._interval) + 1
        self._next += beats * self._interval
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]
