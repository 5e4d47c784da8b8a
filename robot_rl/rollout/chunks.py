"""Sources of whole chunks with their chains: rollouts, for learners that score their own actions.

N envs, T decisions (of the longest episode, in groups), H chunk length, A action dim, G episodes in a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from robot_rl.algos.returns import chunk_return
from robot_rl.core.policy import Chain, ChunkSample
from robot_rl.data.rollout import EpisodeRollout, Rollout, joined_chain
from robot_rl.hal.vector import ChunkStep, Obs, VectorEnv
from robot_rl.rollout.sources import EpisodeLog, Here
from robot_rl.rollout.stepping import merge_rows
from robot_rl.rollout.weights import Published, Subscriber

Array = NDArray[Any]


class ChunkSource(Here):
    """Synchronous simulators in which chunks are sampled and executed, and kept with their chains."""

    def __init__(
        self,
        env: VectorEnv,
        policy: Any,
        *,
        n_exec: int,
        gamma_step: float,
        seed: int,
        device: str = "cpu",
    ) -> None:
        """Begins with new episodes.

        Args:
            env: where.
            policy: the acting copy, a module.
            n_exec: actions executed of each chunk.
            gamma_step: discount per control step.
            seed: of the episodes and of the exploration.
            device: where the policy's parameters are.
        """
        self._env, self._policy = env, policy
        self._n_exec, self._gamma_step = n_exec, gamma_step
        self._seed, self._device = seed, device
        self._generator = Generator(device).manual_seed(seed)
        self._weights = Subscriber(policy)
        self.episodes = EpisodeLog(env.num_envs, env.reset_classes)

    def close(self) -> None:
        """Closes the env."""
        self._env.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns acting weights, the generator and the figures of the episodes."""
        return {
            **self._weights.state_dict(),
            "generator": self._generator.get_state(),
            "episodes": self.episodes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state)
        self._generator.set_state(state["generator"])
        self.episodes.load_state_dict(state["episodes"])

    def _execute(self, obs: Obs, active: Array | None = None) -> tuple[ChunkSample, ChunkStep]:
        """Samples a chunk for every env and executes it in the active ones."""
        with torch.no_grad():
            encoded = self._policy.encode(self._tensors(obs))
            sample = self._policy.sample(encoded, mode="explore", record=True, generator=self._generator)
        done = self._env.step_chunk(sample.actions.cpu().numpy(), self._n_exec, active)
        self.episodes.add(done.reward.sum(axis=1), ended(done), done.infos, steps=done.valid.sum(axis=1))
        return sample, done

    def _rollout(self, obs: list[Obs], samples: list[ChunkSample], executed: list[ChunkStep]) -> Rollout:
        returns = [self._worth(done) for done in executed]
        after = [
            merge_rows(done.obs, done.infos["final_obs"], ended(done))
            if "final_obs" in done.infos
            else done.obs
            for done in executed
        ]
        return Rollout(
            obs=self._stacked(obs),
            chain=_joined([sample.chain for sample in samples]),
            reward=torch.stack([reward for reward, _ in returns], dim=1),
            bootstrap=torch.stack([bootstrap for _, bootstrap in returns], dim=1),
            next_obs=self._stacked(after),
            ended=self._tensor(np.stack([ended(done) for done in executed], axis=1)),
            steps=self._tensor(np.stack([done.valid.sum(axis=1) for done in executed], axis=1)),
            policy_version=self._weights.version,
            source=executed[0].infos.get("source", "sim"),
        )

    def _worth(self, done: ChunkStep) -> tuple[Tensor, Tensor]:
        """Returns the discounted reward of a chunk and its bootstrap, (N,) each."""
        reward, valid, terminated = (
            self._tensor(part) for part in (done.reward.astype(np.float32), done.valid, done.terminated)
        )
        return chunk_return(reward, valid, terminated, self._gamma_step)

    def _stacked(self, obs: list[Obs]) -> dict[str, Tensor]:
        return {key: self._tensor(np.stack([one[key] for one in obs], axis=1)) for key in obs[0]}

    def _tensors(self, obs: Obs) -> dict[str, Tensor]:
        return {key: self._tensor(value) for key, value in obs.items()}

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


