"""A source of whole episodes in groups that begin in the same state, for learners that compare them (GRPO).

Every start is a seed that is never used again. Control steps of dropped groups count.
N envs, G episodes in a group, T decisions of the longest episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from robot_rl.core.policy import ChunkSample
from robot_rl.data.rollout import EpisodeRollout
from robot_rl.hal.vector import ChunkStep, VectorEnv
from robot_rl.rollout.chunks import ChunkSource, ended
from robot_rl.rollout.weights import Published


class GroupSource(ChunkSource):
    """Plays one episode in every env at a time; each G envs, one after another, begin alike."""

    def __init__(self, env: VectorEnv, policy: Any, *, group: int, **how: Any) -> None:
        """Args: env: with autoreset DISABLED; group: G, a divisor of N; how: see `ChunkSource`."""
        super().__init__(env, policy, **how)
        assert env.num_envs % group == 0, "the envs are whole groups"
        self._group = group
        self._next_seed = self._seed

    def collect(self, published: Published) -> EpisodeRollout:
        """Returns the episodes, all with the newest weights; an env whose episode ended stands still."""
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
