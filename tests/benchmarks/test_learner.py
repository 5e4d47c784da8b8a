"""The learner is faster than Stable-Baselines3's, in one process, turn by turn."""

import pytest

from robot_rl.bench.learner import Rate, ratios, run


def test_ratios_are_of_neighbouring_rounds() -> None:
    mine = [Rate(200, 210), Rate(100, 105), Rate(300, 300)]
    peer = [Rate(100, 100), Rate(50, 70), Rate(100, 150)]
    # Wall 2, 2, 3: median 2. CPU 2.1, 1.5, 2: median 2.
    assert ratios(mine, peer) == {"wall": 2.0, "cpu": 2.0}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (1.0, 0)])
def test_bad_options(seconds: float, rounds: int) -> None:
    with pytest.raises(ValueError, match="allowed: at least 1 round, above 0 s"):
        run(seconds_per_round=seconds, rounds=rounds)


@pytest.mark.benchmark
def test_updates_are_faster_than_stable_baselines3() -> None:
    result = run(seconds_per_round=2.0, rounds=5)
    assert result["ratio_to_stable_baselines3"]["cpu"] >= 1.5, result
