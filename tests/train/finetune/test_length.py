"""The length of training is read from validation episodes."""

import pytest

from robot_rl.train.finetune.length import PATIENCE, is_past_best


@pytest.mark.parametrize(
    ("errors", "over"),
    [
        ([3.0, 2.0, 1.0], False),  # still falling
        ([1.0] + [2.0] * (PATIENCE - 1), False),  # not long enough without a better one
        ([1.0] + [2.0] * PATIENCE, True),
        ([2.0, 1.0] + [2.0] * (PATIENCE - 1) + [0.5], False),  # a better one came in time
        ([1.0] + [1.0] * PATIENCE, False),  # as good is good enough to go on
    ],
)
def test_patience(errors: list[float], over: bool) -> None:
    assert is_past_best(errors) is over
