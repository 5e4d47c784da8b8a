"""`robot-rl reward`: a success classifier from a few labelled frames, and how often it is wrong."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from robot_rl.core.errors import ConfigError, DatasetError, require

SUMMARY = "train a success classifier of pictures, with a report of its false positives"

_HELP = """\
Usage: robot-rl reward train data=<folder> out=<folder> [camera=front.rgb] [false_positives=0.01]
                             [updates=300] [seed=0] [--json]

Trains a classifier that says from a picture whether the task is done, for human.reward=classifier.
data is a folder with success/<episode>-<n>.png and failure/<episode>-<n>.png, or a store, a
dataset, or a run folder with pictures. A fifth of the episodes is held out: the report says how
many of their failures pass for success. The threshold lets at most false_positives of the failures
pass that cross-validation held out of the rest. Exit code 1: the classifier is not fit for use, and
the report says why; what is written then cannot be loaded as a reward.

Examples:
  robot-rl reward train data=labelled out=rewards/cube
  robot-rl train recipe=online env.cameras=front human.reward=classifier human.classifier=rewards/cube
"""

_UNFIT = 1


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What to learn from, and where the classifier goes."""

    data: str
    out: str
    """Folder of the classifier; must not exist."""
    camera: str = "front.rgb"
    false_positives: float = 0.01
    updates: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.updates >= 1, "updates", self.updates, "1 or more")
        require(0 < self.false_positives < 1, "false_positives", self.false_positives, "between 0 and 1")


def run(argv: list[str]) -> int:
    """Trains and prints the report."""
    if not argv or {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    if argv[0] != "train":
        raise ConfigError(f"reward: no sub-command {argv[0]!r}, allowed: train. `robot-rl reward --help`")
    from robot_rl.config import load  # Hydra: not for --help

    options = load(RewardConfig, [word for word in argv[1:] if word != "--json"], config_name="reward")
    if Path(options.out).exists():
        raise DatasetError(f"out: {options.out!r} exists already. Choose another folder, or remove it first.")
    if not Path(options.data).is_dir():
        raise DatasetError(f"data: no folder {options.data!r}.")
    from robot_rl.train.deploy.classifier import ClassifierConfig, train_classifier  # torch: not for --help
    from robot_rl.train.deploy.labels import read_labelled

    names = {item.name for item in fields(ClassifierConfig)}
    config = ClassifierConfig(**{name: value for name, value in asdict(options).items() if name in names})
    began_s = time.monotonic()
    classifier = train_classifier(read_labelled(options.data, options.camera), config)
    classifier.save(options.out)
    report = classifier.report
    low, high = report.false_positive_ci
    print(
        f"{options.out}: {report.successes} successes and {report.failures} failures, "
        f"{time.monotonic() - began_s:.1f} s\n"
        f"held out: {report.false_positives} of {report.held_out_failures} failures pass for success "
        f"({report.false_positive_rate:.1%}, 95 % interval {low:.1%} to {high:.1%}), "
        f"{report.missed} of {report.held_out_successes} successes are missed ({report.missed_rate:.1%})"
    )
    if report.unfit:
        print(f"not fit for use: {report.unfit}")
    if "--json" in argv:
        print(json.dumps(asdict(report)))
    return _UNFIT if report.unfit else 0
