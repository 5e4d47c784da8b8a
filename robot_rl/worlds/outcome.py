"""Success and failure in predicted states: by the task's own predicate, or by classifiers that learned it.

B rows, S state elements; of codes of pictures, if the model has any, C channels and h x w cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.core.registry import resolve, table
from robot_rl.policies.networks import initialise
from robot_rl.sim.backends.backend import View
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.task import Task, state_quantities
from robot_rl.worlds.history import AUDIT, TRAIN, Array, History

_NETWORKS, _WIDTH, _SEEN = 5, 64, 16
_CODE_NOISE = 0.2
"""In training, in deviations of a code: predicted codes are less sharp than recorded ones."""
_AT_ONCE = 4096
"""Rows that are judged together."""
_AGREES = 0.99
"""Share of recorded states in which a predicate must say what was recorded, to be used."""


class Outcome(Protocol):
    """Who judges a state."""

    kind: str

    def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
        """Returns success and failure (B,) in states (B, S) with the codes (B, C, h, w) of their pictures."""
        ...


class PredicateOutcome:
    """The task's own `evaluate`, on the quantities that the state holds."""

    kind = "predicate"

    def __init__(self, task: str, robot: str, state_names: tuple[str, ...]) -> None:
        """Finds the quantities.

        Raises:
            ConfigError: no task of ours, or one whose success is not a function of the observed state.
        """
        if task not in table("task"):
            raise ConfigError(f"world model: {task!r} is no task of ours, so it has no predicate.")
        self._task: Task = resolve("task", task)()
        if self._task.hold_s:
            raise ConfigError(f"world model: success of {task} must last {self._task.hold_s:g} s.")
        known = load_robot(robot)
        own = tuple(name.removeprefix(f"{known.name}.") for name in state_names)  # of one of `env.robots`
        self._columns = _columns(state_quantities(self._task, known), own)
        self._fingers = tuple(f"{joint}.pos" for joint in known.finger_joints)
        try:
            self.judge(np.zeros((1, len(state_names)), np.float32))
        except (ModelError, KeyError) as error:
            raise ConfigError(
                f"world model: success of {task} needs what is not observed: {error}"
            ) from error

    def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
        verdict = self._task.evaluate(View(states, self._columns, self._fingers))
        success = np.asarray(verdict["success"], bool)
        return success, np.asarray(verdict.get("fail", np.zeros_like(success)), bool)


def _columns(quantities: tuple[str, ...], names: tuple[str, ...]) -> dict[str, slice]:
    """Returns where each quantity is in the state; those that are not shown whole are left out."""
    columns = dict[str, slice]()
    for quantity in quantities:
        where = [i for i, name in enumerate(names) if name == quantity or name.startswith(f"{quantity}.")]
        if where and where == list(range(where[0], where[-1] + 1)):
            columns[quantity] = slice(where[0], where[-1] + 1)
    return columns


class Judge(nn.Module):
    """One network: a state, and what is anywhere in a code of pictures, to the logit of success."""

    def __init__(self, state_dim: int, channels: int) -> None:
        super().__init__()
        self.look = nn.Sequential()
        if channels:
            first, then = (nn.Conv2d(size, _SEEN, 3, padding=1) for size in (channels, _SEEN))
            self.look = nn.Sequential(first, nn.SiLU(), then)
        self.decide = nn.Sequential(
            nn.Linear(state_dim + (_SEEN if channels else 0), _WIDTH),
            nn.SiLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.SiLU(),
            nn.Linear(_WIDTH, 1),
        )

    def forward(self, state: Tensor, codes: Tensor | None) -> Tensor:
        """Returns logits (B,) of states (B, S) and codes (B, C, h, w)."""
        if codes is not None:
            state = torch.cat([state, self.look(codes).amax(dim=(2, 3))], dim=1)
        return self.decide(state)[:, 0]


