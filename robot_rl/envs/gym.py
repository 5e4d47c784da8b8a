"""Any Gymnasium environment as a `VectorEnv`: actions in [-1, 1], numbers in `state`, pictures by name.

    GymVectorEnv("Hopper-v5", num_envs=4)

Episode 0 of a seed is what `env.reset(seed=seed)` gives; later ones have seeds that follow from it. So an
episode is determined by (seed, episode, actions), and that is what a state dict holds: loading one plays the
actions of the present episode again. It is exact wherever the environment itself repeats under its seed.
B envs, A action dim, D elements of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, flatdim, flatten
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from robot_rl.core.errors import ConfigError, RenderError, RobotRLError, require
from robot_rl.core.seeding import EVAL_SEED_START, EpisodeRng
from robot_rl.hal.vector import Array, Obs, VectorEnv, next_episodes, row_mask

_PICTURE = "image"
"""Name of the camera where the whole observation is one picture."""
_NO_FILMS = "Without films: video.episodes=0 video.failures=0."


class GymVectorEnv(VectorEnv):
    """Several Gymnasium environments of one kind, one after the other in this process.

    Success is `is_success` or `success` of `info`; without either there is none, and `says_success`
    stays false. A control step lasts the env's `dt`, or a frame of its `render_fps`, or else a second.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int = 1,
        *,
        autoreset: Literal["same_step", "disabled"] = "same_step",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the environments.

        Args:
            env_id: as `gymnasium.make` takes it, `package:Name-v0` too.
            num_envs: B.
            autoreset: whether the env begins the next episode itself.
            settings: keyword arguments of `gymnasium.make`, `max_episode_steps` among them. With
                `render_mode="rgb_array"` there are pictures, where the environment can draw.

        Raises:
            ConfigError: no such environment, a package is missing, episodes never end, or spaces that no
                policy here can serve.
        """
        require(num_envs >= 1, f"{env_id}: num_envs", num_envs, "1 or more")
        settings = dict(settings or {})
        self._envs = [_make_first(env_id, settings), *(_make(env_id, settings) for _ in range(num_envs - 1))]
        first = self._envs[0]
        self.render_mode = first.render_mode
        if self.render_mode == "rgb_array":
            for env in self._envs:
                _draw_without_shadows(env)
        self.num_envs, self.task, self.robot, self.instruction = num_envs, env_id, env_id, env_id
        self.caps, self.says_success = frozenset[str](), False
        steps = first.spec.max_episode_steps if first.spec else None
        if steps is None:
            raise ConfigError(f"{env_id}: nothing ends its episodes. Give max_episode_steps in settings.")
        self.horizon = int(steps)
        dt = getattr(first.unwrapped, "dt", None)
        self.control_hz = float(1.0 / dt if dt else first.metadata.get("render_fps") or 1.0)
        self._autoreset = autoreset == "same_step"
        mode = AutoresetMode.SAME_STEP if self._autoreset else AutoresetMode.DISABLED
        self.metadata = {**first.metadata, "autoreset_mode": mode}
        self._describe_actions(first.action_space)
        self._describe_observations(first.observation_space)
        self._is_begun = False
        self._seed, self._episode = np.arange(num_envs, dtype=np.uint64), np.zeros(num_envs, np.uint64)
        self._played: list[list[Array]] = [[] for _ in range(num_envs)]  # actions of the present episodes

    def _describe_actions(self, space: gymnasium.Space[Any]) -> None:
        if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
            raise ConfigError(f"{self.task}: actions are {space}, allowed: a Box of real numbers.")
        if not space.is_bounded():
            raise ConfigError(
                f"{self.task}: actions have no bounds: {space}. Ours lie in [-1, 1]: register it within "
                "gymnasium.wrappers.RescaleAction, or with bounds."
            )
        self._low, self._high, self._action_shape = space.low, space.high, space.shape
        self.action_names = tuple(f"action_{i}" for i in range(flatdim(space)))
        self.single_action_space = Box(-1.0, 1.0, (len(self.action_names),), np.float32)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def _describe_observations(self, space: gymnasium.Space[Any]) -> None:
        parts = dict(space.spaces) if isinstance(space, Dict) else {_PICTURE: space}
        self._is_dict = isinstance(space, Dict)
        self._pictures = {name: part for name, part in parts.items() if _is_picture(part)}
        self._numbers = {name: part for name, part in parts.items() if name not in self._pictures}
        try:
            sizes = {name: flatdim(part) for name, part in self._numbers.items()}
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"{self.task}: observations are {space}: {error}") from error
        stem = "{name}_{i}" if self._is_dict else "state_{i}"
        self.state_names = tuple(stem.format(name=n, i=i) for n, size in sizes.items() for i in range(size))
        shown: dict[str, Box] = {"state": Box(-np.inf, np.inf, (len(self.state_names),), np.float32)}
        shown |= {f"{name}.rgb": Box(0, 255, part.shape, np.uint8) for name, part in self._pictures.items()}
        self.single_observation_space = Dict(tuple(shown.items()))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._obs = {key: np.zeros((self.num_envs, *box.shape), box.dtype) for key, box in shown.items()}

    # Steps

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Advances the active envs by one control step; the others stay, with reward 0."""
        commanded = self._checked(actions)
        if not self._is_begun:
            raise RobotRLError(f"{self.task}: step before the first reset. Call reset(seed=...) first.")
        obs = {key: value.copy() for key, value in self._obs.items()}
        reward, success = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for i in np.flatnonzero(row_mask(active, self.num_envs)).tolist():
            seen, reward[i], terminated[i], truncated[i], info = self._play(i, commanded[i])
            verdict = info.get("is_success", info.get("success"))
            success[i], self.says_success = bool(verdict), self.says_success or verdict is not None
            self._write(obs, i, seen)
            if not np.isfinite(reward[i]):
                raise RobotRLError(
                    f"{self.task}: env {i}: the reward is {reward[i]}. Look at the environment."
                )
        infos: dict[str, Any] = {"success": success, "commanded_action": commanded}
        ended = terminated | truncated
        self._obs = obs
        if self._autoreset and ended.any():
            infos |= {"final_obs": obs, "_final_obs": ended}
            infos |= {"final_info": {"success": success.copy()}, "_final_info": ended}
            self._begin(ended, self._episode + np.uint64(1))
        return self._shown(), reward, terminated, truncated, infos

    def _checked(self, actions: Array) -> Array:
        actions = np.asarray(actions, np.float32)
        need = (self.num_envs, len(self.action_names))
        if actions.shape != need:
            raise ConfigError(f"{self.task}: got actions of shape {actions.shape}, need {need}")
        if not np.isfinite(actions).all():
            raise RobotRLError(f"{self.task}: an action is not finite. Look at the policy's weights.")
        return np.clip(actions, -1.0, 1.0)

    def _play(self, i: int, action: Array) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes a step with an action (A,) in [-1, 1]."""
        self._played[i].append(action.copy())
        share = (action.reshape(self._action_shape).astype(np.float64) + 1.0) / 2.0
        scaled = self._low + share * (self._high - self._low)  # which may round beyond an end
        scaled = np.clip(scaled.astype(self._low.dtype), self._low, self._high)
        seen, reward, terminated, truncated, info = self._envs[i].step(scaled)
        return seen, float(reward), bool(terminated), bool(truncated and not terminated), info

    def _write(self, obs: Obs, i: int, seen: Any) -> None:
        """Writes what an environment showed into row i."""
        parts = seen if self._is_dict else {_PICTURE: seen}
        numbers = [np.asarray(flatten(space, parts[name])) for name, space in self._numbers.items()]
        state = np.concatenate(numbers).astype(np.float32) if numbers else np.zeros(0, np.float32)
        if not np.isfinite(state).all():
            name = self.state_names[int(np.flatnonzero(~np.isfinite(state))[0])]
            raise RobotRLError(f"{self.task}: env {i}: {name} is not finite. Look at the environment.")
        obs["state"][i] = state
        for name in self._pictures:
            obs[f"{name}.rgb"][i] = parts[name]

    def _shown(self) -> Obs:
        return {key: value.copy() for key, value in self._obs.items()}

    # Episodes

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins an episode in all envs, or in those of `options["reset_mask"]`.

        Args:
            seed: s gives env i the seed s + i; a sequence gives each its own; None, also in a sequence, goes
                on to the next episode of the present seed.
            options: `reset_mask` (B,) bool.

        Raises:
            ConfigError: an option that does not exist.
        """
        options = options or {}
        if set(options) - {"reset_mask"}:
            raise ConfigError(f"{self.task}.reset: unknown options {sorted(options)}; allowed: reset_mask")
        mask = row_mask(options.get("reset_mask"), self.num_envs)
        self._seed, episodes = next_episodes(seed, mask, self._seed, self._episode, at=self.task)
        self._begin(mask, episodes)
        return self._shown(), {"success": np.zeros(self.num_envs, bool)}

    def _begin(self, mask: Array, episode: Array) -> None:
        """Begins episodes where masked, and shows their first observations there."""
        self._episode, self._is_begun = np.where(mask, episode, self._episode), True
        self._obs = self._shown()
        for i in np.flatnonzero(mask).tolist():
            self._played[i] = []
            self._write(self._obs, i, self._envs[i].reset(seed=self._episode_seed(i))[0])

    def _episode_seed(self, i: int) -> int:
        """Returns the seed itself for its first episode, and others from it for the next."""
        if not self._episode[i]:
            return int(self._seed[i])
        return int(EpisodeRng(self._seed[i], self._episode[i]).key[0]) % EVAL_SEED_START

    # Resume

    def state_dict(self) -> dict[str, Any]:
        """Returns seeds, episodes, and the actions of the episodes under way."""
        width = len(self.action_names)
        played = [np.asarray(actions, np.float32).reshape(-1, width) for actions in self._played]
        return {"seed": self._seed.copy(), "episode": self._episode.copy(), "played": played}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        """Begins those episodes and plays their actions again; returns the present observation.

        Raises:
            ConfigError: a state of another number of envs.
        """
        held = len(state["played"])
        require(held == self.num_envs, f"{self.task}: envs in the state", held, f"{self.num_envs}")
        self._seed = np.asarray(state["seed"], np.uint64)
        self._begin(np.ones(self.num_envs, bool), np.asarray(state["episode"], np.uint64))
        for i, actions in enumerate(state["played"]):
            for action in np.asarray(actions, np.float32):
                self._write(self._obs, i, self._play(i, action)[0])
        return self._shown()

    # Pictures

    def render(self) -> tuple[Array, ...]:
        """Returns a picture of each env."""
        return tuple(self.picture(i) for i in range(self.num_envs))

    def picture(self, env: int = 0) -> Array:
        """Returns an RGB image (height, width, 3) of one env, of the size that the environment gives it.

        Raises:
            RenderError: the environment draws no pictures, or something that it draws with is missing.
        """
        modes = self._envs[env].metadata.get("render_modes", [])
        if self.render_mode != "rgb_array":
            raise RenderError(
                f"{self.task}: it draws no pictures: got render_mode {self.render_mode!r}, need 'rgb_array'; "
                f"the environment has {', '.join(modes) or 'none'}. {_NO_FILMS}"
            )
        try:
            image = np.asarray(self._envs[env].render())
        except Exception as error:  # whatever the environment draws with
            raise RenderError(
                f"{self.task}: it cannot draw here: {str(error) or repr(error)}. {_NO_FILMS}"
            ) from error
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise RenderError(
                f"{self.task}: a picture is {image.dtype} {image.shape}, need uint8 (height, width, 3)."
            )
        return image

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()


