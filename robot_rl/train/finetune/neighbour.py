"""The baseline of nearest neighbours: the chunks of the nearest moments of the training episodes.

It sees what a policy sees, the present state and pictures. Its settings are chosen by leaving
out one training episode at a time: how much the pictures count, how many neighbours are averaged,
and whether their chunks are taken as they are or carried over to the present state.
N remembered moments, Q queries, F features, H chunk length, A action dim, K neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.policy import DemoBatch
from robot_rl.train.finetune.data import DemoData

Array = NDArray[Any]

THUMB = (16, 20)
"""Height and width that pictures are averaged down to."""
COMPONENTS = 24
"""Principal components kept of the thumbnails of a camera."""
PICTURE_WEIGHTS = (0.0, 0.3, 1.0, 3.0)
NEIGHBOURS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_MOMENTS = 20_000
"""Moments remembered; of more, every so many."""
MAX_QUERIES = 2000
"""Training moments that the choice is made on, evenly spread."""
_QUERY_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How neighbours are found and used."""

    picture_weight: float
    """Share of the pictures in the squared distance, against 1 for the state."""
    neighbours: int
    relative: bool
    """Chunks are carried over as distances from the state at their start."""
    error: float
    """Of this choice on the training episodes, each left out in turn; normalised."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What was seen, and what was done then."""

    state: Array
    """(N, S)"""
    thumbs: Array
    """(N, P), all cameras; P is 0 without pictures."""
    chunks: Array
    """(N, H, A), padded as the loader pads."""
    valid: Array
    """(N, H)"""
    episode: Array
    """(N,)"""


