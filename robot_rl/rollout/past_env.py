"""An env that appends its past to the state, with the names of `robot-rl finetune`.

    <name>.change_3                how far an element has moved in the last 3 control steps
    <name>.last_action             the last action that was sent
    <name>.last_action.change_3    how much that had changed

The numbers are those of `robot_rl.train.finetune.past`, moment for moment.
B envs, S state dim, A action dim, L the longest lag.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.hal.vector import Obs, VectorEnv, row_mask

Array = NDArray[Any]

_NAME = re.compile(r"(?P<of>.+?)(?P<action>\.last_action)?(?:\.change_(?P<lag>\d+))?")


def without_past(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that an env has itself."""
    return tuple(name for name in names if _parsed(name) == (name, False, 0))


class PastEnv(VectorEnv):
    """Shows the state of an env that plays whole episodes, and its past; everything else is the env's."""

    def __init__(self, env: VectorEnv, names: Sequence[str]) -> None:
        """Args: names: of the state to show; those without past are the env's own, in its order.

        Raises:
            ConfigError: a name of an element or of an action that the env does not have.
        """
        self.env = env
        self.num_envs, self.metadata, self.caps = env.num_envs, env.metadata, frozenset[str]()
        self.task, self.robot, self.instruction = env.task, env.robot, env.instruction
        self.control_hz, self.limits = env.control_hz, env.limits
        self.action_space, self.single_action_space = env.action_space, env.single_action_space
        self.state_names, self.action_names = tuple(names), env.action_names
        self._elements = [self._element(name) for name in names]
        longest = 1 + max((lag for *_, lag in self._elements), default=0)
        num_actions = len(env.action_names)
        self._states = np.zeros((longest, self.num_envs, len(env.state_names)), np.float32)
        self._actions = np.zeros((longest, self.num_envs, num_actions), np.float32)
        self._is_first = np.ones(self.num_envs, bool)
        self._same_names = tuple(names[:num_actions]) == env.action_names
        self.single_observation_space = _widened(env.single_observation_space, (len(names),))
        self.observation_space = _widened(env.observation_space, (self.num_envs, len(names)))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        obs, infos = self.env.reset(seed=seed, options=options)
        begun = row_mask((options or {}).get("reset_mask"), self.num_envs)
        state = obs["state"]
        self._states[:, begun] = state[begun]
        start = state[:, : self._actions.shape[2]] if self._same_names else np.zeros(1, np.float32)
        self._actions[:, begun] = np.broadcast_to(start, self._actions.shape[1:])[begun]
        self._is_first |= begun
        return self._shown(obs), infos

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        obs, reward, terminated, truncated, infos = self.env.step_masked(actions, active)
        moved = row_mask(active, self.num_envs)
        self._states[1:, moved] = self._states[:-1, moved]
        self._states[0, moved] = obs["state"][moved]
        self._actions[1:, moved] = self._actions[:-1, moved]
        sent = infos["commanded_action"]
        self._actions[0, moved] = sent[moved]
        first = moved & self._is_first
        self._actions[:, first] = sent[first]  # one action has no change yet
        self._is_first &= ~moved
        return self._shown(obs), reward, terminated, truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close(**kwargs)

    def _shown(self, obs: Obs) -> Obs:
        columns: list[Array] = []
        for past, index, lag in self._elements:
            values = self._actions if past else self._states
            columns.append(values[0, :, index] - (values[lag, :, index] if lag else 0))
        return {**obs, "state": np.stack(columns, axis=1)}

    def _element(self, name: str) -> tuple[bool, int, int]:
        """Returns whether it is of an action, of which one, and its lag."""
        of, is_action, lag = _parsed(name)
        names = self.env.action_names if is_action else self.env.state_names
        if of not in names:
            raise ConfigError(
                f"env.state: {name!r} tells the past of {of!r}, which is no "
                f"{'action' if is_action else 'element of the state'} of {self.env.task!r}."
            )
        return is_action, names.index(of), lag


def _parsed(name: str) -> tuple[str, bool, int]:
    found = _NAME.fullmatch(name)
    assert found is not None, f"a name without letters: {name!r}"
    return found["of"], found["action"] is not None, int(found["lag"] or 0)


def _widened(space: gymnasium.Space[Any], shape: tuple[int, ...]) -> gymnasium.spaces.Dict:
    assert isinstance(space, gymnasium.spaces.Dict), "envs observe dicts"
    state = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
    return gymnasium.spaces.Dict({**space.spaces, "state": state})
