"""The control benchmark: its numbers by hand, and one short run of everything."""

from pathlib import Path

import numpy as np
import pytest

from robot_rl.bench import control
from robot_rl.bench.control import Measured
from robot_rl.core.errors import ConfigError

MS = 1_000_000


def measured() -> Measured:
    """Four cycles of 10 ms and one that comes 12 ms late; targets 0 and 1 are heard, 2 repeats itself."""
    one = Measured(command_hz=100.0, stamps_ns=[0, 10 * MS, 20 * MS, 30 * MS, 52 * MS])
    targets = np.array([[0.0], [1.0], [2.0], [2.0], [3.0]])
    one.flight = {
        "sent_rad": targets,
        "state_stamp_ns": np.array([0, 8, 18, 28, 50]) * MS,
        "plan": np.array([-1, 4, 4, 4, 5]),
    }
    one.heard.extend(
        (at_ms * MS, targets[row].tobytes()) for row, at_ms in ((0, 3), (1, 13), (2, 23), (3, 33))
    )
    one.observed_ns = {4: 6 * MS, 5: 40 * MS}
    one.bare_ns = np.array([1, 11, 21, 31, 41, 51]) * MS
    one.supervisor = {"cost_us": {"p50": 100.0}, "scheduling": "normal"}
    return one


def test_a_row_by_hand() -> None:
    row = measured().row()
    assert row["cycles"] == 5
    assert row["missed"] == 1  # a period of 22 ms: the next cycle should have begun and ended in it
    assert row["jitter_max_ms"] == pytest.approx(12.0)
    assert row["jitter_p50_ms"] == 0.0
    assert row["latency_p50_ms"] == pytest.approx(4.0)  # 3 - 0 and 13 - 8: 3 and 5
    assert row["latency_max_ms"] == pytest.approx(5.0)
    assert row["policy_latency_max_ms"] == pytest.approx(7.0)  # plan 4: 13 - 6; plan 5 was not heard


@pytest.mark.parametrize(
    ("wakes_ms", "missed_alone", "bare_missed"),
    [
        ([1, 11, 21, 31, 41, 51], 1, 0),  # the machine was awake: the miss is ours
        ([1, 11, 21, 47, 57], 0, 1),  # it slept from 31 to 47, which the miss from 30 to 52 meets
        ([1, 27, 37, 47, 57], 1, 1),  # it slept before the miss began at 30
    ],
)
def test_what_the_machine_misses_is_told_apart(
    wakes_ms: list[int], missed_alone: int, bare_missed: int
) -> None:
    one = measured()
    one.bare_ns = np.array(wakes_ms) * MS
    row = one.row()
    assert (row["missed_alone"], row["bare_missed"]) == (missed_alone, bare_missed)


def test_nothing_heard_is_no_number() -> None:
    one = measured()
    one.heard.clear()
    assert one.row()["latency_p99_ms"] is None


def test_rates_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rates_hz: got \(5\.0,\), allowed: 10 to 1000 each"):
        control.run(seconds=1.0, rates_hz=(5.0,))


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedds")
    result = control.run(seconds=2.0, rates_hz=(50.0,), figure=str(tmp_path / "control.png"))
    (row,) = result["rows"]
    assert row["cycles"] > 50
    assert row["bare_jitter_max_ms"] is not None
    assert row["latency_p50_ms"] > 0
    assert row["policy_latency_p50_ms"] > 0
    assert all(row[f"cpu_{name}"] > 0 for name in ("arm", "driver", "supervisor", "policy"))
    assert result["missed_50hz"] == row["missed"]
    assert (tmp_path / "control.png").stat().st_size > 1000
