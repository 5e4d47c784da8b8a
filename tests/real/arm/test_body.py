"""What an arm does by itself: clamps, trips, ramps to rest, and waits to be cleared."""

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.real.arm.body import POWER_OFF, Body, StopConfig


def test_targets_are_clamped_and_counted(make_loop) -> None:
    loop = make_loop()
    loop.body.target_rad, loop.body.gripper = np.array([0.5, 5.0]), 1.0
    loop.cycle()
    assert loop.plant.target.tolist() == [0.5, 2.0]
    assert loop.plant.gripper == 0.04
    assert loop.body.num_beyond_limits == 1
    assert loop.body.target_rad.tolist() == [0.5, 5.0]  # what came, for the record


def test_a_command_that_is_not_finite_stops_the_arm(make_loop) -> None:
    loop = make_loop()
    loop.body.target_rad = np.array([0.0, np.nan])
    loop.cycle()
    assert loop.body.stop_reason == "command is not finite: [0.0, nan], gripper 0.04"
    assert loop.plant.target.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("lie", "values", "text"),
    [
        ("position", [0.0, 2.06], "b: position beyond its limit (at 2.060 rad, 0.000 rad/s, 0.0 N m)"),
        ("velocity", [-1.6, 0.0], "a: speed over 1.5 times its limit (at 0.000 rad, -1.600 rad/s, 0.0 N m)"),
    ],
)
def test_the_arm_stops_itself(make_loop, lie: str, values: list[float], text: str) -> None:
    loop = make_loop()
    setattr(loop.plant, lie, np.array(values))
    loop.cycle()
    assert loop.body.stop_reason == text
    assert loop.body.num_stops == 1


def test_a_saturated_servo_may_last_a_while(make_loop) -> None:
    loop = make_loop(torque_s=0.5)
    loop.plant.effort = np.array([0.0, -20.0])
    loop.run(0.48)
    assert loop.body.stop_reason == ""
    loop.plant.effort[:] = 0.0  # a moment of relief begins the time anew
    loop.cycle()
    loop.plant.effort = np.array([0.0, -20.0])
    loop.run(0.48)
    assert loop.body.stop_reason == ""
    loop.run(0.04)
    assert loop.body.stop_reason == "b: largest torque for 0.5 s (at 0.000 rad, 0.000 rad/s, -20.0 N m)"


def test_a_stop_ramps_to_rest(make_loop) -> None:
    """From 0.8 rad/s evenly to rest in 0.2 s: 0.08 rad more, three quarters of it after half the time."""
    loop = make_loop()
    loop.plant.velocity = np.array([0.8, 0.0])
    loop.body.read(0)
    loop.body.trip("a person")
    loop.body.target_rad = np.array([-1.0, 1.0])  # nobody listens
    loop.run(0.1)
    assert loop.plant.position[0] == pytest.approx(0.06)
    loop.run(0.1)
    assert loop.plant.position == pytest.approx([0.08, 0.0])
    loop.run(0.5)
    assert loop.plant.position == pytest.approx([0.08, 0.0])
    assert np.abs(loop.plant.velocity).max() < 1e-9


def test_a_stop_stays_within_the_limits(make_loop) -> None:
    loop = make_loop()
    loop.plant.position, loop.plant.velocity = np.array([0.99, 0.0]), np.array([1.0, 0.0])
    loop.body.read(0)
    loop.body.trip("a person")
    loop.run(0.3)
    assert loop.plant.position[0] == 1.0


def test_only_a_clear_lifts_a_stop(make_loop) -> None:
    loop = make_loop()
    loop.plant.velocity = np.array([0.5, 0.0])
    loop.body.read(0)
    loop.body.trip("first")
    loop.body.trip("second")
    assert loop.body.stop_reason == "first"
    assert loop.body.clear() == "still moving at 0.50 rad/s, allowed: 0.05 rad/s. Try again."
    loop.run(0.3)
    loop.body.reset(3)
    loop.run(0.3)
    assert loop.body.stop_reason == "first"  # a reset scene is no clear
    assert loop.plant.seed == 3
    loop.body.read(0)
    assert loop.body.clear() == ""
    assert loop.body.read(0).stop_reason == ""
    assert loop.body.target_rad.tolist() == loop.plant.position.tolist()  # nothing jumps


def test_power(make_loop) -> None:
    loop = make_loop()
    loop.body.power(on=False)
    assert loop.body.stop_reason == POWER_OFF
    assert loop.body.is_off
    assert loop.body.power(on=True) == ""
    assert not loop.body.stop_reason
    loop.body.trip("a person")
    loop.body.power(on=True)  # it is on: that clears nothing
    assert loop.body.stop_reason == "a person"


def test_encoders_are_noisy_and_the_truth_is_not(make_loop) -> None:
    plant = make_loop().plant
    body = Body(plant, StopConfig(), encoder_noise_rad=0.01, rng=np.random.default_rng(0))
    measured = np.array([body.read(i).position_rad for i in range(2000)])
    assert measured.std(axis=0) == pytest.approx([0.01, 0.01], rel=0.1)
    assert np.abs(measured.mean(axis=0)).max() < 0.001
    assert body.truth.position_rad.tolist() == [0.0, 0.0]


def test_stops_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"stop\.ramp_s: got 0, allowed: above 0"):
        StopConfig(ramp_s=0)
