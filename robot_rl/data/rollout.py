"""Decisions of an on-policy learner: chunks with their denoising chains, or single control steps.

B decisions, T of them in each of N envs, F features, A action dim. Whole episodes may end before T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from robot_rl.core.arrays import Array
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
    num_steps: int | None = field(default=None, kw_only=True)
    """The sum of m, where the host knows it; None: `steps` is read."""

    @classmethod
    def allocate(cls, obs: Mapping[str, Tensor], chain: Chain, decisions: int) -> Self:
        """Returns memory for T decisions of N envs, like the observations and the chain of one."""
        num_envs = len(chain.x)
        rows = torch.arange(num_envs, device=chain.x.device).repeat_interleave(decisions)

        def memory(like: Tensor) -> Tensor:
            return like.new_zeros((num_envs, decisions, *like.shape[1:]))

        numbers = memory(chain.x.new_zeros(num_envs, dtype=torch.float32))
        return cls(
            obs={name: memory(value) for name, value in obs.items()},
            chain=chain.rows(rows),
            reward=numbers,
            bootstrap=numbers.clone(),
            next_obs={name: memory(value) for name, value in obs.items()},
            ended=numbers.bool(),
            steps=numbers.long(),
        )

    def put(
        self, t: int, obs: Mapping[str, Tensor], chain: Chain, next_obs: Mapping[str, Tensor], **more: Tensor
    ) -> None:
        """Puts decision `t` of all envs.

        Args:
            t: below T.
            obs: (N, ...), what it was made at.
            chain: its rows are the envs.
            next_obs: (N, ...), what the chunk led to.
            more: the other fields, (N,) each.
        """
        for memory, given in ((self.obs, obs), (self.next_obs, next_obs), (vars(self), more)):
            for name, value in given.items():
                memory[name][:, t].copy_(value)
        for name, value in vars(chain).items():
            if isinstance(value, Tensor):
                getattr(self.chain, name).unflatten(0, self.reward.shape)[:, t].copy_(value)

    @property
    def cost(self) -> int:
        return int(self.steps.sum()) if self.num_steps is None else self.num_steps


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
    weight: Tensor
    """(B, 1), or (B, S) where each transition has a ratio: how probable the weights from which ratios count
    make the decision, by how probable those that acted did. 1 where they are the same."""

    def __len__(self) -> int:
        return len(self.advantage)

    def rows(self, index: Tensor) -> PPOBatch:
        """Returns a minibatch."""
        return PPOBatch(
            {key: value[index] for key, value in self.obs.items()},
            self.chain.rows(index),
            *(getattr(self, name)[index] for name in _OF_ROWS),
        )

    @classmethod
    def joined(cls, batches: Sequence[PPOBatch]) -> PPOBatch:
        """Returns the rows of several batches, one after another."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            {key: torch.cat([batch.obs[key] for batch in batches]) for key in batches[0].obs},
            joined_chain([batch.chain for batch in batches], torch.cat),
            *(torch.cat([getattr(batch, name) for batch in batches]) for name in _OF_ROWS),
        )


_OF_ROWS = ("features", "advantage", "value", "target", "weight")
"""Of a `PPOBatch`, in its order."""


def joined_chain(chains: Sequence[Chain], join: Callable[[list[Tensor]], Tensor]) -> Chain:
    """Returns chains of one policy in one; `join` makes one tensor of theirs."""

    def joined(name: str) -> Tensor | None:
        parts = [getattr(chain, name) for chain in chains]
        return None if parts[0] is None else join(parts)

    x, index, log_prob = (joined(name) for name in ("x", "index", "log_prob"))
    assert x is not None
    assert index is not None
    assert log_prob is not None
    return Chain(x, index, log_prob, chains[0].grid, joined("noise"), joined("time"))


