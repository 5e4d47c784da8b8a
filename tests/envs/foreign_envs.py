"""Environments of another Python: what a worker imports from the working folder. Nothing of robot_rl."""

import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Pusher(gymnasium.Env[Any, Any]):
    """LeRobot's convention: `pixels` by camera, `agent_pos`, `is_success`.

    Its position is the seed and the sum of its actions. It fails once, in the way that `fails` names, at step
    `at` of the episode whose seed is `seed`, if the file `once` is there; which it then deletes.
    """

    observation_space = Dict(
        agent_pos=Box(-1e6, 1e6, (2,)), pixels=Dict(top=Box(0, 255, (4, 6, 3), np.uint8))
    )
    action_space = Box(-2.0, 2.0, (2,))
    metadata: Any = None  # as robosuite's

    def __init__(self, fails: str = "", once: str = "", at: int = 3, seed: int = 0) -> None:
        self.fails, self.once, self.at, self.seed = fails, once, at, seed
        sys.stdout.write("made\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.own, self.count = int(seed or 0), 0
        self.sum = np.zeros(2)
        if self.fails == "reset":
            self._fail()
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.count, self.sum = self.count + 1, self.sum + action
        if self.count == self.at and self.fails not in ("reset", "expert"):
            self._fail()
        if self.fails == "chat":
            sys.stdout.write("x" * 2**19 + "\n")
            sys.stdout.flush()
        reward = np.nan if self.fails == "nan" else float(self.sum[0])
        return self._look(), reward, False, self.count == 8, {"is_success": self.count >= 6}

    def _fail(self) -> None:
        if self.own != self.seed or (self.once and not os.path.exists(self.once)):
            return
        if self.once:
            os.remove(self.once)
        os.write(1, b"about to fail\n")
        if self.fails in ("die", "reset"):
            os._exit(7)
        if self.fails == "hang":
            time.sleep(1000)
        if self.fails == "raise":
            raise ZeroDivisionError("a ball without a mass")

    def _look(self) -> dict[str, Any]:
        own = np.random.default_rng().uniform() if self.fails == "seedless" else self.own
        position = np.array([own, self.sum[1]], np.float32)
        return {"agent_pos": position, "pixels": {"top": np.full((4, 6, 3), self.count, np.uint8)}}


class Brakes:
    """An expert that pushes less from step to step, of itself; actions are the environment's, -2 to 2."""

    def __init__(self) -> None:
        self._push = 3.0

    def get_action(self, seen: Any) -> Any:
        self._push -= 1.0
        return np.array([self._push, 0.01 * seen["agent_pos"][0]])


def dies_once(seen: Any) -> Any:
    """An expert whose process ends once, in the third step of the episode with seed 5."""
    if seen["agent_pos"][0] == 5 and (seen["pixels"]["top"] == 2).all() and os.path.exists("once"):
        os.remove("once")
        os._exit(7)
    return np.array([1.0, 0.5])


def gives_nan(seen: Any) -> Any:
    """An expert whose action is not finite."""
    return np.array([1.0, np.nan])


NO_EXPERT = "no function"


class Bead(gymnasium.Env[Any, Any]):
    """A bead on a wire, from its place to a mark; both are of the seed."""

    observation_space = Box(-2.0, 2.0, (2,))
    action_space = Box(-0.2, 0.2, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.mark = self.np_random.uniform(-1.0, 1.0, 2)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.place += float(action[0])
        is_there = bool(abs(self.mark - self.place) < 0.05)
        return self._look(), float(is_there), is_there, False, {"success": is_there}

    def _look(self) -> Any:
        return np.array([self.place, self.mark], np.float32)


def bead() -> Bead:
    return Bead()


def slides(seen: Any) -> Any:
    """Moves a bead to its mark: 2 m at most, with 0.2 m a step."""
    return seen[1:] - seen[:1]


def make(**settings: Any) -> Pusher:
    return Pusher(**settings)
