"""Our vector envs for Stable-Baselines3, without a process or a loop over simulations in between.

    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecMonitor
    env = VecMonitor(StableBaselinesEnv(SimVectorEnv(EnvConfig(task="reach", reward="dense"), 64)))
    PPO("MultiInputPolicy", env).learn(100_000)

Observations are named as torch names modules: `left_rgb` in the place of `left.rgb`.

Stable-Baselines3 is not a dependency of robot_rl: `pip install stable-baselines3`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices

from robot_rl.core.errors import ConfigError
from robot_rl.hal.vector import Obs
from robot_rl.sim.vector import SimVectorEnv

Array = NDArray[Any]
T = TypeVar("T")


class StableBaselinesEnv(VecEnv):
    """A `VecEnv` of Stable-Baselines3; the observation is a dict, so policies are `MultiInputPolicy`.

    The info of a step that ends an episode has `terminal_observation`, `TimeLimit.truncated` and
    `is_success`; those of other steps are empty.
    """

    def __init__(self, env: SimVectorEnv) -> None:
        """Takes an env that begins the next episode by itself.

        Raises:
            ConfigError: its autoreset is disabled.
        """
        if not env.autoreset:
            raise ConfigError("StableBaselinesEnv: got autoreset 'disabled', allowed: 'same_step'")
        self.env = env
        observed: Any = env.single_observation_space
        space = gymnasium.spaces.Dict(spelled(observed.spaces))
        super().__init__(env.num_envs, space, env.single_action_space)

    def reset(self) -> Obs:
        """Begins an episode in every env; the seeds of `seed` count once."""
        seeds = None if all(seed is None for seed in self._seeds) else self._seeds
        obs, _ = self.env.reset(seed=seeds)
        self._reset_seeds()
        self._reset_options()
        return spelled(obs)

    def step_async(self, actions: Array) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Obs, Array, Array, list[dict[str, Any]]]:
        obs, reward, terminated, truncated, infos = self.env.step(self._actions)
        done = terminated | truncated
        row_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(done).tolist():
            row_infos[row] = {
                "terminal_observation": spelled(_row(infos["final_obs"], row)),
                "TimeLimit.truncated": bool(truncated[row]),
                "is_success": bool(infos["success"][row]),
            }
        return spelled(obs), reward.astype(np.float32), done, row_infos

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Sequence[Array | None]:
        """Returns a picture of each env, or None without a render mode."""
        if self.render_mode is None:
            return [None] * self.num_envs
        return [self.env.picture(row) for row in range(self.num_envs)]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Returns an attribute of the vector env, once for each env: they share it."""
        return [getattr(self.env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Sets an attribute of the vector env, for all envs alike.

        Raises:
            ConfigError: for some of them only.
        """
        if len(list(self._get_indices(indices))) != self.num_envs:
            raise ConfigError(
                f"StableBaselinesEnv.set_attr: got {indices}, allowed: all envs, which share it"
            )
        setattr(self.env, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Refuses: there are no single envs to call.

        Raises:
            ConfigError: always; `env` is the vector env, whose methods act on all at once.
        """
        raise ConfigError(f"StableBaselinesEnv: no single env has {method_name!r}; call it on `.env`")

    def env_is_wrapped(self, wrapper_class: type, indices: VecEnvIndices = None) -> list[bool]:
        """Returns False for each: nothing is wrapped one by one."""
        return [False for _ in self._get_indices(indices)]


def spelled(named: Mapping[str, T]) -> dict[str, T]:
    """Returns observations, or their spaces, by the names that they have in Stable-Baselines3."""
    return {name.replace(".", "_"): value for name, value in named.items()}


def _row(obs: Obs, row: int) -> Obs:
    return {name: values[row] for name, values in obs.items()}
