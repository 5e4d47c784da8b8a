"""Randomisation terms: each names the model field it writes and what must be derived again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from robot_rl.core.arrays import Array, assign, namespace
from robot_rl.core.errors import ModelError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.backends.backend import Backend

_DERIVED = frozenset({"body_mass", "body_inertia", "body_ipos", "dof_armature", "geom_size"})
"""Fields after which MuJoCo must recompute constants."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """What of a model an episode draws."""

    field: str
    """An MjModel field by object kind, such as `geom_friction` or `body_mass`."""
    element: str
    """The object's name; of a `dof_` field the joint's, of which the first degree of freedom is meant."""
    component: int | None = None
    """Which column to write; all of them if None."""

    def draw(self, nominal: Array, rng: EpisodeRng, scale: float = 1.0) -> Array:
        """Returns new values (B, k) for `rng.num_rows` simulations, given those of the model (k,).

        Args: scale: share of the change that is made: 0 leaves the model's.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Vary(Term):
    """Draws one number an episode and writes it to rows of a model field."""

    low: float
    high: float
    how: Literal["set", "scale"] = "scale"

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ModelError(f"vary {self.field} of {self.element}: low {self.low} is above high {self.high}")

    def draw(self, nominal: Array, rng: EpisodeRng, scale: float = 1.0) -> Array:
        value = rng.uniform(self.low, self.high)
        if self.how == "scale":
            new = value * nominal
        else:
            new = namespace(value).broadcast_to(value, (rng.num_rows, len(nominal)))
        return new if scale == 1.0 else nominal + scale * (new - nominal)


class Randomizer:
    """Applies terms to the masked simulations at reset; expands only the fields they name."""

    def __init__(self, terms: Sequence[Term], backend: Backend) -> None:
        self._backend = backend
        self._terms = [(term, *backend.locate(term.field, term.element)) for term in terms]
        self._fields = {term.field: backend.expand(term.field) for term in terms}

    @property
    def fields(self) -> tuple[str, ...]:
        """The model fields that differ between simulations."""
        return tuple(self._fields)

    @property
    def labels(self) -> tuple[str, ...]:
        """One name for each number that an episode draws, such as `body_mass cube 0`."""
        return tuple(
            f"{term.field} {term.element} {column}"
            for term, _, nominal in self._terms
            for column in range(nominal.shape[0])[_columns(term)]
        )

    def values(self, ids: Array) -> Array:
        """Returns what some simulations have drawn, (n, numbers), one for each of `labels`."""
        xp = self._backend.xp
        parts = [self._target(term, nominal)[ids, row, _columns(term)] for term, row, nominal in self._terms]
        parts = [xp.asarray(part, dtype=xp.float64) for part in parts]
        return xp.concat(parts, axis=1) if parts else xp.zeros((len(ids), 0), dtype=xp.float64)

    def put(self, ids: Array, values: Array) -> None:
        """Writes `values` (n, numbers) of other simulations, in the place of a draw."""
        first = 0
        for term, row, nominal in self._terms:
            width = len(range(nominal.shape[0])[_columns(term)])
            new = values[:, first : first + width]
            assign(self._target(term, nominal), (ids, row, _columns(term)), new)
            first += width
        if _DERIVED & self._fields.keys():
            self._backend.recompute_constants(ids)

    def _target(self, term: Term, nominal: Array) -> Array:
        return self._fields[term.field].reshape(self._backend.num_sims, -1, nominal.shape[0])

    def restore(self, values: dict[str, Array]) -> None:
        """Writes back every varied field, as an exact resume needs."""
        for name, value in values.items():
            self._fields[name][...] = self._backend.asarray(value)
        if _DERIVED & self._fields.keys():
            self._backend.recompute_constants(self._backend.xp.arange(self._backend.num_sims))

    def apply(self, ids: Array, rng: EpisodeRng, scale: float = 1.0) -> None:
        """Draws and writes every term for the given simulations; `scale` is that of `Term.draw`."""
        for term, row, nominal in self._terms:
            columns, target = _columns(term), self._target(term, nominal)
            assign(target, (ids, row, columns), term.draw(nominal, rng, scale)[:, columns])
        if _DERIVED & self._fields.keys():
            self._backend.recompute_constants(ids)


def _columns(term: Term) -> slice:
    return slice(None) if term.component is None else slice(term.component, term.component + 1)
