"""An env that appends its past to the state, with the names of `robot-rl finetune`.

    <name>.change_3                how far an element has moved in the last 3 control steps
    <name>.last_action             the last action that was sent
    <name>.last_action.change_3    how much that had changed

`last_action` and `last_action.change_3` alone are those of all actions. With changes over 1 to n - 1 control
steps the last n actions are known: what an actor needs where what it commanded takes time to have an effect
(a motor, a line) and nothing measures how far it has come.
The numbers are those of `robot_rl.train.finetune.past`, moment for moment.
B envs, S state dim, A action dim, L the longest lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, nearest, require
from robot_rl.core.names import parsed, without_past
from robot_rl.hal.vector import Obs, VectorEnv, row_mask
from robot_rl.sim.bodies import layouts_of
from robot_rl.sim.config import EnvConfig

Array = NDArray[Any]


def _in_full(names: Sequence[str], env: VectorEnv) -> tuple[str, ...]:
    """Returns names with what `last_action` and the beginnings of the env's own stand for."""
    found, own = list[str](), [name for name in env.state_names if name not in names]
    beginnings = without_past(names)
    if not beginnings:
        found, own = own, []
    for name in names:
        if not parsed(name).of:
            found += [f"{action}.{name}" for action in env.action_names]
        elif name in beginnings and name not in env.state_names:
            found, own = found + own, []
        else:
            found.append(name)
    return tuple(found)


