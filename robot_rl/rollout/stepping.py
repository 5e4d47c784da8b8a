"""The one stepper: single control steps of all envs, and whole episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.arrays import namespace, to_numpy
from robot_rl.hal.vector import Obs, VectorEnv

Array = NDArray[Any]


@dataclass(frozen=True)
class Moment:
    """One control step of all envs, of which only the `live` rows count."""

    obs: Obs
    """Before the step."""
    action: Array
    """(B, A) as sent."""
    next_obs: Obs
    """What to act on next: of the next episode where one ended and the env resets itself."""
    reward: Array
    terminated: Array
    truncated: Array
    infos: dict[str, Any]
    live: Array
    """(B,) bool: the episode of this row had not ended before this step."""

    @property
    def ended(self) -> Array:
        """(B,) bool: the episode of this row ended with this step."""
        return self.terminated | self.truncated

    @property
    def final_obs(self) -> Obs:
        """What the step led to: before the reset, where the env resets itself."""
        if "final_obs" not in self.infos:
            return self.next_obs
        return merge_rows(self.next_obs, self.infos["final_obs"], self.ended)


def step(env: VectorEnv, obs: Obs, action: Array, live: Array | None = None) -> Moment:
    """Takes one control step in the live envs (all if None), which show `obs`."""
    next_obs, reward, terminated, truncated, infos = env.step_masked(action, live)
    live = np.ones(env.num_envs, bool) if live is None else live.copy()
    return Moment(obs, action, next_obs, reward, terminated, truncated, infos, live)


def actions_for(env: VectorEnv, actions: Any) -> Array:
    """Returns a policy's actions, a tensor, as the env takes them: numpy's, or a tensor of its device."""
    found: Any = to_numpy(actions) if env.xp is np else actions.to(env.device)
    return found


def lockstep(
    env: VectorEnv,
    seeds: NDArray[np.uint64],
    begin: Callable[[Obs, dict[str, Any]], None],
    act: Callable[[Obs], Array],
) -> Iterator[Moment]:
    """Runs one episode in every env, each from its own seed, until the last has ended.

    Needs an env with autoreset DISABLED. `begin` sees the first observations before `act` is
    asked. Rows that ended stand still and are no longer `live`.
    """
    obs, infos = env.reset(seed=[int(seed) for seed in seeds])
    begin(obs, infos)
    live = np.ones(env.num_envs, bool)
    while live.any():
        moment = step(env, obs, act(obs), None if live.all() else live)
        yield moment
        live &= ~moment.ended
        obs = moment.next_obs


def seed_batches(seeds: NDArray[np.uint64], size: int) -> Iterator[tuple[slice, NDArray[np.uint64]]]:
    """Yields (which of the seeds, a full batch): the last batch is filled up by repeating its last seed.

    Batches keep their size because a matrix product may round differently at another size.
    """
    for start in range(0, len(seeds), size):
        part = seeds[start : start + size]
        filled = np.concatenate([part, np.repeat(part[-1:], size - len(part))])
        yield slice(start, start + len(part)), filled


def merge_rows(obs: Obs, final_obs: Obs, ended: Array) -> Obs:
    """Returns the observation each row's step led to: `final_obs` where the episode ended."""
    merged = {}
    for key, value in obs.items():
        where = ended.reshape(-1, *[1] * (value.ndim - 1))
        merged[key] = namespace(value).where(where, final_obs[key], value)
    return merged