class ClassifierOutcome(nn.Module):
    """Small networks that learned which recorded states are successes; a share of them must say so.

    Successes are far fewer than other states, so half of each batch is of either kind. The vote is for
    precision, which matters most (DiWA, arXiv 2508.03645, section 5). Where there are pictures, the networks
    see their codes too, with noise in training, and only what is somewhere in them: a cube over its goal
    looks the same wherever it is.
    """

    kind = "classifier"

    def __init__(self, state_dim: int, channels: int = 0, *, vote: float = 0.6, seed: int = 0) -> None:
        """Draws the weights.

        Args:
            state_dim: S.
            channels: C of a code, 0 without pictures.
            vote: share of networks that must see success.
            seed: of the weights; torch's global generator stays as it is.
        """
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # constructors of layers draw from the global one
            self.networks = nn.ModuleList(Judge(state_dim, channels) for _ in range(_NETWORKS))
        initialise(self.networks, torch.Generator().manual_seed(seed))
        self.register_buffer("centre", torch.zeros(state_dim))
        self.register_buffer("scale", torch.ones(state_dim))
        self.register_buffer("vote", torch.tensor(vote, dtype=torch.float64))
        self.centre: Tensor
        self.scale: Tensor
        self.vote: Tensor

    def fit(
        self,
        history: History,
        codes: Array | None = None,
        *,
        updates: int = 1500,
        batch: int = 256,
        seed: int = 0,
    ) -> None:
        """Learns from the recorded states of the first split, and the codes (N, C, h, w) of their pictures.

        Raises:
            ConfigError: no state of it is a success, or none is not.
        """
        rows = np.flatnonzero(np.isin(history.episode, history.split(TRAIN)))
        kinds = [rows[history.success[rows]], rows[~history.success[rows]]]
        if not all(len(kind) for kind in kinds):
            raise ConfigError(
                f"world model: of {len(rows)} recorded states {len(kinds[0])} are successes; a classifier "
                "needs both. Collect episodes that succeed, and some that fail."
            )
        self.centre.copy_(torch.from_numpy(history.state[rows].mean(axis=0)))
        self.scale.copy_(torch.from_numpy(np.maximum(history.state[rows].std(axis=0), 1e-4)))
        rng = np.random.default_rng(seed)
        optimiser = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-3)
        target = torch.cat([torch.ones(batch // 2), torch.zeros(batch // 2)])
        for _ in range(updates):
            loss = torch.zeros(())
            for network in self.networks:
                drawn = np.concatenate([rng.choice(kind, batch // 2) for kind in kinds])
                state, seen = self._inputs(history.state[drawn], None if codes is None else codes[drawn])
                if seen is not None:
                    noise = rng.standard_normal(tuple(seen.shape)).astype(np.float32)
                    seen = seen + _CODE_NOISE * torch.from_numpy(noise)
                logits = network(state, seen)
                loss = loss + nn.functional.binary_cross_entropy_with_logits(logits, target)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

    @torch.no_grad()
    def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
        """See `Outcome.judge`."""
        success, need = np.zeros(len(states), bool), math.ceil(float(self.vote) * _NETWORKS - 1e-9)
        for rows in np.array_split(np.arange(len(states)), max(1, -(-len(states) // _AT_ONCE))):
            state, seen = self._inputs(states[rows], None if codes is None else codes[rows])
            votes = torch.stack([torch.sigmoid(network(state, seen)) > 0.5 for network in self.networks])
            success[rows] = votes.sum(dim=0).numpy() >= need
        return success, np.zeros_like(success)

    def _inputs(self, states: Array, codes: Array | None) -> tuple[Tensor, Tensor | None]:
        state = (torch.from_numpy(np.ascontiguousarray(states)) - self.centre) / self.scale
        return state, None if codes is None else torch.from_numpy(codes.astype(np.float32))


def agreement(
    outcome: Outcome, history: History, split: str = AUDIT, *, codes: Array | None = None
) -> Mapping[str, float]:
    """Returns precision, recall and accuracy of an outcome on recorded states (and codes) of a split."""
    rows = np.flatnonzero(np.isin(history.episode, history.split(split)))
    rows = rows[rows > history.first[history.episode[rows]]]
    seen = None if codes is None else codes[rows]
    found, true = outcome.judge(history.state[rows], seen)[0], history.success[rows]
    both = float((found & true).sum())
    return {
        "precision": both / max(1.0, float(found.sum())),
        "recall": both / max(1.0, float(true.sum())),
        "accuracy": float((found == true).mean()),
    }


def outcome_of(
    history: History, kind: str | None, *, codes: Array | None = None, vote: float = 0.6, seed: int = 0
) -> Outcome:
    """Returns the task's predicate where it can be used and agrees with what was recorded; else classifiers.

    Args:
        kind: `predicate` or `classifier`, or None for the first that fits.
        codes: (N, C, h, w), of the pictures, if the model has any: classifiers see them too.
        vote: share of the classifiers that must see success.
        seed: of the classifiers' first weights and batches.

    Raises:
        ConfigError: the predicate was asked for and cannot be used, or there is no success to learn from.
    """
    meta = history.meta
    if kind != ClassifierOutcome.kind:
        try:
            predicate = PredicateOutcome(meta.task, meta.robot, meta.state_names)
            found = agreement(predicate, history, TRAIN)["accuracy"]
            if found < _AGREES:
                raise ConfigError(
                    f"world model: the predicate of {meta.task} says what was recorded in {found:.1%} of the "
                    f"states alone, need {_AGREES:.0%}. Use outcome=classifier."
                )
            return predicate
        except ConfigError:
            if kind is not None:
                raise
    channels = 0 if codes is None else codes.shape[1]
    classifier = ClassifierOutcome(history.state.shape[1], channels, vote=vote, seed=seed)
    classifier.fit(history, codes, seed=seed)
    return classifier


def state_of(outcome: Any) -> dict[str, Tensor]:
    """Returns the weights of an outcome; none of a predicate."""
    return dict(outcome.state_dict()) if isinstance(outcome, nn.Module) else {}
