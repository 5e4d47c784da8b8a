"""Some steps of a replay, as a part of a mixture: those of one source, or those at which chunks began."""

from __future__ import annotations

from typing import Any

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

    @property
    def is_empty(self) -> bool:
        """Whether nothing can stand in."""
        return not len(self._replay)

    def sample(self, batch_size: int, **how: Any) -> TransitionBatch:
        """Returns windows that begin at steps of the source; see `ReplayBuffer.sample`."""
        return self._replay.sample(batch_size, **how, rows=self._rows())

    def sample_chunks(self, batch_size: int, **how: Any) -> ChunkBatch:
        """Returns chunks that begin at steps of the source, whatever source continues them."""
        return self._replay.sample_chunks(batch_size, **how, rows=self._rows())

    def _rows(self) -> Any:
        rows = self._replay.rows_of(self._source)
        return rows if len(rows) >= self._at_least else None


class AtDecisions:
    """Draws chunks that begin where the policy began them, with the noise that it decoded there."""

    def __init__(self, replay: ReplayBuffer, horizon: int = 1) -> None:
        """Args: replay: keeps latents, and is filled by envs whose chunks are executed to their end.

        horizon: of the chunks that will be drawn, for `is_empty`.
        """
        self._replay, self._horizon = replay, horizon

    def __len__(self) -> int:
        return len(self._replay.decisions())

    @property
    def is_empty(self) -> bool:
        """Whether no chunk was executed to its end yet."""
        return not len(self._replay.decisions(self._horizon))

    def sample_chunks(self, batch_size: int, *, horizon: int, **how: Any) -> ChunkBatch:
        """Returns chunks of `horizon` actions, which has to be how many are executed before the next."""
        rows = self._replay.decisions(horizon)
        return self._replay.sample_chunks(batch_size, horizon=horizon, **how, rows=rows)
