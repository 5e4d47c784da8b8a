"""Randomisation terms: each names the model field it writes and what must be derived again."""

from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np

from robot_rl.core.arrays import Array
from robot_rl.core.errors import ModelError, nearest
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.backends.backend import Backend

_DERIVED = frozenset({"body_mass", "body_inertia", "body_ipos"})
"""Fields after which MuJoCo must recompute constants."""
_COUNTS = {
    "actuator": "nu",
    "body": "nbody",
    "cam": "ncam",
    "dof": "njnt",
    "geom": "ngeom",
    "jnt": "njnt",
    "light": "nlight",
    "mat": "nmat",
    "site": "nsite",
}
"""First word of a field's name -> the size of its list of names."""


@dataclass(frozen=True, kw_only=True)
class Vary:
    """Draws one number an episode and writes it to rows of a model field."""

    field: str
    """An MjModel field by object kind, such as `geom_friction` or `body_mass`."""
    element: str
    """The object's name; of a `dof_` field the joint's, of which the first degree of freedom is meant."""
    low: float
    high: float
    how: Literal["set", "scale"] = "scale"
    component: int | None = None
    """Which column to write; all of them if None."""

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ModelError(f"vary {self.field} of {self.element}: low {self.low} is above high {self.high}")


class Randomizer:
    """Applies terms to the masked simulations at reset; expands only the fields they name."""

    def __init__(self, terms: tuple[Vary, ...], backend: Backend) -> None:
        self._backend = backend
        located = [(term, *_locate(term, backend.model)) for term in terms]
        self._terms = [(term, row, backend.asarray(nominal)) for term, row, nominal in located]
        self._fields = {term.field: backend.expand(term.field) for term in terms}

    @property
    def fields(self) -> tuple[str, ...]:
        """The model fields that differ between simulations."""
        return tuple(self._fields)

    def restore(self, values: dict[str, Array]) -> None:
        """Writes back every varied field, as an exact resume needs."""
        for name, value in values.items():
            self._fields[name][...] = self._backend.asarray(value)
        if _DERIVED & self._fields.keys():
            self._backend.recompute_constants(self._backend.xp.arange(len(self._backend.state)))

    def apply(self, ids: Array, rng: EpisodeRng) -> None:
        """Draws and writes every term for the given simulations."""
        xp = self._backend.xp
        for term, row, nominal in self._terms:
            value = rng.uniform(term.low, term.high)
            size = nominal.shape[0]
            new = value * nominal if term.how == "scale" else xp.broadcast_to(value, (len(ids), size))
            columns = slice(None) if term.component is None else slice(term.component, term.component + 1)
            target = self._fields[term.field].reshape(len(self._backend.state), -1, size)
            target[ids, row, columns] = new[:, columns]
        if _DERIVED & self._fields.keys():
            self._backend.recompute_constants(ids)


def _locate(term: Vary, model: mujoco.MjModel) -> tuple[int, Array]:
    """Returns the row of the named object in the field, and its nominal value."""
    kind = term.field.split("_")[0]
    if kind not in _COUNTS or not hasattr(model, term.field):
        fields = [name for name in dir(model) if name.split("_")[0] in _COUNTS]
        raise ModelError(f"vary: the model has no field {term.field!r}.{nearest(term.field, fields)}")
    access = getattr(model, "jnt" if kind == "dof" else kind)
    objects = [access(i).name for i in range(getattr(model, _COUNTS[kind]))]
    if term.element not in objects:
        raise ModelError(
            f"vary {term.field}: no {kind} named {term.element!r}.{nearest(term.element, objects)}"
        )
    row = objects.index(term.element)
    row = int(model.jnt_dofadr[row]) if kind == "dof" else row
    return row, np.atleast_1d(np.asarray(getattr(model, term.field)[row], dtype=float)).reshape(-1).copy()
