"""Films of environments of others: what is drawn of an episode, and why some are not."""

import builtins
from collections.abc import Generator
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from robot_rl.cli.main import main
from robot_rl.config import build
from robot_rl.core.errors import RenderError
from robot_rl.envs.gym import GymVectorEnv
from robot_rl.hal.leased import LeasedEnv
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.stepping import lockstep
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import RunConfig, VideoConfig
from robot_rl.train.phases import run
from robot_rl.train.pictures import Photographer
from tests.runs import folder_of
from tests.train.test_gym_run import SMALL

SEEDS = np.array([100, 101, 102], np.uint64)


class Drawing(gymnasium.Env[Any, Any]):
    """Five steps at 60 Hz, each drawn in a grey of its own; with an even seed it fails."""

    observation_space = Box(-10.0, 10.0, (1,))
    action_space = Box(-1.0, 1.0, (1,))
    dt = 1 / 60
    drawn = 0

    def __init__(
        self, render_mode: str | None = None, broken: bool = False, silent: bool = False, **how: Any
    ) -> None:
        self.render_mode, self.broken, self.silent = render_mode, broken, silent

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.is_odd, self.count = bool((seed or 0) % 2), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        ended = self.count == 5
        said = {} if self.silent else {"success": ended and self.is_odd}
        return np.full(1, self.count, np.float32), 0.0, ended, False, said

    def render(self) -> Any:
        if self.broken:
            raise ImportError("pygame is not installed")
        type(self).drawn += 1
        return np.full((6, 8, 3), 40 * self.count, np.uint8)


class Blind(Drawing):
    """Has a window and no pictures."""


Drawing.metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 60}
Blind.metadata = {"render_modes": ["human"]}


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    Drawing.drawn = 0
    gymnasium.register("robot_rl_tests/Drawing-v0", Drawing, max_episode_steps=9)
    gymnasium.register("robot_rl_tests/Blind-v0", Blind, max_episode_steps=9)
    yield
    for name in ("Drawing", "Blind"):
        gymnasium.registry.pop(f"robot_rl_tests/{name}-v0")


def watched(tmp_path: Path, draws: bool = True, name: str = "Drawing", **settings: Any) -> Any:
    """Plays an episode for each of the seeds under a photographer; returns the gallery."""
    config = EnvConfig(kind="gym", id=f"robot_rl_tests/{name}-v0", settings=settings)
    with opened(simulation(config, 3, draws=draws), holder="a test") as env:
        photographer = Photographer(env, SEEDS, VideoConfig(episodes=2, failures=5))
        for moment in lockstep(env, SEEDS, lambda obs, infos: None, lambda obs: np.zeros((3, 1), np.float32)):
            photographer(slice(0, 3), moment)
        found = photographer.save(tmp_path, "final")
        photographer.close()
    return found


def test_a_film_has_30_pictures_a_second_and_the_end(tmp_path: Path) -> None:
    gallery = watched(tmp_path)
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == [
        "final-seed100.mp4",
        "final-seed101.mp4",
    ]
    film = av.open(str(tmp_path / "videos/final-seed100.mp4"))
    frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert film.streams.video[0].average_rate == 30
    film.close()
    # Of the steps 1 to 5, every second from the first: 1, 3 and the last.
    assert [float(frame.mean()) for frame in frames] == pytest.approx([40, 120, 200], abs=6)
    # Seeds 100 and 102 fail; what 100 looked like at its end.
    assert [(entry["file"], entry["seed"]) for entry in gallery] == [
        ("final-seed100.png", 100),
        ("final-seed102.png", 102),
    ]
    assert (tmp_path / "failures/final-seed102.png").is_file()
    # One to see whether it can, three of each film, two failures.
    assert Drawing.drawn == 1 + 2 * 3 + 2


def test_where_nobody_says_success_nothing_has_failed(tmp_path: Path) -> None:
    assert watched(tmp_path, silent=True) == []
    assert len(list((tmp_path / "videos").iterdir())) == 2


def test_nothing_is_drawn_where_no_film_is_wanted(tmp_path: Path) -> None:
    config = EnvConfig(kind="gym", id="robot_rl_tests/Drawing-v0")
    with opened(simulation(config, 1), holder="a test") as env:
        assert isinstance(env, LeasedEnv)
        assert env.render_mode is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"draws": False},
            r"render_mode None, need 'rgb_array'; the environment has human, rgb_array\. Without",
        ),
        (
            {"name": "Blind"},
            r"Blind-v0: it draws no pictures: .* the environment has human\. Without films: vid",
        ),
        (
            {"broken": True},
            r"cannot draw here: pygame is not installed\. Without films: video",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=message) as caught:
        watched(tmp_path, **how)
    assert "\n" not in str(caught.value)


def test_pendulum_without_pygame(monkeypatch: pytest.MonkeyPatch) -> None:
    env = GymVectorEnv("Pendulum-v1", settings={"render_mode": "rgb_array"})
    env.reset(seed=0)
    load = builtins.__import__

    def without_pygame(name: str, *rest: Any) -> Any:
        if name.startswith("pygame"):
            raise ImportError(f"No module named {name!r}")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pygame)
    with pytest.raises(RenderError, match=r"pygame is not installed, run .*gymnasium\[classic_control\]"):
        env.picture()


@pytest.mark.usefixtures("whole_runs")
def test_an_environment_of_others_is_filmed_when_it_is_evaluated(tmp_path: Path) -> None:
    env = {"kind": "gym", "id": "robot_rl_tests/Drawing-v0"}
    shown = {"episodes": 0, "failures": 0}
    run(build(RunConfig, {**SMALL, "env": env, "video": shown, "out": str(tmp_path / "runs")}))
    assert Drawing.drawn == 0
    film = tmp_path / "film.mp4"
    words = [f"run={folder_of(tmp_path / 'runs')}", f"video={film}", "video_episodes=2"]
    assert main(["evaluate", *words]) == 0
    with av.open(str(film)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height) == (16, 6)  # two episodes of 8 x 6 pixels
