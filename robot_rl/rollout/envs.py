"""Building envs and experts by name."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from robot_rl.config.used import OTHER_PYTHON
from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve
from robot_rl.data.episode import Feature, observed
from robot_rl.data.episodes import EpisodesMeta, episodes_meta
from robot_rl.hal.device import LeaseLike
from robot_rl.hal.host import HostEnv
from robot_rl.hal.leased import EnvDevice
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.past_env import PastEnv
from robot_rl.sim.vector import EnvConfig
from robot_rl.worlds.inventory import device_spec

if TYPE_CHECKING:
    from robot_rl.rollout.policy_expert import TrueEnvs
    from robot_rl.worlds.env import WorldEnv

Array = NDArray[Any]
Autoreset = Literal["same_step", "disabled"]
"""Whether an env begins the next episode by itself; see `VectorEnv`."""


class Expert(Protocol):
    """A scripted expert over all envs."""

    def act(self) -> Array:
        """Returns actions (B, A) for the present state of every env."""
        ...


def simulation(
    config: EnvConfig,
    num_envs: int,
    *,
    autoreset: Autoreset = "disabled",
    draws: bool = False,
    tensors: bool = False,
) -> EnvDevice:
    """Returns the device that `num_envs` simulations of a task are; see `make_env`.

    Gymnasium's environments draw only if asked to when they are made (`draws`); ours always can.
    """
    if draws and config.kind in ("gym", "process"):
        config = replace(config, settings={"render_mode": "rgb_array", **config.settings})

    def make(lease: LeaseLike) -> VectorEnv:
        env = make_env(config, num_envs, autoreset=autoreset, tensors=tensors)
        if config.kind == "world":
            cast("WorldEnv", env).bill_to(lease.holder)
        return env

    return EnvDevice(device_spec(config), make)


def make_env(
    config: EnvConfig, num_envs: int, *, autoreset: Autoreset = "same_step", tensors: bool = False
) -> VectorEnv:
    """Returns `num_envs` simulations of a task, with the past in their state if its names ask for it.

    An engine with tensors has them copied to numpy arrays, unless the caller takes `tensors`. With
    another `kind` than sim they are environments of others: of Gymnasium, or of a plug-in.

    Raises:
        ConfigError: `env.state` names what the task does not have, or the past of what is not shown.
    """
    if config.kind != "sim":
        more = {name: getattr(config, name) for name in OTHER_PYTHON if config.kind == "process"}
        more |= {} if config.expert is None else {"expert": config.expert}
        return resolve("simulator", config.kind, at="env.kind")(
            config.id, num_envs, autoreset=autoreset, settings=config.settings, **more
        )
    build = resolve("simulator", "mujoco", at="env")
    own = config.without_past()
    if own.state == config.state:
        env = build(config, num_envs, autoreset=autoreset)
        return env if tensors or env.xp is np else HostEnv(env)
    inner = make_env(own, num_envs, autoreset=autoreset)
    return PastEnv(inner, config.state)


def episodes_of(config: EnvConfig) -> tuple[EpisodesMeta, dict[str, Feature]]:
    """Returns what episodes of an env consist of. It is made without a lease, and nothing acts in it."""
    with closing(make_env(config, 1, autoreset="disabled")) as env:
        return episodes_meta(env), observed(env)


def make_expert(env: VectorEnv, *, bias_m: float, noise_m: float, noise_seed: int) -> Expert:
    """Returns the expert that `env.expert` names, or that of the env's task.

    Args:
        env: one env or many.
        bias_m: of a scripted expert, along world x.
        noise_m: of a scripted expert, drawn for each episode.
        noise_seed: of that noise, and of what a policy draws.

    Raises:
        CheckpointError: `env.expert` names no policy, or one that does not fit the env.
        ConfigError: the env has none.
    """
    config = getattr(env, "config", None)
    if isinstance(config, EnvConfig) and config.kind == "sim" and config.expert is not None:
        from robot_rl.rollout.policy_expert import PolicyExpert  # torch

        return PolicyExpert(cast("TrueEnvs", env), config.expert, seed=noise_seed)
    make = getattr(env, "expert", None)
    if make is None:
        raise ConfigError(
            f"demos: {env.task!r} on {env.robot!r} has no scripted expert. "
            "Give recorded episodes: demos.path=<folder>."
        )
    return make(bias_m=bias_m, noise_m=noise_m, noise_seed=noise_seed)