@dataclass
class StepRollout(Segment):
    """T control steps in each of N envs, in memory that the next rollout overwrites; (T, N, ...).

    It is allocated once, on the learner's device, and filled in place: arrays of numpy are copied in once,
    tensors of a device never go through the host.
    """

    obs: dict[str, Tensor]
    """(T + 1, N, ...): what was acted on, and what the last step led to."""
    drawn: Tensor
    """(T, N, A): actions as they were drawn, before they were clamped."""
    mean: Tensor
    """(T, N, A): of what they were drawn from."""
    std: Tensor
    """(A,)"""
    reward: Tensor
    terminated: Tensor
    """bool: the task ended; no reward follows."""
    truncated: Tensor
    """bool: the clock ended it; the value goes on."""
    final_row: Tensor
    """(T N,) int64: which steps, counted as in `reward.flatten()`, led to what is in `final_obs`."""
    final_obs: dict[str, Tensor]
    """(T N, ...): the final observations of episodes that were truncated, and perhaps of other steps."""
    num_final: int = field(default=0, kw_only=True)
    """How many of these there are."""

    @classmethod
    def allocate(
        cls, obs: Mapping[str, Array], steps: int, action_dim: int, device: torch.device | str
    ) -> Self:
        """Returns memory for `steps` control steps that begin at these observations (N, ...)."""
        first = {name: tensor_of(value) for name, value in obs.items()}
        num_envs = len(next(iter(first.values())))

        def memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        made = cls(
            obs={name: memory(steps + 1, *one.shape, dtype=one.dtype) for name, one in first.items()},
            drawn=memory(steps, num_envs, action_dim),
            mean=memory(steps, num_envs, action_dim),
            std=memory(action_dim),
            reward=memory(steps, num_envs),
            terminated=memory(steps, num_envs, dtype=torch.bool),
            truncated=memory(steps, num_envs, dtype=torch.bool),
            final_row=memory(steps * num_envs, dtype=torch.int64),
            final_obs={
                name: memory(steps * num_envs, *one.shape[1:], dtype=one.dtype) for name, one in first.items()
            },
        )
        made.show(0, obs)
        return made

    @property
    def cost(self) -> int:
        return self.reward.numel()

    def begin(self) -> None:
        """Goes on from where the last rollout ended."""
        self.num_final = 0
        for value in self.obs.values():
            value[0].copy_(value[-1])

    def show(self, t: int, obs: Mapping[str, Array]) -> None:
        """Puts what is acted on at step `t`; features that were not there at first are left out."""
        for name, memory in self.obs.items():
            memory[t].copy_(tensor_of(obs[name]))

    def put(
        self, t: int, obs: Mapping[str, Array], reward: Array, terminated: Array, truncated: Array
    ) -> None:
        """Puts what step `t` led to."""
        self.show(t + 1, obs)
        for memory, value in (
            (self.reward, reward),
            (self.terminated, terminated),
            (self.truncated, truncated),
        ):
            memory[t].copy_(tensor_of(value))

    def put_final(self, t: int, obs: Mapping[str, Array], truncated: Any) -> None:
        """Puts the observations that ended episodes at step `t`.

        Of numpy's, those of truncated episodes alone. Of a device all rows: which were truncated is not read
        back, and another step's final observation is what it led to.
        """
        num_envs = self.reward.shape[1]
        rows = None if isinstance(truncated, Tensor) else np.flatnonzero(truncated)
        count = num_envs if rows is None else len(rows)
        place = slice(self.num_final, self.num_final + count)
        for name, memory in self.final_obs.items():
            memory[place].copy_(tensor_of(obs[name] if rows is None else obs[name][rows]))
        found = (
            torch.arange(num_envs, device=self.final_row.device) if rows is None else torch.from_numpy(rows)
        )
        self.final_row[place].copy_(found + t * num_envs)
        self.num_final += count


def tensor_of(array: Any) -> Tensor:
    """Returns an array as a tensor of the same memory, where it has one that can be written."""
    return array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, None, ["C", "W"]))
