"""Control steps on their way to a learner: segments of sources, batches of learners, and their arithmetic.

B rows of a batch, n steps of a window, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.errors import nearest
from robot_rl.data.episode import SOURCES

Array = NDArray[Any]
T = TypeVar("T")


@dataclass(kw_only=True)
class Segment:
    """What a source yields: control steps of one actor. What learns, records or counts reads these fields."""

    source: str = "sim"
    """One of `SOURCES`."""
    actor: int = 0
    """Which source acted. Lanes are an actor's own: lane 0 of one is another lane than lane 0 of the next."""
    policy_version: int = 0
    """Learner updates behind the weights that acted."""
    stamp_ns: int | None = None
    """Measured monotonic time of the first observation; None where time is simulated."""
    begins: bool = False
    """Episodes begin here. Those before that had not ended were cut short."""

    @property
    def cost(self) -> int:
        """Control steps that it took, over all envs, whatever a replay keeps of them."""
        raise NotImplementedError


@dataclass(kw_only=True)
class StepBatch(Segment):
    """One control step of B envs."""

    obs: dict[str, Array]
    base_action: Array
    """(B, A): what the base policy proposed at `obs`."""
    action: Array
    """(B, A): what was commanded, clipped into [-1, 1], before safety."""
    reward: Array
    """(B,)"""
    terminated: Array
    """(B,): the task ended; no reward follows."""
    truncated: Array
    """(B,): the clock ended it; the value goes on."""
    next_obs: dict[str, Array]
    """What the step led to: the final observation where the episode ended."""
    next_base_action: Array
    """(B, A): what the base proposes at `next_obs`."""
    success: Array | None = None
    """(B,); None means nowhere."""
    lanes: Array | None = None
    """(B,): the lane of each row, for sources that step some envs only; None means 0 to B - 1."""
    policy_action: Array | None = None
    """(B, A): what the policy wanted, where a person may have sent something else; None without a person."""
    instruction: str | None = None
    """The instruction that held; None means that of the env."""
    latent: Array | None = None
    """(B, L): the noise behind the chunk that is being executed; None if unknown."""
    decides: Array | None = None
    """(B,): whether a chunk begins here; None if unknown."""
    picture_stamp_ns: Mapping[str, int] | None = None
    """Camera -> when its picture in `obs` was taken; None where all were at `stamp_ns`."""
    executed_target_rad: Array | None = None
    """(B, n): the joint targets that safety let through; None where there is no arm."""
    expert_action: Array | None = None
    """(B, A): what an expert would have done at `obs`; None where none was asked."""

    reset_row: Array | None = None
    """(B, 2): the class (of `VectorEnv.reset_classes`) and the row in which the episode began; None without a
    start bank."""

    @property
    def cost(self) -> int:
        return len(self.reward)

    def check(
        self,
        num_envs: int,
        action_dim: int,
        keys: Collection[str],
        *,
        actors: int = 1,
        imagined: bool = False,
    ) -> None:
        """Refuses steps that a replay of `num_envs` lanes an actor and observations `keys` cannot hold."""
        rows = len(self.reward)
        if not 0 <= self.actor < actors:
            raise ValueError(
                f"replay: got a step of actor {self.actor}, allowed 0 to {actors - 1}: two sources never "
                "share a lane. Make the buffer with as many `actors` as there are sources."
            )
        if self.lanes is not None and not 0 <= np.min(self.lanes) <= np.max(self.lanes) < num_envs:
            raise ValueError(f"replay: got lanes {self.lanes.tolist()}, allowed 0 to {num_envs - 1}")
        if rows > num_envs or self.action.shape != (rows, action_dim):
            raise ValueError(
                f"replay: got actions of shape {self.action.shape}, allowed "
                f"(at most {num_envs} envs, {action_dim} elements)"
            )
        if self.source not in SOURCES:
            raise ValueError(f"replay: source {self.source!r} is unknown.{nearest(self.source, SOURCES)}")
        if (self.source == "world") != imagined:
            own = "imagined" if imagined else "real and simulated"
            raise ValueError(
                f"replay: got steps of source {self.source!r} for the {own} ones: they are never mixed. Keep "
                "imagined steps in a buffer of their own, made with imagined=True."
            )
        missing = set(keys) - set(self.obs)
        if missing:
            raise ValueError(
                f"replay: the step lacks observation {sorted(missing)[0]!r}, it has {sorted(self.obs)}"
            )


