"""Any Gymnasium environment as a `VectorEnv`: actions in [-1, 1], numbers in `state`, pictures by name.

    GymVectorEnv("Hopper-v5", num_envs=4)

Episode 0 of a seed is what `env.reset(seed=seed)` gives; later ones have seeds that follow from it. So an
episode is determined by (seed, episode, actions), and that is what a state dict holds: loading one plays the
actions of the present episode again. It is exact wherever the environment itself repeats under its seed.
B envs, A action dim, D elements of the state.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from robot_rl.core.errors import ConfigError, RenderError, RobotRLError, require
from robot_rl.core.seeding import EVAL_SEED_START, EpisodeRng
from robot_rl.envs import foreign
from robot_rl.envs.foreign import EnvError, Envs
from robot_rl.hal.vector import Array, Obs, VectorEnv, finite_actions, next_episodes, row_mask

logger = logging.getLogger(__name__)

_NO_FILMS = "Without films: video.episodes=0 video.failures=0."


class Rows(Protocol):
    """Environments that write to arrays with a row for each; see `foreign.Envs`."""

    spec: dict[str, Any]
    arrays: dict[str, Array]
    may_lose: bool
    """Whether `step` can lose episodes."""

    def reset(self, rows: Array) -> Sequence[int]: ...
    def step(self, rows: Array) -> Sequence[int]: ...
    def advise(self, rows: Array) -> Sequence[int]: ...
    def picture(self, i: int) -> Array: ...
    @property
    def close(self) -> Callable[[], Any]: ...


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
        expert: str | None = None,
        envs: Rows | None = None,
    ) -> None:
        """Makes the environments.

        Args:
            env_id: as `gymnasium.make` takes it, `package:Name-v0` too.
            num_envs: B.
            autoreset: whether the env begins the next episode itself.
            settings: keyword arguments of `gymnasium.make`, `max_episode_steps` among them. With
                `render_mode="rgb_array"` there are pictures, where the environment can draw.
            expert: who demonstrates: `module:function`, from the environment's own observation to its action.
                Or `module:class`: an object of which is made for each episode without arguments, and acts by
                `get_action(observation)`, or as a function itself.
            envs: that many with that expert, made elsewhere; None makes them here.

        Raises:
            ConfigError: no such environment, a package is missing, episodes never end, or spaces that no
                policy here can serve.
        """
        require(num_envs >= 1, f"{env_id}: num_envs", num_envs, "1 or more")
        if envs is None:
            with as_ours():
                envs = Envs(env_id, num_envs, settings or {}, expert)
        self._envs, spec, self._expert = envs, envs.spec, expert
        if not spec["repeats"]:
            _warn_about_seeds(env_id)
        self.render_mode, self._render_modes = spec["render_mode"], spec["render_modes"]
        self.num_envs, self.task, self.robot, self.instruction = num_envs, env_id, env_id, env_id
        self.caps, self.says_success = frozenset[str](), False
        self.horizon, self.control_hz = spec["horizon"], spec["control_hz"]
        self.state_names = tuple(spec["state_names"])
        self._autoreset = autoreset == "same_step"
        mode = AutoresetMode.SAME_STEP if self._autoreset else AutoresetMode.DISABLED
        self.metadata = {
            "render_modes": self._render_modes,
            "render_fps": spec["render_fps"],
            "autoreset_mode": mode,
        }
        self.action_names = tuple(f"action_{i}" for i in range(spec["actions"]))
        self.single_action_space = Box(-1.0, 1.0, (len(self.action_names),), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        shown: dict[str, Box] = {"state": Box(-np.inf, np.inf, (len(self.state_names),), np.float32)}
        shown |= {f"{name}.rgb": Box(0, 255, shape, np.uint8) for name, shape in spec["pictures"].items()}
        self.single_observation_space = Dict(tuple(shown.items()))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._obs_keys, self._is_begun = tuple(shown), False
        self._seed, self._episode = np.arange(num_envs, dtype=np.uint64), np.zeros(num_envs, np.uint64)
        self._played: list[list[Array]] = [[] for _ in range(num_envs)]  # actions of the present episodes

    # Steps

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Advances the active envs by one control step; the others stay, with reward 0."""
        commanded = finite_actions(self, actions)
        if not self._is_begun:
            raise RobotRLError(f"{self.task}: step before the first reset. Call reset(seed=...) first.")
        rows = row_mask(active, self.num_envs)
        self._play(np.flatnonzero(rows), commanded)
        now = self._envs.arrays
        reward = np.where(rows, now["reward"], 0.0)
        terminated, truncated = rows & now["terminated"], rows & now["truncated"]
        success = rows & (now["success"] > 0)
        self.says_success |= bool((now["success"][rows] >= 0).any())
        infos: dict[str, Any] = {"success": success, "commanded_action": commanded}
        ended = terminated | truncated
        if self._autoreset and ended.any():
            infos |= {"final_obs": self._shown(), "_final_obs": ended}
            infos |= {"final_info": {"success": success.copy()}, "_final_info": ended}
            self._begin(ended, self._episode + np.uint64(1))
        return self._shown(), reward, terminated, truncated, infos

    def _play(self, rows: Array, actions: Array) -> None:
        """Takes a step of these rows with their actions (B, A) in [-1, 1]; a lost episode is cut off."""
        before = self._shown() if self._envs.may_lose else {}
        for i in rows:
            self._played[i].append(actions[i].copy())
        now = self._envs.arrays
        now["action"][rows] = actions[rows]
        with as_ours():
            lost = self._envs.step(rows)
        if not len(lost):
            return
        cut = np.intersect1d(rows, lost)
        rest = np.setdiff1d(lost, cut)
        self._restore(rest)
        for key, value in before.items():
            now[key][lost] = value[lost]
        now["reward"][cut], now["terminated"][cut], now["truncated"][cut], now["success"][cut] = (
            0,
            False,
            True,
            -1,
        )

    def _shown(self) -> Obs:
        return {key: self._envs.arrays[key].copy() for key in self._obs_keys}

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
        """Begins episodes where masked; their first observations are shown there."""
        self._episode, self._is_begun = np.where(mask, episode, self._episode), True
        rows = np.flatnonzero(mask)
        for i in rows:
            self._played[i] = []
        self._envs.arrays["seed"][rows] = [self._episode_seed(i) for i in rows]
        with as_ours():
            lost = self._envs.reset(rows)
        if len(lost):
            again = np.zeros(self.num_envs, bool)
            again[np.intersect1d(rows, lost)] = True
            self._begin(again, episode)
            self._restore(np.setdiff1d(lost, rows))

    def _episode_seed(self, i: int) -> int:
        """Returns the seed itself for its first episode, and others from it for the next."""
        if not self._episode[i]:
            return int(self._seed[i])
        return int(EpisodeRng(self._seed[i], self._episode[i]).key[0]) % EVAL_SEED_START

    # Demonstrations

    def expert(self, bias_m: float = 0.0, noise_m: float = 0.0, noise_seed: int = 0) -> GymExpert:
        """Returns the expert of the environment. Bias and noise are of our tasks' experts: not read here.

        Raises:
            ConfigError: nobody does.
        """
        if self._expert is None:
            raise ConfigError(
                f"env.expert: missing: nobody demonstrates {self.task}. Name a function of the environment's "
                "own observation, env.expert=module:function, or give recorded episodes, demos.path=<folder>."
            )
        return GymExpert(self.advised)

    def advised(self) -> Array:
        """Returns what the expert would do now (B, A), in [-1, 1]; see `expert`."""
        rows = np.arange(self.num_envs)
        while len(rows):
            with as_ours():
                rows = np.asarray(self._envs.advise(rows), int)  # those to be asked again
            if len(rows):
                self._restore(rows)
        return self._envs.arrays["action"].copy()

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
        self._played = [list(np.asarray(actions, np.float32)) for actions in state["played"]]
        self._episode, self._is_begun = np.asarray(state["episode"], np.uint64), True
        self._restore(np.arange(self.num_envs))
        return self._shown()

    def _restore(self, rows: Array) -> None:
        """Plays the episodes under way again."""
        played = [self._played[i] for i in range(self.num_envs)]
        mask = np.zeros(self.num_envs, bool)
        mask[rows] = True
        self._begin(mask, self._episode)
        for step in range(max((len(played[i]) for i in rows), default=0)):
            on = np.array([i for i in rows if step < len(played[i])], int)
            actions = np.zeros((self.num_envs, len(self.action_names)), np.float32)
            actions[on] = [played[i][step] for i in on]
            self._play(on, actions)

    # Pictures

    def render(self) -> tuple[Array, ...]:
        """Returns a picture of each env."""
        return tuple(self.picture(i) for i in range(self.num_envs))

    def picture(self, env: int = 0) -> Array:
        """Returns an RGB image (height, width, 3) of one env, of the size that the environment gives it.

        Raises:
            RenderError: the environment draws no pictures, or something that it draws with is missing.
        """
        if self.render_mode != "rgb_array":
            raise RenderError(
                f"{self.task}: it draws no pictures: got render_mode {self.render_mode!r}, need 'rgb_array'; "
                f"the environment has {', '.join(self._render_modes) or 'none'}. {_NO_FILMS}"
            )
        with as_ours():
            return self._envs.picture(env)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the environments."""
        self._envs.close()


@dataclass(frozen=True)
class GymExpert:
    """Demonstrates in all environments."""

    act: Callable[[], Array]
    """Returns actions (B, A) for what they show now."""


@functools.cache
def _warn_about_seeds(env_id: str) -> None:
    logger.warning(
        "%s: the same seed began two different episodes, so evaluations and resumed runs do not repeat "
        "exactly. Wrap it so that reset(seed=...) draws everything from the seed; docs/suites.md shows how.",
        env_id,
    )


def check_id(env_id: str) -> None:
    """Refuses an environment that nobody registered; one of `package:Name-v0` is found when it is made.

    Raises:
        ConfigError: no such environment.
    """
    with as_ours():
        foreign.check_id(env_id)


@contextmanager
def as_ours() -> Generator[None]:
    """Raises what is wrong with an environment as errors of robot_rl."""
    try:
        yield
    except EnvError as error:
        if error.kind == "render":
            raise RenderError(f"{error.message} {_NO_FILMS}") from error.__cause__
        raise (ConfigError if error.kind == "config" else RobotRLError)(error.message) from error.__cause__
