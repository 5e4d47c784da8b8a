"""The fakes do exactly what they say, also when they lie."""

from dataclasses import dataclass

import numpy as np
import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import ConfigError, DeviceError, SafetyStopError, StaleObservationError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.hal.vector import VectorEnv
from robot_rl.testing.devices import (
    Behaviour,
    FakeEnv,
    FakeRobot,
    Lengths,
    drop,
    faulty,
    late,
    ok,
    protective_stop,
)


@dataclass(frozen=True)
class Ticket:
    token: int = 1
    device: str = "fake_arm"
    slot_ids: tuple[int, ...] = (0,)
    holder: str = "test"


def opened(*script: Behaviour) -> tuple[FakeRobot, VectorEnv]:
    robot = FakeRobot(script, clock=ManualClock())
    env = robot.open(Ticket())
    env.reset(seed=0)
    return robot, env


HALF = np.full((1, 3), 0.5, np.float32)


# FakeEnv


def test_a_full_action_moves_the_point_by_ten_centimetres() -> None:
    env = FakeEnv(1)
    start = env.reset(seed=3)[0]["state"][0]
    assert start[:3].tolist() == [0, 0, 3]  # step, episode, seed
    expected = EpisodeRng(3, 0).uniform(-1.0, 1.0, size=2)[0]
    assert start[3:] == pytest.approx(expected, abs=1e-6)
    state = env.step(np.array([[1.0, -0.5]], np.float32))[0]["state"][0]
    assert state[3:] - start[3:] == pytest.approx([0.1, -0.05], abs=1e-6)


def test_the_end_returns_the_last_observation_apart_and_the_first_of_the_next_episode() -> None:
    env = FakeEnv(1, terminate_after=2)
    env.reset(seed=3)
    zero = np.zeros((1, 2), np.float32)
    env.step(zero)
    obs, reward, terminated, truncated, infos = env.step(zero)
    assert (reward[0], terminated[0], truncated[0], infos["success"][0]) == (2.0, True, False, True)
    assert infos["final_obs"]["state"][0, :2].tolist() == [2, 0]
    assert obs["state"][0, :2].tolist() == [0, 1]


def test_reset_without_a_seed_goes_on_to_the_next_episode() -> None:
    env = FakeEnv(2)
    env.reset(seed=[10, 20])
    obs, _ = env.reset()
    assert obs["state"][:, 1:3].tolist() == [[1, 10], [1, 20]]
    obs, _ = env.reset(seed=[10, 30], options={"reset_mask": np.array([False, True])})
    assert obs["state"][:, 1:3].tolist() == [[1, 10], [0, 30]]
    obs, _ = env.reset(seed=[None, 40])
    assert obs["state"][:, 1:3].tolist() == [[2, 10], [0, 40]]
    obs, _ = env.reset(seed=[None, None])
    assert obs["state"][:, 1:3].tolist() == [[3, 10], [1, 40]]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1], "got 1 lengths, need 2"),
        (0, r"got \[0, 0\], allowed: 1 or more"),
        ([3, -1], r"got \[3, -1\], allowed: 1 or more"),
    ],
)
def test_bad_lengths_are_named(lengths: Lengths, message: str) -> None:
    with pytest.raises(ConfigError, match=f"FakeEnv.truncate_after: {message}"):
        FakeEnv(2, truncate_after=lengths)


def test_bad_calls_are_named() -> None:
    env = FakeEnv(2)
    with pytest.raises(ConfigError, match=r"unknown options \['mask'\]; allowed: reset_mask"):
        env.reset(options={"mask": None})
    with pytest.raises(ConfigError, match="got 3 seeds, need 2"):
        env.reset(seed=[1, 2, 3])
    with pytest.raises(ConfigError, match=r"got actions of shape \(2, 3\), need \(2, 2\): d0, d1"):
        env.step(np.zeros((2, 3), np.float32))
    with pytest.raises(ConfigError, match="got actions that are not finite"):
        env.step(np.full((2, 2), np.nan, np.float32))
    with pytest.raises(ConfigError, match=r"got rows of shape \(2, 3\), need \(2, 4\)"):
        env.set_state(np.zeros((2, 3)))


# FakeRobot


