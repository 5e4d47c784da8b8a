"""Where steps come from, and how the newest weights get there.

A source acts with the policy of a `PolicyHandle` and returns one control step of all its envs.
Synchronous or not, simulated or real: that differs here, never in the loop.
B envs, A action dim.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.errors import RobotRLError
from robot_rl.data.replay import StepBatch
from robot_rl.data.rollout import Rollout
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.policies.executor import Act, ChunkExecutor

Array = NDArray[Any]


class StalePolicyError(RobotRLError):
    """A source acts with weights older than the staleness bound."""


class Source(Protocol):
    """Anything that yields steps: leased simulators, leased robots, imagination."""

    def collect(self, handle: PolicyHandle) -> StepBatch | Rollout | None:
        """Returns the steps that are complete now, or None if there are none yet."""
        ...

    @property
    def is_ahead(self) -> bool:
        """Whether more steps wait to be collected: it does not wait for the learner, which is behind."""
        ...

    @property
    def episodes(self) -> EpisodeLog:
        """The figures of the episodes that ended."""
        ...

    def close(self) -> None:
        """Brings what acts to rest, and gives it back."""
        ...

    @property
    def nan_resets(self) -> int:
        """Episodes cut short because a simulation diverged, since the run began."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PolicyHandle:
    """Hands the newest weights from the learner to whoever acts.

    Weights travel as a snapshot with a version (learner updates) and a checksum, and are swapped
    between two acts. A chunk is sampled whole within one act and waits in the executor's queue, so
    for a chunk policy that is a swap at the chunk's boundary: no chunk mixes two versions. Only
    `refine`, the residual head, changes within a chunk, at the control step it corrects.
    """

    def __init__(self, *, publish_every: int = 1, max_staleness: int = 1000) -> None:
        """Sets the one bound on staleness.

        Args:
            publish_every: learner updates between two snapshots.
            max_staleness: learner updates by which the weights that acted may be older than the learner.
        """
        if not 1 <= publish_every <= max_staleness:
            raise ValueError(
                f"policy handle: got publish_every {publish_every} and max_staleness {max_staleness}, "
                "allowed: 1 <= publish_every <= max_staleness (learner updates)"
            )
        self._publish_every, self._max_staleness = publish_every, max_staleness
        self._weights: dict[str, Tensor] = {}
        self._version = -1
        self._learner = 0
        self._checksum = 0

    @property
    def version(self) -> int:
        """Version of the newest published weights; -1 before the first."""
        return self._version

    @property
    def learner(self) -> int:
        """Updates that the learner has made."""
        return self._learner

    @property
    def max_staleness(self) -> int:
        """Updates by which the weights that acted may be older than the learner."""
        return self._max_staleness

    def offer(self, version: int, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Notes how far the learner is, and publishes its weights if that is due."""
        self._learner = version
        if self._version < 0 or version - self._version >= self._publish_every:
            self._publish(weights(), version)

    def refresh(self, policy: torch.nn.Module, acting: int) -> int:
        """Loads the newest weights into `policy`, which acted with version `acting`; returns theirs.

        Raises:
            StalePolicyError: nothing was published, the weights were damaged on the way, or those
                that acted until now lag further behind the learner than the bound allows.
        """
        if self._version < 0:
            raise StalePolicyError("policy handle: no weights yet. Offer the learner's before collecting.")
        self.check(acting)
        if acting != self._version:
            if checksum(self._weights) != self._checksum:
                raise StalePolicyError(f"policy version {self._version}: weights and checksum differ.")
            load_weights(policy, self._weights)
        return self._version

    def check(self, acting: int) -> None:
        """Passes if weights of version `acting` may still act; see `refresh`."""
        lag = self._learner - acting
        if acting >= 0 and lag > self._max_staleness:
            raise StalePolicyError(
                f"a source acted with version {acting}, the learner is at {self._learner}: {lag} updates "
                f"behind, allowed {self._max_staleness}. Collect more often, or raise max_staleness."
            )

    def snapshot(self) -> tuple[int, int, Mapping[str, Tensor]]:
        """Returns the newest weights for another process: version, checksum, weights."""
        return self._version, self._checksum, self._weights

    def take(self, version: int, crc: int, weights: Mapping[str, Tensor]) -> None:
        """Takes a snapshot of another process's handle; `refresh` compares it with its checksum."""
        self._version, self._checksum, self._weights = version, crc, dict(weights)

    def hear(self, learner: int) -> None:
        """Notes how far the learner of another process is."""
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._weights), "version": self._version, "learner": self._learner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._publish(state["weights"], int(state["version"]))
        self._learner = int(state["learner"])

    def _publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Takes a snapshot: later changes by the learner do not reach those who act."""
        self._weights = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        self._version, self._checksum = version, checksum(self._weights)


class SimSource:
    """Synchronous simulators: acts in all envs, steps them, and returns the step at once."""

    def __init__(
        self,
        env: VectorEnv,
        policy: torch.nn.Module,
        executor: ChunkExecutor,
        *,
        seed: int,
        label: str = "sim",
    ) -> None:
        """Args: policy: the acting copy inside `executor`; label: recorded as the source of every step."""
        self._env, self._policy, self._executor = env, policy, executor
        self._seed, self._label = seed, label
        self._obs: Obs | None = None
        self._act: Act | None = None
        self._version = -1
        self._episodes = EpisodeLog(env.num_envs)

    @property
    def episodes(self) -> EpisodeLog:
        return self._episodes

    @property
    def nan_resets(self) -> int:
        return self._episodes.nan_resets

    @property
    def is_ahead(self) -> bool:
        return False

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
            # Asked before the reset: the noise is the ended episode's, not the next one's.
            final_base = self._executor.base_action(final_obs, ended)
            self._executor.reset(ended)
        if "human" in infos:  # a plan from before a person moved the arm is of another state
            self._executor.reset(infos["human"])
        self._obs, self._act = next_obs, self._next_act(next_obs, handle)
        next_base = self._act.base_action
        if final_base is not None:
            next_base = np.where(ended[:, None], final_base, next_base)
        self._episodes.add(reward, ended, infos)
        return StepBatch(
            obs=obs,
            action=infos["commanded_action"],
            executed_target_rad=infos.get("executed_target_rad"),
            base_action=act.base_action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            next_obs=final_obs,
            next_base_action=next_base,
            success=infos["success"],
            source=infos.get("source", self._label),
            policy_version=version,
            policy_action=infos.get("policy_action"),
            instruction=infos.get("instruction"),
            stamp_ns=infos.get("stamp_ns"),
            latent=act.latent,
            decides=act.decides,
            picture_stamp_ns=infos.get("picture_stamp_ns"),
            limited=infos.get("limited"),
            diverged=infos.get("diverged"),
        )

    def close(self) -> None:
        """Closes the env."""
        self._env.close()

    def _begin(self, handle: PolicyHandle) -> tuple[Obs, Act]:
        obs, _ = self._env.reset(seed=self._seed)
        self._executor.reset()
        return obs, self._next_act(obs, handle)

    def _next_act(self, obs: Obs, handle: PolicyHandle) -> Act:
        self._version = handle.refresh(self._policy, self._version)
        return self._executor.act(obs)

    def state_dict(self) -> dict[str, Any]:
        """Returns env, executor, acting weights, and the action that is pending."""
        act = self._act
        return {
            "env": self._env.state_dict(),
            "executor": self._executor.state_dict(),
            "policy": dict(self._policy.state_dict()),
            "version": self._version,
            "pending": None if act is None else dict(vars(act)),
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

    def add(self, reward: Array, ended: Array, infos: Mapping[str, Any], *, steps: int | Array = 1) -> None:
        """Takes what `steps` control steps of each env came to."""
        self._return += reward
        self._length += steps
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
        octets = weights[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(octets.data, zlib.crc32(name.encode(), crc))
    return crc


def load_weights(policy: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads the learner's part of the weights in place; the frozen rest stays."""
    unknown = policy.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, f"the learner published weights that the policy lacks: {unknown}"