@dataclass
class Origin:
    """Where the rows of a batch come from; (B,) each, int64."""

    pool: Tensor
    """Which part of a `Mixture`, in the order they were named; 0 outside of one."""
    episode: Tensor
    """Number of the episode in its pool; the lane, in a `ReplayBuffer`."""
    step: Tensor
    """Control step within the episode; frames since the beginning, in a `ReplayBuffer`."""
    policy_version: Tensor
    """Learner updates behind the weights that acted."""


@dataclass
class TransitionBatch:
    """What an off-policy learner reads: windows of up to n steps, as tensors."""

    obs: dict[str, Tensor]
    base_action: Tensor
    """(B, A)"""
    action: Tensor
    """(B, A)"""
    reward: Tensor
    """(B,): sum of gamma^i r_i over the m steps of the window."""
    bootstrap: Tensor
    """(B,): gamma^m, or 0 where the task ended."""
    next_obs: dict[str, Tensor]
    """The observation that the window's last step led to."""
    next_base_action: Tensor
    """(B, A)"""
    source: Tensor
    """(B,): index into `SOURCES`, uint8."""
    origin: Origin | None = None
    """Where each row comes from; None if unknown."""
    weight: Tensor | None = None
    """(B,): importance weights of prioritised draws; None means 1 everywhere."""

    def __len__(self) -> int:
        return len(self.reward)

    def to(self, device: str | torch.device) -> TransitionBatch:
        """Returns the batch on another device."""
        return map_tensors(lambda tensors: tensors[0].to(device), [self])


@dataclass
class Prefixes:
    """What the first k actions of each chunk earned and led to, for P lengths k."""

    reward: Tensor
    """(B, P): sum of gamma^i r_i over the at most k steps before the end of the episode."""
    bootstrap: Tensor
    """(B, P): gamma^steps, or 0 where the task ended."""
    is_whole: Tensor
    """(B, P) bool: all k steps were executed, or the episode ended within; else the lane ends there."""
    next_obs: dict[str, Tensor]
    """(B, P, ...): where they led to."""


@dataclass
class ChunkBatch:
    """What a learner of action chunks reads: H steps as one decision."""

    obs: dict[str, Tensor]
    action: Tensor
    """(B, H, A); where not valid, the last valid action repeats."""
    valid: Tensor
    """(B, H) bool: steps before the end of the episode."""
    reward: Tensor
    """(B,): sum of gamma^i r_i over the m valid steps."""
    bootstrap: Tensor
    """(B,): gamma^m, or 0 where the task ended."""
    next_obs: dict[str, Tensor]
    """The observation that the last valid step led to."""
    source: Tensor
    """(B,): index into `SOURCES` of the chunk's first step, uint8."""
    origin: Origin | None = None
    weight: Tensor | None = None
    latent: Tensor | None = None
    """(B, L): the noise that the chunk was decoded from, where that is kept."""
    prefix: Prefixes | None = None
    """The returns of its beginnings, if asked for."""
    whole: Tensor | None = None
    """(B,) bool: all H steps were executed, or the episode ended within; else the data ends there, and
    the return of the chunk is unknown. None means everywhere."""

    def __len__(self) -> int:
        return len(self.reward)

    def whole_rows(self) -> ChunkBatch:
        """Returns the rows whose chunks the data does not cut short."""
        whole = self.whole
        if whole is None or bool(whole.all()):
            return self
        return map_tensors(lambda tensors: tensors[0][whole], [self])

    def to(self, device: str | torch.device) -> ChunkBatch:
        """Returns the batch on another device."""
        return map_tensors(lambda tensors: tensors[0].to(device), [self])


Batch = TypeVar("Batch", TransitionBatch, ChunkBatch)


