"""Decisions of an on-policy learner, with their denoising chains and their returns.

B decisions, T of them in each of N envs, F features. Whole episodes may end before T.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robot_rl.core.policy import Chain
from robot_rl.data.transitions import Segment


@dataclass
class Rollout(Segment):
    """T decisions in each of N envs, as they were made; everything but the chain is (N, T, ...)."""

    obs: dict[str, Tensor]
    """Observations that the decisions were made at."""
    chain: Chain
    """Its rows are the decisions, env after env: (N T, ...)."""
    reward: Tensor
    """Discounted reward of the m control steps that were executed."""
    bootstrap: Tensor
    """gamma^m, or 0 where the task ended."""
    next_obs: dict[str, Tensor]
    """What the chunk led to: the final observation where the episode ended."""
    ended: Tensor
    """bool: terminated or truncated."""
    steps: Tensor
    """m, int64."""

    @property
    def cost(self) -> int:
        return int(self.steps.sum())


@dataclass
class EpisodeRollout(Rollout):
    """One whole episode of each of N envs; T is how many decisions the longest has.

    After the end of an episode a row repeats its last values; `reward`, `bootstrap` and `steps` are 0
    there, `ended` is True.
    """

    valid: Tensor
    """(N, T) bool: which decisions were made, and are to be learned from."""
    success: Tensor
    """(N,) bool"""
    score: Tensor
    """(N,) float: score of the whole episode."""


@dataclass
class PPOBatch:
    """Decisions, their advantages and the targets of the value."""

    obs: dict[str, Tensor]
    chain: Chain
    features: Tensor
    """(B, F)"""
    advantage: Tensor
    """(B,)"""
    value: Tensor
    """(B,): before the updates."""
    target: Tensor
    """(B,): of the value."""

    def __len__(self) -> int:
        return len(self.advantage)

    def rows(self, index: Tensor) -> PPOBatch:
        """Returns a minibatch."""
        return PPOBatch(
            {key: value[index] for key, value in self.obs.items()},
            self.chain.rows(index),
            self.features[index],
            self.advantage[index],
            self.value[index],
            self.target[index],
        )
