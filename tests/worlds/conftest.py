"""A point that moves where it is pushed, and a world model of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robot_rl.data.episodes import EpisodesMeta
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.audit import measured
from robot_rl.worlds.config import EnsembleConfig, FitConfig, TrustConfig
from robot_rl.worlds.fit import Fitter, new_model
from robot_rl.worlds.history import History
from robot_rl.worlds.outcome import ClassifierOutcome
from robot_rl.worlds.saved import World

STEPS, SPEED, RADIUS = 24, 0.05, 0.2
META = EpisodesMeta(
    task="point",
    robot="point",
    control_hz=20.0,
    instruction="go to the goal",
    state_names=("x", "y", "goal.0", "goal.1"),
    action_names=("vx", "vy"),
)
SMALL = EnsembleConfig(members=3, width=32, depth=2, stride=4)
FIT = FitConfig(updates=500, batch=64, ahead=2, select_every=100, noise=0.0)


def point_history(episodes: int = 100, *, seed: int = 0, noise: float = 0.0) -> History:
    """Returns episodes of a point that moves SPEED times its action; it goes on where it is solved."""
    rng = np.random.default_rng(seed)
    length = STEPS + 1
    state = np.zeros((episodes, length, 4), np.float32)
    action = rng.uniform(-1, 1, (episodes, length, 2)).astype(np.float32)
    action += rng.uniform(-0.5, 0.5, (episodes, 1, 2)).astype(np.float32)
    action = np.clip(action, -1, 1)
    action[:, -1] = 0.0
    state[:, 0, :2] = rng.uniform(-0.2, 0.2, (episodes, 2))
    state[:, :, 2:] = rng.uniform(-0.4, 0.4, (episodes, 1, 2))
    for t in range(STEPS):
        push = SPEED * action[:, t] + noise * rng.standard_normal((episodes, 2))
        state[:, t + 1, :2] = state[:, t, :2] + push
    success = np.linalg.norm(state[..., :2] - state[..., 2:], axis=-1) < RADIUS
    success[:, 0] = False
    first = np.arange(episodes) * length
    return History(
        meta=META,
        state=state.reshape(-1, 4),
        action=action.reshape(-1, 2),
        success=success.reshape(-1),
        episode=np.repeat(np.arange(episodes), length),
        first=first,
        last=first + STEPS,
        ended=success[:, -1],
    )


def made(history: History, *, fit: FitConfig = FIT, limits: TrustConfig | None = None) -> World:
    """Returns a model that was fitted to a history, with its report."""
    model = new_model(SMALL, history, seed=0)
    Fitter(model, history, fit, seed=0).run()
    judge = ClassifierOutcome(4)
    judge.fit(history, updates=250)
    how: dict[str, Any] = {"env": EnvConfig(task="reach"), "horizon": STEPS, "version": 1}
    return measured(model, judge, history, limits=limits or TrustConfig(), **how)[0]


@pytest.fixture(scope="session")
def history() -> History:
    return point_history()


@pytest.fixture(scope="session")
def made_once(history: History) -> World:
    return made(history)


@pytest.fixture
def world(made_once: World) -> World:
    """A copy: a test may change its report and its limits."""
    return replace(made_once)