class StepSource(Protocol):
    """What a `Mixture` draws from: a ring of steps, or a pool of episodes."""

    def __len__(self) -> int:
        """Returns the number of control steps that can be sampled."""
        ...

    def sample(
        self, batch_size: int, *, n_step: int, gamma_step: float, rng: np.random.Generator
    ) -> TransitionBatch: ...


class Mixture:
    """Batches made from several buffers or pools, each with its share of the rows."""

    def __init__(self, parts: Mapping[str, tuple[StepSource, float | None]]) -> None:
        """Args: parts: what to draw from and its share, by name; the shares sum to 1.

        Those whose share is None divide what the others leave: each of their steps is as likely as any other.
        What is empty, as the replay of an arm that has not begun, leaves its share to the others.
        """
        shares = {name: share for name, (_, share) in parts.items()}
        fixed = [share for share in shares.values() if share is not None]
        total, is_open = sum(fixed), len(fixed) < len(shares)
        if min(fixed, default=0) < 0 or (total >= 1 if is_open else abs(total - 1.0) > 1e-6):
            allowed = "summing to less than 1 together with None" if is_open else "summing to 1"
            raise ValueError(f"mixture: got shares {shares}, allowed: none below 0, {allowed}")
        self._parts, self._open = dict(parts), 1.0 - total
        self.names = tuple(parts)
        """What `Origin.pool` counts."""

    def counts(self, batch_size: int) -> dict[str, int]:
        """Returns the rows of each part: exact shares, rounded so that they sum to the batch."""
        steps = {name: len(part) for name, (part, share) in self._parts.items() if share is None}
        total = max(1, sum(steps.values()))
        shares = [
            self._open * steps[name] / total if share is None else share * (not _is_empty(part))
            for name, (part, share) in self._parts.items()
        ]
        given = sum(shares) or 1.0
        rows = exact_counts([share / given for share in shares], batch_size)
        return dict(zip(self._parts, rows.tolist(), strict=True))

    def sample(self, batch_size: int, **how: Any) -> TransitionBatch:
        """Returns one batch, part after part, in the order they were named; see `ReplayBuffer.sample`."""
        return self._mixed(batch_size, lambda part, count: part.sample(count, **how))

    def sample_chunks(self, batch_size: int, **how: Any) -> ChunkBatch:
        """Returns one batch of chunks, part after part; all parts have to have `sample_chunks`."""
        return self._mixed(batch_size, lambda part, count: part.sample_chunks(count, **how))

    def _mixed(self, batch_size: int, draw: Callable[[Any, int], Batch]) -> Batch:
        batches: list[Batch] = []
        for number, (name, count) in enumerate(self.counts(batch_size).items()):
            if count:
                batches.append(draw(self._parts[name][0], count))
                origin = batches[-1].origin
                if origin is not None:
                    origin.pool += number
        return batches[0] if len(batches) == 1 else concatenate(batches)

    def update_priorities(self, origin: Origin, priority: Tensor) -> None:
        """Tells the prioritised pools among the parts; see `EpisodePool.update_priorities`."""
        for number, (part, _) in enumerate(self._parts.values()):
            update = getattr(part, "update_priorities", None)
            rows = origin.pool == number
            if update is not None and rows.any():
                fields = {name: value[rows] for name, value in vars(origin).items()}
                update(Origin(**fields), priority[rows])


def _is_empty(part: StepSource) -> bool:
    empty: bool | None = getattr(part, "is_empty", None)
    return not len(part) if empty is None else empty


