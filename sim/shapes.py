"""Shapes of things: a box, or a cylinder that stands upright; their volumes, inertias and sizes.

MuJoCo fixes a geom's type for all simulations. A thing of several shapes has a geom of each, in its middle.
A simulation shows one at its size; each other is a speck inside of it, which nothing sees or touches.

N rows, S shapes. A shape is given by its number among them and by half sizes (x, y, z) in metres; those of a
cylinder are radius, radius and half its height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.arrays import Array, namespace

Shape = Literal["box", "cylinder"]
SHAPES: tuple[str, ...] = get_args(Shape)
Floats = NDArray[np.float64]
SPECK_M = 1e-4
"""Half sizes of a geom that is not shown."""


def geom_of(thing: str, shape: Shape) -> str:
    """Returns the name of a thing's geom of one shape; the box has the name of the thing."""
    return thing if shape == "box" else f"{thing}_{shape}"


def inscribed(shapes: Sequence[Shape], shown: NDArray[np.int64], box_half_m: Floats) -> Floats:
    """Returns half sizes (N, 3) of the largest shapes in boxes: a cylinder is as wide as they are narrow.

    Args:
        shapes: (S,)
        shown: (N,) numbers of shapes.
        box_half_m: (N, 3) half sizes of the boxes.
    """
    round_m = box_half_m.copy()
    round_m[:, :2] = box_half_m[:, :2].min(axis=1, keepdims=True)
    return np.where(_is_round(shapes, shown)[:, None], round_m, box_half_m)


def volumes(shapes: Sequence[Shape], shown: NDArray[np.int64], half_m: Floats) -> Floats:
    """Returns volumes (N,) in cubic metres: 8 a b c of a box, 2 pi r^2 h of a cylinder of half height h."""
    return np.where(_is_round(shapes, shown), 2.0 * math.pi, 8.0) * half_m.prod(axis=1)


def inertias(shapes: Sequence[Shape], shown: NDArray[np.int64], mass_kg: Floats, half_m: Floats) -> Floats:
    """Returns moments of inertia (N, 3) about the axes of the body.

    Of a box about x: m (b^2 + c^2) / 3. Of a cylinder: m (r^2 / 4 + h^2 / 3) about x and y, m r^2 / 2 about
    its axis.
    """
    weights = np.where(_is_round(shapes, shown)[:, None], (0.25, 0.25, 1.0 / 3.0), 1.0 / 3.0)
    squares = weights * half_m**2
    return mass_kg[:, None] * (squares.sum(axis=1, keepdims=True) - squares)


def geom_sizes(shapes: Sequence[Shape], shown: NDArray[np.int64], half_m: Floats) -> Floats:
    """Returns MuJoCo's sizes of all geoms of things, (N, 3 S), in the order of the shapes."""
    columns: list[Floats] = []
    for number, shape in enumerate(shapes):
        size = half_m if shape == "box" else half_m[:, [0, 2, 2]] * (1.0, 1.0, 0.0)
        columns.append(np.where((shown == number)[:, None], size, np.minimum(size, SPECK_M)))
    return np.concatenate(columns, axis=1)


def shown_half_m(shapes: Sequence[Shape], sizes: Sequence[Array]) -> Array:
    """Returns half sizes (N, 3) of the shapes that are shown, of sizes (N, 3) of each geom."""
    found = [
        size if shape == "box" else size[:, [0, 0, 1]] for shape, size in zip(shapes, sizes, strict=True)
    ]
    largest = found[0]
    for other in found[1:]:
        largest = namespace(largest).maximum(largest, other)
    return largest


def shows_cylinder(shapes: Sequence[Shape], sizes: Sequence[Array]) -> Array:
    """Returns whether cylinders are shown, (N, 1) bool, of sizes (N, 3) of each geom."""
    if "cylinder" not in shapes:
        return sizes[0][:, :1] < 0.0
    return sizes[shapes.index("cylinder")][:, :1] > 2.0 * SPECK_M


def _is_round(shapes: Sequence[Shape], shown: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.array([shape == "cylinder" for shape in shapes])[shown]
