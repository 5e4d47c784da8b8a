"""Whether training was worth it: the best of what was trained against the best of what was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from robot_rl.train.finetune.errors import Difference, Errors

TRAINED = ("policy", "ACT")
"""Predictors that gradient descent made; all others are baselines."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The best trained predictor beside the best baseline, both by their held-out error."""

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
        """Whether the whole interval says that the trained one is better."""
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
