"""How many episodes an error needs, by numbers by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.build import RealEnv
from robot_rl.worlds.config import WorldSettings
from robot_rl.worlds.curve import curve_counts, episodes_needed, learning_curve
from tests.worlds.conftest import FIT, META, SMALL, STEPS, point_history


def rows(*points: tuple[float, float]) -> list[dict[str, float]]:
    return [{"episodes": number, "held_out_error": error} for number, error in points]


def test_a_power_law_through_exact_points_has_no_spread() -> None:
    # Error 8 / n: 0.1 of it needs 80 to learn from, of which there are 70 in a hundred.
    found = episodes_needed(rows((10, 0.8), (20, 0.4), (40, 0.2)), 0.1)
    for number in (found.episodes, found.low, found.high):
        assert number == pytest.approx(80 / 0.7)
    assert found.measured == pytest.approx(40 / 0.7)
    assert found.words() == (
        "an error of 0.1 needs some 114 episodes by a power law through the curve (114 to 114 if one of its "
        "points is left out)"
    )


def test_its_spread_is_that_of_the_lines_without_one_point() -> None:
    # In logarithms to base 2: (0, 2), (1, 1), (2, 0), (3, 0). All: slope -3.5 / 5, level 1.8: -2 at 38 / 7.
    # Without the first, second, third, last: -2 at 20 / 3, 5.4, 6 and 4.
    found = episodes_needed(rows((1, 4.0), (2, 2.0), (4, 1.0), (8, 1.0)), 0.25)
    assert found.episodes == pytest.approx(2 ** (38 / 7) / 0.7)
    assert (found.low, found.high) == pytest.approx((2**4 / 0.7, 2 ** (20 / 3) / 0.7))
    assert "needs some 62 episodes" in found.words()
    assert "(23 to 145 if one" in found.words()


def test_an_error_that_does_not_fall_needs_no_known_number() -> None:
    found = episodes_needed(rows((2, 1.0), (4, 1.0), (8, 1.5)), 0.5)
    assert found.episodes == math.inf
    assert found.words().startswith("up to 11 episodes the error does not fall with their number")
    # Without the first of these it rises.
    unsure = episodes_needed(rows((2, 2.0), (4, 1.0), (8, 1.1)), 0.5)
    assert math.isfinite(unsure.episodes)
    assert unsure.high == math.inf
    assert " or more if one of its points is left out)" in unsure.words()


def test_a_number_far_from_what_was_measured_is_a_guess() -> None:
    # Error n^-0.5: 0.1 needs 100, 0.05 needs 400 of 8 measured.
    points = rows((2, 2**-0.5), (4, 0.5), (8, 8**-0.5))
    assert "a guess" in episodes_needed(points, 0.05).words()
    assert "a guess" not in episodes_needed(points, 0.2).words()


def test_a_curve_needs_three_points_and_a_held_out_episode() -> None:
    assert curve_counts(point_history(8)) == [2, 3, 6]  # of six: shares 1/8 and 1/4 are two, as few as may be
    assert curve_counts(point_history(80))[-1] == len(point_history(80).split("train"))
    with pytest.raises(
        DatasetError, match=r"curve: got 3 episodes to learn from and 1 held out, of 4; need 6"
    ):
        curve_counts(point_history(4))


def test_a_curve_is_drawn_of_too_few_episodes_for_a_fit() -> None:
    real = RealEnv(EnvConfig(task="reach"), META, STEPS)
    done, few = list[int](), point_history(8)
    how: dict[str, Any] = {"seed": 0, "shown": done.append}
    found = learning_curve(few, real, WorldSettings(model=SMALL, fit=replace(FIT, updates=20)), **how)
    assert [row["episodes"] for row in found] == [2, 3, 6]
    assert done == [1, 2, 3]
    assert found[-1]["held_out_error"] < found[0]["held_out_error"]
