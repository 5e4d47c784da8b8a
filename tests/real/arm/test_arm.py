"""The whole arm without ROS, on MuJoCo: episodes, stops, the bad line, the record."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.real.arm.arm import SimArm
from robot_rl.real.arm.config import SimArmConfig
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

POSITION = ("joint_state_broadcaster", "forward_position_controller", "gripper_controller")
MS = 1_000_000


def make(**values: Any) -> SimArm:
    settings: dict[str, Any] = {"task": "pick_cube", "active": POSITION, **values}
    return SimArm(SimArmConfig(**settings))


def run(arm: SimArm, duration_s: float, dt_s: float = 0.005) -> None:
    for _ in range(round(duration_s / dt_s)):
        arm.cycle(round(1e9 * dt_s) * arm.num_cycles, 0, dt_s)


def test_an_expert_picks_the_cube_as_in_the_env() -> None:
    """The env's own commands at 20 Hz, forwarded at 200 Hz: the same motion, bit for bit, and no stop."""
    env = SimVectorEnv(EnvConfig(task="pick_cube", num_threads=1), 1, autoreset="disabled")
    env.reset(seed=[11])
    arm = make(seed=11)
    expert, servos = env.expert(), env.backend.bind("ctrl")
    success = False
    for _ in range(100):
        *_, infos = env.step(expert.act())
        arm.position.set(servos[0, :7].copy())
        arm.gripper.set(float(servos[0, 7]))
        run(arm, 0.05)
        assert arm.plant.state().tobytes() == env.get_state()[0].tobytes()
        success = success or bool(infos["success"][0])
        if success:
            break
    assert success
    assert arm.body.num_stops == 0
    assert arm.body.num_beyond_limits == 0


def test_a_stop_ends_everything_until_it_is_cleared() -> None:
    arm = make()
    start = arm.body.truth.position_rad
    arm.position.set(start + 0.3)
    run(arm, 0.1)
    assert arm.stop("a person") == (True, "stopped: a person")
    moving = arm.body.truth
    run(arm, 1.0)
    stopped = arm.body.truth
    # Evenly to rest within 0.2 s is a tenth of a second of the speed it had; a soft servo adds its lag.
    limit = 0.25 * np.abs(moving.velocity_rad_s) + 0.01
    assert (np.abs(stopped.position_rad - moving.position_rad) < limit).all()
    assert np.abs(stopped.velocity_rad_s).max() < 0.01
    assert not arm.listens("forward_position_controller")
    arm.commands.send((arm.position.set, start), 0)
    assert arm.body.state.stop_reason == "a person"
    assert arm.clear() == (True, "clear")
    run(arm, 0.5)
    assert (
        np.abs(arm.body.truth.position_rad - stopped.position_rad).max() < 0.01
    )  # nothing old is carried out


def test_power() -> None:
    arm = make()
    assert arm.power(on=False) == (True, "power is off")
    run(arm, 0.1)
    assert arm.clear() == (False, "power is off: call power_on.")
    assert arm.power(on=True) == (True, "power is on")
    assert arm.body.stop_reason == ""


def test_an_episode_begins_anew() -> None:
    arm = make()
    arm.position.set(arm.body.truth.position_rad + 0.2)
    run(arm, 0.3)
    arm.set_episode(5)
    env = SimVectorEnv(EnvConfig(task="pick_cube", num_threads=1), 1, autoreset="disabled")
    env.reset(seed=[5])
    assert arm.plant.state().tobytes() == env.get_state()[0].tobytes()
    before = arm.body.truth.position_rad
    run(arm, 0.5)
    assert np.abs(arm.body.truth.position_rad - before).max() < 1e-3  # nothing pulls it back


def test_a_late_command_is_late() -> None:
    arm = make(delay_ms=20.0)
    wanted = arm.body.truth.position_rad + 0.1
    arm.commands.send((arm.position.set, wanted), 0)
    moved = []
    for k in range(8):
        arm.cycle(k * 5 * MS, 0, 0.005)
        moved.append(bool((arm.body.target_rad == wanted).all()))
    assert moved == [False] * 4 + [True] * 4


def test_the_record_keeps_what_came_and_what_was_applied(tmp_path: Path) -> None:
    arm = make(log=str(tmp_path / "truth.npz"), encoder_noise_rad=0.01)
    run(arm, 0.05)
    beyond = arm.body.truth.position_rad.copy()
    beyond[0] = 3.5  # its limit is 2.8973
    arm.position.set(beyond)
    run(arm, 0.02)
    arm.position.set(np.full(7, np.nan))
    run(arm, 0.03)
    assert arm.save_log() == tmp_path / "truth.npz"
    with np.load(tmp_path / "truth.npz") as log:
        assert log["joint_names"].tolist() == [f"joint{i}" for i in range(1, 8)]
        assert log["position_rad"].shape == log["commanded_rad"].shape == (20, 7)
        assert log["objects"].shape == (20, 2, 7)
        assert log["commanded_rad"][10:14, 0].tolist() == [3.5] * 4
        assert log["applied_rad"][10:14, 0].tolist() == [2.8973] * 4
        assert np.isnan(log["commanded_rad"][14]).all()
        assert log["stopped"].tolist() == [False] * 14 + [True] * 6
        assert np.isfinite(log["applied_rad"]).all()
        assert np.diff(log["stamp_ns"]).tolist() == [5 * MS] * 19
        # The truth of an arm that rests has no noise: below a milliradian in the first cycles.
        assert np.abs(np.diff(log["position_rad"][:10], axis=0)).max() < 1e-3
    assert arm.body.num_beyond_limits == 4


def test_a_long_stall_does_not_tear_the_simulation() -> None:
    arm = make()
    arm.cycle(0, 0, 30.0)
    assert arm.sim_ns == 100 * MS


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rate_hz": 0.0}, "rate_hz: got 0.0, allowed: 1 to 1000"),
        ({"loss": 1.5}, "loss: got 1.5, allowed: 0 to below 1"),
        ({"log": "truth.csv"}, r"log: got 'truth.csv', allowed: a file that ends in .npz, or null"),
        ({"active": ("ghost",)}, "active: got .'ghost',., allowed: of joint_state_broadcaster, joint_traj"),
    ],
)
def test_settings_are_checked(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**values)


def test_two_controllers_of_one_joint_cannot_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="active: Resource conflict for controller 'forward_position_contr"):
        make(active=("joint_trajectory_controller", "forward_position_controller"))
