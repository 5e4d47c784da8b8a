"""On-policy experience: rollouts, each used for a few epochs and forgotten.

    RolloutSource: T decisions in N envs  ->  RolloutExperience: advantages once, then minibatches
    GroupSource: G episodes of each start ->  GroupExperience: groups without contrast dropped, then the same
    StepRolloutSource: T control steps    ->  NewestRollouts: whole; the learner makes its minibatches

A block of updates pays for what the sources bring in a turn of the loop, so that between two turns
nothing of it is left, and a checkpoint needs none of it.
N envs, T decisions, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from robot_rl.algos.returns import kept_groups
from robot_rl.data.rollout import EpisodeRollout, PPOBatch, Rollout, StepRollout
from robot_rl.train.loop import Stateful


class PreparingLearner(Protocol):
    """A learner that computes advantages."""

    def prepare(self, rollout: Rollout, *, is_stale: bool = False) -> PPOBatch:
        """Returns the decisions, N T of them, with their advantages."""
        ...


class RolloutExperience:
    """The decisions of the newest rollouts, in minibatches: each once in an epoch, in a new order."""

    def __init__(
        self,
        learner: PreparingLearner,
        *,
        batch: int,
        epochs: int,
        seed: int,
        updates: Callable[[], int] | None = None,
        max_staleness: int | None = None,
    ) -> None:
        """Has nothing yet.

        Args:
            learner: computes the advantages.
            batch: decisions in a minibatch, at most.
            epochs: passes over the decisions.
            seed: of the order.
            updates: returns those of the learner; None: every rollout is of its present weights.
            max_staleness: updates by which the weights that acted may be older than the learner's. Rollouts
                of older ones are dropped; None: none is.
        """
        self._learner, self._rows_at_once, self._epochs = learner, batch, epochs
        self._updates, self._max_staleness = updates, max_staleness
        self._rng = np.random.default_rng(seed)
        self._added: list[PPOBatch] = []
        self._cut = set[int]()
        """Sources whose last rollout was dropped: their next one does not go on from what came before."""
        self._batch: PPOBatch | None = None
        self._rows: list[Tensor] = []
        self._steps, self._stale, self._dropped, self._age = 0, 0, 0, 0

    def add(self, segment: Rollout) -> None:
        """Adds to what the next block of updates is of, unless the rollout is too old."""
        age = 0 if self._updates is None else self._updates() - segment.policy_version
        self._steps += segment.cost
        self._age += age * segment.cost
        self._stale += segment.cost * (age > 0)
        if self._max_staleness is not None and age > self._max_staleness:
            self._dropped += segment.cost
            self._cut.add(segment.actor)
            return
        if segment.actor in self._cut:
            self._cut.remove(segment.actor)
            segment = replace(segment, begins=True)
        if (chosen := self._chosen(segment)) is not None:
            self._added.append(self._learner.prepare(chosen, is_stale=age > 0))

    def _chosen(self, segment: Rollout) -> Rollout | None:
        """Returns what is learned from of a rollout; None if nothing is."""
        return segment

    def owed(self) -> int:
        """Returns the updates for what was added since the last call: minibatches of all epochs over it."""
        if not self._added:
            return 0
        self._batch, self._added, self._rows = PPOBatch.joined(self._added), [], []
        return self._epochs * self._minibatches(self._batch)

    def _minibatches(self, batch: PPOBatch) -> int:
        return -(-len(batch) // self._rows_at_once)

    def sample(self) -> PPOBatch:
        """Returns the next minibatch; an epoch follows on another."""
        if self._batch is None:
            raise RuntimeError("rollouts: nothing was collected since the run began or was resumed")
        if not self._rows:
            order = torch.from_numpy(self._rng.permutation(len(self._batch)))
            order = order.to(self._batch.advantage.device, non_blocking=True)
            self._rows = list(order.tensor_split(self._minibatches(self._batch)))
        return self._batch.rows(self._rows.pop())

    def metrics(self) -> dict[str, float]:
        """Returns how old the weights that acted were, since the last call; nothing if none were.

        `collect/staleness` is in the learner's updates, a mean over control steps. Decisions of `stale_steps`
        that were not dropped were weighed.
        """
        row = dict[str, float]()
        if self._stale:
            row["collect/staleness"] = self._age / self._steps
            row["collect/stale_steps"] = float(self._stale)
            row["collect/stale_steps_dropped"] = float(self._dropped)
        self._steps, self._stale, self._dropped, self._age = 0, 0, 0, 0
        return row

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator and the counts; between two turns of the loop the rollouts are used up."""
        counts = [self._steps, self._stale, self._dropped, self._age]
        return {"rng": self._rng.bit_generator.state, "counts": counts, "cut": sorted(self._cut)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
        # Checkpoints of earlier versions have no counts.
        self._steps, self._stale, self._dropped, self._age = state.get("counts", [0, 0, 0, 0])
        self._cut = set(state.get("cut", ()))


class NewestRollouts:
    """The newest rollouts, whole, for a learner that takes all its epochs over them in one update."""

    def __init__(self) -> None:
        self._added: list[StepRollout] = []

    def add(self, segment: StepRollout) -> None:
        """Adds to what the next update is of."""
        self._added.append(segment)

    def owed(self) -> int:
        """Returns 1, if there is anything that the next update can be of."""
        return min(len(self._added), 1)

    def sample(self) -> list[StepRollout]:
        """Returns what was added, once."""
        added, self._added = self._added, []
        if not added:
            raise RuntimeError("rollouts: nothing was collected since the last update")
        return added

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: between two turns of the loop the rollouts are used up."""
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
        **how: Any,
    ) -> None:
        """Has nothing yet.

        Args:
            learner: computes the advantages.
            reward: what episodes are worth; None: 1 where they succeed.
            group: G.
            keep: shares of successes between which a group is learned from.
            how: see `RolloutExperience`.
        """
        super().__init__(learner, **how)
        self._reward, self._group, self._keep = reward, group, keep
        self._seen, self._groups_dropped = 0, 0

    def _chosen(self, segment: Rollout) -> Rollout | None:
        """Returns the episodes; only decisions of groups with contrast are valid."""
        assert isinstance(segment, EpisodeRollout), "groups are of whole episodes"
        rollout = segment if self._reward is None else self._reward.judge(segment)
        shape = (-1, self._group)
        kept = kept_groups(rollout.success.view(shape), rollout.score.view(shape), self._keep)
        self._seen, self._groups_dropped = self._seen + len(kept), self._groups_dropped + int((~kept).sum())
        valid = rollout.valid & kept.repeat_interleave(self._group).unsqueeze(1)
        return replace(rollout, valid=valid) if valid.any() else None

    def metrics(self) -> dict[str, float]:
        """Returns further how many groups were played and how many of them dropped, since the last call."""
        row = {
            "collect/groups": float(self._seen),
            "collect/groups_dropped": float(self._groups_dropped),
            **super().metrics(),
        }
        self._seen, self._groups_dropped = 0, 0
        return row

    def state_dict(self) -> dict[str, Any]:
        reward = None if self._reward is None else self._reward.state_dict()
        return {**super().state_dict(), "groups": [self._seen, self._groups_dropped], "reward": reward}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._seen, self._groups_dropped = state["groups"]
        if self._reward is not None:
            self._reward.load_state_dict(state["reward"])
