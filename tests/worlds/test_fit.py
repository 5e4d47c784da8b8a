"""The ensemble and its fit, on a system that it can learn."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from robot_rl.core.errors import DatasetError
from robot_rl.worlds.ensemble import Ensemble
from robot_rl.worlds.fit import Fitter, beta_nll, check_enough, fewest, new_model, open_loop
from robot_rl.worlds.history import AUDIT, CALIBRATION, History, Windows
from robot_rl.worlds.saved import World
from tests.worlds.conftest import FIT, SMALL, SPEED, point_history


def test_a_linear_system_is_learned(world: World, history: History) -> None:
    windows = Windows(history, history.split(AUDIT), stride=4)
    error = open_loop(world.model, windows, windows.rows)[0][0]
    assert np.sqrt((error**2).mean()) < 0.1  # of the change in a stride


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_state_after_m_steps_is_that_of_the_first_m_actions(
    world: World, history: History, steps: int
) -> None:
    windows = Windows(history, history.split(AUDIT), stride=4)
    rows, actions = windows.rows[:50], windows.actions(windows.rows[:50])
    m = np.full(len(rows), steps)
    said = world.model.predict(windows.at(rows), actions, m).mean.mean(dim=0).numpy()
    moved = SPEED * actions[:, :steps].sum(axis=1)
    need = history.state[rows, :2] + moved
    assert np.sqrt(((said[:, :2] - need) ** 2).mean()) < 0.15 * np.sqrt((moved**2).mean())
    changed = actions.copy()
    changed[:, steps:] = -1.0
    again = world.model.predict(windows.at(rows), changed, m).mean.mean(dim=0).numpy()
    assert np.array_equal(said, again)


def test_what_does_not_change_in_an_episode_is_copied(world: World, history: History) -> None:
    assert world.model.moves.tolist() == [1, 1, 0, 0]
    windows = Windows(history, history.split(AUDIT), stride=4)
    rows = windows.rows[:20]
    found = world.model.predict(windows.at(rows), windows.actions(rows), np.full(20, 4))
    assert torch.equal(found.mean[:, :, 2:], torch.from_numpy(history.state[rows, 2:]).expand(3, 20, 2))
    assert not found.std[..., 2:].any()


def test_members_are_independent(history: History) -> None:
    model = Ensemble(SMALL, 4, 2)
    fitter = Fitter(model, history, FIT, seed=0)
    before = [layer.clone() for layer in model.layers.parameters()]
    loss = fitter._loss(model, fitter._one, np.zeros((3, 8), np.int64) + fitter._one.rows[0], 1)
    gradient = torch.autograd.grad(loss, list(model.layers.parameters()))
    assert all(g.shape[0] == 3 for g in gradient)
    assert all(not torch.equal(w[0], w[1]) for w in before if w.dim() == 3 and w.std() > 0 and w.numel() > 96)


def test_the_likelihood_by_hand() -> None:
    # One member, one row, one element: error 2, deviation e^0 = 1: 0.5 * 4 = 2, weighted by 1.
    # With deviation 2: 0.5 * (4 / 4 + 2 log 2), weighted by its variance to the 0.5: times 2.
    change, moves = torch.zeros(1, 1, 1), torch.ones(1)
    needed = torch.full((1, 1, 1), 2.0)
    assert float(beta_nll(change, torch.zeros(1, 1, 1), needed, moves)) == pytest.approx(2.0)
    wide = torch.full((1, 1, 1), float(np.log(2.0)))
    assert float(beta_nll(change, wide, needed, moves)) == pytest.approx(2 * 0.5 * (1 + 2 * np.log(2.0)))


def test_a_fit_that_was_cut_short_goes_on_to_the_same_losses(history: History) -> None:
    short = replace(FIT, updates=12, select_every=4)

    def fitter() -> Fitter:
        return Fitter(new_model(SMALL, history, seed=0), history, short, seed=0)

    whole = fitter()
    losses = [float(whole.update()) for _ in range(12)]
    first = fitter()
    for _ in range(5):
        first.update()
    second = fitter()
    second.load_state_dict(first.state_dict())
    assert [float(second.update()) for _ in range(7)] == losses[5:]


def test_too_few_episodes_say_how_many_are_enough() -> None:
    # Each of 24 steps has 21 windows of 4, so 200 need ten for calibration: the tenth of these is the 71st.
    few = point_history(8)
    assert point_history(80).split(CALIBRATION)[9] == 70
    words = (
        r"got 8 episodes \(6 to learn from, 2 for calibration, 0 to judge\), need 71 or more like these: 20"
    )
    with pytest.raises(
        DatasetError, match=words + r".* and 200 windows for calibration, got 42\. .*curve=true"
    ):
        Fitter(new_model(SMALL, few, seed=0), few, FIT, seed=0)
    with pytest.raises(DatasetError, match=r"need 71 .* Collect more: so says the curve\."):
        check_enough(few, 4, curve="so says the curve")
    check_enough(point_history(71), 4)


def test_episodes_that_are_too_short_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"need longer ones: few have the 25 steps of a stride"):
        check_enough(point_history(8), 25)
    # With 200 windows each, two of each part do: the second to judge is the 21st, that to calibrate the 7th.
    assert point_history(80).split(AUDIT)[1] == 20
    assert fewest(200.0) == 21
