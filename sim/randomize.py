"""Randomisation terms: each names the model field it writes and what must be derived again."""

from dataclasses import dataclass
from typing import Literal

from robot_rl.core.arrays import Array
from robot_rl.core.errors import ModelError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.backends.backend import Backend

_DERIVED = frozenset({"body_mass", "body_inertia", "body_ipos"})
"""Fields after which MuJoCo must recompute constants."""


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
        self._terms = [(term, *backend.locate(term.field, term.element)) for term in terms]
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
