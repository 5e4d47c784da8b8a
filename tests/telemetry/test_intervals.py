import pytest

from robot_rl.telemetry.intervals import wilson_interval


def test_wilson_interval_of_a_half():
    # z^2 = 3.8416, n = 10: centre (0.5 + 0.19208) / 1.38416 = 0.5;
    # half 1.96 * sqrt(0.025 + 0.009604) / 1.38416 = 0.26341.
    assert wilson_interval(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_wilson_interval_of_all_and_none():
    # n = 10: high end of 0/10 is (0.19208 + 1.96 * sqrt(0.009604)) / 1.38416 = 0.27754.
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27754), abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx((0.72246, 1.0), abs=1e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)
