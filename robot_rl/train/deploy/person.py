"""A scripted person, for simulated arms: watches, takes over late and imprecisely, gives control back.

It imitates a person with a keyboard: it notices a failing episode only after a while, reacts after a
delay, moves slower than the expert and misses its aim a little, and watches less often as time goes by.
B is 1 here: one arm. A action dim.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.names import GRIPPERS
from robot_rl.hal.vector import VectorEnv
from robot_rl.real.teleop.intent import Intent
from robot_rl.rollout.envs import make_expert
from robot_rl.train.human_config import ScriptedPersonConfig

Array = NDArray[Any]
_STATE = ("steps", "watches", "best", "best_at", "step", "alarmed_at", "drives_since", "from")


class ScriptedPerson:
    """A `Teleop` that reads the simulated scene."""

    def __init__(self, env: VectorEnv, config: ScriptedPersonConfig, seed: int) -> None:
        """Raises `ConfigError` where the env shows no progress or has no expert."""
        progress: Callable[[], Array] | None = getattr(env, "progress", None)
        if progress is None or env.num_envs != 1:
            raise ConfigError(
                f"human.input: a scripted person watches one simulated arm, got {env.num_envs} of "
                f"{type(env).__name__}. Use human.input=keyboard, gamepad or leader with a real arm."
            )
        self._progress = progress
        self._expert = make_expert(env, bias_m=0.0, noise_m=config.misjudges_m, noise_seed=seed)
        self._config, self._hz = config, env.control_hz
        self._has_gripper = env.action_names[-1] in GRIPPERS
        self._rng = np.random.default_rng(seed)
        self._seen: deque[Array] = deque(maxlen=1 + round(config.lag_s * self._hz))
        self._steps = 0
        """Control steps so far: the person's clock is the arm's."""
        self.begin()

    def begin(self) -> None:
        elapsed_s = self._steps / self._hz
        watching = self._config.attention * 0.5 ** (elapsed_s / self._config.half_life_s)
        self._watches = bool(self._rng.random() < watching)
        self._best, self._best_at, self._step = -math.inf, 0, 0
        self._alarmed_at = self._drives_since = -1
        self._from = 0.0
        self._seen.clear()

    def read(self, wanted: Array) -> Intent:
        """Returns what the person does at this control step."""
        self._steps += 1
        if not self._watches:
            return Intent()
        progress = float(self._progress()[0])
        self._seen.append(self._expert.act()[0])
        self._watch(progress, wanted)
        self._step += 1
        if self._drives_since < 0:
            return Intent()
        return Intent(takes_over=True, action=self._hand())

    def ask(self, question: str) -> None:
        """Confirms at once."""

    def close(self) -> None:
        """Has nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """Returns all that decides what the person does next."""
        kept = {name: getattr(self, f"_{name}") for name in _STATE}
        return kept | {"seen": list(self._seen), "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _STATE:
            setattr(self, f"_{name}", state[name])
        self._seen.clear()
        self._seen.extend(state["seen"])
        self._rng.bit_generator.state = state["rng"]

    def _watch(self, progress: float, wanted: Array) -> None:
        """Decides who drives: alarm, then reaction, then the person; then back."""
        if progress > self._best + 0.01:
            self._best, self._best_at = progress, self._step
        if self._drives_since >= 0:
            if self._lets_go(progress):
                self._drives_since = self._alarmed_at = -1
                self._best, self._best_at = progress, self._step
            return
        if self._alarmed_at < 0:
            stuck = (self._step - self._best_at) / self._hz >= self._config.patience_s
            if stuck or (self._has_gripper and wanted[-1] < 0.0 < self._seen[-1][-1]):
                self._alarmed_at = self._step
        elif (self._step - self._alarmed_at) / self._hz >= self._config.reaction_s:
            self._drives_since, self._from = self._step, progress

    def _lets_go(self, progress: float) -> bool:
        held_s = (self._step - self._drives_since) / self._hz
        return progress >= self._from + self._config.gives_back or held_s >= self._config.longest_s

    def _hand(self) -> Array:
        """Returns the expert's action of a moment ago, slower and with noise."""
        action = self._seen[0].copy()
        arm = slice(0, len(action) - self._has_gripper)
        action[arm] = self._config.speed * action[arm] + self._rng.normal(
            0, self._config.noise, len(action[arm])
        )
        return np.clip(action, -1.0, 1.0).astype(np.float32)