class RolloutSource(ChunkSource):
    """Collects T decisions of every env at a time; episodes continue from one rollout to the next."""

    def __init__(self, env: VectorEnv, policy: Any, *, decisions: int, **how: Any) -> None:
        """Args: env: with autoreset SAME_STEP; decisions: T; how: see `ChunkSource`."""
        super().__init__(env, policy, **how)
        self._decisions = decisions
        self._obs: Obs | None = None

    def collect(self, published: Published) -> Rollout:
        """Returns T decisions of every env, all with the newest weights."""
        if self._obs is None:
            self._obs, _ = self._env.reset(seed=self._seed)
        self._weights.refresh(published)
        obs, samples, executed = [self._obs], list[ChunkSample](), list[ChunkStep]()
        for _ in range(self._decisions):
            sample, done = self._execute(obs[-1])
            samples.append(sample)
            executed.append(done)
            obs.append(done.obs)
        self._obs = obs.pop()
        return self._rollout(obs, samples, executed)

    def state_dict(self) -> dict[str, Any]:
        """Returns what every source does, the env, and the observation."""
        return {**super().state_dict(), "env": self._env.state_dict(), "obs": self._obs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if state["obs"] is None:
            return
        self._env.reset(seed=self._seed)
        self._env.load_state_dict(state["env"])
        self._obs = dict(state["obs"])


class GroupSource(ChunkSource):
    """Plays one episode in every env at a time, for learners that compare episodes (GRPO).

    Each G envs, one after another, begin in the same state. Every start is a seed that is never used again.
    """

    def __init__(self, env: VectorEnv, policy: Any, *, group: int, **how: Any) -> None:
        """Args: env: with autoreset DISABLED; group: G, a divisor of N; how: see `ChunkSource`."""
        super().__init__(env, policy, **how)
        assert env.num_envs % group == 0, "the envs are whole groups"
        self._group = group
        self._next_seed = self._seed

    def collect(self, published: Published) -> EpisodeRollout:
        """Returns the episodes, all with the newest weights; an env whose episode ended does not move."""
        self._weights.refresh(published)
        starts = range(self._next_seed, self._next_seed + self._env.num_envs // self._group)
        self._next_seed = starts.stop
        first, _ = self._env.reset(seed=[start for start in starts for _ in range(self._group)])
        obs, samples, executed, made = [first], list[ChunkSample](), list[ChunkStep](), []
        live, success = np.ones(self._env.num_envs, bool), np.zeros(self._env.num_envs, bool)
        while live.any():
            sample, done = self._execute(obs[-1], live)
            samples.append(sample)
            executed.append(done)
            obs.append(done.obs)
            made.append(live)
            success |= done.infos["success"] & live
            live = live & ~ended(done)
        rollout = self._rollout(obs[:-1], samples, executed)
        valid, solved = self._tensor(np.stack(made, axis=1)), self._tensor(success)
        rollout.bootstrap = rollout.bootstrap * valid
        rollout.ended = rollout.ended | ~valid
        score = solved.to(rollout.reward.dtype)
        return EpisodeRollout(**vars(rollout), valid=valid, success=solved, score=score)

    def state_dict(self) -> dict[str, Any]:
        """Returns what every source does, and the next start; between two rollouts no episode is open."""
        return {**super().state_dict(), "next_seed": self._next_seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next_seed = int(state["next_seed"])


def ended(done: ChunkStep) -> Array:
    """Returns which episodes ended, (N,)."""
    return done.terminated | done.truncated


def _joined(chains: list[Chain | None]) -> Chain:
    """Returns the chains of T decisions in one, its rows env after env."""
    found = [chain for chain in chains if chain is not None]
    assert len(found) == len(chains), "a policy that records returns its chain"
    return joined_chain(found, lambda parts: torch.stack(parts, dim=1).flatten(0, 1))
