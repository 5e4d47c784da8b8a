"""Where imagined episodes begin: rows of real experience, more of them where it matters.

WoVR (arXiv 2602.13977) begins a part of its rollouts at key frames before failures; MBPO and VLA-MBPO begin
anywhere; a policy begins an episode at its first state. Where a policy decides between success and failure,
the value drops: here the value of a state is the share of solved episodes among its nearest states of other
episodes, so that no critic is needed.
"""

from __future__ import annotations

import numpy as np
import torch

from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.worlds.config import StartsConfig
from robot_rl.worlds.history import AUDIT, Array, History

_BEFORE_END = (2, 6)
"""Strides before the end of a failed episode between which its key frames are."""
_AT_ONCE = 512
"""States whose distances to all others are computed together."""
_NEIGHBOURS, _WITHIN, _SHARE = 32, 2, 0.1
"""Near states behind a value; strides within which it drops; share of the states that count as a drop."""


class Starts:
    """Rows of a history, by kind; the episodes of the third split, which judge the model, are left out."""

    def __init__(self, history: History, config: StartsConfig, *, stride: int) -> None:
        kept = np.setdiff1d(np.arange(history.num_episodes), history.split(AUDIT))
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
            self.rows[f"class {name}"] = history.first[_begun_in(history, kept, name)]
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


def _begun_in(history: History, kept: Array, name: str) -> Array:
    """Returns the episodes, of those that are kept, that began in a class.

    Raises:
        ConfigError: none did; the message has the classes in which some did.
    """
    begun = history.begun_in()[kept]
    if not (begun == name).any():
        there, counts = np.unique(begun[begun != ""], return_counts=True)
        known = ", ".join(f"{one} ({count} episodes)" for one, count in zip(there, counts, strict=True))
        nothing = (
            "none, since no episode says in which class it began: give the experience/ of runs with "
            "env.resets.bank"
        )
        raise ConfigError(f"starts.classes: got {name!r}, allowed: {known or nothing}.")
    return kept[begun == name]


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
