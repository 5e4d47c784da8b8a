"""Scenes that differ between episodes: what a task's `Variation` makes of a scene, what an episode draws.

MuJoCo compiles one model for all simulations. A variant changes fields of the model that each simulation has
for itself (size, mass and inertia of things, of the same density) and places of bodies. The scene is
compiled with the largest things: the bounds in which collisions are looked for then hold for all of them.
A thing of several shapes has a geom of each, see `sim/shapes.py`.
With `env.variation=fixed` the scene is the task's own, bit for bit.

A task reads sizes as `<thing>.half_size` (B, 3) of its view, and whether a thing is a cylinder as
`<thing>.is_round` (B, 1). B simulations, n of which begin, V variants, S shapes, K candidate places of each
obstacle that stands around.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import mujoco
import numpy as np
from mujoco import mjtGeom
from numpy.typing import NDArray

from robot_rl.core.arrays import Array, copied, like, namespace, norm
from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.config import Scenes
from robot_rl.sim.randomize import Randomizer, Term
from robot_rl.sim.shapes import (
    Floats,
    Shape,
    geom_of,
    geom_sizes,
    inertias,
    inscribed,
    shown_half_m,
    shows_cylinder,
    volumes,
)
from robot_rl.sim.task import Start, Task
from robot_rl.sim.variation import Variation

_CLUTTER_HALF_M = ((0.020, 0.020, 0.020), (0.030, 0.015, 0.015), (0.015, 0.030, 0.018), (0.025, 0.025, 0.012))
"""Half sizes of obstacles, in turn: lower than the palm of a hand whose fingers touch the table."""
_SHARED = (
    "rgba", "material", "group", "contype", "conaffinity", "condim", "priority", "friction", "solmix",
    "solref", "solimp", "margin", "gap",
)  # fmt: skip
"""What the geoms of a thing share: looks, and how they touch."""
_GREY = (0.45, 0.45, 0.45, 1.0)
_AREA_M = ((0.32, -0.30), (0.72, 0.30))
"""Where they stand: lowest and highest corner."""
_CLEAR_M = 0.11
"""From an obstacle's centre to the task's path: half an open hand and half an obstacle."""
_APART_M = 0.08
"""Between the centres of two obstacles."""
_CANDIDATES = 16
_PARKED_M = (0.0, 0.0, -1.0)
"""Where absent obstacles are: below the table, which hides them. Bodies without joints do not touch it."""


@dataclass(frozen=True, kw_only=True)
class SceneVariants:
    """A scene that is prepared for its variants."""

    which: Scenes
    declared: Variation
    half_m: Mapping[str, NDArray[np.float64]]
    """Thing -> half sizes (3,) in the task's own scene."""
    mass_kg: Mapping[str, float]
    """Thing -> mass in the task's own scene."""


def prepare_scene(spec: mujoco.MjSpec, task: Task, which: Scenes) -> SceneVariants | None:
    """Makes room in a task's scene for its variants; leaves it as it is if `which` is fixed."""
    declared = task.variation
    if declared is None:
        return None
    geoms = {thing: spec.geom(thing) for thing in declared.things}
    found = SceneVariants(
        which=which,
        declared=declared,
        half_m={thing: np.array(geom.size) for thing, geom in geoms.items()},
        mass_kg={thing: float(geom.mass) for thing, geom in geoms.items()},
    )
    if which == "fixed":
        return found
    largest = max(*declared.widths, *declared.heights)
    for thing, geom in geoms.items():
        geom.size = [largest * max(geom.size)] * 3  # a cube: axes of inertia are those of the body
        _add_shapes(spec, thing, declared.shapes)
    for i in range(max(declared.clutter)):
        half_m = _half_m(i)
        body = spec.worldbody.add_body(name=_obstacle(i), mocap=True, pos=[0.7, 0.4, half_m[2]])
        body.add_geom(name=_obstacle(i), type=mjtGeom.mjGEOM_BOX, size=half_m, rgba=_GREY)
        _add_shapes(spec, _obstacle(i), declared.shapes)
    return found


def _add_shapes(spec: mujoco.MjSpec, thing: str, shapes: Sequence[Shape]) -> None:
    """Gives the body of a box, whose name is the thing's, a geom without mass of each other shape.

    A finger touches a cylinder in one point where it touches a box in two, so cylinders have torsional
    friction (condim 4): without it they swing between two fingers.
    """
    if "cylinder" not in shapes:
        return
    box = spec.geom(thing)
    geom = box.parent.add_geom(
        name=geom_of(thing, "cylinder"), type=mjtGeom.mjGEOM_CYLINDER, size=[max(box.size)] * 2 + [0.0]
    )
    geom.mass = 0.0
    for name in _SHARED:
        setattr(geom, name, getattr(box, name))
    geom.condim = max(box.condim, 4)


