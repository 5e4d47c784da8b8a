"""The interface of leased robots, simulators and world models to the training loop.

B envs, H chunk length, A action dim. Observations are dicts of batched arrays: always
`state`, float32 (B, D); cameras add `<camera>.rgb`, uint8 (B, h, w, 3), and `<camera>.depth`,
float32 (B, h, w) in metres. Actions are float32 (B, A) in [-1, 1]. Arrays are those of the env's `xp`
on its `device`: numpy's, or torch tensors (`robot_rl.core.arrays`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np

from robot_rl.core.arrays import Array, is_array, like, namespace
from robot_rl.core.errors import ConfigError, RobotRLError
from robot_rl.hal.safety import SafetyLimits

Obs = dict[str, Array]


@dataclass
class ChunkStep:
    """The result of a chunk; a row stops at the end of its episode."""

    obs: Obs
    """After the chunk; the first observation of the next episode where one ended."""
    reward: Array
    """(B, n_exec), zero where not valid."""
    terminated: Array
    """(B,)"""
    truncated: Array
    """(B,)"""
    valid: Array
    """(B, n_exec): which control steps were executed."""
    infos: dict[str, Any]
    """As in `step`, merged over the chunk: flags (B,) are True if they were at any executed step;
    `final_obs` holds each row where its episode ended; `commanded_action` is (B, n_exec, A), zero
    where not valid; any other array keeps each row's last executed value."""


