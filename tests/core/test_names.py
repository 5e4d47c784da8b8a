"""Parts of the state by the beginnings of their names."""

import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.core.names import chosen

NAMES = ("joint1.pos", "tool.pos.0", "cube.pos.0", "cube_in_tool.pos.0", "joint2.pos")


@pytest.mark.parametrize(
    ("beginnings", "places"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["joint", "tool"], [0, 1, 4]),
        (["tool.pos.0", "cube."], [1, 2]),
        (["cube"], [2, 3]),
    ],
)
def test_they_stay_in_the_order_of_the_names(beginnings: list[str], places: list[int]) -> None:
    assert chosen(NAMES, beginnings, at="state") == places


def test_a_beginning_of_nothing_is_refused() -> None:
    message = (
        r"env.state: got 'tol.pos.0', with which no element of the state begins. Did you mean 'tool.pos.0'\?"
    )
    with pytest.raises(ConfigError, match=message):
        chosen(NAMES, ["joint", "tol.pos.0"], at="env.state")
