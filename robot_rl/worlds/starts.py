"""Where imagined episodes begin: rows of real experience, more of them where it matters.

WoVR (arXiv 2602.13977) begins a part of its rollouts at key frames before failures; MBPO and VLA-MBPO begin
anywhere; a policy begins an episode at its first state. Where a policy decides between success and failure,
the value drops: here the value of a state is the share of solved episodes among its nearest states of other
episodes, so that no critic is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.worlds.config import StartsConfig
from robot_rl.worlds.history import AUDIT, Array, History

logger = logging.getLogger(__name__)

_KINDS = ("initial", "keyframe", "replay", "drop")
_BEFORE_END = (2, 6)
"""Strides before the end of a failed episode between which its key frames are."""
_AT_ONCE = 512
"""States whose distances to all others are computed together."""
_NEIGHBOURS, _WITHIN, _SHARE = 32, 2, 0.1
"""Near states behind a value; strides within which it drops; share of the states that count as a drop."""


class Starts:
    """Rows of a history, by kind; the episodes of the third split, which judge the model, are left out."""

    def __init__(self, history: History, config: StartsConfig, *, stride: int) -> None:
        """Finds the rows; `stride` is the model's.

        Raises:
            ConfigError: see `recorded_starts`.
        """
        config, kept = recorded_starts(config, history), _kept(history)
        low, high = (stride * strides for strides in _BEFORE_END)
        failed = kept[~history.solved()[kept]]
        parts = [
            np.arange(max(history.first[e], history.last[e] - high), history.last[e] - low + 1)
            for e in failed
        ]
        inner = [np.arange(history.first[e], history.last[e]) for e in kept]
        rows = {
            "initial": history.first[kept],
            "keyframe": np.concatenate(parts) if parts else np.zeros(0, np.int64),
            "replay": np.concatenate(inner),
        }
        self.rows = {kind: found for kind, found in rows.items() if len(found)}
        """Kind, or `class <name>` -> rows of the history."""
        if config.drop:
            found = drops(history, kept, stride)
            self.rows |= {"drop": found} if len(found) else {}
        weights = np.array([getattr(config, kind) for kind in self.rows])
        for name, weight in config.classes.items():
            self.rows[f"class {name}"] = history.first[kept[history.begun_in()[kept] == name]]
            weights = np.append(weights, weight)
        if not weights.sum():
            weights = np.array([float(kind == "replay") for kind in self.rows])
        self._upto = np.cumsum(weights / weights.sum())

    def draw(self, rng: EpisodeRng) -> Array:
        """Returns the rows (n,) in which the episodes of a generator begin."""
        kind = np.searchsorted(self._upto, rng.uniform()[:, 0], side="right").clip(max=len(self.rows) - 1)
        at = rng.uniform()[:, 0]
        drawn = np.zeros(len(kind), np.int64)
        for number, found in enumerate(self.rows.values()):
            mine = kind == number
            drawn[mine] = found[(at[mine] * len(found)).astype(np.int64)]
        return drawn


def recorded_starts(
    config: StartsConfig,
    history: History,
    *,
    known: Iterable[str] = (),
    at: str = "env.settings.starts",
) -> StartsConfig:
    """Returns the weights without classes in which no episode began, but for those that judge the model.

    The weight of such a class goes to the other starts, with a warning.

    Args:
        config: weights as they were given.
        history: of the model.
        known: classes in which by chance no episode may have begun; another one is a mistake.
        at: where the weights were given, for messages.

    Raises:
        ConfigError: no episode of all began in a class that is not `known`, or there are no other starts.
    """
    begun, given = history.begun_in(), {name: weight for name, weight in config.classes.items() if weight > 0}
    there, counts = np.unique(begun[_kept(history)], return_counts=True)
    found = {name: weight for name, weight in given.items() if name in there}
    lacking = [name for name in given if name not in found]
    are_known = {*known, *begun.tolist()}.issuperset(lacking)
    if lacking and not (are_known and (found or any(getattr(config, kind) for kind in _KINDS))):
        shown = [f"{name} ({count} episodes)" for name, count in zip(there, counts, strict=True) if name]
        nothing = (
            "none, since no episode says in which class it began: give the experience/ of runs with "
            "env.resets.bank"
        )
        got = ", ".join(map(repr, lacking))
        raise ConfigError(f"{at}.classes: got {got}, allowed: {', '.join(shown) or nothing}.")
    if lacking:
        words = "%s.classes: no episode began in %s but those that judge the model; begins in the others"
        logger.warning(words, at, ", ".join(lacking))
    return replace(config, classes=found)


def _kept(history: History) -> Array:
    """Returns the episodes that imagined ones may begin in: not those that judge the model."""
    return np.setdiff1d(np.arange(history.num_episodes), history.split(AUDIT))


def values(history: History, rows: Array) -> Array:
    """Returns for each row (n,) the share of solved episodes among its nearest states of other episodes.

    Only these rows count as near.
    """
    states = history.state[rows]
    scaled = (states - states.mean(axis=0)) / np.maximum(states.std(axis=0), 1e-6)
    of, solved = history.episode[rows], history.solved()
    most = min(len(rows), _NEIGHBOURS + int(np.bincount(of).max()))  # some may be of its own episode
    every = torch.from_numpy(scaled)
    parts = [torch.cdist(part, every).topk(most, largest=False).indices for part in every.split(_AT_ONCE)]
    found = torch.cat(parts).numpy()
    is_other = of[found] != of[:, None]
    counted = is_other & (np.cumsum(is_other, axis=1) <= _NEIGHBOURS)
    return (solved[of[found]] * counted).sum(axis=1) / np.maximum(1, counted.sum(axis=1))


def drops(history: History, episodes: Array, stride: int) -> Array:
    """Returns the rows after which the value drops most within two strides: a tenth of those that have them.

    One state a stride counts. Empty where the value never drops.
    """
    parts = [np.arange(history.first[e], history.last[e] + 1, stride) for e in episodes]
    rows = np.concatenate(parts)
    value = values(history, rows)
    drop = np.full(len(rows), -np.inf)
    drop[:-_WITHIN] = value[:-_WITHIN] - value[_WITHIN:]
    drop[:-_WITHIN][history.episode[rows[:-_WITHIN]] != history.episode[rows[_WITHIN:]]] = -np.inf
    limit = np.quantile(drop[np.isfinite(drop)], 1 - _SHARE) if np.isfinite(drop).any() else np.inf
    return rows[(drop >= limit) & (drop > 0)]
