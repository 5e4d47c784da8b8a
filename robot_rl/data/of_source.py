"""The steps of one source in a ring, as a part of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.transitions import ChunkBatch, TransitionBatch


class OfSource:
    """The steps of one source in a buffer, as a part of a `Mixture`: what a person did, drawn more often.

    The steps stay where they are, between those before and after, so that no window or next
    observation is lost. While there are fewer than `at_least`, all steps of the buffer stand in.
    """

    def __init__(self, replay: ReplayBuffer, source: str, *, at_least: int = 100) -> None:
        self._replay, self._source, self._at_least = replay, source, at_least

    def __len__(self) -> int:
        return len(self._replay.rows_of(self._source))

    def sample(
        self, batch_size: int, *, n_step: int, gamma_step: float, rng: np.random.Generator
    ) -> TransitionBatch:
        """Returns windows that begin at steps of the source."""
        return self._replay.sample(
            batch_size, n_step=n_step, gamma_step=gamma_step, rng=rng, rows=self._rows()
        )

    def sample_chunks(
        self,
        batch_size: int,
        *,
        horizon: int,
        gamma_step: float,
        rng: np.random.Generator,
        prefixes: Sequence[int] = (),
    ) -> ChunkBatch:
        """Returns chunks that begin at steps of the source, whoever goes on with them."""
        return self._replay.sample_chunks(
            batch_size,
            horizon=horizon,
            gamma_step=gamma_step,
            rng=rng,
            rows=self._rows(),
            prefixes=prefixes,
        )

    def _rows(self) -> NDArray[np.int64] | None:
        rows = self._replay.rows_of(self._source)
        return rows if len(rows) >= self._at_least else None
