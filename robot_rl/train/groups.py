"""Whole episodes in groups that begin in the same state, for learners that compare them (GRPO).

    GroupSource: N / G starts, G episodes from each  ->  GroupExperience: what each was worth,
    groups without contrast dropped, advantages once, then minibatches

Every start is a seed that is never used again. Control steps of dropped groups count.
N envs, G episodes in a group, T decisions of the longest episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from robot_rl.algos.returns import kept_groups
from robot_rl.core.policy import ChunkSample
from robot_rl.data.rollout import EpisodeRollout, Rollout
from robot_rl.hal.vector import ChunkStep, VectorEnv
from robot_rl.train.rollouts import ChunkSource, PreparingLearner, RolloutExperience, ended
from robot_rl.train.schedule import Always
from robot_rl.train.sources import PolicyHandle


class GroupSource(ChunkSource):
    """Plays one episode in every env at a time; each G envs, one after another, begin alike."""

    def __init__(self, env: VectorEnv, policy: Any, *, group: int, **how: Any) -> None:
        """Args: env: with autoreset DISABLED; group: G, a divisor of N; how: see `ChunkSource`."""
        super().__init__(env, policy, **how)
        assert env.num_envs % group == 0, "the envs are whole groups"
        self._group = group
        self._next_seed = self._seed

    def collect(self, handle: PolicyHandle) -> EpisodeRollout:
        """Returns the episodes, all with the newest weights; an env whose episode ended stands still."""
        self._version = handle.refresh(self._policy, self._version)
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
        return EpisodeRollout(
            obs=rollout.obs,
            chain=rollout.chain,
            reward=rollout.reward,
            bootstrap=rollout.bootstrap * valid,
            next_obs=rollout.next_obs,
            ended=rollout.ended | ~valid,
            steps=rollout.steps,
            valid=valid,
            success=solved,
            score=solved.to(rollout.reward.dtype),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what every source does, and the next start; between two rollouts no episode is open."""
        return {**super().state_dict(), "next_seed": self._next_seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._next_seed = int(state["next_seed"])


class EpisodeReward(Protocol):
    """Says what episodes were worth, in the place of the env; see `algos.episode_rewards`."""

    def judge(self, rollout: EpisodeRollout) -> EpisodeRollout: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class GroupExperience(RolloutExperience):
    """The decisions of the newest episodes, but for groups without contrast, in minibatches."""

    def __init__(
        self,
        learner: PreparingLearner,
        *,
        reward: EpisodeReward | None,
        group: int,
        keep: tuple[float, float],
        batch: int,
        epochs: int,
        seed: int,
    ) -> None:
        """Has nothing yet.

        Args:
            learner: knows the advantages.
            reward: what episodes are worth; None: 1 where they succeed.
            group: G.
            keep: shares of successes between which a group is learned from.
            batch: decisions in a minibatch, at most.
            epochs: passes over what is kept.
            seed: of the order.
        """
        super().__init__(learner, minibatches=1, seed=seed)
        self._reward, self._group, self._keep = reward, group, keep
        self._rows_at_once, self._epochs = batch, epochs
        self._seen, self._dropped = 0, 0
        self.owed = 0
        """Minibatches of all epochs over the newest episodes: none if every group was dropped."""

    def add(self, steps: Rollout) -> int:
        """Takes the place of the episodes before; returns their control steps, dropped or not."""
        assert isinstance(steps, EpisodeRollout), "groups are of whole episodes"
        rollout = steps if self._reward is None else self._reward.judge(steps)
        shape = (-1, self._group)
        kept = kept_groups(rollout.success.view(shape), rollout.score.view(shape), self._keep)
        self._seen, self._dropped = self._seen + len(kept), self._dropped + int((~kept).sum())
        valid = rollout.valid & kept.repeat_interleave(self._group).unsqueeze(1)
        if valid.any():
            super().add(replace(rollout, valid=valid))
            self._minibatches = -(-int(valid.sum()) // self._rows_at_once)
            self.owed = self._epochs * self._minibatches
        else:
            self._batch, self.owed = None, 0
        return int(steps.steps.sum())

    def metrics(self) -> dict[str, float]:
        """Returns how many groups were played and how many of them dropped, since the last call."""
        row = {"collect/groups": float(self._seen), "collect/groups_dropped": float(self._dropped)}
        self._seen, self._dropped = 0, 0
        return row

    def state_dict(self) -> dict[str, Any]:
        reward = None if self._reward is None else self._reward.state_dict()
        return {**super().state_dict(), "groups": [self._seen, self._dropped], "reward": reward}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._seen, self._dropped = state["groups"]
        if self._reward is not None:
            self._reward.load_state_dict(state["reward"])


class AllOf(Always):
    """Owes as many updates as the newest episodes have minibatches."""

    def __init__(self, experience: GroupExperience) -> None:
        super().__init__()
        self._experience = experience

    def owed(self, step: int) -> int:
        return self._experience.owed
