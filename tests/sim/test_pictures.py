"""Cameras with a rate and a delay: which instant each control step shows, and how often is drawn."""

from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.hal import env_rules
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.cameras import Camera
from robot_rl.sim.pictures import CameraClock, Pictures
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from tests.sim.test_cameras import can_draw

Array = NDArray[Any]


class Clockwork:
    """A back end whose state is the time in physics steps of 5 ms; its pictures show it."""

    timestep_s = 0.005

    def __init__(self, num_envs: int) -> None:
        self.state, self.state_size = np.zeros((num_envs, 1)), 1
        self.drawn: list[tuple[str, list[int]]] = []

    def step(self, num_substeps: int, mask: Array | None = None) -> Array:
        self.state[:, 0] += num_substeps * (np.ones(len(self.state)) if mask is None else mask)
        return np.zeros(len(self.state), bool)

    def read_states(self) -> Array:
        return self.state

    def renderer(self, cameras: list[Camera], num_threads: int = 1) -> Any:
        assert num_threads == 1
        assert cameras
        return self

    def render_batch(
        self, ids: Array, camera: str, *, depth: bool = False, states: Array | None = None
    ) -> Array:
        assert not depth
        self.drawn.append((camera, ids.tolist()))
        return (self.state[ids] if states is None else states).copy()

    def close(self) -> None:
        pass


def clockwork(num_envs: int, **config: Any) -> tuple[Clockwork, Pictures]:
    """Returns both, at the beginning; ten physics steps are a control step of 50 ms, 20 Hz."""
    backend = Clockwork(num_envs)
    pictures = Pictures(EnvConfig(**config), cast("Backend", backend), num_envs, 10, 1)
    pictures.begin(np.arange(num_envs))
    return backend, pictures


def times(pictures: Pictures, camera: str = "top", num_envs: int = 1) -> list[int]:
    return pictures.show(np.arange(num_envs))[f"{camera}.rgb"][:, 0].astype(int).tolist()


@pytest.mark.parametrize(
    ("hz", "delay_s", "shown"),
    [
        # Every 10 steps, at once; and 4 steps later: the picture of 10 (50 ms) is there at 14, seen at 20.
        (20, 0, [0, 10, 20, 30, 40, 50]),
        (20, 0.02, [0, 0, 10, 20, 30, 40]),
        (20, 0.05, [0, 0, 10, 20, 30, 40]),
        (20, 0.051, [0, 0, 0, 10, 20, 30]),
        # Every 20 steps.
        (10, 0, [0, 0, 20, 20, 40, 40]),
        (10, 0.1, [0, 0, 0, 0, 20, 20]),
        # Every 25 steps (125 ms), 4 steps late: there at 29, 54, 79, 104; seen at 30, 60, 80, 110.
        (8, 0.02, [0, 0, 0, 25, 25, 25, 50, 50, 75, 75, 75, 100]),
        # Every 40/3 steps, taken at 13, 26, 40, 53.
        (15, 0, [0, 0, 13, 26, 40, 40, 53]),
    ],
)
def test_each_control_step_shows_the_instant_that_the_clock_says(
    hz: float, delay_s: float, shown: list[int]
) -> None:
    backend, pictures = clockwork(1, cameras=("top",), camera_hz=(hz,), camera_delay_s=(delay_s,))
    seen = times(pictures)
    for _ in shown[1:]:
        assert not pictures.step(None).any()
        seen += times(pictures)
    assert seen == shown
    assert len(backend.drawn) == len(set(shown))  # no picture is drawn twice
    assert backend.state[0, 0] == 10 * (len(shown) - 1)


def test_without_settings_each_control_step_shows_itself() -> None:
    _, pictures = clockwork(1, cameras=("top",))
    seen = [times(pictures)]
    for _ in range(3):
        pictures.step(None)
        seen.append(times(pictures))
    assert seen == [[0], [10], [20], [30]]
    assert pictures.rows().shape == (1, 0)  # the present state is enough


def test_each_camera_has_its_own_rate_and_delay() -> None:
    backend, pictures = clockwork(1, cameras=("top", "wrist"), camera_hz=(20, 5), camera_delay_s=(0.05, 0.0))
    for _ in range(5):
        pictures.step(None)
    assert times(pictures, "top") == [40]
    assert times(pictures, "wrist") == [40]  # every 40 steps
    pictures.step(None)
    backend.drawn.clear()
    assert times(pictures, "top") == [50]
    assert times(pictures, "wrist") == [40]
    assert backend.drawn == [("top", [0])]


def test_each_episode_has_its_own_beginning() -> None:
    backend, pictures = clockwork(2, cameras=("top",), camera_hz=(10,), camera_delay_s=(0.02,))
    for _ in range(3):
        pictures.step(None)
    assert times(pictures, num_envs=2) == [20, 20]  # there at 24, seen at 30
    backend.state[1] = 1000
    pictures.begin(np.array([1]))
    backend.drawn.clear()
    seen = []
    for _ in range(4):
        seen.append(times(pictures, num_envs=2))
        pictures.step(None)
    assert seen == [[20, 1000], [20, 1000], [40, 1000], [40, 1020]]
    assert backend.drawn == [("top", [1]), ("top", [0]), ("top", [1])]


def test_who_waits_keeps_its_picture_and_its_clock() -> None:
    _, pictures = clockwork(2, cameras=("top",), camera_hz=(10,))
    only = np.array([True, False])
    for _ in range(2):
        pictures.step(only)
    assert times(pictures, num_envs=2) == [20, 0]
    for _ in range(2):
        pictures.step(~only)
    assert times(pictures, num_envs=2) == [20, 20]


