"""Baselines that need no training, against numbers worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_rl.data.lerobot.pictures import PictureCache
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.train.finetune.baselines import (
    LAGS,
    Ridge,
    fit_ridge,
    mean_action,
    past_of,
    predictor,
    simple_baselines,
)
from robot_rl.train.finetune.data import DemoData, moving_joints
from robot_rl.train.finetune.errors import Ruler
from robot_rl.train.finetune.past import Known, Past
from robot_rl.train.finetune.split import Split


@pytest.fixture
def data(dataset: Path) -> DemoData:
    """Five episodes to learn from; action t is state t + 1, so the last action is the present state."""
    split = Split((0, 1, 2, 3, 4), (5, 6))
    return DemoData(Dataset(dataset), split, picture=None, device="cpu", cache=PictureCache())


def known(state: np.ndarray, last_action: np.ndarray) -> Known:
    """The past of moments at which nothing moves."""
    rows = len(state)
    return Known(
        state=state,
        state_change=np.zeros((rows, len(LAGS) * state.shape[1])),
        last_action=last_action,
        action_change=np.zeros((rows, len(LAGS) * last_action.shape[1])),
    )


def test_the_past_is_what_came_before(data: DemoData) -> None:
    (batch,) = data.batches([6], horizon=3, stride=1, pictures=False)
    read = Dataset(data.dataset.folder).read(6)
    state, action = np.asarray(read.obs["state"]), np.asarray(read.action)
    past = past_of(data).of(batch)
    np.testing.assert_array_equal(past.last_action[1:], action[:-1])
    np.testing.assert_array_equal(past.last_action[0], state[0])  # no action yet: the present joints
    one, four = np.split(past.state_change, 2, axis=1)  # LAGS
    np.testing.assert_allclose(one[1:], np.diff(state, axis=0))
    np.testing.assert_allclose(four[4:], state[4:] - state[:-4])
    np.testing.assert_allclose(four[:4], state[:4] - state[0])  # nothing before the first step
    of_actions = past.action_change[:, :2]
    np.testing.assert_allclose(of_actions[2:], action[1:-1] - action[:-2])
    assert not of_actions[:2].any()  # one action or none: no velocity yet


def test_the_simple_ones_hold_one_action(data: DemoData) -> None:
    (batch,) = data.batches([6], horizon=3, stride=1, pictures=False)
    actions, state = batch.actions.numpy(), batch.obs["state"].numpy()
    found = {
        name: predictor(policy, past_of(data))(batch)
        for name, policy in simple_baselines(data, past_of(data), horizon=3).items()
    }
    train = np.concatenate([np.asarray(data.dataset.read(episode).action) for episode in range(5)])
    for place in range(3):
        np.testing.assert_allclose(found["mean action"][:, place], np.tile(train.mean(0), (20, 1)), rtol=1e-6)
        np.testing.assert_array_equal(found["last action"][1:, place], actions[:-1, 0])
        np.testing.assert_array_equal(found["present joints"][:, place], state)


def test_joints_of_other_names_are_no_place_to_stay(data: DemoData) -> None:
    columns = data.dataset
    columns.meta = replace(columns.meta, action_names=("left_speed", "right_speed"))
    past = past_of(data)
    (batch,) = data.batches([6], horizon=3, stride=1, pictures=False)
    assert "present joints" not in simple_baselines(data, past, horizon=3)
    np.testing.assert_allclose(past.of(batch).last_action[0], mean_action(data))  # nor a first action
    # A policy is told 0, which an env can tell it too.
    assert not Past(data.dataset, lags=()).of(batch).last_action[0].any()


def test_the_ridge_weight_is_the_textbooks(monkeypatch: pytest.MonkeyPatch) -> None:
    # One feature of mean 0 and variance 1, x = -1, -1, 1, 1; y = 5 + 2 x + (-1, 1, 1, -1), n = 4:
    # the offset is the mean 5, the weight sum(x y) / (n + strength n) = 8 / (4 + 4) = 1 at strength 1.
    monkeypatch.setattr("robot_rl.train.finetune.baselines.STRENGTHS", (1.0,))
    x = np.array([[-1.0], [-1.0], [1.0], [1.0]])
    y = (5 + 2 * x[:, 0] + np.array([-1.0, 1.0, 1.0, -1.0]))[:, None, None]
    seen = known(x, np.zeros((4, 1)))
    valid, episode = np.ones((4, 1), bool), np.array([0, 1, 0, 1])
    ridge = Ridge(seen, y, valid, episode, np.ones(1), joints=False)
    assert (ridge.choice.strength, ridge.choice.origin) == (1.0, "nothing")
    query = known(np.array([[0.0], [1.0], [2.0]]), np.zeros((3, 1)))
    np.testing.assert_allclose(ridge.predict(query)[:, 0, 0], [5.0, 6.0, 7.0])
    # Left out in turn: episode 1 has x = -1, 1 and y = 4, 6: weight (6 - 4) / (2 + 2) = 0.5, offset 5.
    # It says 4.5 and 5.5 to y = 2, 8 of episode 0: off by 2.5. The other way round 3 / 2 = 1.5 and 5:
    # 3.5, 6.5 to 4, 6: off by 0.5. Mean 1.5.
    assert ridge.choice.error == pytest.approx(1.5)


def test_the_ridge_finds_what_the_action_is_a_distance_from() -> None:
    # The next action is the last one plus the state's push: exact as a distance from the last action,
    # which is fresh in every episode, and the state alone does not know it.
    random = np.random.default_rng(0)
    episode = np.repeat(np.arange(12), 10)
    state, last = random.standard_normal((120, 1)), 10 * random.standard_normal((12, 1))[episode]
    chunks = (last + 0.5 * state)[:, None]
    ridge = Ridge(known(state, last), chunks, np.ones((120, 1), bool), episode, np.ones(1), joints=True)
    assert ridge.choice.origin == "last action"
    assert not ridge.choice.sees_action or ridge.choice.error < 0.01
    query = known(np.array([[2.0]]), np.array([[100.0]]))  # far from every episode
    np.testing.assert_allclose(ridge.predict(query), [[[101.0]]], atol=0.05)


def test_the_strength_is_chosen_by_leaving_episodes_out() -> None:
    # 40 features of noise, 4 episodes of 15 moments: fitted freely they learn the noise by heart.
    random = np.random.default_rng(1)
    state, chunks = random.standard_normal((60, 40)), random.standard_normal((60, 1, 1))
    episode = np.repeat(np.arange(4), 15)
    seen = known(state, np.zeros((60, 1)))
    ridge = Ridge(seen, chunks, np.ones((60, 1), bool), episode, np.ones(1), joints=False)
    assert ridge.choice.strength >= 1.0


def test_held_out_episodes_do_not_reach_the_baselines(
    data: DemoData, make_dataset: Callable[..., Path]
) -> None:
    other = DemoData(
        Dataset(make_dataset([0, 1, 2, 3, 4, 100, 101])),  # the same but for the last two
        data.split,
        picture=None,
        device="cpu",
        cache=PictureCache(),
    )
    found = [fit_ridge(one, past_of(one), np.ones(2), horizon=3) for one in (data, other)]
    assert found[0].choice == found[1].choice
    (batch,) = data.batches([0], horizon=3, stride=1, pictures=False)
    past = past_of(data).of(batch)
    np.testing.assert_array_equal(found[0].predict(past), found[1].predict(past))


def test_the_ridge_solves_what_is_linear(data: DemoData) -> None:
    # state t + 1 = state t + 0.2 (goal - state t), so each change is 0.8 of the one before it.
    past = past_of(data)
    ruler = Ruler(np.ones(2), data.dataset.meta.action_names)
    ridge = fit_ridge(data, past, ruler.std, horizon=3)
    batches = data.batches(data.split.heldout, horizon=3, stride=1, pictures=False)
    later = [batch for batch in batches]
    errors = ruler.measure(later, lambda batch: ridge.predict(past.of(batch)))
    repeated = ruler.measure(later, predictor(simple_baselines(data, past, horizon=3)["last action"], past))
    assert errors.normalised < 0.5 * repeated.normalised


def test_joints_that_move(dataset: Path) -> None:
    # Within an episode both joints run to a goal; a third one stands where each episode found it.
    read = Dataset(dataset)
    assert moving_joints(read, range(5)).tolist() == [True, True]
    action, ends = read.columns["action"].copy(), read.episode_ends
    action[:, 1] = np.searchsorted(ends, np.arange(len(action)), side="right")
    read.columns["action"] = action
    assert moving_joints(read, range(5)).tolist() == [True, False]
