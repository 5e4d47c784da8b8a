"""What Gymnasium's ids make: one simulation as a `gymnasium.Env`, or a vector env."""

from dataclasses import fields
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, nearest
from robot_rl.hal.vector import Obs
from robot_rl.sim.task import Control
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]

RENDER_MODES = ("rgb_array",)


def _metadata(fps: float) -> dict[str, Any]:
    return {"render_modes": list(RENDER_MODES), "render_fps": int(fps)}


class SingleEnv(gymnasium.Env[Obs, Array]):
    """A vector env of one, without its leading axis.

    The observation stays a dict (`state`, and the cameras asked for): `MultiInputPolicy` in
    Stable-Baselines3, or `gymnasium.wrappers.FlattenObservation` where a vector is wanted.
    """

    metadata: dict[str, Any] = _metadata(Control.hz)

    def __init__(self, *, render_mode: str | None = None, **config: Any) -> None:
        """Makes an env.

        Args:
            render_mode: `rgb_array` makes `render` return pictures of the task's own camera.
            config: fields of `robot_rl.sim.vector.EnvConfig`.
        """
        self.render_mode = _checked(render_mode)
        self._batch = SimVectorEnv(_config({"num_threads": 1, **config}), 1, autoreset="disabled")
        self.metadata = _metadata(self._batch.control_hz)
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space

    @property
    def batch(self) -> SimVectorEnv:
        """The vector env of one behind this env: states, experts, instruction, names."""
        return self._batch

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins an episode; without a seed, one is drawn from this env's own generator.

        Args:
            seed: the same seed gives the same episode, in `SimVectorEnv` too.
            options: `state`, a row of `batch.get_state()` to start from.

        Raises:
            ConfigError: an option that does not exist.
        """
        super().reset(seed=seed)
        options = options or {}
        if set(options) - {"state"}:
            raise ConfigError(f"{self._batch.task}.reset: unknown options {sorted(options)}; allowed: state")
        episode = int(self.np_random.integers(2**31)) if seed is None else seed
        batched = {"states": np.asarray(options["state"])[None]} if "state" in options else None
        obs, infos = self._batch.reset(seed=[episode], options=batched)
        return _first(obs), _first(infos)

    def step(self, action: Array) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        """Advances by one control step."""
        obs, reward, terminated, truncated, infos = self._batch.step(np.asarray(action)[None])
        return _first(obs), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(infos)

    def render(self) -> Array | None:
        """Returns an RGB image (480, 640, 3), or None without a render mode."""
        return None if self.render_mode is None else self._batch.picture(0)

    def close(self) -> None:
        """Frees the renderer."""
        self._batch.close()


def make_vector(
    num_envs: int = 1,
    *,
    render_mode: str | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
    **config: Any,
) -> SimVectorEnv:
    """Returns `num_envs` simulations, from fields of `EnvConfig`.

    Args:
        num_envs: how many.
        render_mode: as of `SingleEnv`.
        autoreset_mode: SAME_STEP, or DISABLED: the caller resets ended episodes by
            `reset(options={"reset_mask": mask})`. Gymnasium's words "SameStep" and "Disabled" work too.
        config: fields of `EnvConfig`.
    """
    mode = _checked(render_mode)
    allowed = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
    chosen = next((each for each in allowed if autoreset_mode in (each, each.value)), None)
    if chosen is None:
        words = ", ".join(each.value for each in allowed)
        raise ConfigError(f"gymnasium.make_vec: autoreset_mode: got {autoreset_mode!r}, allowed: {words}")
    is_ours = chosen is AutoresetMode.SAME_STEP
    env = SimVectorEnv(_config(config), num_envs, autoreset="same_step" if is_ours else "disabled")
    env.render_mode = mode
    return env


def _config(values: dict[str, Any]) -> EnvConfig:
    known = [field.name for field in fields(EnvConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"gymnasium.make: no keyword {name!r}.{nearest(name, known)}")
    return EnvConfig(**values)


def _checked(render_mode: str | None) -> str | None:
    if render_mode not in (None, *RENDER_MODES):
        raise ConfigError(f"render_mode: got {render_mode!r}, allowed: None, {', '.join(RENDER_MODES)}")
    return render_mode


def _first(values: dict[str, Any]) -> dict[str, Any]:
    """Returns row 0 of every array; flags become bool."""
    rows = {key: value[0] for key, value in values.items()}
    return {key: bool(row) if isinstance(row, np.bool_) else row for key, row in rows.items()}
