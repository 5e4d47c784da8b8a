"""Recording does not hold a control loop up; a large store opens quickly."""

import pytest

from robot_rl.bench.store import capacity, measure


@pytest.mark.benchmark
def test_append_within_a_millisecond() -> None:
    row = measure(seconds=100)
    assert row["steps"] == 10_000
    assert row["dropped_steps"] == 0
    assert row["dropped_pictures"] == 0
    assert row["waits"] == 0
    assert row["append_p99_ms"] <= 1.0


@pytest.mark.benchmark
def test_a_million_steps_open_in_a_second() -> None:
    row = capacity(steps=1_000_000)
    assert row["steps"] == 1_000_000
    assert row["open_s"] <= 1.0
    assert row["read_columns_s"] <= 2.0


def test_the_measurement_counts() -> None:
    row = measure(seconds=0.3)
    assert (row["steps"], row["dropped_steps"], row["pictures"]) == (30, 0, 2 * 9)
    assert 0 < row["append_p50_ms"] <= row["append_p99_ms"] <= row["append_max_ms"]
    assert capacity(steps=2_000)["steps"] == 2_000
