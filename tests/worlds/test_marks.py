"""What moves does not read where a mark is."""

from dataclasses import replace

import numpy as np
import pytest

from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.build import RealEnv
from robot_rl.worlds.ensemble import Ensemble
from robot_rl.worlds.fit import Fitter, new_model, open_loop
from robot_rl.worlds.history import AUDIT, History, Windows
from tests.worlds.conftest import FIT, SMALL, point_history

NAMES = ("x", "y", "goal.0", "goal.1", "goal_in_point.0", "goal_in_point.1")


@pytest.fixture(scope="module")
def seen_from_point() -> History:
    """Returns episodes in which the state also says where the goal is from the point."""
    found = point_history()
    state = np.concatenate([found.state, found.state[:, 2:] - found.state[:, :2]], axis=1)
    return replace(found, state=state, meta=replace(found.meta, state_names=NAMES))


@pytest.fixture(scope="module")
def model(seen_from_point: History) -> Ensemble:
    found = new_model(SMALL, seen_from_point, marks=("goal",), seed=0)
    Fitter(found, seen_from_point, FIT, seed=0).run()
    assert isinstance(found, Ensemble)
    return found


def test_another_goal_changes_nothing_that_moves(model: Ensemble, seen_from_point: History) -> None:
    assert model.aside == (2, 3, 4, 5)
    windows = Windows(seen_from_point, seen_from_point.split(AUDIT), stride=4)
    rows = windows.rows[:20]
    window, actions, m = windows.at(rows), windows.actions(rows), np.full(20, 4)
    before = model.predict(window, actions, m).mean
    window.state[:, 2:] += 0.3
    window.past_state[:, 2:] += 0.3
    after = model.predict(window, actions, m).mean
    assert (before[..., :2] == after[..., :2]).all()
    assert np.allclose(after[..., 4:] - before[..., 4:], 0.3, atol=0.05)


def test_where_the_mark_is_from_a_thing_is_learned(model: Ensemble, seen_from_point: History) -> None:
    windows = Windows(seen_from_point, seen_from_point.split(AUDIT), stride=4)
    error = open_loop(model, windows, windows.rows)[0][0]  # of x, y and the goal from the point
    assert error.shape[-1] == 4
    assert np.sqrt((error**2).mean()) < 0.1


def test_marks_of_settings_come_before_those_of_a_scene(seen_from_point: History) -> None:
    for marks, aside in (((), ()), (("point",), (4, 5))):
        found = new_model(replace(SMALL, marks=marks), seen_from_point, marks=("goal",), seed=0)
        assert isinstance(found, Ensemble)
        assert found.aside == aside


@pytest.mark.parametrize(("task", "marks"), [("push_cube", ("goal",)), ("gantry_peg", ())])
def test_a_mark_is_what_nothing_can_touch(task: str, marks: tuple[str, ...]) -> None:
    """The hole of a block has walls: physics reads where it is."""
    env = EnvConfig(task=task)
    with opened(simulation(env, 1), holder="test", wait_s=60.0) as real:
        assert RealEnv.of(env, real).marks == marks
