"""Building envs by name, and running whole episodes in lockstep: what evaluation and demonstrations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve
from robot_rl.hal.leased import EnvDevice
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.devices import simulator_of
from robot_rl.train.past_env import PastEnv, without_past

Array = NDArray[Any]
Autoreset = Literal["same_step", "disabled"]
"""Whether an env begins the next episode by itself; see `VectorEnv`."""


class Expert(Protocol):
    """A scripted expert over all envs."""

    def act(self) -> Array:
        """Returns actions (B, A) for the present state of every env."""
        ...


def simulation(
    config: EnvConfig, num_envs: int, *, autoreset: Autoreset = "disabled", draws: bool = False
) -> EnvDevice:
    """Returns the device that `num_envs` simulations of a task are; see `make_env`.

    Gymnasium's environments draw only if asked to when they are made (`draws`); ours always can.
    """
    if draws and config.kind == "gym":
        config = replace(config, settings={"render_mode": "rgb_array", **config.settings})
    return EnvDevice(simulator_of(config), lambda _: make_env(config, num_envs, autoreset=autoreset))


def make_env(config: EnvConfig, num_envs: int, *, autoreset: Autoreset = "same_step") -> VectorEnv:
    """Returns `num_envs` simulations of a task, with the past in their state if its names ask for it.

    With another `kind` than sim they are environments of others: of Gymnasium, or of a plug-in.

    Raises:
        ConfigError: the past, of envs that begin the next episode by themselves.
    """
    if config.kind != "sim":
        return resolve("simulator", config.kind, at="env.kind")(
            config.id, num_envs, autoreset=autoreset, settings=config.settings
        )
    build = resolve("simulator", "mujoco", at="env")
    own = without_past(config.state)
    if own == config.state:
        return build(config, num_envs, autoreset=autoreset)
    if autoreset != "disabled":
        raise ConfigError(
            f"env.state: got {next(name for name in config.state if name not in own)!r}, which is of the "
            "past; allowed only where whole episodes are played: `robot-rl evaluate policy=`, "
            "`robot-rl collect`."
        )
    return PastEnv(build(replace(config, state=own), num_envs, autoreset=autoreset), config.state)


def make_expert(env: VectorEnv, *, bias_m: float, noise_m: float, noise_seed: int) -> Expert:
    """Returns the expert of the env's task.

    Raises:
        ConfigError: the env has none.
    """
    make = getattr(env, "expert", None)
    if make is None:
        raise ConfigError(
            f"demos: {env.task!r} on {env.robot!r} has no scripted expert. "
            "Give recorded episodes: demos.path=<folder>."
        )
    return make(bias_m=bias_m, noise_m=noise_m, noise_seed=noise_seed)


@dataclass(frozen=True)
class Moment:
    """One control step of all envs, of which only the `live` rows count."""

    obs: Obs
    """Before the step."""
    action: Array
    """(B, A) as sent."""
    next_obs: Obs
    reward: Array
    terminated: Array
    truncated: Array
    infos: dict[str, Any]
    live: Array
    """(B,) bool: the episode of this row had not ended before this step."""


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
        action = act(obs)
        active = None if live.all() else live
        next_obs, reward, terminated, truncated, infos = env.step_masked(action, active)
        yield Moment(obs, action, next_obs, reward, terminated, truncated, infos, live.copy())
        live &= ~(terminated | truncated)
        obs = next_obs


def seed_batches(seeds: NDArray[np.uint64], size: int) -> Iterator[tuple[slice, NDArray[np.uint64]]]:
    """Yields (which of the seeds, a full batch): the last batch is filled up by repeating its last seed.

    Batches keep their size because a matrix product may round differently at another size.
    """
    for start in range(0, len(seeds), size):
        part = seeds[start : start + size]
        filled = np.concatenate([part, np.repeat(part[-1:], size - len(part))])
        yield slice(start, start + len(part)), filled