class VectorEnv(gymnasium.vector.VectorEnv[Obs, Array, Array]):
    """A `gymnasium.vector.VectorEnv` (1.4 conventions) with chunks and, where possible, states.

    `step` returns in `infos`, for every env: `success` (B,) bool and `commanded_action` (B, A), the
    action clipped into [-1, 1], which learners learn from. An arm (`limits`) adds `executed_target_rad`
    (B, n), the joint targets after safety. They have no equivalent action: safety limits joint by joint,
    so a limited step of the tool is in general a step of no action.

    With SAME_STEP autoreset it returns `final_obs`, a dict of batched arrays whose rows hold where
    `_final_obs` (B,) is True, and the returned observation of those rows is already the next episode's.
    With DISABLED autoreset the caller resets by `reset(options={"reset_mask": mask})`.

    `reset(seed=s)` gives env i the seed s + i; a list gives each its own, where None lets an env go on to
    the next episode of its present seed, as `reset()` does all of them.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    single_observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    task: str
    robot: str
    instruction: str
    control_hz: float
    state_names: tuple[str, ...]
    """One name for each element of `state`: a dataset with other names is refused."""
    action_names: tuple[str, ...]
    limits: SafetyLimits | None = None
    """Safety limits of the arm; None where there is no arm."""
    says_success: bool = True
    """Whether the env reports successes; if not, the return counts."""
    reset_classes: tuple[str, ...] = ()
    """Names of the classes of starts, where episodes begin in rows of a bank: then `infos` has `reset_class`
    (B,), a number in this table, and `reset_row` (B,), of the episode that the step belongs to."""
    xp: Any = np
    """The array API functions of its arrays."""
    device: Any = "cpu"
    """Where its arrays are, as `xp.asarray` takes it."""
    caps: frozenset[str]
    """Some of `set_state`, `fork`, `render`, `batch`: code asks for these, never for the type."""

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins an episode in all envs, or in those of `options["reset_mask"]`."""
        raise NotImplementedError

    def step(self, actions: Array) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Advances every env by one control step."""
        return self.step_masked(actions, None)

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Advances the active envs (all if None) by one control step; returns what `step` does.

        An env that has this method has chunks. Rows that are not active keep their state and
        clock, show their present observation, and have reward 0 and no end.
        """
        raise NotImplementedError

    def step_unseen(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """As `step_masked`, for a step whose observation is read only where an episode ends.

        Where none ends, the observation may be empty: an env with cameras then draws nothing.
        """
        return self.step_masked(actions, active)

    def step_chunk(self, actions: Array, n_exec: int, active: Array | None = None) -> ChunkStep:
        """Executes the first `n_exec` of (B, H, A); an env whose episode ends waits for the rest.

        Only the `active` envs move (all if None); at least one. Only the last step is observed, and steps
        in which an episode ends.
        """
        xp, num_envs = self.xp, self.num_envs
        actions = xp.asarray(actions, dtype=xp.float32, device=self.device)
        self._check_chunk(actions, n_exec)

        def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
            return xp.zeros(shape, dtype=dtype, device=self.device)

        reward, valid = zeros((num_envs, n_exec), xp.float64), zeros((num_envs, n_exec), xp.bool)
        terminated, truncated = zeros((num_envs,), xp.bool), zeros((num_envs,), xp.bool)
        commanded = zeros((num_envs, n_exec, actions.shape[2]), xp.float32)
        merged: dict[str, Any] = {"commanded_action": commanded}
        rows: Array = ~terminated if active is None else xp.asarray(active, dtype=xp.bool, device=self.device)
        everyone = active is None or bool(rows.all())
        is_read = xp is np or not self._resets_itself
        obs: Obs = {}
        for k in range(n_exec):
            step = self.step_masked if k == n_exec - 1 else self.step_unseen
            obs, step_reward, step_terminated, step_truncated, infos = step(
                actions[:, k], None if everyone else rows
            )
            valid[:, k] = rows
            reward[:, k] = xp.where(rows, step_reward, 0.0)
            commanded[:, k] = xp.where(rows[:, None], infos["commanded_action"], 0.0)
            _merge_infos(merged, infos, rows)
            terminated |= step_terminated & rows
            truncated |= step_truncated & rows
            # An env that resets itself says whether an episode ended: else its device need not be read.
            if is_read or "final_obs" in infos:
                rows = rows & ~(terminated | truncated)
                everyone = is_read and bool(rows.all())
                if not rows.any():
                    break
        return ChunkStep(obs, reward, terminated, truncated, valid, merged)

    @property
    def _resets_itself(self) -> bool:
        return self.metadata.get("autoreset_mode") == gymnasium.vector.AutoresetMode.SAME_STEP

    def _check_chunk(self, actions: Array, n_exec: int) -> None:
        num_envs, action_dim = self.num_envs, len(self.action_names)
        if actions.ndim != 3 or actions.shape[0] != num_envs or actions.shape[2] != action_dim:
            raise ConfigError(
                f"{self.task}.step_chunk: got actions of shape {tuple(actions.shape)}, "
                f"need ({num_envs}, H, {action_dim}): envs, chunk length, actions"
            )
        if not 1 <= n_exec <= actions.shape[1]:
            raise ConfigError(
                f"{self.task}.step_chunk: got n_exec {n_exec}, "
                f"allowed 1 to {actions.shape[1]}, the chunk length"
            )

    def get_state(self) -> Array:
        """Returns one state row per env, (B, n) float64. Needs the cap `set_state`."""
        raise NotImplementedError

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        """Puts the masked envs into the given states and returns the observations."""
        raise NotImplementedError

    def park(self) -> None:
        """Brings the arm to where it may be left alone; the env still works. Simulations do nothing."""

    def safe_stop(self) -> None:
        """Brings the arm to rest now, and latches. Simulations do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns all that an exact resume needs (states, seeds, episode counters), as arrays."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        """Restores `state_dict` and returns the current observation."""
        raise NotImplementedError


def given_seeds(seed: int | Sequence[int | None] | None, num_envs: int, *, at: str) -> tuple[Array, Array]:
    """Returns the seeds (B,) uint64 that a reset gives, and which envs (B,) it gives one.

    Raises:
        ConfigError: another number of them; `at` begins the message.
    """
    if seed is None:
        return np.zeros(num_envs, np.uint64), np.zeros(num_envs, bool)
    if isinstance(seed, int | np.integer):
        first = np.uint64(int(seed) % 2**64)
        return np.arange(num_envs, dtype=np.uint64) + first, np.ones(num_envs, bool)
    if len(seed) != num_envs:
        raise ConfigError(f"{at}.reset: got {len(seed)} seeds, need {num_envs}, one an env")
    seeds = np.array([0 if one is None else int(one) % 2**64 for one in seed], np.uint64)
    return seeds, np.array([one is not None for one in seed])


def next_episodes(
    seed: int | Sequence[int | None] | None, mask: Array, seeds: Array, episodes: Array, *, at: str
) -> tuple[Array, Array]:
    """Returns the seeds (B,) from a reset on, and the episodes (B,) that it begins where masked.

    Args:
        seed: as given to `reset`.
        mask: (B,), which envs it resets.
        seeds: (B,) uint64, in a tensor int64, present.
        episodes: (B,) of the same kind, present, counted from a seed on.
        at: begins the message of an error.

    Raises:
        ConfigError: another number of seeds than envs.
    """
    xp, (given, is_given) = namespace(seeds), given_seeds(seed, len(seeds), at=at)
    given, is_given = like(given.view(np.int64), seeds), like(is_given, mask)
    return xp.where(mask & is_given, given, seeds), xp.where(is_given, 0, episodes + 1)


def set_spaces(env: VectorEnv, pictures: Mapping[str, tuple[int, int]] | None = None) -> None:
    """Sets the spaces of an env from its names: a state without bounds, actions in [-1, 1], and pictures.

    Args: pictures: camera -> height and width in pixels.
    """
    box, batch = gymnasium.spaces.Box, gymnasium.vector.utils.batch_space
    shown: dict[str, gymnasium.Space[Any]] = {
        "state": box(-np.inf, np.inf, (len(env.state_names),), np.float32)
    }
    for camera, size in (pictures or {}).items():
        shown[f"{camera}.rgb"] = box(0, 255, (*size, 3), np.uint8)
    env.single_observation_space = gymnasium.spaces.Dict(shown)
    env.single_action_space = box(-1.0, 1.0, (len(env.action_names),), np.float32)
    env.observation_space = batch(env.single_observation_space, env.num_envs)
    env.action_space = batch(env.single_action_space, env.num_envs)


def finite_actions(env: VectorEnv, actions: Array) -> Array:
    """Returns actions (B, A) of an env in numpy arrays, clipped into [-1, 1].

    Raises:
        ConfigError: another shape.
        RobotRLError: one is not finite.
    """
    actions = np.asarray(actions, np.float32)
    need = (env.num_envs, len(env.action_names))
    if actions.shape != need:
        raise ConfigError(f"{env.task}: got actions of shape {actions.shape}, need {need}")
    if not np.isfinite(actions).all():
        raise RobotRLError(f"{env.task}: an action is not finite. Look at the policy's weights.")
    return np.clip(actions, -1.0, 1.0)


def row_mask(mask: Array | None, num_envs: int) -> Array:
    """Returns a bool mask (B,), all True for None."""
    return np.ones(num_envs, bool) if mask is None else np.asarray(mask, bool)


def _merge_infos(merged: dict[str, Any], infos: dict[str, Any], active: Array) -> None:
    """Adds one step's infos to those of the chunk so far; see `ChunkStep.infos`."""
    for key, value in infos.items():
        if key == "commanded_action":
            continue  # kept a column per step by the caller
        if isinstance(value, dict):
            rows = infos.get(f"_{key}", active) & active
            _merge_rows(merged.setdefault(key, {}), cast("dict[str, Any]", value), rows)
        elif is_array(value):
            if value.dtype == namespace(value).bool and value.ndim == 1:
                merged[key] = merged.get(key, False) | (value & active)
            else:
                _merge_rows(merged, {key: value}, active)
        else:
            merged[key] = value


def _merge_rows(kept: dict[str, Any], new: dict[str, Any], rows: Array) -> None:
    for key, value in new.items():
        if key in kept:
            where = rows.reshape(-1, *[1] * (value.ndim - 1))
            kept[key] = like(namespace(value).where(where, value, kept[key]), kept[key])
        else:
            kept[key] = value
