"""`robot-rl reward`: trains a success classifier on labelled pictures and measures its errors."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError, DatasetError, require
from robot_rl.data.reading import ReadingConfig

SUMMARY = "train a success classifier on pictures, and report its false positives"

_HELP = """\
Usage: robot-rl reward train data=<folder> out=<folder> [camera=front.rgb] [false_positives=0.01]
                             [updates=300] [seed=0] [--json]

Trains a classifier that decides from a picture whether the task is done, for human.reward=classifier.
data is a folder with success/<episode>-<n>.png and failure/<episode>-<n>.png, or a store, a
dataset or a run folder with pictures. A fifth of the episodes is held out: the report says how
many of their failures the classifier takes for successes. Cross-validation on the other episodes
sets the threshold: at most the share false_positives of the failures is taken for a success.
Of a dataset only a part may be read: episodes=0-79,82  on_damage=skip  rename=<name there>:<LeRobot's name>.
Exit code 1: the classifier is not fit for use. The report says why, and no run can load it as a reward.

Examples:
  robot-rl reward train data=labelled out=rewards/cube
  robot-rl train recipe=online env.cameras=front human.reward=classifier human.classifier=rewards/cube
"""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(ReadingConfig):
    """Settings of the command, and what of a dataset it reads; see its help."""

    data: str
    out: str
    """New folder for the classifier."""
    camera: str = "front.rgb"
    false_positives: float = 0.01
    updates: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.out), "out", self.out, "a new folder")
        require(self.updates >= 1, "updates", self.updates, "1 or more")
        require(0 < self.false_positives < 1, "false_positives", self.false_positives, "between 0 and 1")


def run(argv: list[str]) -> int:
    """Trains and prints the report."""
    return run_command(argv or ["--help"], _HELP, _train)


def _train(words: list[str]) -> Outcome:
    if words[:1] != ["train"]:
        got = words[0] if words else ""
        raise ConfigError(f"reward: no sub-command {got!r}, allowed: train. `robot-rl reward --help`")
    from robot_rl.config import load  # Hydra: not for --help

    options = load(RewardConfig, words[1:], config_name="reward")
    if Path(options.out).exists():
        raise DatasetError(f"out: {options.out!r} exists already. Choose another folder, or remove it first.")
    if not Path(options.data).is_dir():
        raise DatasetError(f"data: no folder {options.data!r}.")
    from robot_rl.train.deploy.classifier import ClassifierConfig, train_classifier  # torch: not for --help
    from robot_rl.train.deploy.labels import read_labelled

    names = {item.name for item in fields(ClassifierConfig)}
    config = ClassifierConfig(**{name: value for name, value in asdict(options).items() if name in names})
    began_s = time.monotonic()
    labelled = read_labelled(options.data, options.camera, **options.options())
    classifier = train_classifier(labelled, config)
    classifier.save(options.out)
    report = classifier.report
    low, high = report.false_positive_ci
    print(
        f"{options.out}: {report.successes} successes and {report.failures} failures, "
        f"{time.monotonic() - began_s:.1f} s\n"
        f"held out: {report.false_positives} of {report.held_out_failures} failures count as success "
        f"({report.false_positive_rate:.1%}, 95 % interval {low:.1%} to {high:.1%}), "
        f"{report.missed} of {report.held_out_successes} successes are missed ({report.missed_rate:.1%})"
    )
    if report.unfit:
        print(f"not fit for use: {report.unfit}")
    return int(bool(report.unfit)), asdict(report)
