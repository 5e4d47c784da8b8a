"""Errors against numbers worked out by hand."""

import numpy as np
import pytest
import torch

from robot_rl.core.policy import DemoBatch
from robot_rl.train.finetune.errors import STD_FLOOR, Ruler, joint_groups


def batch(actions: list[list[list[float]]], valid: list[list[bool]]) -> DemoBatch:
    return DemoBatch({}, torch.tensor(actions), torch.tensor(valid))


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


def test_groups_of_joints() -> None:
    names = ["kLeftHandPinky", "left_hand_thumb", "kRightElbow", "shoulder_pan.pos", "joint1", "joint2", "7"]
    assert joint_groups(names) == {
        "left hand": [0, 1],
        "right elbow": [2],
        "shoulder": [3],
        "joint": [4, 5],
        "7": [6],
    }
