"""Where imagined episodes begin: rows of real experience, more of them where it matters.

WoVR (arXiv 2602.13977) begins a part of its rollouts at key frames before failures; MBPO and VLA-MBPO begin
anywhere; a policy begins an episode at its first state.
"""

from __future__ import annotations

import numpy as np

from robot_rl.core.seeding import EpisodeRng
from robot_rl.worlds.config import StartsConfig
from robot_rl.worlds.history import AUDIT, Array, History

_BEFORE_END = (2, 6)
"""Strides before the end of a failed episode between which its key frames are."""


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
        """Kind -> rows of the history."""
        weights = np.array([getattr(config, kind) for kind in self.rows])
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
