"""What a task declares of scenes that differ: shapes and sizes of its things, regions of its goal, clutter.

All combinations of the declared levels form a grid of V variants. A variant is held out if the sum of its
things' level numbers is a multiple of `EVERY`: no shape and size of a thing (of two things: no pair of these)
is in both sets, whatever the goal and the clutter, while every single level is. So `held_out` asks for
combinations that training never shows, not for other shapes or sizes beyond its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, require
from robot_rl.core.registry import resolve, table
from robot_rl.sim.shapes import SHAPES, Shape

Vector = tuple[float, float, float]
EVERY = 4
"""About one combination of shape and sizes in so many is held out."""
_ROUND = 2
"""What a cylinder adds to the sum in place of a level along y: each of its levels is then in both sets."""


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A task's declaration. Levels are ordered: a variant is one level of each axis of the grid."""

    things: tuple[str, ...]
    """Bodies of one box each, made by `add_free_box`; each has levels of its own."""
    shapes: tuple[Shape, ...] = ("box",)
    """Of a thing, and of what stands around: the box first. A cylinder is upright, and as wide as the box is
    narrow."""
    widths: tuple[float, ...] = (0.75, 1.0, 1.3)
    """A share of the task's own size: of a box along its x and, independently, along its y; of a cylinder."""
    heights: tuple[float, ...] = (0.75, 1.0, 1.4)
    goal: str = ""
    """The mocap body that marks the goal; none where a thing is the goal."""
    goals_m: tuple[Vector, ...] = ((0.0, 0.0, 0.0),)
    """Regions of the goal: by how much the task's own draw is moved."""
    clutter: tuple[int, ...] = (0, 1, 2, 3)
    """Numbers of obstacles that stand around."""
    path: tuple[str, ...]
    """Things and goal between which the task needs the table free: obstacles stand away from these lines."""

    def __post_init__(self) -> None:
        assert len(self.goals_m) == 1 or self.goal, "goals_m: name the goal"
        assert min(self.clutter) >= 0, f"clutter: {self.clutter}, allowed: 0 or more"
        known = self.shapes in [SHAPES[: number + 1] for number in range(len(SHAPES))]
        require(known, "variation.shapes", self.shapes, f"the first or more of {', '.join(SHAPES)}")

    @property
    def forms(self) -> NDArray[np.int64]:
        """The levels (F, 4) of all forms that a thing can have: shape, x, y and z. A cylinder has x = y."""
        width, height = range(len(self.widths)), range(len(self.heights))
        rows = product(range(len(self.shapes)), width, width, height)
        return np.array([row for row in rows if self.shapes[row[0]] == "box" or row[1] == row[2]])

    @property
    def levels(self) -> NDArray[np.int64]:
        """The levels (V, axes) of all variants: shape, x, y and z of each thing, goal, clutter.

        A variant's number is its row.
        """
        num_things, forms = len(self.things), self.forms
        sizes = (*(len(forms),) * num_things, len(self.goals_m), len(self.clutter))
        grid = np.indices(sizes).reshape(len(sizes), -1).T
        of_things = forms[grid[:, :num_things]].reshape(len(grid), -1)
        return np.concatenate([of_things, grid[:, num_things:]], axis=1)

    def variants(self, *, held_out: bool) -> NDArray[np.int64]:
        """Returns the numbers of the variants of one of the two sets."""
        shape, x, y, z = self._of_things()
        is_round = np.array([name == "cylinder" for name in self.shapes])[shape]
        total = (x + np.where(is_round, _ROUND, y) + z).sum(axis=1)
        return np.flatnonzero((total % EVERY == 0) == held_out)

    def scales(self) -> NDArray[np.float64]:
        """Returns the sizes of all variants as shares of the task's own, (V, things, 3)."""
        _, x, y, z = self._of_things()
        width, height = np.array(self.widths), np.array(self.heights)
        return np.stack([width[x], width[y], height[z]], axis=2)

    def shown(self) -> NDArray[np.int64]:
        """Returns the shapes of the things of all variants, (V, things): numbers in `shapes`."""
        return self._of_things()[0]

    def goals(self) -> NDArray[np.float64]:
        """Returns by how much the goal is moved, (V, 3) metres."""
        return np.array(self.goals_m)[self.levels[:, -2]]

    def counts(self) -> NDArray[np.int64]:
        """Returns the numbers of obstacles that stand around, (V,)."""
        return np.array(self.clutter)[self.levels[:, -1]]

    def _of_things(self) -> NDArray[np.int64]:
        """Returns the levels (4, V, things) of all things."""
        return np.moveaxis(self.levels[:, :-2].reshape(-1, len(self.things), 4), 2, 0)


def check_variation(task: str, asked: str) -> None:
    """Refuses variation of a task that declares none."""
    if asked == "fixed" or resolve("task", task, at="env.task").variation is not None:
        return
    able: Sequence[str] = [name for name in table("task") if resolve("task", name).variation is not None]
    raise ConfigError(
        f"env.variation: got {asked!r}, allowed: fixed, as {task!r} declares no "
        f"`variation` (docs/variation.md). Tasks that do: {', '.join(able)}."
    )
