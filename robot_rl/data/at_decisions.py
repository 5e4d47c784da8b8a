"""Chunks of a replay that begin where the policy decided them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.transitions import ChunkBatch


class AtDecisions:
    """Draws chunks from the steps at which the policy decided them, with the noise that it decoded there."""

    def __init__(self, replay: ReplayBuffer) -> None:
        """Args: replay: keeps latents, and is filled by envs whose chunks are executed to their end."""
        self._replay = replay

    def __len__(self) -> int:
        return len(self._replay.decisions())

    def sample_chunks(
        self,
        batch_size: int,
        *,
        horizon: int,
        gamma_step: float,
        rng: np.random.Generator,
        prefixes: Sequence[int] = (),
    ) -> ChunkBatch:
        """Returns chunks of `horizon` actions, as many as are executed before the next chunk."""
        return self._replay.sample_chunks(
            batch_size,
            horizon=horizon,
            gamma_step=gamma_step,
            rng=rng,
            rows=self._replay.decisions(horizon),
            prefixes=prefixes,
        )
