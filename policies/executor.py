"""Execution of chunks: the only owner of an action queue.

Per env, the executor plans a chunk, hands out its first `n_exec` actions one by one, and plans
again; each action passes through the policy's `refine`, which closes the loop at every step. With
temporal ensembling (Zhao et al. 2023, section 4.2) the actions of overlapping chunks are averaged
with weights exp(-m i), where i = 0 is the oldest chunk.

The initial noise of a row depends on its episode seed and the number of the decision alone, so a
row acts the same alone or beside a thousand others.
B envs, H chunk length, A action dim, N rows that plan now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.errors import CheckpointError
from robot_rl.core.policy import Mode, Policy
from robot_rl.core.seeding import EpisodeRng
from robot_rl.policies.spec import check_mode

Array = NDArray[Any]
_STREAM = np.uint64(0x706F6C6963790000)
"""Keeps the noise apart from what an env draws from the same episode seed."""


@dataclass(frozen=True)
class Act:
    """What to execute now."""

    action: NDArray[np.float32]
    """(B, A), refined, in [-1, 1]."""
    base_action: NDArray[np.float32]
    """(B, A), the chunk's action before `refine`."""


class ChunkExecutor:
    """Turns a chunk policy into one action per env and control step."""

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        *,
        n_exec: int,
        ensemble: float | None = None,
        mode: Mode = "ode",
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Starts with empty queues.

        Args:
            policy: any policy; its weights may change between calls.
            num_envs: B.
            n_exec: how many actions of a chunk are executed before planning again.
            ensemble: m of the temporal ensemble, at least 0; None executes each chunk as it is.
            mode: how chunks are sampled and actions refined.
            seed: of the exploration noise, and (plus the row) of episodes without a seed of their own.
            device: where the policy's parameters are.
        """
        if num_envs < 1:
            raise ValueError(f"executor: num_envs must be at least 1, got {num_envs}")
        if not 1 <= n_exec <= policy.horizon:
            raise ValueError(
                f"executor: n_exec must be between 1 and the policy's horizon {policy.horizon}, got {n_exec}"
            )
        if ensemble is not None and not (math.isfinite(ensemble) and ensemble >= 0):
            raise ValueError(f"executor: ensemble must be None or at least 0, got {ensemble}")
        check_mode(mode)
        self.policy = policy
        self.num_envs = num_envs
        self.n_exec = n_exec
        self.mode: Mode = mode
        self._device = torch.device(device)
        self._ensemble = ensemble
        self._generator = torch.Generator().manual_seed(seed)
        self._plan = np.zeros((num_envs, policy.horizon, policy.action_dim), np.float32)
        self._votes = np.zeros((num_envs, policy.horizon), np.int64)
        self._left = np.zeros(num_envs, np.int64)
        self._decisions = np.zeros(num_envs, np.uint64)
        self._seeds = np.arange(num_envs, dtype=np.uint64) + np.uint64(seed)

    def reset(self, mask: Array | None = None, seeds: Array | None = None) -> None:
        """Empties the queues of the masked envs: after termination and truncation, before `act`.

        Args:
            mask: bool (B,); None means all.
            seeds: uint64 (B,), the seed of each masked env's new episode; None keeps the seeds and
                goes on counting decisions, so that the noise does not repeat.
        """
        rows = self._rows(mask)
        self._left[rows] = 0
        self._votes[rows] = 0
        if seeds is None:
            return
        seeds = np.asarray(seeds)
        if seeds.shape != (self.num_envs,) or seeds.dtype.kind not in "iu":
            raise ValueError(
                f"executor reset: seeds are {seeds.dtype} {seeds.shape}, allowed integers ({self.num_envs},)"
            )
        self._seeds[rows] = seeds[rows].astype(np.uint64)
        self._decisions[rows] = 0

    def act(self, obs: Mapping[str, Array]) -> Act:
        """Returns the next action of every env, planning where a queue is empty."""
        self._check_rows(obs)
        every = np.arange(self.num_envs)
        with torch.inference_mode():
            tensors = self._tensors(obs)
            empty = np.flatnonzero(self._left == 0)
            if len(empty):
                self._take(empty, self._sample(tensors, empty))
            base_action = self._plan[every, self.n_exec - self._left]
            self._left -= 1
            action = self.policy.refine(
                tensors,
                torch.from_numpy(base_action).to(self._device),
                mode=self.mode,
                generator=self._generator,
            )
            return Act(_array(action), base_action)

    def base_action(self, obs: Mapping[str, Array], mask: Array | None = None) -> NDArray[np.float32]:
        """Returns the first action of a fresh chunk, (B, A), zero where not masked.

        Neither queues nor counters change: it is for the value of the observation that an episode
        was truncated at. The noise is the one the env's next decision would have had.
        """
        self._check_rows(obs)
        rows = self._rows(mask)
        action = np.zeros((self.num_envs, self.policy.action_dim), np.float32)
        if len(rows):
            with torch.inference_mode():
                action[rows] = self._sample(self._tensors(obs), rows)[:, 0]
        return action

    def state_dict(self) -> dict[str, Array]:
        """Returns queues, counters, seeds and the generator, as arrays."""
        return {
            "plan": self._plan.copy(),
            "votes": self._votes.copy(),
            "left": self._left.copy(),
            "decisions": self._decisions.copy(),
            "seeds": self._seeds.copy(),
            "generator": self._generator.get_state().numpy().copy(),
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restores `state_dict`.

        Raises:
            CheckpointError: a field is missing or of another shape (other num_envs or policy).
        """
        for name, own in self.state_dict().items():
            if name not in state or np.shape(state[name]) != own.shape:
                got = np.shape(state[name]) if name in state else "nothing"
                raise CheckpointError(
                    f"executor: {name!r} has shape {got}, allowed {own.shape}. Resume with the "
                    "num_envs and the policy of the run."
                )
        for name in ("plan", "votes", "left", "decisions", "seeds"):
            own = getattr(self, f"_{name}")
            own[...] = state[name]
        self._generator.set_state(torch.from_numpy(np.array(state["generator"], np.uint8)))

    def _sample(self, tensors: dict[str, Tensor], rows: Array) -> NDArray[np.float32]:
        """Returns a fresh chunk (N, H, A) for the rows."""
        if len(rows) < self.num_envs:
            index = torch.from_numpy(rows).to(self._device)
            tensors = {name: value[index] for name, value in tensors.items()}
        shape = (len(rows), self.policy.horizon, self.policy.action_dim)
        rng = EpisodeRng(self._seeds[rows] ^ _STREAM, self._decisions[rows])
        noise = rng.normal(shape[1] * shape[2]).astype(np.float32).reshape(shape)
        z = torch.from_numpy(noise).to(self._device)
        sample = self.policy.sample(tensors, z=z, mode=self.mode, generator=self._generator)
        return _array(sample.actions)

    def _take(self, rows: Array, chunk: NDArray[np.float32]) -> None:
        """Puts fresh chunks (N, H, A) into the queues."""
        if self._ensemble is None:
            self._plan[rows] = chunk
        else:
            self._plan[rows], self._votes[rows] = self._averaged(rows, chunk, self._ensemble)
        self._left[rows] = self.n_exec
        self._decisions[rows] += np.uint64(1)

    def _averaged(
        self, rows: Array, chunk: NDArray[np.float32], m: float
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns the running average of all chunks that cover each step, and their number."""
        old = np.zeros_like(chunk)
        votes = np.zeros(chunk.shape[:2], np.int64)
        old[:, : -self.n_exec] = self._plan[rows, self.n_exec :]
        votes[:, : -self.n_exec] = self._votes[rows, self.n_exec :]
        weights = np.exp(-m * np.arange(chunk.shape[1] + 1))
        before = np.concatenate([[0.0], np.cumsum(weights)])[votes][..., None]
        now = weights[votes][..., None]
        return ((old * before + chunk * now) / (before + now)).astype(np.float32), votes + 1

    def _tensors(self, obs: Mapping[str, Array]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(np.ascontiguousarray(value)).to(self._device)
            for name, value in obs.items()
        }

    def _rows(self, mask: Array | None) -> Array:
        if mask is None:
            return np.arange(self.num_envs)
        mask = np.asarray(mask)
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise ValueError(
                f"executor: the mask is {mask.dtype} {mask.shape}, allowed bool ({self.num_envs},)"
            )
        return np.flatnonzero(mask)

    def _check_rows(self, obs: Mapping[str, Array]) -> None:
        for name, value in obs.items():
            if len(value) != self.num_envs:
                raise ValueError(
                    f"executor: observation {name!r} has {len(value)} rows, allowed {self.num_envs}, "
                    "one per env"
                )


def _array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.to("cpu", torch.float32).numpy().copy()
