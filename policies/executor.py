"""Execution of chunks: the only owner of an action queue.

Per env, the executor plans a chunk, returns its actions one by one, and plans again after
`n_exec` of them, or sooner where the policy asks for it (`ChunkSample.n_exec`). A policy that
`refines` corrects each action, which closes the loop at every step: then every observation is encoded
once, and planning reads the same encoding. Otherwise only the observations that chunks are planned from
are encoded. With temporal
ensembling (Zhao et al. 2023, section 4.2) the actions of overlapping chunks are averaged with
weights exp(-m i), where i = 0 is the oldest chunk.

A policy that takes `delay` control steps to plan begins that much ahead: its chunk belongs to the
observation it began with, and the arm follows the chunk before until it is there.

    step             0  1  2  3  4  5  6  7  8  9     n_exec 4, delay 2
    first chunk      0  1  2  3  4  5                 the first of an episode is waited for
    second chunk                (0  1) 2  3  4  5     begun at step 4, followed from step 6 on

A policy with `sample_after` (real-time chunking) gets the rest of the chunk before.

The initial noise of a row depends on its episode seed and the number of the decision alone, so a
row acts the same alone or among a thousand others.
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
from robot_rl.core.policy import ChunkSample, ContinuingPolicy, Encoded, Mode, Policy, rows_of
from robot_rl.core.seeding import EpisodeRng
from robot_rl.policies.spec import check_mode

Array = NDArray[Any]
_STREAM = np.uint64(0x706F6C6963790000)
"""Keeps the noise apart from what an env draws from the same episode seed."""
_ARRAYS = ("plan", "votes", "next", "left", "decisions", "seeds")
"""Of an executor's state."""


@dataclass(frozen=True)
class Act:
    """What to execute now."""

    action: NDArray[np.float32]
    """(B, A), refined, in [-1, 1]."""
    base_action: NDArray[np.float32]
    """(B, A), the chunk's action before `refine`."""
    latent: NDArray[np.float32] | None = None
    """(B, H * A), the noise behind the chunk, if the policy returns it."""
    decides: Array | None = None
    """(B,) bool, whether the chunk begins here; None with `latent`."""


@dataclass(frozen=True)
class Question:
    """All that a policy needs to plan N rows; it stays the same while the policy plans."""

    shown: dict[str, Tensor]
    """The observations; for a policy that `refines`, their encoding."""
    z: Tensor
    """(N, H, A), the initial noise."""
    before: NDArray[np.float32]
    """(N, H, A), what is left of the plans, moved to begin now."""
    known: Array
    """(N,), how much that is."""
    frozen: int
    """Control steps until the answer is expected."""