def test_what_nobody_looks_at_is_never_drawn_and_what_is_in_flight_arrives() -> None:
    backend, pictures = clockwork(1, cameras=("top",), camera_hz=(20,), camera_delay_s=(0.15,))
    for _ in range(7):
        pictures.step(None)
    assert backend.drawn == []
    assert times(pictures) == [40]
    assert backend.drawn == [("top", [0])]


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.333, 1.0])
@pytest.mark.parametrize("hz", [0.5, 3, 7, 15, 20])
def test_what_waits_goes_on_after_a_restart(hz: float, delay_s: float) -> None:
    config = {"cameras": ("top",), "camera_hz": (hz,), "camera_delay_s": (delay_s,)}
    for cut in (0, 1, 7, 30):
        one, first = clockwork(1, **config)
        for _ in range(cut):
            first.step(None)
        other, second = clockwork(1, **config)
        other.state[:] = one.state
        second.put(np.arange(1), first.rows())
        for _ in range(30):
            assert times(second) == times(first)
            now = one.state[0, 0]  # the least age, by the definition: k periods, rounded down to a step
            taken = np.floor(np.arange(200) * 200 / hz + 1e-9)
            assert times(first) == [taken[taken <= max(0, now - delay_s * 200 + 1e-9)].max()]
            first.step(None)
            second.step(None)


def test_pictures_in_flight_are_bounded() -> None:
    clock = CameraClock.of(15, 0.2, timestep_s=0.005, num_substeps=10)
    assert clock.period == Fraction(40, 3)
    assert clock.delay == 40
    assert clock.num_in_flight == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"camera_hz": (0.0,)}, r"env.camera_hz: got \(0.0,\), allowed: above 0"),
        (
            {"camera_hz": (5.0, 5.0)},
            r"env.camera_hz: got .*, allowed: one number, or one for each of env.cameras",
        ),
        ({"camera_delay_s": (-0.1,)}, r"env.camera_delay_s: got \(-0.1,\), allowed: 0 to 1"),
        ({"camera_delay_s": (20.0,)}, r"env.camera_delay_s: got \(20.0,\), allowed: 0 to 1"),
        ({"camera_delay_s": (float("nan"),)}, r"env.camera_delay_s: got \(nan,\), allowed: 0 to 1"),
    ],
)
def test_nonsense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvConfig(cameras=("left",), **config)


def test_a_camera_faster_than_the_control_rate_is_refused() -> None:
    need = r"env.camera_hz: got 30, allowed: at most 20, the control rate. .* as env.camera_delay_s"
    with pytest.raises(ConfigError, match=need):
        SimVectorEnv(EnvConfig(task="reach", cameras=("left",), camera_hz=(30.0,)), 1)


def late(
    num_envs: int, camera_hz: tuple[float, ...] = (12.5,), camera_delay_s: tuple[float, ...] = (0.045,)
) -> SimVectorEnv:
    """Ten control steps of 50 ms are an episode; pictures every 80 ms, shown 45 ms later."""
    config = EnvConfig(
        task="reach",
        cameras=("front",),
        image_size=(8, 12),
        depth=True,
        horizon_s=0.5,
        num_threads=1,
        camera_hz=camera_hz,
        camera_delay_s=camera_delay_s,
    )
    return SimVectorEnv(config, num_envs)


def test_a_simulation_shows_the_states_between_control_steps() -> None:
    if not can_draw():
        return  # test_cameras has checked the error
    env, plain = late(1), late(1, camera_hz=(), camera_delay_s=())
    action = np.full((1, len(env.action_names)), 0.7, np.float32)
    before, (obs, _) = plain.reset(seed=3)[0], env.reset(seed=3)
    np.testing.assert_array_equal(obs["front.rgb"], before["front.rgb"])
    states, step = [plain.get_state()], plain.backend.step

    def step_by_step(num_substeps: int, mask: Array | None = None) -> Array:
        for _ in range(num_substeps):
            step(1, mask)
            states.append(plain.get_state())
        return np.zeros(1, bool)

    cast("Any", plain.backend).step = step_by_step
    renderer = plain.backend.renderer([Camera(name="front", width=12, height=8)])
    # Taken every 16 steps, shown 9 later: there at 25, 41, 57; seen at 30, 50, 60.
    for instant in (0, 0, 16, 16, 32):
        obs = env.step(action)[0]
        np.testing.assert_array_equal(obs["state"], plain.step(action)[0]["state"])
        for key, depth in (("front.rgb", False), ("front.depth", True)):
            need = renderer.render_batch(np.zeros(1, int), "front", depth=depth, states=states[instant])
            np.testing.assert_array_equal(obs[key], need)
    assert (obs["front.depth"] != before["front.depth"]).any()  # the arm has moved
    for each in (renderer, env, plain):
        each.close()


def test_late_pictures_keep_the_rules_of_envs() -> None:
    if not can_draw():
        return
    case = env_rules.Case(late, 3, seed=7, max_steps=20)
    env_rules.check_chunk(case, length=11)
    env_rules.check_state_rows(case)
    env_rules.check_resume(case, length=6)


def test_a_diverged_simulation_shows_its_last_good_state() -> None:
    if not can_draw():
        return
    env = late(2)
    env.reset(seed=0)
    action = np.zeros((2, len(env.action_names)), np.float32)
    env.step(action)
    on_cpu(env.backend).state[1, 2] = np.nan
    infos = env.step(action)[4]
    assert infos["diverged"].tolist() == [False, True]
    assert np.isfinite(infos["final_obs"]["front.depth"]).all()
    env.close()
