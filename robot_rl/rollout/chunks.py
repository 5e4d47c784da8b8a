"""Sources of whole chunks with their chains: rollouts, for learners that score their own actions.

N envs, T decisions (of the longest episode, in groups), H chunk length, A action dim, G episodes in a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from robot_rl.algos.returns import chunk_return
from robot_rl.core.policy import Chain, ChunkSample
from robot_rl.data.rollout import EpisodeRollout, Rollout, joined_chain, tensor_of
from robot_rl.hal.vector import ChunkStep, Obs, VectorEnv
from robot_rl.rollout.sources import LOGGED, EpisodeLog, Here
from robot_rl.rollout.stepping import actions_for, merge_rows
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

    def _execute(self, obs: dict[str, Tensor], active: Array | None = None) -> tuple[ChunkSample, ChunkStep]:
        """Samples a chunk for every env and executes it in the active ones."""
        with torch.no_grad():
            encoded = self._policy.encode(obs)
            sample = self._policy.sample(encoded, mode="explore", record=True, generator=self._generator)
        return sample, self._env.step_chunk(actions_for(self._env, sample.actions), self._n_exec, active)

    def _worth(self, done: ChunkStep) -> dict[str, Tensor]:
        """Returns what a chunk was worth and led to: fields of a `Rollout`, (N, ...) each."""
        reward, valid, terminated = (
            self._tensor(part) for part in (done.reward, done.valid, done.terminated)
        )
        worth, bootstrap = chunk_return(reward.to(torch.float32), valid, terminated, self._gamma_step)
        return {
            "reward": worth,
            "bootstrap": bootstrap,
            "ended": self._tensor(ended(done)),
            "steps": valid.sum(dim=1),
        }

    def _led_to(self, done: ChunkStep) -> dict[str, Tensor]:
        """Returns what a chunk led to: the final observation where the episode ended."""
        found = done.obs
        if "final_obs" in done.infos:
            found = merge_rows(found, done.infos["final_obs"], ended(done))
        return self._tensors(found)

    def _tensors(self, obs: Obs) -> dict[str, Tensor]:
        return {key: self._tensor(value) for key, value in obs.items()}

    def _tensor(self, array: Array) -> Tensor:
        return tensor_of(array).to(self._device)


class RolloutSource(ChunkSource):
    """Collects T decisions of every env at a time; episodes continue from one rollout to the next.

    Tensors of an env never go through the host, and of an env that resets itself nothing is read here but the
    figures of the episodes, after the last decision.
    """

    def __init__(
        self, env: VectorEnv, policy: Any, *, decisions: int, travels: bool = False, **how: Any
    ) -> None:
        """Begins with new episodes.

        Args:
            env: with autoreset SAME_STEP.
            policy: see `ChunkSource`.
            decisions: T.
            travels: whether rollouts go to a learner in another process. Each is then memory of its own; else
                the next rollout overwrites it, so the learner has to be done with it.
            how: see `ChunkSource`.
        """
        super().__init__(env, policy, **how)
        self._decisions, self._travels = decisions, travels
        self._obs: Obs | None = None
        self._memory: Rollout | None = None

    def collect(self, published: Published) -> Rollout:
        """Returns T decisions of every env, all with the newest weights."""
        if self._obs is None:
            self._obs, _ = self._env.reset(seed=self._seed)
        version, memory = self._weights.refresh(published), self._memory
        obs, source, turns = self._tensors(self._obs), "sim", list[dict[str, Any]]()
        for t in range(self._decisions):
            sample, done = self._execute(obs)
            assert sample.chain is not None, "a policy that records returns its chain"
            if memory is None:
                memory = Rollout.allocate(obs, sample.chain, self._decisions)
            memory.put(t, obs, sample.chain, self._led_to(done), **self._worth(done))
            turns.append(_logged(done))
            source = done.infos.get("source", source)
            self._obs, obs = done.obs, self._tensors(done.obs)
        assert memory is not None, "there is a decision"
        self._memory = None if self._travels else memory
        memory.num_steps, memory.policy_version = self.episodes.add_turns(turns), version
        memory.source = source
        return memory

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
        obs, samples, executed, made = [first], list[ChunkSample](), list[ChunkStep](), list[Array]()
        live, success = np.ones(self._env.num_envs, bool), np.zeros(self._env.num_envs, bool)
        while live.any():
            sample, done = self._execute(self._tensors(obs[-1]), live)
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

    def _rollout(self, obs: list[Obs], samples: list[ChunkSample], executed: list[ChunkStep]) -> Rollout:
        worth: dict[str, Any] = _stacked([self._worth(done) for done in executed])
        return Rollout(
            obs=_stacked([self._tensors(one) for one in obs]),
            chain=_joined([sample.chain for sample in samples]),
            next_obs=_stacked([self._led_to(done) for done in executed]),
            **worth,
            num_steps=self.episodes.add_turns([_logged(done) for done in executed]),
            policy_version=self._weights.version,
            source=executed[0].infos.get("source", "sim"),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what every source does, and the next start; between two rollouts no episode is open."""
        return {**super().state_dict(), "next_seed": self._next_seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next_seed = int(state["next_seed"])


def ended(done: ChunkStep) -> Array:
    """Returns which episodes ended, (N,)."""
    return done.terminated | done.truncated


def _logged(done: ChunkStep) -> dict[str, Any]:
    """Returns what the figures of the episodes need of a chunk: a turn of `EpisodeLog.add_turns`."""
    return {
        "reward": done.reward.sum(axis=1),
        "ended": ended(done),
        "steps": done.valid.sum(axis=1),
        **{name: done.infos[name] for name in LOGGED if name in done.infos},
    }


def _stacked(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns T rows of fields (N, ...) as fields (N, T, ...)."""
    return {name: torch.stack([row[name] for row in rows], dim=1) for name in rows[0]}


def _joined(chains: list[Chain | None]) -> Chain:
    """Returns the chains of T decisions in one, its rows env after env."""
    found = [chain for chain in chains if chain is not None]
    assert len(found) == len(chains), "a policy that records returns its chain"
    return joined_chain(found, lambda parts: torch.stack(parts, dim=1).flatten(0, 1))
