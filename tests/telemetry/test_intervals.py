import pytest

from robot_rl.telemetry.intervals import mean_interval, wilson_interval


def test_wilson_interval_of_a_half():
    # z^2 = 3.8416, n = 10: centre (0.5 + 0.19208) / 1.38416 = 0.5;
    # half 1.96 * sqrt(0.025 + 0.009604) / 1.38416 = 0.26341.
    assert wilson_interval(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_wilson_interval_of_all_and_none():
    # n = 10: high end of 0/10 is (0.19208 + 1.96 * sqrt(0.009604)) / 1.38416 = 0.27754.
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27754), abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx((0.72246, 1.0), abs=1e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_interval_of_a_mean():
    # 1, 2, 3: standard deviation 1, t(2) = 4.303: 2 +- 4.303 / sqrt(3).
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48434, 2 + 2.48434), abs=1e-4)
    # 10 and 30: standard deviation sqrt(200), t(1) = 12.706: 20 +- 127.06.
    assert mean_interval([10.0, 30.0]) == pytest.approx((-107.06, 147.06))
    # 31 numbers, 15 zeros, 16 ones: standard deviation sqrt(16 * 15 / (31 * 30)); t(30) = 2.0423 in tables.
    half = 2.0423 * (16 * 15 / (31 * 30) / 31) ** 0.5
    assert mean_interval([0.0] * 15 + [1.0] * 16) == pytest.approx((16 / 31 - half, 16 / 31 + half), abs=1e-4)


def test_one_number_has_no_interval():
    assert mean_interval([3.0]) == (None, None)
    assert mean_interval([]) == (None, None)