class NearestNeighbour:
    """Predicts the mean chunk of the nearest remembered moments."""

    def __init__(self, memory: Moments, action_std: Array, *, same_names: bool) -> None:
        """Measures the memory and chooses.

        Args:
            memory: the training episodes.
            action_std: (A,), what errors are divided by.
            same_names: the state begins with the joints of the action, so chunks can be carried over.
        """
        self._memory, self._std = memory, action_std
        self._centre, self._scale = memory.state.mean(0), np.maximum(memory.state.std(0), 1e-3)
        self._basis, self._thumb_mean, self._thumb_scale = _principal(memory.thumbs)
        self._state_N = self._states(memory.state)
        self._pictures_N = self._pictures(memory.thumbs)
        found = self._tried(same_names)
        self.choice = min(found, key=lambda choice: choice.error)
        """The best of all."""
        self.single = min((one for one in found if one.neighbours == 1), key=lambda one: one.error)
        """The best with one neighbour."""

    def predict(self, state: Array, thumbs: Array, choice: Choice | None = None) -> Array:
        """Returns chunks (Q, H, A) for states (Q, S) and thumbnails (Q, P), by the best choice or another."""
        choice = choice or self.choice
        distance = self._distance(self._states(state), self._pictures(thumbs), choice.picture_weight)
        nearest = np.argpartition(distance, choice.neighbours - 1, axis=1)[:, : choice.neighbours]
        return self._chunks(nearest, state, choice.relative).mean(axis=1)

    def _tried(self, same_names: bool) -> list[Choice]:
        """Returns every choice with its error."""
        memory = self._memory
        queries = np.unique(np.linspace(0, len(memory.state) - 1, MAX_QUERIES).astype(int))
        most = min(max(NEIGHBOURS), len(memory.state) - int(np.bincount(memory.episode).max()))
        counts = [count for count in NEIGHBOURS if count <= most]
        weights = PICTURE_WEIGHTS if memory.thumbs.shape[1] else (0.0,)
        settings = itertools.product(weights, (False, True) if same_names else (False,))
        found: list[Choice] = []
        for weight, relative in settings:
            errors = self._left_out(queries, weight, relative, counts)
            for count, error in zip(counts, errors, strict=True):
                found.append(
                    Choice(picture_weight=weight, neighbours=count, relative=relative, error=float(error))
                )
        return found

    def _left_out(self, queries: Array, weight: float, relative: bool, counts: Sequence[int]) -> Array:
        """Returns the error for every number of neighbours, each query's own episode left out."""
        memory, totals, steps = self._memory, np.zeros(len(counts)), 0
        for block in np.array_split(queries, -(-len(queries) // _QUERY_BLOCK)):
            distance = self._distance(self._state_N[block], self._pictures_N[block], weight)
            distance[memory.episode[block][:, None] == memory.episode[None]] = np.inf
            nearest = np.argsort(distance, axis=1)[:, : max(counts)]
            chunks = self._chunks(nearest, memory.state[block], relative)
            running = np.cumsum(chunks, axis=1)
            valid = memory.valid[block]
            for place, count in enumerate(counts):
                error = np.abs(running[:, count - 1] / count - memory.chunks[block]) / self._std
                totals[place] += (error.mean(-1) * valid).sum()
            steps += int(valid.sum())
        return totals / steps

    def _chunks(self, nearest: Array, state: Array, relative: bool) -> Array:
        """Returns the neighbours' chunks (Q, K, H, A)."""
        chunks = self._memory.chunks[nearest]
        if not relative:
            return chunks
        moved = (state[:, None] - self._memory.state[nearest])[..., : chunks.shape[-1]]
        return chunks + moved[:, :, None]

    def _distance(self, state: Array, pictures: Array, weight: float) -> Array:
        """Returns squared distances (Q, N): the mean over state elements, plus the pictures' part."""
        distance = _squared(state, self._state_N) / state.shape[1]
        if weight > 0:
            distance += weight * _squared(pictures, self._pictures_N) / pictures.shape[1]
        return distance

    def _states(self, state: Array) -> Array:
        return (state - self._centre) / self._scale

    def _pictures(self, thumbs: Array) -> Array:
        return (thumbs - self._thumb_mean) @ self._basis / self._thumb_scale


def read_moments(
    data: DemoData, *, horizon: int, on_episode: Callable[[int], None] = lambda done: None
) -> Moments:
    """Reads the training episodes; of many, every so many steps, so that memory is bounded."""
    episodes = data.split.train
    stride = max(1, int(data.dataset.lengths()[list(episodes)].sum()) // MAX_MOMENTS)
    parts: list[dict[str, Array]] = []
    for number, episode in enumerate(episodes):
        batches = data.batches([episode], horizon=horizon, stride=stride)
        parts += [_moments(episode, batch) for batch in batches]
        on_episode(number + 1)
    return Moments(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _moments(episode: int, batch: DemoBatch) -> dict[str, Array]:
    return {
        "state": batch.obs["state"].cpu().numpy().astype(np.float32),
        "thumbs": thumbnails(batch),
        "chunks": batch.actions.cpu().numpy().astype(np.float32),
        "valid": batch.valid.cpu().numpy(),
        "episode": np.full(len(batch.actions), episode),
    }


def thumbnails(batch: DemoBatch) -> Array:
    """Returns the pictures of all cameras, averaged down: (B, cameras * h * w * 3)."""
    keys = sorted(key for key in batch.obs if key.endswith(".rgb"))
    flat = [_thumb(batch.obs[key].cpu().numpy()).reshape(len(batch.actions), -1) for key in keys]
    return np.concatenate(flat, axis=1) if flat else np.zeros((len(batch.actions), 0), np.float32)


def _thumb(pictures: Array) -> Array:
    """Averages (B, h, w, 3) uint8 over a grid of areas; returns floats in [0, 1]."""
    _, height, width, _ = pictures.shape
    rows, columns = _edges(height, THUMB[0]), _edges(width, THUMB[1])
    sums = np.add.reduceat(pictures.astype(np.float32), rows[:-1], axis=1)
    sums = np.add.reduceat(sums, columns[:-1], axis=2)
    areas = np.diff(rows)[:, None] * np.diff(columns)[None]
    return sums / (255.0 * areas[None, :, :, None].astype(np.float32))


def _edges(size: int, pieces: int) -> Array:
    return np.linspace(0, size, min(size, pieces) + 1).astype(int)


def _principal(thumbs: Array) -> tuple[Array, Array, Array]:
    """Returns the leading directions (P, F), the mean (P,), and one scale for all: the first's."""
    if thumbs.shape[1] == 0:
        return np.zeros((0, 0), np.float32), np.zeros(0, np.float32), np.ones(0, np.float32)
    mean = thumbs.mean(0)
    values, vectors = np.linalg.eigh(np.cov(thumbs - mean, rowvar=False))
    kept = min(COMPONENTS, len(values))
    scale = np.sqrt(max(float(values[-kept:].mean()), 1e-12))
    return vectors[:, -kept:].astype(np.float32), mean, np.full(kept, scale, np.float32)


def _squared(a: Array, b: Array) -> Array:
    """Returns squared distances (Q, N)."""
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T, 0.0)
