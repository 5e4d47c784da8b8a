"""Episodes at another rate, by hand: which rows are shown, who has the rewards and the ends."""

from dataclasses import replace

import numpy as np
import pytest

from robot_rl.data.resample import resampled, rows_at
from tests.data.conftest import episode


@pytest.mark.parametrize(
    ("steps", "from_hz", "to_hz", "rows"),
    [
        (6, 20.0, 10.0, [0, 2, 4]),
        (5, 20.0, 10.0, [0, 2, 4]),  # 0.25 s: an instant at 0.2 s
        (3, 10.0, 20.0, [0, 0, 1, 1, 2, 2]),
        (6, 30.0, 20.0, [0, 1, 3, 4]),  # 0, 50, 100, 150 ms; row 4 began at 133 ms
        (4, 20.0, 30.0, [0, 0, 1, 2, 2, 3]),  # 0, 33, 67, 100, 133, 167 ms
        (3, 29.97, 29.97, [0, 1, 2]),
        (1, 50.0, 10.0, [0]),
        (0, 50.0, 10.0, []),
        (20, 100.0, 1000.00001, [*(k // 10 for k in range(200)), 19]),  # no row beyond the last
    ],
)
def test_each_instant_has_the_newest_row(steps: int, from_hz: float, to_hz: float, rows: list[int]) -> None:
    assert rows_at(steps, from_hz, to_hz).tolist() == rows


def test_no_instant_misses_its_own_row_by_a_rounding() -> None:
    for rate in (3.0, 7.0, 29.97, 30.0, 60.0, 1000.0 / 3.0):
        assert rows_at(5_000, 3 * rate, rate).tolist() == list(range(0, 5_000, 3))


def test_half_the_rate_sums_rewards_and_keeps_the_end() -> None:
    whole = episode(1, 5)  # rewards 0 to 4; the last step terminates and succeeds
    half = resampled(whole, 10.0)
    assert half.meta.control_hz == 10.0
    np.testing.assert_array_equal(half.action, whole.action[[0, 2, 4]])
    np.testing.assert_array_equal(half.obs["state"], whole.obs["state"][[0, 2, 4]])
    assert half.reward.tolist() == [1.0, 5.0, 4.0]
    assert half.terminated.tolist() == half.success.tolist() == [False, False, True]
    assert half.final_obs is whole.final_obs


def test_a_success_on_a_row_that_is_skipped_is_not_lost() -> None:
    whole = replace(episode(1, 6), success=np.arange(6) == 3)
    assert resampled(whole, 10.0).success.tolist() == [False, True, False]


def test_twice_the_rate_gives_a_reward_once() -> None:
    whole = episode(1, 3)
    double = resampled(whole, 40.0)
    np.testing.assert_array_equal(double.action, whole.action[[0, 0, 1, 1, 2, 2]])
    assert double.reward.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 2.0]
    assert double.terminated.tolist() == [False] * 5 + [True]


def test_pictures_are_picked_as_rows_are_and_only_when_looked_at() -> None:
    asked: list[object] = []
    pictures = episode(0, 6).obs["front.rgb"]

    class Lazy:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, step: object) -> object:
            asked.append(step)
            return pictures[step]

    frames = resampled(replace(episode(0, 6), obs={"front.rgb": Lazy()}), 10.0).obs["front.rgb"]
    assert (len(frames), asked) == (3, [])
    np.testing.assert_array_equal(frames[2], pictures[4])
    np.testing.assert_array_equal(frames[np.array([0, 1])], pictures[[0, 2]])
    np.testing.assert_array_equal(frames[1:], pictures[[2, 4]])
