"""What a task declares of scenes that differ: sizes of its things, regions of its goal, clutter.

All combinations of the declared levels form a grid of V variants. A variant is held out if the sum of its
things' level numbers is a multiple of `EVERY`: no shape of a thing (of two things: no pair of shapes) is in
both sets, whatever the goal and the clutter, while every single level is. So `held_out` asks for shapes that
training never shows, not for sizes beyond its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve, table

Vector = tuple[float, float, float]
EVERY = 4
"""About one shape in so many is held out."""


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A task's declaration. Levels are ordered: a variant is one level of each axis of the grid."""

    things: tuple[str, ...]
    """Bodies of one box each, made by `add_free_box`; each has levels of its own."""
    widths: tuple[float, ...] = (0.75, 1.0, 1.3)
    """Of a thing along its x and, independently, along its y: a share of the task's own size."""
    heights: tuple[float, ...] = (0.75, 1.0, 1.4)
    goal: str = ""
    """The mocap body that marks the goal; none where a thing is the goal."""
    goals_m: tuple[Vector, ...] = ((0.0, 0.0, 0.0),)
    """Regions of the goal: by how much the task's own draw is moved."""
    clutter: tuple[int, ...] = (0, 1, 2, 3)
    """Numbers of boxes that stand around."""
    path: tuple[str, ...]
    """Things and goal between which the task needs the table free: boxes stand away from these lines."""

    def __post_init__(self) -> None:
        assert len(self.goals_m) == 1 or self.goal, "goals_m: name the goal"
        assert min(self.clutter) >= 0, f"clutter: {self.clutter}, allowed: 0 or more"

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of levels of each axis: x, y and z of each thing, goal, clutter."""
        of_a_thing = (len(self.widths), len(self.widths), len(self.heights))
        return (*of_a_thing * len(self.things), len(self.goals_m), len(self.clutter))

    @property
    def levels(self) -> NDArray[np.int64]:
        """The levels (V, axes) of all variants; a variant's number is its row."""
        axes = len(self.shape)
        return np.indices(self.shape).reshape(axes, -1).T

    def variants(self, *, held_out: bool) -> NDArray[np.int64]:
        """Returns the numbers of the variants of one of the two sets."""
        of_things = self.levels[:, : 3 * len(self.things)]
        return np.flatnonzero((of_things.sum(axis=1) % EVERY == 0) == held_out)

    def scales(self) -> NDArray[np.float64]:
        """Returns the sizes of all variants as shares of the task's own, (V, things, 3)."""
        of_axis = (self.widths, self.widths, self.heights) * len(self.things)
        columns = [np.array(values)[self.levels[:, i]] for i, values in enumerate(of_axis)]
        return np.stack(columns, axis=1).reshape(-1, len(self.things), 3)

    def goals(self) -> NDArray[np.float64]:
        """Returns by how much the goal is moved, (V, 3) metres."""
        return np.array(self.goals_m)[self.levels[:, -2]]

    def counts(self) -> NDArray[np.int64]:
        """Returns the numbers of boxes that stand around, (V,)."""
        return np.array(self.clutter)[self.levels[:, -1]]


def check_variation(task: str, asked: str) -> None:
    """Refuses variation of a task that declares none."""
    if asked == "fixed" or resolve("task", task, at="env.task").variation is not None:
        return
    able: Sequence[str] = [name for name in table("task") if resolve("task", name).variation is not None]
    raise ConfigError(
        f"env.variation: got {asked!r}, allowed: fixed, as {task!r} declares no "
        f"`variation` (docs/variation.md). Tasks that do: {', '.join(able)}."
    )