class ChunkExecutor:
    """Turns a chunk policy into one action per env and control step."""

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        *,
        n_exec: int,
        delay: int = 0,
        ensemble: float | None = None,
        mode: Mode = "ode",
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Starts with empty queues.

        Args:
            policy: any policy; its weights may change between calls.
            num_envs: B.
            n_exec: how many actions are executed before planning again, at most.
            delay: control steps that planning takes.
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
        longest = min(n_exec, policy.horizon - n_exec)
        if not 0 <= delay <= longest:
            raise ValueError(
                f"executor: delay must be between 0 and {longest}, got {delay}: one plan is made at a "
                f"time (delay <= n_exec = {n_exec}), and the chunk before lasts until the next is "
                f"there (n_exec + delay <= horizon = {policy.horizon})"
            )
        if ensemble is not None and not (math.isfinite(ensemble) and ensemble >= 0):
            raise ValueError(f"executor: ensemble must be None or at least 0, got {ensemble}")
        check_mode(mode)
        self.policy = policy
        self.num_envs = num_envs
        self.n_exec = n_exec
        self.delay = delay
        self.mode: Mode = mode
        self._device = torch.device(device)
        self._ensemble = ensemble
        self._generator = self._sampling = torch.Generator().manual_seed(seed)
        self._plan = np.zeros((num_envs, policy.horizon, policy.action_dim), np.float32)
        self._votes = np.zeros((num_envs, policy.horizon), np.int64)
        self._next = np.full(num_envs, policy.horizon, np.int64)
        """(B,) index of the next action in the plan; its end where there is no plan."""
        self._left = np.zeros(num_envs, np.int64)
        """(B,) actions to execute before planning again."""
        self._decisions = np.zeros(num_envs, np.uint64)
        self._seeds = np.arange(num_envs, dtype=np.uint64) + np.uint64(seed)
        self._latent: NDArray[np.float32] | None = None
        """(B, H * A), of the chunks in the queues."""

    @property
    def is_between_chunks(self) -> bool:
        """Whether all that was to be executed of the present chunks was handed out."""
        return not (self._left > 0).any()

    def reset(self, mask: Array | None = None, seeds: Array | None = None) -> None:
        """Empties the queues of the masked envs: after termination and truncation, before `act`.

        Args:
            mask: bool (B,); None means all.
            seeds: uint64 (B,), the seed of each masked env's new episode; None keeps the seeds and
                goes on counting decisions, so that the noise does not repeat.
        """
        rows = self._rows(mask)
        self._left[rows] = 0
        self._next[rows] = self.policy.horizon
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
            shown = self._read(self._tensors(obs))
            decides = self._left == 0
            empty = np.flatnonzero(decides)
            if len(empty):
                self._take(empty, self._sample(self._picked(shown, empty), empty))
            base_action = self._plan[every, self._next]
            self._next += 1
            self._left -= 1
            action = self._refined(shown, base_action)
            if self._latent is None:
                return Act(action, base_action)
            return Act(action, base_action, self._latent.copy(), decides)

    def base_action(self, obs: Mapping[str, Array], mask: Array | None = None) -> NDArray[np.float32]:
        """Returns the first action of a plan made now, (B, A), zero where not masked.

        Where planning takes time it is the next action of the old chunk. Queues and counters stay as they
        are: the action is for the value of the observation at which an episode was truncated. The noise
        is that of the env's next decision.
        """
        self._check_rows(obs)
        rows = self._rows(mask)
        action = np.zeros((self.num_envs, self.policy.action_dim), np.float32)
        if len(rows):
            with torch.inference_mode():
                shown = self._read(self._picked(self._tensors(obs), rows))
                chunk = _array(self._sample(shown, rows).actions)
                action[rows] = self._spliced(chunk, *self._rest(rows))[:, 0]
        return action

    def ahead(self, row: int = 0) -> NDArray[np.float32]:
        """Returns what an env's plan holds after the action just handed out, (0 to H, A), not refined."""
        return self._plan[row, self._next[row] :].copy()

    def state_dict(self) -> dict[str, Array]:
        """Returns queues, counters, seeds and the generator, as arrays."""
        state = {name: getattr(self, f"_{name}").copy() for name in _ARRAYS}
        state["generator"] = self._generator.get_state().numpy().copy()
        return state if self._latent is None else state | {"latent": self._latent.copy()}

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
        for name in _ARRAYS:
            getattr(self, f"_{name}")[...] = state[name]
        if "latent" in state:
            self._latent = np.array(state["latent"], np.float32)
        self._generator.set_state(torch.from_numpy(np.array(state["generator"], np.uint8)))

    def _read(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the observations, or their encoding where `refine` reads it too."""
        return self.policy.encode(tensors) if self.policy.refines else tensors

    def _picked(self, shown: dict[str, Tensor], rows: Array) -> dict[str, Tensor]:
        if len(rows) == self.num_envs:
            return shown
        return rows_of(shown, torch.from_numpy(rows).to(self._device))

    def _refined(self, shown: dict[str, Tensor], base_action: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the actions (B, A) to execute now."""
        if not self.policy.refines:
            return base_action.copy()
        action = torch.from_numpy(base_action).to(self._device)
        encoded = Encoded(shown)
        return _array(self.policy.refine(encoded, action, mode=self.mode, generator=self._generator))

    def _sample(self, shown: dict[str, Tensor], rows: Array) -> ChunkSample:
        """Returns new chunks (N, H, A) for the rows, given their observations or encoding."""
        return self._answer(self._question(shown, rows))

    def _question(self, shown: dict[str, Tensor], rows: Array) -> Question:
        shape = (len(rows), self.policy.horizon, self.policy.action_dim)
        rng = EpisodeRng(self._seeds[rows] ^ _STREAM, self._decisions[rows])
        noise = rng.normal(shape[1] * shape[2]).astype(np.float32).reshape(shape)
        z = torch.from_numpy(noise).to(self._device)
        return Question(shown, z, *self._rest(rows), self.delay)

    def _answer(self, question: Question) -> ChunkSample:
        shown = question.shown
        encoded = Encoded(shown) if self.policy.refines else self.policy.encode(shown)
        how: dict[str, Any] = {"z": question.z, "mode": self.mode, "generator": self._sampling}
        if not isinstance(self.policy, ContinuingPolicy):
            return self.policy.sample(encoded, **how)
        return self.policy.sample_after(
            encoded,
            torch.from_numpy(question.before).to(self._device),
            torch.from_numpy(question.known).to(self._device),
            frozen=question.frozen,
            **how,
        )

    def _take(self, rows: Array, sample: ChunkSample, ago: int = 0) -> None:
        """Puts chunks (N, H, A), begun `ago` control steps ago, into the queues."""
        chunk, (before, known) = _array(sample.actions), self._rest(rows, ago)
        if self._ensemble is not None:
            chunk, self._votes[rows] = self._averaged(rows, chunk, before, self._ensemble, ago)
        self._plan[rows] = self._spliced(chunk, before, known, ago)
        if sample.latent is not None:
            if self._latent is None:
                self._latent = np.zeros((self.num_envs, sample.latent[0].numel()), np.float32)
            self._latent[rows] = _array(sample.latent.flatten(1))
        self._next[rows] = ago
        self._left[rows] = self._span(sample) - ago
        self._decisions[rows] += np.uint64(1)

    def _span(self, sample: ChunkSample) -> int | Array:
        """Returns how many actions to execute before planning again, for each row.

        `ChunkSample.n_exec` counts all actions of a chunk that are executed. With a delay the next chunk
        begins that much later. Fewer than the delay is impossible, because plans do not overlap.
        """
        if sample.n_exec is None:
            return self.n_exec
        steps = sample.n_exec.cpu().numpy() - self.delay
        return np.clip(steps, max(self.delay, 1), self.n_exec)

    def _rest(self, rows: Array, ago: int = 0) -> tuple[NDArray[np.float32], Array]:
        """Returns what was left of the plans `ago` steps ago, moved to begin then, and how much it was.

        That is (N, H, A), where beyond the end the last action repeats, and (N,).
        """
        index = np.minimum(self._steps_ahead(rows, ago), self.policy.horizon - 1)
        return self._plan[rows[:, None], index], np.maximum(self.policy.horizon - self._next[rows] + ago, 0)

    def _spliced(self, chunk: Array, before: Array, known: Array, ago: int = 0) -> NDArray[np.float32]:
        """Returns the chunk with what is executed before it is there, (N, H, A)."""
        committed = np.arange(chunk.shape[1]) < np.minimum(max(self.delay, ago), known)[:, None]
        return np.where(committed[..., None], before, chunk)

    def _averaged(
        self, rows: Array, chunk: NDArray[np.float32], before: NDArray[np.float32], m: float, ago: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Returns the running average of all chunks that cover each step, and their number."""
        horizon = chunk.shape[1]
        ahead = self._steps_ahead(rows, ago)
        votes = np.where(ahead < horizon, self._votes[rows[:, None], np.minimum(ahead, horizon - 1)], 0)
        weights = np.exp(-m * np.arange(horizon + 1))
        old = np.concatenate([[0.0], np.cumsum(weights)])[votes][..., None]
        new = weights[votes][..., None]
        return ((before * old + chunk * new) / (old + new)).astype(np.float32), votes + 1

    def _steps_ahead(self, rows: Array, ago: int = 0) -> Array:
        """Returns the index in the plan of the step `ago` steps ago and the H - 1 after it, (N, H)."""
        return self._next[rows, None] - ago + np.arange(self.policy.horizon)

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
