"""Scenes that differ between episodes: what a task's `Variation` makes of a scene, what an episode draws.

MuJoCo compiles one model for all simulations. A variant changes fields of the model that each simulation has
for itself (size, mass and inertia of things, of the same density) and places of bodies. The scene is
compiled with the largest things: the bounds in which collisions are looked for then hold for all of them.
With `env.variation=fixed` the scene is the task's own, bit for bit.

A task reads sizes as `<thing>.half_size` (B, 3) of its view. B simulations, n of which begin, V variants,
K candidate places of each box that stands around.
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
from robot_rl.sim.task import Start, Task
from robot_rl.sim.variation import Variation

_CLUTTER_HALF_M = ((0.020, 0.020, 0.020), (0.030, 0.015, 0.015), (0.015, 0.030, 0.018), (0.025, 0.025, 0.012))
"""Half sizes of the boxes, in turn: lower than the palm of a hand whose fingers touch the table."""
_GREY = (0.45, 0.45, 0.45, 1.0)
_AREA_M = ((0.32, -0.30), (0.72, 0.30))
"""Where they stand: lowest and highest corner."""
_CLEAR_M = 0.11
"""From a box's centre to the task's path: half an open hand and half a box."""
_APART_M = 0.08
"""Between the centres of two boxes."""
_CANDIDATES = 16
_PARKED_M = (0.0, 0.0, -1.0)
"""Where absent boxes are: below the table, which hides them. Bodies without joints do not touch it."""


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
    for geom in geoms.values():
        geom.size = [largest * max(geom.size)] * 3  # a cube: axes of inertia are those of the body
    for i in range(max(declared.clutter)):
        half_m = _half_m(i)
        body = spec.worldbody.add_body(name=_box(i), mocap=True, pos=[0.7, 0.4, half_m[2]])
        body.add_geom(name=_box(i), type=mjtGeom.mjGEOM_BOX, size=half_m, rgba=_GREY)
    return found


class Variants:
    """Draws the variant of each episode; writes its sizes, and changes where things begin."""

    def __init__(
        self, prepared: SceneVariants | None, backend: Backend, randomized: Collection[tuple[str, str]]
    ) -> None:
        """Names sizes in the view, and expands the fields that differ.

        Args:
            prepared: the scene's; None for a task that declares nothing.
            backend: whose model was compiled from that scene.
            randomized: fields and elements that the task's randomisation draws.
        """
        self._backend, self._prepared = backend, prepared
        self.is_on = prepared is not None and prepared.which != "fixed"
        terms: list[Term] = []
        if prepared is not None:
            fields = ("geom_size", "body_mass", "body_inertia") if self.is_on else ()
            terms = [Term(field=name, element=thing) for thing in prepared.declared.things for name in fields]
        self.terms = Randomizer(terms, backend)
        """Writes what a variant changes of the model, and restores it."""
        if prepared is None:
            return
        for thing in prepared.declared.things:
            backend.view.name(f"{thing}.half_size", self._live_half_m(thing))
        if self.is_on:
            self._tabulate(prepared, randomized)

    def _live_half_m(self, thing: str) -> Array:
        row, nominal = self._backend.locate("geom_size", thing)
        shape = (self._backend.num_sims, 3)
        if not self.is_on:
            return self._backend.xp.broadcast_to(nominal, shape)
        return self._backend.expand("geom_size").reshape(shape[0], -1, 3)[:, row]

    def _tabulate(self, prepared: SceneVariants, randomized: Collection[tuple[str, str]]) -> None:
        declared, asarray = prepared.declared, self._backend.asarray
        columns: list[NDArray[np.float64]] = []
        lifts: list[NDArray[np.float64]] = []
        for i, thing in enumerate(declared.things):
            own_m, scales = prepared.half_m[thing], declared.scales()[:, i]
            half_m, mass_kg = own_m * scales, prepared.mass_kg[thing] * scales.prod(axis=1)
            columns += [half_m, mass_kg[:, None], box_inertia(mass_kg, half_m)]
            lifts.append(half_m[:, 2] - own_m[2])
        self._table = asarray(np.concatenate(columns, axis=1))
        self._lifts = asarray(np.stack(lifts, axis=1))
        self._goals, self._counts = asarray(declared.goals()), asarray(declared.counts())
        self._set = asarray(declared.variants(held_out=prepared.which == "held_out"))
        self._masses = [
            (i, prepared.mass_kg[thing])
            for thing, i in zip(declared.things, range(3, self._table.shape[1], 7), strict=True)
            if ("body_mass", thing) in randomized
        ]
        """Columns of masses that randomisation has drawn, and what it has scaled."""

    def infos(self, seeds: Array, episodes: Array) -> dict[str, Array]:
        """Returns the number of each episode's variant, a row of `Variation.levels`, where they differ."""
        return {"variant": self._draw(_rng(seeds, episodes))} if self.is_on else {}

    def _draw(self, rng: EpisodeRng) -> Array:
        xp = self._backend.xp
        at = xp.asarray(xp.floor(rng.uniform()[:, 0] * len(self._set)), dtype=xp.int64)
        return self._set[at]

    def begin(self, ids: Array, seeds: Array, episodes: Array, start: Start) -> Start:
        """Draws the variants of simulations (n,) that begin, writes them; returns where things begin in them.

        Comes after randomisation, whose masses it scales.
        """
        prepared = self._prepared
        if prepared is None or not self.is_on:
            return start
        declared, rng = prepared.declared, _rng(seeds, episodes)
        variant = self._draw(rng)
        values = copied(self._table[variant])
        if self._masses:
            present = self.terms.values(ids)
            for column, own_kg in self._masses:
                values[:, column] = values[:, column] * present[:, column] / own_kg
        self.terms.put(ids, values)
        joints, mocap = dict(start.joints), dict(start.mocap)
        for i, thing in enumerate(declared.things):
            joints[thing] = copied(joints[thing])
            joints[thing][:, 2] += self._lifts[variant, i]
        if declared.goal:
            mocap[declared.goal] = mocap[declared.goal] + self._goals[variant]
        places = {**joints, **mocap}
        path = [places[name][:, :2] for name in declared.path]
        mocap |= self._clutter(path, rng, self._counts[variant])
        return replace(start, joints=joints, mocap=mocap)

    def _clutter(self, path: Sequence[Array], rng: EpisodeRng, counts: Array) -> dict[str, Array]:
        """Draws places (n, 3) of boxes, away from a path and from each other; absent ones are parked."""
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
            found[_box(i)] = xp.where((i < counts)[:, None], standing, like(_PARKED_M, standing))
        return found


def box_inertia(mass_kg: NDArray[np.float64], half_m: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the moments of inertia (V, 3) of boxes: about an axis m (b^2 + c^2) / 3, of half sizes b, c."""
    squares = half_m**2
    return mass_kg[:, None] / 3.0 * (squares.sum(axis=1, keepdims=True) - squares)


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


def _box(i: int) -> str:
    return f"clutter_{i}"


def _half_m(i: int) -> tuple[float, float, float]:
    return _CLUTTER_HALF_M[i % len(_CLUTTER_HALF_M)]
