"""A success classifier of pictures from a few labelled frames, with a report of its error rates.

    frames, by episode --> held-out episodes (a fifth)        how often it is wrong: the report
                       --> the rest: k folds, by episode      where the threshold lies
                       --> the rest, as a whole               the network that is used

A false positive teaches the policy to look successful (the trouble HIL-SERL's users report, its issue
32), so the threshold is the one that at most 1 % of the failures pass that a fold's network never saw.
N frames, all pictures (N, h, w, 3) uint8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn
from torch.nn import functional

from robot_rl.algos.optim import Optimiser
from robot_rl.core.errors import CheckpointError, DatasetError, require
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.train.checkpoint import read_state, write_state

Array = NDArray[Any]

MIN_SUCCESSES = 20
MIN_FAILURES = 100
"""Fewer cannot show a rate of 1 %."""

_SIZE = 48
"""Pictures are shrunk to so many pixels a side."""


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """How a success classifier is trained."""

    updates: int = 300
    batch: int = 64
    lr: float = 2e-3
    folds: int = 4
    held_out: float = 0.2
    """Share of the episodes that only the report sees."""
    false_positives: float = 0.01
    """Largest share of the folds' failures that may pass the threshold."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "lr"):
            require(getattr(self, name) > 0, f"reward.{name}", getattr(self, name), "above 0")
        require(2 <= self.folds <= 20, "reward.folds", self.folds, "2 to 20")
        require(0 < self.held_out < 1, "reward.held_out", self.held_out, "above 0, below 1")
        require(
            0 < self.false_positives < 1, "reward.false_positives", self.false_positives, "between 0 and 1"
        )


@dataclass(frozen=True)
class Labelled:
    """Frames of one camera, and what they show."""

    frames: Array
    """(N, h, w, 3) uint8"""
    success: Array
    """(N,) bool"""
    episode: Array
    """(N,) int64: frames of one episode resemble each other, so they stay together."""
    camera: str
    """Key of the observation, such as `front.rgb`."""

    def rows(self, chosen: Array) -> Labelled:
        """Returns some of the frames."""
        return Labelled(self.frames[chosen], self.success[chosen], self.episode[chosen], self.camera)


@dataclass(frozen=True, kw_only=True)
class Report:
    """How good a classifier is, on episodes that neither weights nor threshold saw."""

    successes: int
    """Labelled frames in all."""
    failures: int
    threshold: float
    held_out_failures: int
    false_positives: int
    """Of the held-out failures."""
    false_positive_rate: float
    false_positive_ci: tuple[float, float]
    """95 % Wilson interval."""
    held_out_successes: int
    missed: int
    """Of the held-out successes."""
    missed_rate: float
    missed_ci: tuple[float, float]
    unfit: str
    """Why it is not fit for use; empty if it is."""


