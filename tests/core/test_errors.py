"""Messages offer what was probably meant."""

from types import SimpleNamespace

import pytest

from robot_rl.core.errors import ConfigError, RobotRLError, SafetyStopError, nearest, require_fields


def test_nearest_offers_the_closest_name() -> None:
    assert nearest("pik_cube", ["reach", "pick_cube"]) == " Did you mean 'pick_cube'?"


def test_nearest_lists_the_known_names_when_none_is_close() -> None:
    assert nearest("zzz", ["reach", "pick_cube"]) == " Known: pick_cube, reach."


def test_every_error_of_the_user_can_be_caught_as_one() -> None:
    assert issubclass(ConfigError, RobotRLError)
    assert issubclass(SafetyStopError, RobotRLError)
    assert issubclass(RobotRLError, ValueError)


def test_fields_out_of_range_are_named() -> None:
    config = SimpleNamespace(width=0, tau=1.0, kind="c", clip=None)
    require_fields(config, "critic.", "above 0, at most 1", "tau")
    require_fields(config, "critic.", "above 0, or null for none", "tau", "clip")
    with pytest.raises(ConfigError, match=r"^critic\.width: got 0, allowed: 1 or more$"):
        require_fields(config, "critic.", "1 or more", "tau", "width")
    with pytest.raises(ConfigError, match=r"^kind: got 'c', allowed: a, b$"):
        require_fields(config, "", "a, b", "kind")