def exact_counts(shares: Sequence[float], rows: int) -> NDArray[np.int64]:
    """Returns how many of `rows` each share gets, rounded so that they sum to `rows`."""
    edges = np.rint(np.cumsum([0.0, *shares]) * rows)
    return np.diff(edges).astype(np.int64)


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Returns the rows of all batches in one.

    Rows without a weight count 1 if others have one. Origins and latents stay if all have them. Chunks
    without `whole` are whole.
    """
    if any(batch.weight is not None for batch in batches):
        for batch in batches:
            batch.weight = torch.ones(len(batch)) if batch.weight is None else batch.weight
    chunks = [batch for batch in batches if isinstance(batch, ChunkBatch)]
    if any(batch.whole is not None for batch in chunks):
        for batch in chunks:
            batch.whole = torch.ones(len(batch), dtype=torch.bool) if batch.whole is None else batch.whole
    for optional in ("origin", "latent"):
        if hasattr(batches[0], optional) and any(getattr(batch, optional) is None for batch in batches):
            for batch in batches:
                setattr(batch, optional, None)
    return map_tensors(torch.cat, batches)


def map_tensors(function: Callable[[list[Tensor]], Tensor], batches: Sequence[T]) -> T:
    """Returns the batch whose every tensor is `function` of the batches' tensors of that name."""

    def mapped(values: list[Any]) -> Any:
        first = values[0]
        if first is None:
            return None
        if isinstance(first, dict):
            return {key: function([value[key] for value in values]) for key in first}
        return map_tensors(function, values) if is_dataclass(first) else function(values)

    names = vars(batches[0])
    return type(batches[0])(**{name: mapped([getattr(batch, name) for batch in batches]) for name in names})


def draw_rows(
    is_step: Callable[[Array], Array], rows: int, steps: int, count: int, rng: np.random.Generator
) -> Array:
    """Returns `count` uniformly drawn rows that are steps: draws rows, keeps those that are.

    Args:
        is_step: for rows (n,), whether each is a step and not only where an episode ended.
        rows: rows in use, of which `steps` are steps.
        steps: above 0.
        count: how many to draw.
        rng: of the draws.
    """
    drawn = rng.integers(0, rows, int(count * (rows / steps * 1.05)) + 8)
    kept = drawn.compress(is_step(drawn))[:count]
    if len(kept) < count:
        return np.concatenate([kept, draw_rows(is_step, rows, steps, count - len(kept), rng)])
    return kept


def discounted(
    reward_Bn: Array, inside_Bn: Array, length_B: Array, terminated_B: Array, gamma_step: float
) -> tuple[Array, Array]:
    """Returns what a window earned, sum of gamma^i r_i, and its bootstrap: gamma^m, 0 where the task ended.

    Args:
        reward_Bn: rewards from the window's first step on.
        inside_Bn: which of them are steps of the window.
        length_B: m, how many they are.
        terminated_B: whether the last of them ended the task.
        gamma_step: discount per control step.
    """
    discounts = np.power(gamma_step, np.arange(reward_Bn.shape[1] + 1)).astype(np.float32)
    reward_B = (reward_Bn * inside_Bn) @ discounts[:-1]
    return reward_B, discounts.take(length_B) * ~terminated_B


def are_whole(inside_Bn: Array, ended_Bn: Array) -> Array:
    """Returns which windows (B,) have all their steps, or the end of an episode among them."""
    return np.logical_or(inside_Bn.all(axis=1), (inside_Bn & ended_Bn).any(axis=1))


def prefixes_of(
    lengths: Sequence[int],
    windows: Callable[[int], tuple[Array, Array, Array, Array, Array]],
    ended: Callable[[Array], Array],
    observe: Callable[[Array], dict[str, Tensor]],
) -> Prefixes | None:
    """Returns the returns of the beginnings of chunks; None if no lengths are asked for.

    Args:
        lengths: k of each, in control steps.
        windows: for k: frames (B, k), which are inside (B, k), frame after, reward and bootstrap (B,).
        ended: returns whether the steps at frames (B, k) ended their episodes.
        observe: returns the observations of frames (n,).
    """
    if not lengths:
        return None
    found = [windows(k) for k in lengths]
    is_whole = [are_whole(inside, ended(rows)) for rows, inside, *_ in found]
    after, reward, bootstrap = (
        np.stack(column, axis=1) for column in zip(*(window[2:] for window in found), strict=True)
    )
    next_obs = {key: value.unflatten(0, after.shape) for key, value in observe(after.reshape(-1)).items()}
    return Prefixes(
        reward=torch.from_numpy(reward),
        bootstrap=torch.from_numpy(bootstrap),
        is_whole=torch.from_numpy(np.stack(is_whole, axis=1)),
        next_obs=next_obs,
    )
