"""Whether anything trained beats the best baseline, said plainly."""

import pytest

from robot_rl.train.finetune.errors import judge
from tests.train.finetune.test_errors import errors_of

BASELINES = {
    "last action": errors_of([0.5, 0.5]),
    "ridge": errors_of([0.4, 0.2]),
    "mean": errors_of([1.0, 1.0]),
}


def test_a_policy_that_is_better_on_every_episode() -> None:
    verdict = judge({"policy": errors_of([0.3, 0.1]), "ACT": errors_of([0.9, 0.9]), **BASELINES})
    assert (verdict.trained, verdict.baseline, verdict.beats) == ("policy", "ridge", True)
    assert verdict.text() == (
        "training beats the best baseline: policy 0.2000 is 33.3 % below ridge 0.3000 "
        "(difference -0.1000, 95 % interval -0.1000 to -0.1000 over 2 episodes)"
    )


def test_a_policy_that_is_worse() -> None:
    verdict = judge({"policy": errors_of([0.6, 0.6]), **BASELINES})
    assert verdict.text().startswith(
        "nothing trained beats the best baseline: policy 0.6000 is 100.0 % above"
    )


def test_better_in_the_mean_is_not_surely_better() -> None:
    # -0.3 in one episode, +0.1 in the other: the interval is -0.3 to 0.1.
    verdict = judge({"policy": errors_of([0.1, 0.3]), **BASELINES})
    assert verdict.difference.mean == pytest.approx(-0.1)
    assert not verdict.beats
    assert verdict.text() == (
        "nothing trained is surely better than the best baseline: policy 0.2000 is 33.3 % below ridge 0.3000 "
        "(difference -0.1000, 95 % interval -0.3000 to +0.1000 over 2 episodes)"
    )


def test_the_best_of_what_was_trained_counts() -> None:
    verdict = judge({"policy": errors_of([0.6, 0.6]), "ACT": errors_of([0.1, 0.1]), **BASELINES})
    assert (verdict.trained, verdict.beats) == ("ACT", True)


def test_one_episode_has_no_interval_and_settles_nothing() -> None:
    verdict = judge({"policy": errors_of([0.1]), "ridge": errors_of([0.3])})
    assert not verdict.beats
    assert "no interval from one held-out episode" in verdict.text()
    assert verdict.to_json()["beats"] is False
