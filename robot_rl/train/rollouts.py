"""On-policy experience: rollouts, each used for a few epochs and forgotten.

    RolloutSource: T decisions in N envs  ->  RolloutExperience: advantages once, then minibatches
    GroupSource: G episodes of each start ->  GroupExperience: groups without contrast dropped, then the same
    StepRolloutSource: T control steps    ->  NewestRollout: whole; the learner makes its minibatches

A block of updates pays for each rollout, so that between two turns of
the loop nothing of a rollout is left, and a checkpoint needs none of it.
N envs, T decisions, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.returns import kept_groups
from robot_rl.data.rollout import EpisodeRollout, PPOBatch, Rollout, StepRollout
from robot_rl.train.loop import Stateful

Array = NDArray[Any]


class PreparingLearner(Protocol):
    """A learner that computes advantages."""

    def prepare(self, rollout: Rollout) -> PPOBatch:
        """Returns the decisions, N T of them, with their advantages."""
        ...


class RolloutExperience:
    """The decisions of the newest rollout, in minibatches: each once in an epoch, in a new order."""

    def __init__(self, learner: PreparingLearner, *, minibatches: int, seed: int) -> None:
        self._learner, self._minibatches = learner, minibatches
        self._rng = np.random.default_rng(seed)
        self._batch: PPOBatch | None = None
        self._rows: list[Array] = []

    def add(self, segment: Rollout) -> None:
        """Takes the place of the rollout before."""
        self._batch, self._rows = self._learner.prepare(segment), []

    def sample(self) -> PPOBatch:
        """Returns the next minibatch; an epoch follows on another."""
        if self._batch is None:
            raise RuntimeError("rollouts: nothing was collected since the run began or was resumed")
        if not self._rows:
            order = self._rng.permutation(len(self._batch))
            self._rows = np.array_split(order, self._minibatches)
        return self._batch.rows(torch.from_numpy(self._rows.pop()).to(self._batch.advantage.device))

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator; between two turns of the loop the rollout is used up."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]


class NewestRollout:
    """The newest rollout, whole, for a learner that takes all its epochs in one update."""

    def __init__(self) -> None:
        self._rollout: StepRollout | None = None

    def add(self, segment: StepRollout) -> None:
        """Takes the place of the rollout before."""
        self._rollout = segment

    def sample(self) -> StepRollout:
        """Returns the rollout, once."""
        rollout, self._rollout = self._rollout, None
        if rollout is None:
            raise RuntimeError("rollouts: nothing was collected since the last update")
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: between two turns of the loop the rollout is used up."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class EpisodeReward(Stateful, Protocol):
    """Judges what episodes were worth, in the place of the env; see `algos.episode_rewards`."""

    def judge(self, rollout: EpisodeRollout) -> EpisodeRollout: ...


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
            learner: computes the advantages.
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

    def add(self, segment: Rollout) -> None:
        """Takes the place of the episodes before."""
        assert isinstance(segment, EpisodeRollout), "groups are of whole episodes"
        rollout = segment if self._reward is None else self._reward.judge(segment)
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