class PastEnv(VectorEnv):
    """Shows the state of an env and its past; all else is the env's, also attributes not named here."""

    def __init__(self, env: VectorEnv, names: Sequence[str]) -> None:
        """Args: names: of the state to show, as `EnvConfig.state`; the env shows those without past already.

        Raises:
            ConfigError: the past of an element that the env does not show or have, or of no action; or a
                change over no control step.
        """
        self.env = env
        for name, value in vars(env).items():
            if hasattr(VectorEnv, name):  # the others are asked for when they are needed
                setattr(self, name, value)
        self.state_names = names = _in_full(names, env)
        self._elements = [self._element(name) for name in names]
        longest = 1 + max((lag for *_, lag in self._elements), default=0)
        num_actions = len(env.action_names)
        self._states = np.zeros((longest, self.num_envs, len(env.state_names)), np.float32)
        self._actions = np.zeros((longest, self.num_envs, num_actions), np.float32)
        self._is_first = np.ones(self.num_envs, bool)
        self._same_names = tuple(names[:num_actions]) == env.action_names
        self.single_observation_space = _widened(env.single_observation_space, (len(names),))
        self.observation_space = _widened(env.observation_space, (self.num_envs, len(names)))

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        """Begins episodes; rows of `get_state` in `options["states"]` begin with the past that they hold."""
        options, past = dict(options or {}), list[Array]()
        if "states" in options:
            options["states"], *past = self._split(options["states"])
        obs, infos = self.env.reset(seed=seed, options=options)
        begun = row_mask(options.get("reset_mask"), self.num_envs)
        self._begin(begun, obs["state"])
        if past:
            self._put(past, begun)
        return self._shown(obs), infos

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        return self._followed(self.env.step_masked(actions, active), active)

    def step_unseen(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        return self._followed(self.env.step_unseen(actions, active), active)

    def _followed(
        self, step: tuple[Obs, Array, Array, Array, dict[str, Any]], active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Adds a step of the env inside to the past, and returns it with the past.

        Where the env inside shows nothing, as `step_unseen` may, its `shown_state` tells the state.
        """
        obs, reward, terminated, truncated, infos = step
        state = obs["state"] if obs else cast("Any", self.env).shown_state()
        ended = infos.get("_final_obs", np.zeros(self.num_envs, bool))
        last = infos["final_obs"]["state"] if ended.any() else state
        moved = row_mask(active, self.num_envs)
        self._states[1:, moved] = self._states[:-1, moved]
        self._states[0, moved] = np.where(ended[:, None], last, state)[moved]
        self._actions[1:, moved] = self._actions[:-1, moved]
        sent = infos["commanded_action"]
        self._actions[0, moved] = sent[moved]
        first = moved & self._is_first
        self._actions[:, first] = sent[first]  # one action has no change yet
        self._is_first &= ~moved
        if ended.any():
            infos = {**infos, "final_obs": self._shown(infos["final_obs"])}
            self._begin(ended, state)
        return self._shown(obs) if obs else obs, reward, terminated, truncated, infos

    def _begin(self, begun: Array, state: Array) -> None:
        """Forgets the past of the envs (B,) that begin an episode in these states (B, S)."""
        self._states[:, begun] = state[begun]
        start = state[:, : self._actions.shape[2]] if self._same_names else np.zeros(1, np.float32)
        self._actions[:, begun] = np.broadcast_to(start, self._actions.shape[1:])[begun]
        self._is_first |= begun

    def get_state(self) -> Array:
        """Returns rows (B, n) of the env, followed by the past."""
        return np.concatenate(
            [np.asarray(self.env.get_state()), *(part.reshape(self.num_envs, -1) for part in self._past())],
            axis=1,
        )

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        """Puts the masked envs into rows of `get_state`."""
        own, *past = self._split(rows)
        obs = self.env.set_state(own, mask)
        self._put(past, row_mask(mask, self.num_envs))
        return self._shown(obs)

    def state_dict(self) -> dict[str, Any]:
        return {"env": self.env.state_dict(), "past": [part.copy() for part in self._past()]}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        obs = self.env.load_state_dict(state["env"])
        for part, values in zip(self._past(), state["past"], strict=True):
            part[:] = values
        return self._shown(obs)

    def park(self) -> None:
        self.env.park()

    def safe_stop(self) -> None:
        self.env.safe_stop()

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close(**kwargs)

    def _split(self, rows: Array) -> list[Array]:
        """Returns the env's part of rows of `get_state`, and each part of the past.

        Raises:
            ConfigError: rows of another shape, such as those of the env inside.
        """
        sizes, own = [part[0].size for part in self._past()], self._own_columns
        need = (self.num_envs, own + sum(sizes))
        if np.shape(rows) != need:
            raise ConfigError(
                f"{self.task}: got rows of shape {np.shape(rows)}, need {need}: {own} numbers of the env and "
                f"{sum(sizes)} of its past. Take rows of `get_state` of this env."
            )
        return np.split(np.asarray(rows), np.cumsum([own, *sizes[:-1]]), axis=1)

    @cached_property
    def _own_columns(self) -> int:
        """How many numbers a row of the env inside has."""
        return np.shape(self.env.get_state())[1]

    def _put(self, past: list[Array], into: Array) -> None:
        """Puts some envs (B,) into the parts of the past, each (B, numbers)."""
        for part, values in zip(self._past(), past, strict=True):
            part[into] = values[into].reshape(-1, *part.shape[1:])

    def _past(self) -> tuple[Array, ...]:
        """Returns views (B, ...) of what an episode's past consists of."""
        return self._states.swapaxes(0, 1), self._actions.swapaxes(0, 1), self._is_first

    def _shown(self, obs: Obs) -> Obs:
        columns: list[Array] = []
        for past, index, lag in self._elements:
            values = self._actions if past else self._states
            columns.append(values[0, :, index] - (values[lag, :, index] if lag else 0))
        return {**obs, "state": np.stack(columns, axis=1)}

    def _element(self, name: str) -> tuple[bool, int, int]:
        """Returns whether it is of an action, of which one, and its lag."""
        of, is_action, lag = parsed(name)
        allowed = f"a change over 1 or more control steps, such as {name.rpartition('_')[0]}_1"
        require(lag != 0, "env.state", name, allowed)
        names = self.env.action_names if is_action else self.env.state_names
        if of in names:
            return is_action, names.index(of), lag or 0
        known = names if is_action else _elements_of(self.env)
        if of in known:
            raise ConfigError(
                f"env.state: {name!r} tells the past of {of!r}, which is not shown. Add {of} to env.state."
            )
        raise ConfigError(
            f"env.state: {name!r} tells the past of {of!r}, which is no "
            f"{'action' if is_action else 'element of the state'} of {self.env.task!r}.{nearest(of, known)}"
        )


def _elements_of(env: VectorEnv) -> tuple[str, ...]:
    """Returns all that `env.state` can show of a simulation, and of another env what it shows."""
    config = getattr(env, "config", None)
    if isinstance(config, EnvConfig) and config.robots:
        return layouts_of(replace(config, state=()))[0].names
    return getattr(env, "true_names", env.state_names)


def _widened(space: gymnasium.Space[Any], shape: tuple[int, ...]) -> gymnasium.spaces.Dict:
    assert isinstance(space, gymnasium.spaces.Dict), "envs observe dicts"
    state = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
    return gymnasium.spaces.Dict({**space.spaces, "state": state})
