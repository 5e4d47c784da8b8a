"""How far predicted chunks are from what the demonstrator did, on held-out episodes.

The error is the mean absolute difference over the valid steps of a chunk and over the joints, each
divided by the standard deviation of that joint's actions in the training episodes: 1 is as wrong
as the mean action would be, roughly. It is also given in the dataset's own units
(radians, where these are joint positions), by group of joints. Chunks of one episode resemble each
other, so intervals are of a bootstrap over whole episodes.
B chunks, H chunk length, A action dim, E episodes, R resamples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.policy import DemoBatch

Array = NDArray[Any]
Predict = Callable[[DemoBatch], Array]
"""Returns chunks (B, >= H, A) in the dataset's units for a batch."""

STD_FLOOR = 1e-3
"""Smallest standard deviation divided by, in the dataset's units: joints that never moved."""
RESAMPLES = 10_000
"""Of the bootstrap."""
TRAINED = ("policy", "ACT")
"""Predictors that gradient descent made; all others are baselines."""


@dataclass(frozen=True)
class EpisodeError:
    """What one held-out episode adds to the mean."""

    episode: int
    total: float
    """Sum over the valid steps of all its chunks, normalised, mean over joints."""
    steps: int


@dataclass(frozen=True)
class Difference:
    """Of two predictors on the same episodes; below 0, the first is better."""

    mean: float
    interval: tuple[float, float] | None
    """95 %, paired, over held-out episodes; None with fewer than two."""


@dataclass(frozen=True)
class Errors:
    """Of one predictor."""

    normalised: float
    """Mean absolute error in standard deviations of the training actions."""
    groups: dict[str, float]
    """The same by group of joints."""
    units: dict[str, float]
    """In the dataset's own units by group of joints."""
    chunks: int
    """How many chunks were compared."""
    by_step: tuple[float | None, ...]
    """(H,), the normalised error of each action of a chunk, the first one first; None where all had ended."""
    moving: float | None
    """The normalised error of the joints that move within an episode; None if none does."""
    still: float | None
    """The normalised error of the others."""
    by_episode: tuple[EpisodeError, ...]
    interval: tuple[float, float] | None
    """95 % of `normalised` over held-out episodes; None with fewer than two."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        rows = tuple(EpisodeError(**row) for row in values["by_episode"])
        known: dict[str, Any] = {**values, "by_episode": rows}
        return cls(**known)

    def minus(self, other: Errors) -> Difference:
        """Returns how much larger this error is than another predictor's on the same episodes."""
        pairs = zip(self.by_episode, other.by_episode, strict=True)
        if any((a.episode, a.steps) != (b.episode, b.steps) for a, b in pairs):
            raise ValueError("errors: the two predictors were measured on other episodes or steps")
        mine, others = resampled_means(self.by_episode), resampled_means(other.by_episode)
        apart = None if mine is None or others is None else mine - others
        return Difference(self.normalised - other.normalised, interval_of(apart))


