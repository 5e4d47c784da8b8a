"""Where steps come from, and how the newest weights get there.

A source acts with the policy of a `PolicyHandle` and returns one control step of all its envs.
Synchronous or not, simulated or real: that differs here, never in the loop.
B envs, A action dim.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.errors import RobotRLError
from robot_rl.data.replay import StepBatch
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.policies.executor import Act, ChunkExecutor

Array = NDArray[Any]


class StalePolicyError(RobotRLError):
    """A source acts with weights older than the staleness bound."""


class Source(Protocol):
    """Anything that yields steps: leased simulators, leased robots, imagination."""

    def collect(self, handle: PolicyHandle) -> StepBatch | None:
        """Returns the steps that are complete now, or None if there are none yet."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PolicyHandle:
    """Hands the newest weights from the learner to whoever acts.

    Weights travel as a snapshot with a version (learner updates) and a checksum. When they may be
    swapped is said once: `"chunk"`, only before an act at which a new chunk is sampled, so that no
    chunk mixes two versions; or `"step"`, before any act, for residual heads, whose frozen base
    makes the chunk and whose own output concerns the present control step alone.
    """

    def __init__(self, *, swap: Literal["chunk", "step"], max_staleness: int) -> None:
        """Args: max_staleness: largest number of updates the acting weights may lag behind."""
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0 learner updates, got {max_staleness}")
        self._swap = swap
        self._max_staleness = max_staleness
        self._weights: dict[str, Tensor] = {}
        self._version = 0
        self._checksum = 0

    @property
    def version(self) -> int:
        """Version of the newest published weights."""
        return self._version

    def publish(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Takes a snapshot: later changes by the learner do not reach those who act."""
        self._weights = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        self._version = version
        self._checksum = checksum(self._weights)

    def refresh(self, policy: torch.nn.Module, acting: int, *, at_chunk_boundary: bool) -> int:
        """Loads the newest weights into `policy` if a swap is allowed now; returns its version.

        Raises:
            StalePolicyError: the acting version lags further behind than the bound allows.
        """
        if acting != self._version and (self._swap == "step" or at_chunk_boundary):
            if checksum(self._weights) != self._checksum:
                raise StalePolicyError(f"policy version {self._version}: weights do not match their checksum")
            load_weights(policy, self._weights)
            acting = self._version
        lag = self._version - acting
        if lag > self._max_staleness:
            raise StalePolicyError(
                f"a source acts with version {acting}, the learner is at {self._version}: {lag} updates behind, "
                f"allowed {self._max_staleness}. Execute fewer steps of a chunk, or raise max_staleness."
            )
        return acting

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._weights), "version": self._version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.publish(state["weights"], version=int(state["version"]))


class SimSource:
    """Synchronous simulators: acts in all envs, steps them, and returns the step at once."""

    def __init__(
        self, env: VectorEnv, policy: torch.nn.Module, executor: ChunkExecutor, *, seed: int, device: str = "sim"
    ) -> None:
        """Args: policy: the acting copy inside `executor`; device: name recorded with every step."""
        self._env, self._policy, self._executor = env, policy, executor
        self._seed, self._device = seed, device
        self._obs: Obs | None = None
        self._act: Act | None = None
        self._version = -1
        self._episodes = EpisodeLog(env.num_envs)

    @property
    def episodes(self) -> EpisodeLog:
        return self._episodes

    def collect(self, handle: PolicyHandle) -> StepBatch:
        """Returns one control step of all envs, complete with the base's next action."""
        if self._obs is None or self._act is None:
            self._obs, self._act = self._begin(handle)
        obs, act, version = self._obs, self._act, self._version
        next_obs, reward, terminated, truncated, infos = self._env.step(act.action)
        ended = terminated | truncated
        final_obs, final_base = next_obs, None
        if ended.any():
            final_obs = merge_rows(next_obs, infos["final_obs"], ended)
            # Asked before the reset, so that a truncated chunk is continued and not begun anew.
            final_base = self._executor.base_action(final_obs, ended)
            self._executor.reset(ended, self._env.episode_seeds())
        self._obs, self._act = next_obs, self._next_act(next_obs, handle)
        next_base = self._act.base_action
        if final_base is not None:
            next_base = np.where(ended[:, None], final_base, next_base)
        self._episodes.add(reward, ended, infos)
        return StepBatch(
            obs=obs,
            action=infos["executed_action"],
            base_action=act.base_action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            next_obs=final_obs,
            next_base_action=next_base,
        )

    def _begin(self, handle: PolicyHandle) -> tuple[Obs, Act]:
        obs, _ = self._env.reset(seed=self._seed)
        self._executor.reset(np.ones(self._env.num_envs, bool), self._env.episode_seeds())
        return obs, self._next_act(obs, handle)

    def _next_act(self, obs: Obs, handle: PolicyHandle) -> Act:
        boundary = self._executor.at_boundary
        self._version = handle.refresh(self._policy, self._version, at_chunk_boundary=boundary)
        return self._executor.act(obs)

    def state_dict(self) -> dict[str, Any]:
        """Returns env, executor, acting weights, and the action that is pending."""
        act = self._act
        return {
            "env": self._env.state_dict(),
            "executor": self._executor.state_dict(),
            "policy": dict(self._policy.state_dict()),
            "version": self._version,
            "pending": None if act is None else {"action": act.action, "base_action": act.base_action},
            "obs": self._obs,
            "episodes": self._episodes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        self._version = int(state["version"])
        self._episodes.load_state_dict(state["episodes"])
        if state["pending"] is None:
            return
        self._env.reset(seed=self._seed)
        self._env.load_state_dict(state["env"])
        self._executor.load_state_dict(state["executor"])
        self._obs, self._act = dict(state["obs"]), Act(**state["pending"])


class EpisodeLog:
    """Returns, lengths and successes of the episodes that ended since the last `take`."""

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self._ended = np.zeros((0, 3))
        self._limited = 0
        self.nan_resets = 0

    def add(self, reward: Array, ended: Array, infos: Mapping[str, Any]) -> None:
        self._return += reward
        self._length += 1
        self._limited += int(np.sum(infos.get("limited", 0)))
        self.nan_resets += int(np.sum(infos.get("diverged", 0)))
        if ended.any():
            rows = np.stack([self._return[ended], self._length[ended], infos["success"][ended]], axis=1)
            self._ended = np.concatenate([self._ended, rows])
            self._return[ended], self._length[ended] = 0.0, 0

    def take(self) -> dict[str, float]:
        """Returns their means and counts, and starts anew."""
        means: dict[str, float] = {"episodes": float(len(self._ended)), "safety_clamps": float(self._limited)}
        if len(self._ended):
            names = ("return", "length", "success")
            means |= dict(zip(names, self._ended.mean(axis=0).tolist(), strict=True))
        self._ended, self._limited = np.zeros((0, 3)), 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {
            "return": self._return.copy(),
            "length": self._length.copy(),
            "ended": self._ended,
            "limited": self._limited,
            "nan_resets": self.nan_resets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._return, self._length = state["return"].copy(), state["length"].copy()
        self._ended, self._limited = state["ended"], int(state["limited"])
        self.nan_resets = int(state["nan_resets"])


def merge_rows(obs: Obs, final_obs: Obs, ended: Array) -> Obs:
    """Returns the observation each row's step led to: `final_obs` where the episode ended."""
    merged = {}
    for key, value in obs.items():
        where = ended.reshape(-1, *[1] * (value.ndim - 1))
        merged[key] = np.where(where, final_obs[key], value)
    return merged


def checksum(weights: Mapping[str, Tensor]) -> int:
    """Returns a CRC-32 over names and bytes, in the order of the names."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].contiguous().view(torch.uint8).numpy().data, zlib.crc32(name.encode(), crc))
    return crc


def load_weights(policy: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads the learner's part of the weights in place; the frozen rest stays."""
    unknown = policy.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, f"the learner published weights that the policy lacks: {unknown}"
