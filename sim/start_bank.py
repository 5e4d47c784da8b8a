"""Episodes that begin in states of a bank: which row each draws, and putting it into the simulations.

A draw depends on (seed, episode) alone, as the task's own starts do; with `retry` also on what failed, and
with `learnability` on the success of each class. Rows
and what they draw of the model are uploaded once, into arrays of the back end. n envs that begin, C
classes, N rows.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np

from robot_rl.core.arrays import Array, copied, is_array, to_numpy
from robot_rl.core.errors import ConfigError, nearest, require
from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.bank_files import OWN, Bank, BankKey, load_bank
from robot_rl.sim.config import ResetsConfig
from robot_rl.sim.randomize import Randomizer

HELD_OUT = 0.1
"""Share of each class's rows, its last ones, that only evaluation draws."""
_FORGETS = 0.02
"""Share of an episode in the success of its class that `learnability` reads."""


def key_of(task: str, robot: str, backend: Backend, randomizer: Randomizer) -> BankKey:
    """Returns the key of banks that fit these simulations."""
    return BankKey(
        task=task,
        robot=robot,
        model_hash=backend.model_hash(),
        num_state=backend.state_size,
        mujoco=version("mujoco"),
        varied=randomizer.labels,
    )


class StartBank:
    """Draws a class and a row for each episode; class 0 is the task's own starts, which have no row."""

    def __init__(self, config: ResetsConfig, key: BankKey, backend: Backend, randomizer: Randomizer) -> None:
        """Reads the bank and uploads it.

        Raises:
            DatasetError: it is damaged, or of another task, robot or model.
            ConfigError: the mixture names a class that it has not.
        """
        at = "env.resets.bank"
        bank = Bank(key=key, sets={}, bills={}) if config.bank is None else load_bank(config.bank, at=at)
        bank.key.check(key, at=f"{at}={config.bank}")
        self._backend, self._randomizer = backend, randomizer
        self.classes: tuple[str, ...] = (OWN, *bank.sets)
        if config.evaluate not in self.classes:
            near = nearest(config.evaluate, self.classes)
            raise ConfigError(f"env.resets.evaluate: no class {config.evaluate!r}.{near}")
        asarray = backend.asarray
        sets = list(bank.sets.values())
        empty = np.zeros((0, key.num_state)), np.zeros((0, len(key.varied)))
        self._states = asarray(np.concatenate([empty[0], *(each.states for each in sets)]))
        self._varied = asarray(np.concatenate([empty[1], *(each.varied for each in sets)]))
        self.sizes = [0, *(len(each) for each in sets)]
        self._offset = asarray(np.array([0, *np.cumsum(self.sizes)[:-1]], np.int64))
        first, count = _drawn(self.sizes, config)
        self._first, self._count = asarray(first), asarray(count)
        self._kinds, self._weights = self._mixture(config.weights(bank.sets), count)
        self._learnability, self._every_class = config.learnability, asarray(np.arange(len(self.classes)))
        self._success = asarray(np.full(len(self.classes), 0.5))
        """(C,): of each class, forgetting; half at first, so that the weights begin as given."""
        self._asked: tuple[Array, Array] | None = None
        self._are_given = False
        """Whether the caller puts what begins into states of its own."""
        num_envs = backend.num_sims
        self.kind = asarray(np.zeros(num_envs, np.int64))
        """(B,): the class of each env's present episode."""
        self.row = asarray(np.full(num_envs, -1, np.int64))
        """(B,): its row within that class; -1 where the task began it."""
        self._retry, self._failed = config.retry, asarray(np.zeros(num_envs, bool))
        self._begun = asarray(np.full(num_envs, -1, np.int64))
        """(B,): the episode whose draws each env's present start is of; -1 of given states, which are not
        tried again."""

    def _mixture(self, weights: Mapping[str, float], count: Array) -> tuple[Array, Array]:
        """Returns the classes that are drawn, and their weights; `weights` has those above 0."""
        drawn = [i for i, name in enumerate(self.classes) if name in weights]
        for i in drawn:
            if i and not count[i]:
                raise ConfigError(
                    f"env.resets.mix: class {self.classes[i]!r} has {self.sizes[i]} rows, too few to hold "
                    "some out for evaluation. Make a larger bank: robot-rl resets generate rows=1000."
                )
        share = np.array([weights[self.classes[i]] for i in drawn], float)
        return self._backend.asarray(np.array(drawn, np.int64)), self._backend.asarray(share)

    def _until(self) -> Array:
        """Returns up to where in [0, 1) the classes that are drawn are, all but the last."""
        success, follows = self._success[self._kinds], self._learnability
        share = self._weights * (1.0 - follows + 4.0 * follows * success * (1.0 - success))
        return self._backend.xp.cumulative_sum(share / share.sum())[:-1]

    def draw(self, rng: EpisodeRng) -> tuple[Array, Array]:
        """Returns the class and the row (n,) of episodes; the row is -1 where the class is 0."""
        xp, unit = self._backend.xp, rng.uniform(size=2)
        among = xp.sum(xp.asarray(unit[:, :1] >= self._until()[None, :], dtype=xp.int64), axis=1)
        kind = self._kinds[among]
        row = xp.asarray(xp.floor(unit[:, 1] * self._count[kind]), dtype=xp.int64) + self._first[kind]
        return kind, xp.where(kind == 0, -1, row)

    def begin(self, ids: Array, seeds: Array, episodes: Array) -> tuple[Array, Array]:
        """Puts simulations that begin into their rows.

        Returns those of them that the task begins itself, and the episodes whose draws these take: the
        present one, or that of the start which is tried again.

        Args:
            ids: (n,) simulations, cleared.
            seeds: (n,) of these; as `EpisodeRng` has them.
            episodes: (n,)
        """
        xp = self._backend.xp
        begun = xp.asarray(episodes, dtype=xp.int64)
        if self._asked is None:
            kind, row = self.draw(EpisodeRng(seeds, episodes, stream=Stream.BANK_ROWS))
            if self._retry:
                again = self._tries_again(ids, seeds, episodes)
                kind = xp.where(again, self.kind[ids], kind)
                row = xp.where(again, self.row[ids], row)
                begun = xp.where(again, self._begun[ids], begun)
        else:
            kind, row = self._asked[0][ids], self._asked[1][ids]
        self.kind[ids], self.row[ids], self._failed[ids] = kind, row, False
        self._begun[ids] = -1 if self._are_given else begun
        from_bank = kind > 0
        taken, at = ids[from_bank], (self._offset[kind] + row)[from_bank]
        if len(taken):
            self._backend.write_states(taken, self._states[at])
            if self._varied.shape[1]:
                self._randomizer.put(taken, self._varied[at])
        return ids[~from_bank], begun[~from_bank]

    def note(self, ended: Array, success: Array) -> None:
        """Remembers which episodes (B,) ended in failure, until the next ones begin, and of which class."""
        if self._retry:
            self._failed = (self._failed | ended) & ~success
        if self._learnability:
            xp, of_class = self._backend.xp, ended[:, None] & (self.kind[:, None] == self._every_class)
            number, solved = (
                xp.sum(xp.asarray(each, dtype=xp.float64), axis=0)
                for each in (of_class, of_class & success[:, None])
            )
            found = solved / xp.clip(number, 1.0, None)
            self._success = self._success + (1.0 - (1.0 - _FORGETS) ** number) * (found - self._success)

    def _tries_again(self, ids: Array, seeds: Array, episodes: Array) -> Array:
        """Returns which of the simulations (n,) that begin try their start again; none after a new seed."""
        drawn = EpisodeRng(seeds, episodes, stream=Stream.RETRIES).uniform(size=1)[:, 0] < self._retry
        return drawn & self._failed[ids] & (self._begun[ids] >= 0) & (episodes > 0)

    @contextmanager
    def asked(self, options: Mapping[str, Any]) -> Generator[None]:
        """Within it, episodes begin as `reset_class` and `reset_row` (B,) say, in the place of draws.

        A number alone is meant for every env. With `states` they begin as the task's own, in no row: the
        caller then puts them into these states. Without either it changes nothing.

        Raises:
            ConfigError: there is no such class, or no such row, or both options are given.
        """
        if "states" in options:
            named = sorted({"reset_class", "reset_row"} & set(options))
            require(not named, "reset: states", f"states with {', '.join(named)}", "one of them")
            own = self._backend.asarray(np.zeros(len(self.kind), np.int64))
            self._asked, self._are_given = (own, own - 1), True
        elif "reset_class" not in options:
            require(
                "reset_row" not in options, "reset: reset_row", options.get("reset_row"), "with reset_class"
            )
        else:
            self._asked = self._checked(options["reset_class"], options.get("reset_row", 0))
        try:
            yield
        finally:
            self._asked, self._are_given = None, False

    def _checked(self, kind: Any, row: Any) -> tuple[Array, Array]:
        size, every = np.array(self.sizes), (len(self.kind),)
        allowed = f"a number, or one for each of {every[0]} envs"
        kind, row = (_host(given) for given in (kind, row))
        for name, given in (("reset_class", kind), ("reset_row", row)):
            is_whole = given.dtype.kind in "iu" and given.shape in ((), every)
            require(is_whole, f"reset: {name}", given.tolist(), allowed)
        kind, row = (np.array(np.broadcast_to(given, every), np.int64) for given in (kind, row))
        is_class = (kind >= 0) & (kind < len(size))
        if not (is_class.all() and ((kind == 0) | ((row >= 0) & (row < size[kind]))).all()):
            rows = ", ".join(f"{i} {name}: {size[i]}" for i, name in enumerate(self.classes) if i)
            raise ConfigError(
                f"reset: got reset_class {kind.tolist()} and reset_row {row.tolist()}, allowed: 0 {OWN}, and "
                f"these classes with rows below {rows}"
            )
        return self._backend.asarray(kind), self._backend.asarray(np.where(kind == 0, -1, row))

    def infos(self) -> dict[str, Array]:
        """Returns the class and row of every env's present episode."""
        return {"reset_class": copied(self.kind), "reset_row": copied(self.row)}

    def state_dict(self) -> dict[str, Array]:
        """Returns the class and row of every env's present episode, and what later draws depend on."""
        again = {"reset_failed": copied(self._failed), "reset_begun": copied(self._begun)}
        success = {"reset_success": copied(self._success)} if self._learnability else {}
        return self.infos() | (again if self._retry else {}) | success

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        names = ("reset_class", "reset_row")
        self.kind, self.row = (copied(self._backend.asarray(state[name])) for name in names)
        if "reset_failed" in state:
            self._failed = copied(self._backend.asarray(state["reset_failed"]))
            # A checkpoint that lacks it is of a version that tried rows alone again.
            begun = state.get("reset_begun", np.where(_host(state["reset_row"]) < 0, -1, 0))
            self._begun = copied(self._backend.asarray(begun))
        if "reset_success" in state:
            self._success = copied(self._backend.asarray(state["reset_success"]))


def _host(values: Any) -> Array:
    return to_numpy(values) if is_array(values) else np.asarray(values)


def _drawn(sizes: list[int], config: ResetsConfig) -> tuple[Array, Array]:
    """Returns the first row and the number of rows (C,) of each class that may be drawn."""
    size = np.array(sizes, np.int64)
    held_out = np.ceil(HELD_OUT * size).astype(np.int64)
    if config.rows == "held_out":
        return size - held_out, held_out
    return np.zeros_like(size), size - held_out