class Ruler:
    """Measures predictions in the training actions' standard deviations."""

    def __init__(
        self, action_std: Array, action_names: Sequence[str], *, moving: Array | None = None
    ) -> None:
        """Prepares to measure.

        Args:
            action_std: (A,), of the training episodes alone.
            action_names: of the joints.
            moving: (A,), which joints move within an episode; None: all do.
        """
        self.std = np.maximum(np.asarray(action_std, np.float64).reshape(-1), STD_FLOOR)
        self.groups = joint_groups(action_names)
        self.moving = np.ones(len(self.std), bool) if moving is None else moving

    def measure(self, batches: Iterable[DemoBatch], predict: Predict) -> Errors:
        """Returns the errors of a predictor over all batches."""
        totals: dict[int, Array] = {}  # episode -> (H, A)
        steps: dict[int, Array] = {}  # episode -> (H,)
        chunks = 0
        for batch in batches:
            actions, valid = batch.actions.cpu().numpy(), batch.valid.cpu().numpy()
            apart = np.abs(predict(batch)[:, : actions.shape[1]] - actions) * valid[..., None]
            episodes = np.asarray(batch.source.get("episode", np.zeros(len(actions), int)))
            for episode in np.unique(episodes).tolist():
                rows = episodes == episode
                total = apart[rows].sum(axis=0, dtype=np.float64)
                totals[episode] = totals.get(episode, 0.0) + total
                steps[episode] = steps.get(episode, 0) + valid[rows].sum(axis=0)
            chunks += len(actions)
        return self._errors(totals, steps, chunks)

    def _errors(self, totals: Mapping[int, Array], steps: Mapping[int, Array], chunks: int) -> Errors:
        total_HA, steps_H = sum(totals.values(), np.zeros((1, 1))), sum(steps.values(), np.zeros(1))
        absolute = total_HA.sum(axis=0) / max(1, steps_H.sum())
        scaled = absolute / self.std
        by_episode = tuple(
            EpisodeError(episode, float((total / self.std).mean(axis=-1).sum()), int(steps[episode].sum()))
            for episode, total in sorted(totals.items())
        )
        by_step = zip((total_HA / self.std).mean(axis=-1).tolist(), steps_H.tolist(), strict=True)
        return Errors(
            normalised=float(scaled.mean()),
            groups={name: float(scaled[joints].mean()) for name, joints in self.groups.items()},
            units={name: float(absolute[joints].mean()) for name, joints in self.groups.items()},
            chunks=chunks,
            by_step=tuple(total / steps if steps else None for total, steps in by_step),
            moving=float(scaled[self.moving].mean()) if self.moving.any() else None,
            still=float(scaled[~self.moving].mean()) if not self.moving.all() else None,
            by_episode=by_episode,
            interval=interval_of(resampled_means(by_episode)),
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The best trained predictor and the best baseline, both by their held-out error."""

    trained: str
    trained_error: float
    baseline: str
    baseline_error: float
    difference: Difference
    """Trained minus baseline."""
    episodes: int
    """Held out."""

    @property
    def beats(self) -> bool:
        """Whether the trained one is better over the whole interval."""
        interval = self.difference.interval
        return interval is not None and interval[1] < 0

    def text(self) -> str:
        """Returns one plain sentence."""
        ratio = 100 * abs(self.difference.mean) / max(self.baseline_error, 1e-12)
        side = "below" if self.difference.mean < 0 else "above"
        apart = f"{self.trained} {self.trained_error:.4f} is {ratio:.1f} % {side} {self.baseline} "
        apart += f"{self.baseline_error:.4f} (difference {self.difference.mean:+.4f}, {self._interval()})"
        if self.beats:
            return f"training beats the best baseline: {apart}"
        if self.difference.mean < 0:
            return f"nothing trained is surely better than the best baseline: {apart}"
        return f"nothing trained beats the best baseline: {apart}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "beats": self.beats, "text": self.text()}

    def _interval(self) -> str:
        if self.difference.interval is None:
            return "no interval from one held-out episode"
        low, high = self.difference.interval
        return f"95 % interval {low:+.4f} to {high:+.4f} over {self.episodes} episodes"


def judge(errors: Mapping[str, Errors]) -> Verdict:
    """Compares; choosing the best baseline by the held-out error favours the baselines."""

    def best(names: list[str]) -> str:
        return min(names, key=lambda name: errors[name].normalised)

    trained = best([name for name in errors if name in TRAINED])
    baseline = best([name for name in errors if name not in TRAINED])
    return Verdict(
        trained=trained,
        trained_error=errors[trained].normalised,
        baseline=baseline,
        baseline_error=errors[baseline].normalised,
        difference=errors[trained].minus(errors[baseline]),
        episodes=len(errors[trained].by_episode),
    )


def resampled_means(by_episode: Sequence[EpisodeError]) -> Array | None:
    """Returns the mean error of every resample (R,), the same draws for every predictor.

    A resample draws as many whole episodes as there are, with replacement; long ones count for more,
    as they do in the mean. None with fewer than two episodes.
    """
    if len(by_episode) < 2:
        return None
    count = len(by_episode)
    draws_RE = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    total, steps = np.array([[row.total, row.steps] for row in by_episode]).T
    return total[draws_RE].sum(axis=1) / np.maximum(1, steps[draws_RE].sum(axis=1))


def interval_of(means: Array | None) -> tuple[float, float] | None:
    """Returns the middle 95 % of resampled means."""
    if means is None:
        return None
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def joint_groups(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns group -> indices of the action, by the words that the names begin with.

    `kLeftHandPinky` and `left_hand_thumb` are in `left hand`, `shoulder_pan.pos` is in `shoulder`.
    """
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
        words = words[1:] if len(words) > 1 and words[0] == "k" else words
        kept = words[: 2 if words[:1] in (["left"], ["right"]) else 1]
        groups.setdefault(" ".join(kept) or name, []).append(index)
    return groups
