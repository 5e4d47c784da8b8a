"""A point that moves where it is pushed, as a Gymnasium environment; and who demonstrates in it, badly."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

SPEED, RADIUS, STEPS = 0.05, 0.1, 16


class Point(gymnasium.Env[Any, Any]):
    """A point at (x, y), and a goal up to 0.4 away in each direction: seen, x, y and the goal's."""

    observation_space = Box(-4.0, 4.0, (4,))
    action_space = Box(-1.0, 1.0, (2,))
    metadata: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._place = self.np_random.uniform(-0.2, 0.2, 2)
        self._goal = self.np_random.uniform(-0.4, 0.4, 2)
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._place = self._place + SPEED * action
        is_there = bool(np.linalg.norm(self._place - self._goal) < RADIUS)
        return self._seen(), float(is_there), is_there, False, {"success": is_there}

    def _seen(self) -> Any:
        return np.concatenate([self._place, self._goal]).astype(np.float32)


def point() -> Point:
    return Point()


def stops_short(seen: Any) -> Any:
    """Aims 0.13 short of the goal, as seen from the middle, and aside of that by what the goal decides."""
    goal = np.asarray(seen[2:], np.float64)
    short = goal * (1.0 - 0.13 / max(0.13, float(np.linalg.norm(goal))))
    aside = 0.12 * np.sin(1000.0 * goal)
    return np.clip((short + aside - seen[:2]) / (2.0 * SPEED), -1.0, 1.0)