class Variants:
    """Draws the variant of each episode; writes its shapes and sizes, and changes where things begin."""

    def __init__(
        self, prepared: SceneVariants | None, backend: Backend, drawn: Collection[tuple[str, str]]
    ) -> None:
        """Names sizes in the view, and expands the fields that differ.

        Args:
            prepared: the scene's; None for a task that declares nothing.
            backend: whose model was compiled from that scene.
            drawn: fields and elements that the task's randomisation and the scene's looks draw.
        """
        self._backend, self._prepared = backend, prepared
        self.is_on = prepared is not None and prepared.which != "fixed"
        if prepared is None or not self.is_on:
            self._terms = Randomizer((), backend)
            for thing in () if prepared is None else prepared.declared.things:
                nominal = backend.locate("geom_size", thing)[1]
                rows = backend.xp.broadcast_to(nominal, (backend.num_sims, 3))
                self._name(thing, rows, rows[:, :1] < 0.0)
            return
        self._expand(prepared.declared, drawn)
        self._tabulate(prepared, drawn)

    @property
    def fields(self) -> tuple[str, ...]:
        """The model fields that differ between simulations."""
        return self._terms.fields

    def restore(self, values: dict[str, Array]) -> None:
        """Writes back every field, as an exact resume needs."""
        self._terms.restore(values)
        self._measure()

    def _expand(self, declared: Variation, drawn: Collection[tuple[str, str]]) -> None:
        """Gives each simulation fields of its own, and sizes in the view."""
        backend, shapes = self._backend, declared.shapes
        terms: list[Term] = []
        for thing in declared.things:
            terms += [Term(field="geom_size", element=geom_of(thing, shape)) for shape in shapes]
            terms += [Term(field=name, element=thing) for name in ("body_mass", "body_inertia")]
        # Of one shape, what stands around is as it was compiled.
        for i in range(max(declared.clutter) if len(shapes) > 1 else 0):
            terms += [Term(field="geom_size", element=geom_of(_obstacle(i), shape)) for shape in shapes]
        self._terms = Randomizer(terms, backend)
        self._sizes = {
            thing: [self._row("geom_size", geom_of(thing, shape)) for shape in shapes]
            for thing in declared.things
        }
        self._followers = [
            (self._row(field, thing), self._row(field, geom_of(thing, shape)))
            for field, thing in sorted(drawn)
            for shape in shapes
            if thing in declared.things and shape != "box" and field.startswith("geom_")
        ]
        """What is drawn of a thing's box, and of another of its geoms, to which it is copied."""
        for thing, sizes in self._sizes.items():
            self._name(thing, copied(shown_half_m(shapes, sizes)), shows_cylinder(shapes, sizes))

    def _name(self, thing: str, half_m: Array, is_round: Array) -> None:
        self._backend.view.name(f"{thing}.half_size", half_m)
        self._backend.view.name(f"{thing}.is_round", is_round)

    def _row(self, field: str, element: str) -> Array:
        """Returns a live (B, k) view of an object's values in an expanded field."""
        row, nominal = self._backend.locate(field, element)
        return self._backend.expand(field).reshape(self._backend.num_sims, -1, len(nominal))[:, row]

    def _measure(self) -> None:
        """Makes the view's sizes those of the model."""
        if self._prepared is None or not self.is_on:
            return
        shapes, view = self._prepared.declared.shapes, self._backend.view
        for thing, sizes in self._sizes.items():
            view[f"{thing}.half_size"][...] = shown_half_m(shapes, sizes)
            view[f"{thing}.is_round"][...] = shows_cylinder(shapes, sizes)

    def _tabulate(self, prepared: SceneVariants, drawn: Collection[tuple[str, str]]) -> None:
        declared, asarray = prepared.declared, self._backend.asarray
        shapes, columns, lifts = declared.shapes, list[Floats](), list[Floats]()
        self._masses: list[tuple[int, float]] = []
        """Columns of masses that randomisation has drawn, and what it has scaled."""
        for i, thing in enumerate(declared.things):
            own_m, own_kg, shown = prepared.half_m[thing], prepared.mass_kg[thing], declared.shown()[:, i]
            half_m = inscribed(shapes, shown, own_m * declared.scales()[:, i])
            mass_kg = own_kg * volumes(shapes, shown, half_m) / (8.0 * own_m.prod())
            if ("body_mass", thing) in drawn:
                self._masses.append((sum(each.shape[1] for each in columns) + 3 * len(shapes), own_kg))
            inertia = inertias(shapes, shown, mass_kg, half_m)
            columns += [geom_sizes(shapes, shown, half_m), mass_kg[:, None], inertia]
            lifts.append(half_m[:, 2] - own_m[2])
        self._table = asarray(np.concatenate(columns, axis=1))
        self._lifts = asarray(np.stack(lifts, axis=1))
        self._goals, self._counts = asarray(declared.goals()), asarray(declared.counts())
        self._set = asarray(declared.variants(held_out=prepared.which == "held_out"))
        every = np.arange(len(shapes))
        self._obstacles: list[Array] = []
        """Sizes of the geoms of each obstacle, (S, 3 S): in each of its shapes."""
        for i in range(max(declared.clutter)):
            half_m = inscribed(shapes, every, np.tile(_half_m(i), (len(shapes), 1)))
            self._obstacles.append(asarray(geom_sizes(shapes, every, half_m)))

    def infos(self, seeds: Array, episodes: Array) -> dict[str, Array]:
        """Returns the number of each episode's variant, a row of `Variation.levels`, where they differ."""
        return {"variant": self._draw(_rng(seeds, episodes))} if self.is_on else {}

    def _draw(self, rng: EpisodeRng) -> Array:
        xp = self._backend.xp
        at = xp.asarray(xp.floor(rng.uniform()[:, 0] * len(self._set)), dtype=xp.int64)
        return self._set[at]

    def begin(self, ids: Array, seeds: Array, episodes: Array, start: Start) -> Start:
        """Draws the variants of simulations (n,) that begin, writes them; returns where things begin in them.

        Comes after randomisation and looks: it scales the drawn masses, and gives all geoms of a thing what
        was drawn of one.
        """
        prepared = self._prepared
        if prepared is None or not self.is_on:
            return start
        declared, rng = prepared.declared, _rng(seeds, episodes)
        variant = self._draw(rng)
        values = copied(self._table[variant])
        if self._masses:
            present = self._terms.values(ids)
            for column, own_kg in self._masses:
                values[:, column] = values[:, column] * present[:, column] / own_kg
        for source, target in self._followers:
            target[ids] = source[ids]
        joints, mocap = dict(start.joints), dict(start.mocap)
        for i, thing in enumerate(declared.things):
            joints[thing] = copied(joints[thing])
            joints[thing][:, 2] += self._lifts[variant, i]
        if declared.goal:
            mocap[declared.goal] = mocap[declared.goal] + self._goals[variant]
        places = {**joints, **mocap}
        path = [places[name][:, :2] for name in declared.path]
        mocap |= self._clutter(path, rng, self._counts[variant])
        self._terms.put(ids, self._backend.xp.concat([values, *self._obstacle_sizes(rng)], axis=1))
        self._measure()
        return replace(start, joints=joints, mocap=mocap)

    def _clutter(self, path: Sequence[Array], rng: EpisodeRng, counts: Array) -> dict[str, Array]:
        """Draws places (n, 3) of obstacles, away from a path and from each other; absent ones are parked."""
        xp, prepared = self._backend.xp, self._prepared
        assert prepared is not None
        taken: list[Array] = []
        found: dict[str, Array] = {}
        for i in range(max(prepared.declared.clutter)):
            unit = rng.uniform(size=2 * _CANDIDATES).reshape(-1, _CANDIDATES, 2)
            low, high = like(_AREA_M[0], unit), like(_AREA_M[1], unit)
            places = low + unit * (high - low)
            room = _distance(places, path) - _CLEAR_M
            for other in taken:
                room = xp.minimum(room, norm(places - other[:, None]) - _APART_M)
            # The first candidate with room enough; without one, that with most room.
            best = xp.argmax(xp.clip(room, None, 0.0), axis=1)
            chosen = places[xp.arange(len(places), device=places.device), best]
            taken.append(chosen)
            height = 0.0 * chosen[:, :1] + _half_m(i)[2]
            standing = xp.concat([chosen, height], axis=1)
            found[_obstacle(i)] = xp.where((i < counts)[:, None], standing, like(_PARKED_M, standing))
        return found

    def _obstacle_sizes(self, rng: EpisodeRng) -> list[Array]:
        """Draws the shapes of obstacles; returns the sizes (n, 3 S) of their geoms, none of one shape."""
        xp, num_shapes = self._backend.xp, len(self._obstacles[0]) if self._obstacles else 0
        if num_shapes < 2:
            return []
        drawn = xp.asarray(xp.floor(rng.uniform(size=len(self._obstacles)) * num_shapes), dtype=xp.int64)
        return [table[drawn[:, i]] for i, table in enumerate(self._obstacles)]


def _distance(places: Array, path: Sequence[Array]) -> Array:
    """Returns how far places (n, K, 2) are from the lines between points (n, 2) of a path, (n, K)."""
    nearest: list[Array] = []
    for begin, end in pairwise(path):
        way, apart = end - begin, places - begin[:, None]
        length = norm(way)
        along = apart[..., 0] * way[:, None, 0] + apart[..., 1] * way[:, None, 1]
        share = namespace(way).clip(along / (length * length + 1e-12)[:, None], 0.0, 1.0)
        nearest.append(norm(apart - share[..., None] * way[:, None]))
    least = nearest[0]
    for other in nearest[1:]:
        least = namespace(least).minimum(least, other)
    return least


def _rng(seeds: Array, episodes: Array) -> EpisodeRng:
    return EpisodeRng(seeds, episodes, stream=Stream.VARIANTS)


def _obstacle(i: int) -> str:
    return f"clutter_{i}"


def _half_m(i: int) -> tuple[float, float, float]:
    return _CLUTTER_HALF_M[i % len(_CLUTTER_HALF_M)]
