"""Messages offer what was probably meant."""

from robot_rl.core.errors import ConfigError, RobotRLError, SafetyStopError, nearest


def test_nearest_offers_the_closest_name() -> None:
    assert nearest("pik_cube", ["reach", "pick_cube"]) == " Did you mean 'pick_cube'?"


def test_nearest_lists_the_known_names_when_none_is_close() -> None:
    assert nearest("zzz", ["reach", "pick_cube"]) == " Known: pick_cube, reach."


def test_every_error_of_the_user_can_be_caught_as_one() -> None:
    assert issubclass(ConfigError, RobotRLError)
    assert issubclass(SafetyStopError, RobotRLError)
    assert issubclass(RobotRLError, ValueError)
