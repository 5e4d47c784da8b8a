"""Robots that lack cameras which others have, and robots at a rate of their own."""

from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.hal.conformance import check_vector_env
from robot_rl.rollout.envs import make_expert
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

SEEING: dict[str, Any] = {"cameras": ("front", "side"), "image_size": (16, 24)}


def make(num_envs: int = 2, **config: Any) -> SimVectorEnv:
    return SimVectorEnv(EnvConfig(task="reach", num_threads=1, **config), num_envs, autoreset="disabled")


def test_a_camera_that_a_robot_lacks_is_black_and_changes_nothing_else() -> None:
    both, one = make(**SEEING, depth=True), make(**SEEING, depth=True, missing_cameras=("front",))
    assert one.observation_space == both.observation_space
    (seen, _), (shown, _) = both.reset(seed=4), one.reset(seed=4)
    for _ in range(3):
        assert one.observation_space.contains(shown)
        for key in ("front.rgb", "front.depth"):
            assert seen[key].any()
            assert not shown[key].any()
        for key in seen.keys() - {"front.rgb", "front.depth"}:
            np.testing.assert_array_equal(shown[key], seen[key])
        action = np.full((2, len(one.action_names)), 0.3, np.float32)
        seen, shown = both.step(action)[0], one.step(action)[0]


def test_each_camera_that_is_there_keeps_its_own_rate_and_delay() -> None:
    late: dict[str, Any] = {"camera_hz": (20.0, 5.0), "camera_delay_s": (0.0, 0.1)}
    both, one = make(**SEEING, **late), make(**SEEING, **late, missing_cameras=("front",))
    (seen, _), (shown, _) = both.reset(seed=4), one.reset(seed=4)
    for _ in range(9):
        np.testing.assert_array_equal(shown["side.rgb"], seen["side.rgb"])
        action = np.full((2, len(one.action_names)), 0.3, np.float32)
        seen, shown = both.step(action)[0], one.step(action)[0]


def test_a_robot_without_any_camera_needs_nothing_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("nothing is drawn")

    monkeypatch.setattr("robot_rl.sim.backends.mujoco_cpu.Renderers", refuse)
    obs, _ = make(**SEEING, missing_cameras=("front", "side")).reset(seed=1)
    assert obs["side.rgb"].shape == (2, 16, 24, 3)


@pytest.mark.parametrize(("hz", "substeps", "horizon"), [(10.0, 20, 25), (40.0, 5, 100), (8.0, 25, 20)])
def test_a_rate_changes_how_long_a_control_step_is_and_nothing_of_an_episode(
    hz: float, substeps: int, horizon: int
) -> None:
    env = make(1, control_hz=hz)
    assert (env.control_hz, env.num_substeps, env.horizon) == (hz, substeps, horizon)
    assert make(1).horizon / make(1).control_hz == horizon / hz
    env.reset(seed=1)
    before_s = float(env.backend.bind("time")[0])
    for _ in range(4):
        env.step(np.zeros((1, len(env.action_names)), np.float32))
    assert float(env.backend.bind("time")[0]) - before_s == pytest.approx(4 / hz)


def test_a_goal_is_held_for_as_long_at_any_rate() -> None:
    """A quarter of a second is 5 control steps at 20 Hz, and 3 at 10 Hz: never less."""
    for hz, steps in ((20.0, 5), (10.0, 3), (2.0, 1)):
        env = SimVectorEnv(EnvConfig(task="bimanual_reach", num_threads=1, control_hz=hz), 1)
        assert env._hold_steps == steps


@pytest.mark.parametrize("hz", [10.0, 40.0])
def test_an_action_is_a_lead_of_the_servos_at_any_rate(hz: float) -> None:
    """A servo that closes 10 of the lead in a second has closed 1 - exp(-10 / hz) of it in a control step."""
    moved = list[Any]()
    for env in (make(8, control_hz=hz), make(8)):
        env.reset(seed=5)
        begin = env.view["tool.pos"].copy()
        for _ in range(round(env.control_hz)):
            env.step(np.tile(np.array([[0.3, 0.2, 0.1, 1.0]], np.float32), (8, 1)))
        moved.append(np.linalg.norm(env.view["tool.pos"] - begin, axis=1))
    speed = [rate * -np.expm1(-10.0 / rate) for rate in (hz, 20.0)]
    np.testing.assert_allclose(moved[0] / moved[1], speed[0] / speed[1], rtol=0.05)


@pytest.mark.parametrize("hz", [10.0, 40.0])
def test_the_expert_solves_the_task_at_any_rate(hz: float) -> None:
    env, arrived = make(8, control_hz=hz), np.zeros(8, bool)
    env.reset(seed=6)
    expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
    for _ in range(env.horizon):
        arrived |= env.step(expert.act())[4]["success"]
    assert arrived.all()


def test_an_env_with_a_rate_and_a_lacking_camera_keeps_the_rules() -> None:
    check_vector_env(lambda count: make(count, control_hz=10.0, **SEEING, missing_cameras=("side",)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"control_hz": 30.0}, "env.control_hz: got 30.0, allowed: 200, the rate of the physics, divided by"),
        ({"control_hz": 400.0}, "env.control_hz: got 400.0, allowed: 200, the rate of the physics"),
        ({"control_hz": 0.0}, "env.control_hz: got 0.0, allowed: above 0"),
        ({**SEEING, "missing_cameras": ("wrist",)}, r"env.missing_cameras: got \('wrist',\), allowed: names"),
        ({"control_hz": 10.0, "cameras": ("front",), "camera_hz": (20.0,)}, "env.camera_hz: got 20, allowed"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(1, **config)
