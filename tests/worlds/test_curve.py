"""How many episodes an error needs, by numbers by hand."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.build import RealEnv
from robot_rl.worlds.config import WorldSettings
from robot_rl.worlds.curve import (
    Needed,
    curve_counts,
    episodes_needed,
    keep_curve,
    kept_curve,
    learning_curve,
)
from robot_rl.worlds.history import CALIBRATION, TRAIN, Array, History
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


def test_an_error_that_was_measured_is_already_reached() -> None:
    # 0.7 was measured of 20 and 40 to learn from, which are 29 and 57 in all; 0.9 of 10, too, but not of 20.
    points = rows((10, 0.8), (20, 0.4), (40, 0.2))
    assert episodes_needed(points, 0.7).words() == "an error of 0.7 is already reached, by 29 episodes"
    assert episodes_needed(points, 8.0).words() == "an error of 8 is already reached, by 14 episodes"
    assert episodes_needed(points, 0.19).reached is None
    rising = rows((10, 0.8), (20, 1.0), (40, 0.9))
    assert episodes_needed(rising, 0.9).words() == "an error of 0.9 is already reached, by 57 episodes"


def test_what_is_not_known_is_null_in_json() -> None:
    found = episodes_needed(rows((2, 1.0), (4, 1.0), (8, 1.5)), 0.5)
    assert (found.episodes, found.low, found.high) == (None, None, None)
    assert Needed(**json.loads(json.dumps(asdict(found), allow_nan=False))) == found


def test_an_error_that_does_not_fall_needs_no_known_number() -> None:
    found = episodes_needed(rows((2, 1.0), (4, 1.0), (8, 1.5)), 0.5)
    assert found.episodes is None
    assert found.words().startswith("up to 11 episodes the error does not fall with their number")
    # Without the first of these it rises.
    unsure = episodes_needed(rows((2, 2.0), (4, 1.0), (8, 1.1)), 0.5)
    assert unsure.episodes is not None
    assert unsure.high is None
    assert " or more if one of its points is left out)" in unsure.words()


def test_a_number_far_from_what_was_measured_is_a_guess() -> None:
    # Error n^-0.5: 0.1 needs 100, 0.05 needs 400 of 8 measured.
    points = rows((2, 2**-0.5), (4, 0.5), (8, 8**-0.5))
    assert episodes_needed(points, 0.05).words() == (
        "an error of 0.05 needs more than 114 episodes, 10 times the most measured: a guess, by a power law "
        "through the curve (more than 114 if one of its points is left out)"
    )
    assert "a guess" not in episodes_needed(points, 0.2).words()
    flat = rows((2, 1.0), (4, 0.999), (8, 0.99))  # the law asks for a number of a hundred digits
    assert "more than 114 episodes" in episodes_needed(flat, 0.1).words()


def test_a_curve_needs_three_points_and_a_held_out_episode() -> None:
    settings = WorldSettings(model=SMALL, fit=FIT)
    assert curve_counts(point_history(8), settings) == [
        2,
        3,
        6,
    ]  # of six: shares 1/8 and 1/4 are two, as few as may be
    assert curve_counts(point_history(80), settings)[-1] == len(point_history(80).split("train"))
    with pytest.raises(
        DatasetError, match=r"curve: got 3 episodes to learn from and 1 held out, of 4; need 6"
    ):
        curve_counts(point_history(4), settings)


def test_points_without_a_long_episode_are_left_out() -> None:
    # 55 learn: points of 6, 13, 27 and 55. The first 6 are too short for two strides of 4, then the first 13.
    settings, history = WorldSettings(model=SMALL, fit=FIT), point_history(80)
    train = history.split(TRAIN)
    assert curve_counts(history, settings) == [6, 13, 27, 55]
    assert curve_counts(shortened(history, train[:6]), settings) == [13, 27, 55]
    with pytest.raises(DatasetError, match=r"curve: 42 of 55 episodes .* 8 control steps .*; 2 points have"):
        curve_counts(shortened(history, train[:13]), settings)
    with pytest.raises(DatasetError, match=r"and 0 of \d+ held out have the 8 control steps"):
        curve_counts(shortened(history, history.split(CALIBRATION)), settings)


def shortened(history: History, episodes: Array) -> History:
    """Returns a history in which these episodes end after 7 control steps."""
    last = history.last.copy()
    last[episodes] = history.first[episodes] + 7
    return replace(history, last=last)


def test_a_kept_curve_is_that_of_the_same_episodes(tmp_path: Path) -> None:
    path, points = tmp_path / "curve.json", rows((2, 1.0), (4, 0.5), (8, 0.4))
    assert kept_curve(path, [2, 4, 8]) is None
    keep_curve(path, points, episodes_needed(points, 0.1))
    assert kept_curve(path, [2, 4, 8]) == points
    assert kept_curve(path, [2, 4, 9]) is None


def test_a_curve_is_learned_on_the_device_that_is_wanted() -> None:
    real = RealEnv(EnvConfig(task="reach"), META, STEPS)
    how: dict[str, Any] = {"seed": 0, "shown": lambda done: None, "device": "meta"}
    with pytest.raises(RuntimeError, match="meta tensors"):  # it holds no numbers
        learning_curve(point_history(8), real, WorldSettings(model=SMALL, fit=FIT), **how)


def test_a_curve_is_drawn_of_too_few_episodes_for_a_fit() -> None:
    real = RealEnv(EnvConfig(task="reach"), META, STEPS)
    done, few = list[int](), point_history(8)
    how: dict[str, Any] = {"seed": 0, "shown": done.append}
    found = learning_curve(few, real, WorldSettings(model=SMALL, fit=replace(FIT, updates=20)), **how)
    assert [row["episodes"] for row in found] == [2, 3, 6]
    assert done == [1, 2, 3]
    assert found[-1]["held_out_error"] < found[0]["held_out_error"]
