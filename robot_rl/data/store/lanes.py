"""Where the lanes of a writer stand: what each is inside of, and which pictures it saw last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

NONE = -1


class Lanes:
    """One row for each lane that was ever written to; L lanes, C cameras."""

    def __init__(self, num_cameras: int) -> None:
        self.episode = np.full(0, NONE, np.int64)
        """(L,), `NONE` outside of an episode."""
        self.step = np.zeros(0, np.int64)
        """(L,), the next one of the episode."""
        self.picture = np.full((0, num_cameras), NONE, np.int64)
        """(L, C), the newest one."""
        self.stamp = np.full((0, num_cameras), NONE, np.int64)
        """(L, C), in ns, when that was taken."""

    def grow(self, lane: int) -> None:
        """Makes room for lanes up to this one."""
        more = lane + 1 - len(self.episode)
        if more > 0:
            num_cameras = self.picture.shape[1]
            self.episode = np.r_[self.episode, np.full(more, NONE)]
            self.step = np.r_[self.step, np.zeros(more, np.int64)]
            self.picture = np.r_[self.picture, np.full((more, num_cameras), NONE)]
            self.stamp = np.r_[self.stamp, np.full((more, num_cameras), NONE)]

    def state_dict(self) -> dict[str, Any]:
        return {name: values.copy() for name, values in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episode, self.step, self.picture, self.stamp = (
            np.array(state[name], np.int64) for name in ("episode", "step", "picture", "stamp")
        )
