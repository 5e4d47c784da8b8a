"""Parts of the state by the beginnings of their names."""

import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.core.names import chosen, parsed, without_past

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


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("joint1.pos", ("joint1.pos", False, None)),
        ("joint1.pos.change_3", ("joint1.pos", False, 3)),
        ("joint1.pos.change_0", ("joint1.pos", False, 0)),
        ("grip.last_action", ("grip", True, None)),
        ("grip.last_action.change_12", ("grip", True, 12)),
        ("last_action", ("", True, None)),
        ("last_action.change_3", ("", True, 3)),
        ("last_actions", ("last_actions", False, None)),
        ("exchange_3", ("exchange_3", False, None)),
    ],
)
def test_a_name_is_of_the_present_or_of_the_past(name: str, meaning: tuple[str, bool, int | None]) -> None:
    assert parsed(name) == meaning
    assert without_past((name, "tool")) == ((name, "tool") if meaning == (name, False, None) else ("tool",))
