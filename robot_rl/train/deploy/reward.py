"""Judges of success: the task's predicate, a person's key, or a classifier."""

from __future__ import annotations

from robot_rl.core.errors import ConfigError, nearest
from robot_rl.hal.vector import Obs
from robot_rl.real.teleop.intent import Intent
from robot_rl.train.deploy.classifier import SuccessClassifier


class Judge:
    """Ends episodes by the person's verdict, or else by the rule of a subclass."""

    def begin(self) -> None:
        """Notes that an episode begins."""

    def __call__(self, obs: Obs, success: bool, terminated: bool, intent: Intent) -> tuple[bool, bool]:
        """Returns (success, failure); the episode goes on while both are False.

        Args:
            obs: what the step led to, one row.
            success: what the env says.
            terminated: whether the env ended the episode.
            intent: of the person; their verdict overrides all others.
        """
        if intent.verdict is not None:
            return intent.verdict == "success", intent.verdict == "fail"
        return self.judge(obs, success, terminated)

    def judge(self, obs: Obs, success: bool, terminated: bool) -> tuple[bool, bool]:
        """Returns (success, failure) without a verdict of the person."""
        return False, False


class KeyJudge(Judge):
    """Believes the person alone."""


class TaskJudge(Judge):
    """Believes the env: simulations, and stations that track what the task is about."""

    def judge(self, obs: Obs, success: bool, terminated: bool) -> tuple[bool, bool]:
        return success, terminated and not success


class ClassifierJudge(Judge):
    """Believes a classifier of pictures that is sure several times in a row."""

    def __init__(self, classifier: SuccessClassifier, *, in_a_row: int = 3) -> None:
        self._classifier, self._in_a_row = classifier, in_a_row
        self._count = 0

    def begin(self) -> None:
        self._count = 0

    def judge(self, obs: Obs, success: bool, terminated: bool) -> tuple[bool, bool]:
        self._count = self._count + 1 if self._classifier.says_success(obs) else 0
        return self._count >= self._in_a_row, False


JUDGES = ("task", "key", "classifier")


def make_judge(name: str, classifier: str | None) -> Judge:
    """Returns a judge by name; `classifier` is the folder that `robot-rl reward train` wrote.

    Raises:
        ConfigError: no such judge, or a classifier without a folder.
        CheckpointError: the classifier is damaged, or unfit for use.
    """
    if name == "task":
        return TaskJudge()
    if name == "key":
        return KeyJudge()
    if name != "classifier":
        raise ConfigError(f"human.reward: no reward named {name!r}.{nearest(name, JUDGES)}")
    if classifier is None:
        raise ConfigError(
            "human.classifier: missing, human.reward=classifier needs it. "
            "`robot-rl reward train data=<folder>` makes one."
        )
    return ClassifierJudge(SuccessClassifier.load(classifier))
