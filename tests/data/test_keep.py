"""Which episodes are kept, on numbers that can be followed by hand."""

from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.data.keep import Facts, KeepConfig, describe_refused, roughness, sift, together

# Episode                    0     1     2     3     4     5
FACTS = Facts(
    success=np.array([True, True, False, True, True, True]),
    steps=np.array([30, 10, 10, 50, 20, 20]),
    roughness=np.array([0.1, 0.4, 0.1, 0.1, 0.3, 0.2]),
)
NONE = {"success": 0, "max_steps": 0, "max_roughness": 0, "fastest": 0, "smoothest": 0}


def test_roughness_is_the_mean_squared_change() -> None:
    # Changes (0.5, 0), (0, -1): (0.25 + 0 + 0 + 1) / 4.
    assert roughness(np.array([[0, 1], [0.5, 1], [0.5, 0]], np.float32)) == pytest.approx(0.3125)
    assert roughness(np.ones((1, 2), np.float32)) == 0.0


@pytest.mark.parametrize(
    ("keep", "passed", "refused"),
    [
        ({}, [0, 1, 2, 3, 4, 5], {}),
        ({"success": False}, [0, 1, 2, 3, 4, 5], {}),
        ({"success": True}, [0, 1, 3, 4, 5], {"success": 1}),
        ({"max_steps": 20}, [1, 2, 4, 5], {"max_steps": 2}),
        ({"max_roughness": 0.2}, [0, 2, 3, 5], {"max_roughness": 2}),
        # Half of 6: the steps 10, 10, and of the two with 20 the one that came first.
        ({"fastest": 0.5}, [1, 2, 4], {"fastest": 3}),
        ({"smoothest": 0.4}, [0, 2, 3], {"smoothest": 3}),  # 2.4 of 6 are 3
        # 2 fails, 3 is too long, 1 too rough, 0 is the slowest of three, 4 the rougher of two.
        (
            {"success": True, "max_steps": 40, "max_roughness": 0.3, "fastest": 0.66, "smoothest": 0.5},
            [5],
            {"success": 1, "max_steps": 1, "max_roughness": 1, "fastest": 1, "smoothest": 1},
        ),
    ],
)
def test_an_episode_is_refused_by_the_first_setting_that_it_fails(
    keep: dict[str, Any], passed: list[int], refused: dict[str, int]
) -> None:
    found = sift(FACTS, KeepConfig(**keep))
    assert found[0].tolist() == passed
    assert found[1] == {**NONE, **refused}


def test_a_share_is_not_rounded_up_by_the_last_bit() -> None:
    # 0.07 * 100 is 7.000000000000001 in floating point.
    facts = Facts(np.ones(100, bool), np.arange(100), np.zeros(100))
    assert sift(facts, KeepConfig(fastest=0.07))[0].tolist() == list(range(7))


def test_nothing_is_left_of_nothing() -> None:
    facts = Facts(np.zeros(2, bool), np.ones(2, np.int64), np.zeros(2))
    passed, refused = sift(facts, KeepConfig(success=True, fastest=0.5))
    assert passed.tolist() == []
    assert refused == {**NONE, "success": 2}


def test_the_points_are_those_of_all_episodes() -> None:
    told = together([FACTS, FACTS]).to_json()
    assert told["episodes"] == 12
    assert told["success"] == pytest.approx(5 / 6)
    # Steps 10 x4, 20 x4, 30 x2, 50 x2: the last point is 0.9 of the way from 30 to 50.
    assert told["steps"] == pytest.approx([10, 20, 48])


def test_what_was_refused_in_words() -> None:
    refused = {**NONE, "success": 10, "fastest": 2}
    assert describe_refused(refused, 50) == "refused 12 of 50: success 10, fastest 2"
    assert describe_refused(NONE, 3) == "refused 0 of 3"


@pytest.mark.parametrize(
    ("keep", "takes_all"),
    [
        ({}, True),
        ({"success": True}, False),
        ({"max_steps": 5}, False),
        ({"max_roughness": 0.5}, False),
        ({"fastest": 0.9}, False),
        ({"smoothest": 0.9}, False),
    ],
)
def test_who_takes_all(keep: dict[str, Any], takes_all: bool) -> None:
    assert KeepConfig(**keep).takes_all == takes_all


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"max_steps": 0}, r"keep\.max_steps: got 0, allowed: 1 or more, or null"),
        ({"max_roughness": 0.0}, r"keep\.max_roughness: got 0\.0, allowed: above 0, or null"),
        ({"fastest": 0.0}, r"keep\.fastest: got 0\.0, allowed: above 0, at most 1"),
        ({"smoothest": 1.5}, r"keep\.smoothest: got 1\.5, allowed: above 0, at most 1"),
    ],
)
def test_settings_out_of_range(keep: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KeepConfig(**keep)
