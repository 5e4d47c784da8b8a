"""A simulator of its own: points on a line that are to be brought to 0. B envs."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AutoresetMode

from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.hal.vector import Array, Obs, VectorEnv, next_episodes, row_mask, set_spaces

_NEAR, _STEP, _LONGEST = 0.05, 0.1, 30


class Points(VectorEnv):
    """One action moves a point by up to `speed`; an episode ends when it is near 0, or after 30 steps."""

    def __init__(
        self,
        name: str,
        num_envs: int,
        *,
        autoreset: Literal["same_step", "disabled"] = "same_step",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes what `env.id`, `num_envs` and `env.settings` say."""
        settings = dict(settings or {})
        self._speed = float(settings.pop("speed", _STEP))
        if name != "line" or settings:
            raise ConfigError(f"env.id: got {name!r} {settings}, allowed: 'line', with env.settings.speed")
        self.num_envs, self.task, self.robot, self.instruction = num_envs, name, "point", "Go to 0."
        self.control_hz, self.caps = 10.0, frozenset[str]()
        self.state_names, self.action_names = ("x", "step"), ("move",)
        set_spaces(self)
        self._autoreset = autoreset == "same_step"
        mode = AutoresetMode.SAME_STEP if self._autoreset else AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": mode}
        self._seed, self._episode = np.arange(num_envs, dtype=np.uint64), np.zeros(num_envs, np.uint64)
        self._x, self._step = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        mask = row_mask((options or {}).get("reset_mask"), self.num_envs)
        self._seed, episodes = next_episodes(seed, mask, self._seed, self._episode, at=self.task)
        self._begin(mask, episodes)
        return self._observe(), {"success": np.zeros(self.num_envs, bool)}

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        actions = np.asarray(actions, np.float32)
        if actions.shape != (self.num_envs, 1) or not np.isfinite(actions).all():
            raise ConfigError(f"{self.task}: got {actions.shape}, need ({self.num_envs}, 1) finite numbers")
        commanded, rows = np.clip(actions, -1.0, 1.0), row_mask(active, self.num_envs)
        before = np.abs(self._x)
        self._x = np.where(rows, self._x + self._speed * commanded[:, 0], self._x)
        self._step = self._step + rows
        success = rows & (np.abs(self._x) < _NEAR)
        truncated = rows & ~success & (self._step >= _LONGEST)
        reward = np.where(rows, before - np.abs(self._x) + success, 0.0)
        infos: dict[str, Any] = {"success": success.copy(), "commanded_action": commanded}
        obs, ended = self._observe(), success | truncated
        if self._autoreset and ended.any():
            infos["final_obs"], infos["_final_obs"] = obs, ended
            self._begin(ended, self._episode + np.uint64(1))
            obs = self._observe()
        return obs, reward, success, truncated, infos

    def _begin(self, mask: Array, episode: Array) -> None:
        self._episode = np.where(mask, episode, self._episode)
        self._step = np.where(mask, 0, self._step)
        start = EpisodeRng(self._seed, self._episode).uniform(-1.0, 1.0, size=1)[:, 0]
        self._x = np.where(mask, start + np.sign(start) * _NEAR, self._x)

    def _observe(self) -> Obs:
        return {"state": np.stack([self._x, self._step / _LONGEST], axis=1).astype(np.float32)}

    def state_dict(self) -> dict[str, Any]:
        return {"x": self._x, "step": self._step, "seed": self._seed, "episode": self._episode}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        self._x, self._step = np.array(state["x"]), np.array(state["step"])
        self._seed, self._episode = np.array(state["seed"]), np.array(state["episode"])
        return self._observe()
