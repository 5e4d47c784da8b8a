"""A source that is gone is begun again, later and later, as often in a row as is allowed."""

from __future__ import annotations

import logging
import time

from robot_rl.core.errors import DeviceError

_LONGEST_S = 30.0
_MOST_AT_FIRST = 4
"""Losses before anything was collected: a station of a run that died may live on for 10 s."""
logger = logging.getLogger(__name__)


class ActorError(DeviceError):
    """What acts elsewhere has failed or is gone."""


class LostActorError(ActorError):
    """It died, fell silent, or its device failed: another one may do better."""


class Revival:
    """Counts the losses of one source, and says when the next may begin: 1, 2, 4, ... 30 s later."""

    def __init__(self, allowed: int) -> None:
        """Args: allowed: losses in a row, with nothing collected between them; one more is an error."""
        self._allowed, self._most = allowed, min(allowed, _MOST_AT_FIRST)
        self._in_a_row, self._due_s = 0, 0.0
        self.count = 0
        """How often the source was lost."""

    @property
    def wait_s(self) -> float:
        """Time until the next may begin; 0 if it may begin now."""
        return max(0.0, self._due_s - time.monotonic())

    def is_due(self, most_s: float | None) -> bool:
        """Returns whether the next may begin now, after a wait of `most_s` at most; None: until it may."""
        time.sleep(self.wait_s if most_s is None else min(self.wait_s, most_s))
        return not self.wait_s

    def lost(self, error: LostActorError) -> None:
        """Notes a loss.

        Raises:
            LostActorError: the one given, where no other may begin.
        """
        if self._in_a_row >= self._most:
            raise error
        after_s = min(2.0**self._in_a_row, _LONGEST_S)
        self._due_s, self._in_a_row, self.count = (
            time.monotonic() + after_s,
            self._in_a_row + 1,
            self.count + 1,
        )
        logger.warning("%s It is begun again in %g s.", error, after_s)

    def well(self) -> None:
        """Notes that the source collects."""
        self._in_a_row, self._most = 0, self._allowed