def _make_first(env_id: str, settings: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Returns an environment; takes `render_mode` out of the settings if it is to draw and cannot."""
    if settings.get("render_mode") != "rgb_array":
        return _make(env_id, settings)
    mode = settings.pop("render_mode")
    env = _make(env_id, settings)
    if mode not in env.metadata.get("render_modes", ()):
        return env
    env.close()
    settings["render_mode"] = mode
    return _make(env_id, settings)


def _draw_without_shadows(env: gymnasium.Env[Any, Any]) -> None:
    """Turns off shadows and smoothing of MuJoCo: most of the time of a picture without a GPU."""
    look = getattr(getattr(env.unwrapped, "model", None), "vis", None)
    if look is not None:
        look.quality.shadowsize = look.quality.offsamples = 0


def check_id(env_id: str) -> None:
    """Refuses an environment that nobody registered; one of `package:Name-v0` is found when it is made.

    Raises:
        ConfigError: no such environment.
    """
    if ":" not in env_id:
        try:
            gymnasium.spec(env_id)
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
            raise _not_made(env_id, error) from error
        except gymnasium.error.Error:  # a name without its version, which `make` adds
            pass


def _make(env_id: str, settings: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        return gymnasium.make(env_id, **settings)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise _not_made(env_id, error) from error


def _not_made(env_id: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"env {env_id!r}: {error} Write package:Name-v0 where a package registers it on import, and "
        "install what is missing (`uv pip install 'gymnasium[mujoco]'` for MuJoCo's)."
    )


def _is_picture(space: gymnasium.Space[Any]) -> bool:
    return isinstance(space, Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)
