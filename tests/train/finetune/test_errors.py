"""Errors against numbers worked out by hand."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from robot_rl.core.policy import DemoBatch
from robot_rl.train.finetune.errors import STD_FLOOR, Errors, Ruler, joint_groups


def batch(
    actions: list[list[list[float]]], valid: list[list[bool]], episodes: list[int] | None = None
) -> DemoBatch:
    source = {} if episodes is None else {"episode": np.array(episodes)}
    return DemoBatch({}, torch.tensor(actions), torch.tensor(valid), source)


def errors_of(wrong: list[float], lengths: list[int] | None = None, *, by: float = 0.0) -> Errors:
    """Of a predictor that is off by `wrong[e]` in every step of episode e, of one joint."""
    lengths = lengths or [1] * len(wrong)
    rows = [[[off]] for off, length in zip(wrong, lengths, strict=True) for _ in range(length)]
    episodes = [episode for episode, length in enumerate(lengths) for _ in range(length)]
    demos = batch(rows, [[True]] * len(rows), episodes)
    return Ruler(np.ones(1), ["elbow"]).measure([demos], lambda b: np.full((len(rows), 1, 1), by))


def test_the_error_counts_valid_steps_and_joints_alike() -> None:
    # Joint 0 (std 2) is off by 1 and 3 in the two valid steps, joint 1 (std 0.5) by 0 and 1.
    # Mean 2 / 2 = 1 and 0.5 / 0.5 = 1; the third step is beyond the end.
    ruler = Ruler(np.array([2.0, 0.5]), ["left_elbow", "right_elbow"])
    demos = batch([[[1.0, 0.0], [3.0, 1.0], [99.0, 99.0]]], [[True, True, False]])
    errors = ruler.measure([demos], lambda b: np.zeros((1, 3, 2)))
    assert errors.normalised == pytest.approx(1.0)
    assert errors.groups == {"left elbow": pytest.approx(1.0), "right elbow": pytest.approx(1.0)}
    assert errors.units == {"left elbow": pytest.approx(2.0), "right elbow": pytest.approx(0.5)}
    assert errors.chunks == 1


def test_steps_count_and_not_batches() -> None:
    # 1 in the one step of the first batch, 0 in the three of the second: 1/4, not 1/2.
    ruler = Ruler(np.ones(1), ["elbow"])
    short, whole = batch([[[1.0]]], [[True]]), batch([[[0.0]], [[0.0]], [[0.0]]], [[True]] * 3)
    assert ruler.measure([short, whole], lambda b: np.zeros((len(b.actions), 1, 1))).normalised == 0.25


def test_a_longer_prediction_is_cut_to_the_chunk() -> None:
    ruler = Ruler(np.ones(1), ["elbow"])
    predicted = np.array([[[1.0], [50.0]]])
    assert ruler.measure([batch([[[0.0]]], [[True]])], lambda b: predicted).normalised == 1.0


def test_a_joint_that_never_moved_is_divided_by_the_floor() -> None:
    ruler = Ruler(np.zeros(1), ["elbow"])
    errors = ruler.measure([batch([[[STD_FLOOR]]], [[True]])], lambda b: np.zeros((1, 1, 1)))
    assert errors.normalised == pytest.approx(1.0)


def test_each_step_of_the_chunk_has_its_own_error() -> None:
    # Step 0: off by 1 and 3, mean 2; step 1: off by 5, its other chunk is beyond the end.
    demos = batch([[[1.0], [5.0]], [[3.0], [99.0]]], [[True, True], [True, False]])
    errors = Ruler(np.ones(1), ["elbow"]).measure([demos], lambda b: np.zeros((2, 2, 1)))
    assert errors.by_step == (2.0, 5.0)
    assert errors.normalised == 3.0


def test_a_step_that_no_episode_reached_has_no_error() -> None:
    # Both chunks end after their first step: the second has nothing to be wrong about, which is not 0.
    demos = batch([[[1.0], [99.0]], [[3.0], [99.0]]], [[True, False], [True, False]], [0, 1])
    errors = Ruler(np.ones(1), ["elbow"]).measure([demos], lambda b: np.zeros((2, 2, 1)))
    assert errors.by_step == (2.0, None)


def test_joints_that_move_are_told_from_those_that_do_not() -> None:
    ruler = Ruler(np.ones(3), ["a", "b", "c"], moving=np.array([True, False, False]))
    errors = ruler.measure([batch([[[4.0, 1.0, 2.0]]], [[True]])], lambda b: np.zeros((1, 1, 3)))
    assert (errors.moving, errors.still) == (4.0, 1.5)
    assert errors_of([4.0]).still is None  # of one joint, that moves


def test_the_interval_is_of_whole_episodes() -> None:
    # Of 4 episodes one is off by 1. Drawn 4 times with replacement, it comes up 3 times or more in
    # (4 * 3 + 1) / 256 = 5 % of the resamples and 4 times in 0.4 %, so the upper 2.5 % begin at 3 / 4.
    errors = errors_of([1.0, 0.0, 0.0, 0.0])
    assert (errors.normalised, errors.interval) == (0.25, (0.0, 0.75))
    assert [row.total for row in errors.by_episode] == [1.0, 0.0, 0.0, 0.0]
    # As many steps of one episode say nothing of other episodes.
    assert errors_of([1.0], [4]).interval is None


def test_long_episodes_count_for_more() -> None:
    # Both resamples of one episode alone come up in a quarter of the cases: 0 and 1 are the ends.
    errors = errors_of([1.0, 0.0], [3, 1])
    assert (errors.normalised, errors.interval) == (0.75, (0.0, 1.0))


def test_a_difference_is_paired() -> None:
    # The episodes differ by up to 9, the predictors by 1 in each: no resample hides that.
    hard, harder = errors_of([1.0, 5.0, 10.0]), errors_of([1.0, 5.0, 10.0], by=-1.0)
    found = hard.minus(harder)
    assert found.mean == pytest.approx(-1.0)
    assert found.interval == (pytest.approx(-1.0), pytest.approx(-1.0))
    assert hard.interval == (1.0, 10.0)
    with pytest.raises(ValueError, match="measured on other episodes or steps"):
        hard.minus(errors_of([1.0, 5.0, 10.0], [1, 1, 2]))


def test_errors_survive_a_checkpoint() -> None:
    errors = errors_of([1.0, 0.0])
    again = Errors.from_json(json.loads(json.dumps(asdict(errors))))
    assert again.minus(errors).interval == (0.0, 0.0)


def test_groups_of_joints() -> None:
    names = ["kLeftHandPinky", "left_hand_thumb", "kRightElbow", "shoulder_pan.pos", "joint1", "joint2", "7"]
    assert joint_groups(names) == {
        "left hand": [0, 1],
        "right elbow": [2],
        "shoulder": [3],
        "joint": [4, 5],
        "7": [6],
    }