class SuccessClassifier:
    """Says whether a picture shows success."""

    def __init__(self, network: nn.Module, camera: str, report: Report) -> None:
        self._network = network.eval()
        self.camera, self.report = camera, report

    def score(self, frames: Array) -> Array:
        """Returns (N,): the network's probability of success."""
        return _scores(self._network, frames)

    def says_success(self, obs: Mapping[str, Array]) -> bool:
        """Returns whether the first row of an observation shows success.

        Raises:
            DatasetError: the observation lacks the camera.
        """
        if self.camera not in obs:
            raise DatasetError(
                f"reward: the classifier looks at {self.camera!r}, the observation has {sorted(obs)}. "
                "Give the env that camera, or train a classifier on one that it has."
            )
        return bool(self.score(obs[self.camera][:1])[0] >= self.report.threshold)

    def save(self, folder: Path | str) -> None:
        """Writes it into a new folder, without pickle."""
        state = {"network": self._network.state_dict(), "camera": self.camera, "report": asdict(self.report)}
        write_state(state, Path(folder))

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Reads what `save` wrote.

        Raises:
            CheckpointError: damaged, or its report says that it is not fit for use.
        """
        state = read_state(Path(folder))
        report = Report(**state["report"])
        if report.unfit:
            raise CheckpointError(f"{folder}: this classifier may not be used as a reward: {report.unfit}")
        network = _network()
        network.load_state_dict(state["network"])
        return cls(network, state["camera"], report)


def train_classifier(labelled: Labelled, config: ClassifierConfig) -> SuccessClassifier:
    """Trains a classifier and measures it; the report says so if it is not fit for use.

    Raises:
        DatasetError: so few episodes that nothing can be held out.
    """
    rng = np.random.default_rng(config.seed)
    parts = _parts(labelled, config, rng)
    held_out, rest = labelled.rows(parts == 0), labelled.rows(parts > 0)
    fold = parts[parts > 0]
    out_of_fold = np.zeros(len(fold))
    for number in range(1, config.folds + 1):
        network = _fit(rest.rows(fold != number), config, rng)
        out_of_fold[fold == number] = _scores(network, rest.frames[fold == number])
    threshold = _threshold(out_of_fold[~rest.success], config.false_positives)
    network = _fit(rest, config, rng)
    report = _report(labelled, held_out, _scores(network, held_out.frames), threshold, config.false_positives)
    return SuccessClassifier(network, labelled.camera, report)


def _parts(labelled: Labelled, config: ClassifierConfig, rng: np.random.Generator) -> Array:
    """Returns (N,): 0 for held-out frames, else the number of the fold; no episode is in two."""
    episodes, of_frame = np.unique(labelled.episode, return_inverse=True)
    succeeds = np.zeros(len(episodes), bool)
    np.logical_or.at(succeeds, of_frame, labelled.success)
    part = np.zeros(len(episodes), np.int64)
    for kind in (True, False):
        members = rng.permutation(np.flatnonzero(succeeds == kind))
        held_out = round(config.held_out * len(members))
        part[members[held_out:]] = 1 + np.arange(len(members) - held_out) % config.folds
    parts = part[of_frame]
    for number in range(config.folds + 1):
        found = labelled.success[parts == number]
        if not found.any() or found.all():
            raise DatasetError(
                f"reward: {len(episodes)} episodes ({int(succeeds.sum())} with success) do not give held-out "
                f"frames and {config.folds} folds that each show success and failure. Label more episodes."
            )
    return parts


def _threshold(failures: Array, share: float) -> float:
    """Returns the lowest score that at most `share` of the failures reach; never below one half."""
    allowed = math.floor(share * len(failures))
    above = float(np.sort(failures)[::-1][allowed])
    return max(0.5, float(np.nextafter(above, 2.0)))


def _report(
    labelled: Labelled, held_out: Labelled, scores: Array, threshold: float, allowed: float
) -> Report:
    passes, success = scores >= threshold, held_out.success
    wrong, failures = int((passes & ~success).sum()), int((~success).sum())
    missed, successes = int((~passes & success).sum()), int(success.sum())
    report = Report(
        successes=int(labelled.success.sum()),
        failures=int((~labelled.success).sum()),
        threshold=threshold,
        held_out_failures=failures,
        false_positives=wrong,
        false_positive_rate=wrong / failures,
        false_positive_ci=wilson_interval(wrong, failures),
        held_out_successes=successes,
        missed=missed,
        missed_rate=missed / successes,
        missed_ci=wilson_interval(missed, successes),
        unfit="",
    )
    return replace(report, unfit=_unfit(report, allowed))


def _unfit(report: Report, allowed: float) -> str:
    """Returns why a classifier may not be used, or nothing."""
    if report.successes < MIN_SUCCESSES or report.failures < MIN_FAILURES:
        return (
            f"it saw {report.successes} successes and {report.failures} failures, allowed: at least "
            f"{MIN_SUCCESSES} and {MIN_FAILURES}. Label more frames."
        )
    if report.false_positive_ci[0] > allowed:
        return (
            f"{report.false_positives} of {report.held_out_failures} held-out failures pass for successes, "
            f"surely more than {allowed:.0%}. Label more frames of failures that look like success."
        )
    if report.missed_ci[0] > 0.5:
        return (
            f"it misses {report.missed} of {report.held_out_successes} held-out successes, surely more than "
            "half. Label more successes, or choose a camera that sees them."
        )
    return ""


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (_SIZE // 8) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
    )


def _fit(labelled: Labelled, config: ClassifierConfig, rng: np.random.Generator) -> nn.Module:
    """Returns a network trained on batches of which half are successes, shifted at random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        network = _network()
    optimiser = Optimiser(network.parameters(), lr=config.lr, weight_decay=1e-3, grad_clip=0.0)
    pictures, half = _pictures(labelled.frames), config.batch // 2
    of_kind = [np.flatnonzero(labelled.success == kind) for kind in (False, True)]
    target = torch.cat([torch.zeros(half), torch.ones(half)])
    generator = Generator().manual_seed(int(rng.integers(2**31)))
    for _ in range(config.updates):
        rows = np.concatenate([rng.choice(members, half) for members in of_kind])
        logits = network(_shifted(pictures[torch.from_numpy(rows)], generator))[:, 0]
        loss = functional.binary_cross_entropy_with_logits(logits, target)
        optimiser.step(loss)
    return network.eval()


def _scores(network: nn.Module, frames: Array) -> Array:
    with torch.inference_mode():
        parts = [network(_pictures(frames[i : i + 256]))[:, 0].sigmoid() for i in range(0, len(frames), 256)]
    return torch.cat(parts).double().numpy()


def _pictures(frames: Array) -> Tensor:
    """Returns (N, 3, 48, 48) float32 in [-1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    return functional.interpolate(pixels, (_SIZE, _SIZE), mode="area") / 127.5 - 1.0


def _shifted(pictures: Tensor, generator: Generator, by: int = 2) -> Tensor:
    """Returns the pictures moved together by up to `by` pixels (random-shift augmentation)."""
    padded = functional.pad(pictures, (by, by, by, by), mode="replicate")
    top, left = (int(n) for n in torch.randint(0, 2 * by + 1, (2,), generator=generator))
    return padded[:, :, top : top + _SIZE, left : left + _SIZE]
