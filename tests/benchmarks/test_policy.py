"""The policy benchmark names its policies, and one chunk is as fast as a robot needs it."""

import pytest

from robot_rl.bench.policy import run
from robot_rl.core.errors import UnknownComponentError


def test_one_policy_of_the_table() -> None:
    result = run(samples=5, policy="flow, 4 steps")
    (row,) = result["rows"]
    assert row["policy"] == "flow, 4 steps"
    assert 0 < row["p50_ms"] <= row["p99_ms"]


def test_mistakes_are_named() -> None:
    with pytest.raises(
        UnknownComponentError, match=r"no policy 'flow 4 steps'\. Did you mean 'flow, 4 steps'"
    ):
        run(policy="flow 4 steps")
    with pytest.raises(ValueError, match="got 0 samples, allowed: 1 or more"):
        run(samples=0)


@pytest.mark.benchmark
def test_a_chunk_is_fast() -> None:
    rows = {row["policy"]: row for row in run(samples=500)["rows"]}
    assert rows["flow, 4 steps"]["p50_ms"] <= 3.0
    assert rows["flow, 4 steps"]["p99_ms"] <= 10.0