def test_a_robot_that_is_ok_goes_where_it_is_sent() -> None:
    # Half of 0.1 rad, at 20 Hz a velocity of 0.05 * 20 = 1 rad/s.
    robot, env = opened(ok)
    obs, _, _, _, infos = env.step(HALF)
    assert obs["state"][0] == pytest.approx([0.05] * 3 + [1.0] * 3)
    assert infos["commanded_action"][0] == pytest.approx([0.5] * 3)
    assert infos["executed_target_rad"][0] == pytest.approx([0.05] * 3)
    assert robot.sent[0] == pytest.approx([0.05] * 3)


def test_the_executed_target_is_the_one_after_safety() -> None:
    # From 0.98 a full step would reach 1.08; the limit is 1.0.
    robot, env = opened()
    robot.position_rad[:] = 0.98
    infos = env.step(2 * HALF)[4]
    assert infos["commanded_action"][0].tolist() == [1.0] * 3
    assert infos["executed_target_rad"][0] == pytest.approx([1.0] * 3, abs=1e-6)


def test_a_late_observation_is_refused_and_makes_the_robot_suspect() -> None:
    robot, env = opened(ok, late(ms=20), late(ms=40))
    env.step(HALF)
    env.step(HALF)  # allowed are 30 ms
    with pytest.raises(StaleObservationError, match="40 ms old, allowed is 30 ms"):
        env.step(HALF)
    assert robot.health().state == "suspect"
    env.step(HALF)
    assert len(robot.sent) == 4


def test_three_late_observations_take_the_robot_out_until_it_recovers() -> None:
    robot, env = opened(late(40), late(40), late(40))
    for _ in range(3):
        with pytest.raises(StaleObservationError):
            env.step(HALF)
    assert robot.health().state == "quarantined"
    with pytest.raises(DeviceError, match=r"quarantined 0.0 s ago after .*40 ms"):
        env.step(HALF)
    assert isinstance(robot.clock, ManualClock)
    robot.clock.advance(10.0)
    for _ in range(3):
        env.step(HALF)
    assert robot.health().state == "ok"


def test_a_dropped_connection_stays_dropped_until_it_is_mended() -> None:
    robot, env = opened(drop())
    with pytest.raises(DeviceError, match="fake_arm: connection lost in the middle of a step"):
        env.step(HALF)
    with pytest.raises(DeviceError, match="disconnected; check the cable, then reconnect"):
        env.step(HALF)
    with pytest.raises(DeviceError, match="disconnected"):
        robot.open(Ticket(2))
    assert robot.sent == []
    robot.reconnect()
    env.step(HALF)
    assert robot.health().state == "suspect"


def test_a_faulty_measurement_is_refused_and_nothing_is_sent() -> None:
    robot, env = opened(faulty())
    with pytest.raises(DeviceError, match="joint 0 measures nan; the observation is refused"):
        env.step(HALF)
    assert robot.sent == []
    told = "device fake_arm: joint 0 measures nan; the observation is refused, the target not sent."
    assert robot.health().reason == told


def test_a_protective_stop_needs_a_person() -> None:
    robot, env = opened(protective_stop())
    for _ in range(2):
        with pytest.raises(SafetyStopError, match=r"stopped by fake_arm .*protective stop of the arm"):
            env.step(HALF)
    with pytest.raises(SafetyStopError):
        env.reset()
    health = robot.health()
    assert (health.state, health.needs_person) == ("quarantined", True)
    robot.clear(by="ada")
    assert robot.health().state == "recovering"
    env.reset()
    env.step(HALF)
    assert len(robot.sent) == 1


def test_nan_never_reaches_the_arm() -> None:
    robot, env = opened()
    with pytest.raises(SafetyStopError, match="is not finite"):
        env.step(HALF * np.float32(np.nan))
    assert robot.sent == []
    assert robot.health().needs_person


def test_safe_stop_latches_once() -> None:
    robot, env = opened()
    robot.safe_stop()
    robot.safe_stop()
    assert robot.health().counts["failure"] == 1
    with pytest.raises(SafetyStopError, match="after 'safe_stop'; look at it"):
        env.step(HALF)


def test_an_episode_on_an_arm_ends_by_its_length_only() -> None:
    robot = FakeRobot(max_episode_steps=2)
    env = robot.open(Ticket())
    env.reset()
    done = env.step_chunk(np.zeros((1, 4, 3), np.float32), 4)
    assert done.valid.tolist() == [[True, True, False, False]]
    assert done.truncated.tolist() == [True]
    assert len(robot.sent) == 2
