"""The baseline that remembers, on memories whose best use is known."""

import numpy as np
import pytest
import torch

from robot_rl.core.policy import DemoBatch
from robot_rl.train.finetune.neighbour import Moments, NearestNeighbour, thumbnails


def memory(state: np.ndarray, chunks: np.ndarray, thumbs: np.ndarray, per_episode: int = 10) -> Moments:
    rows = len(state)
    return Moments(
        state=state.astype(np.float32),
        thumbs=thumbs.astype(np.float32),
        chunks=chunks.astype(np.float32),
        valid=np.ones(chunks.shape[:2], bool),
        episode=np.arange(rows) // per_episode,
    )


def no_pictures(rows: int) -> np.ndarray:
    return np.zeros((rows, 0))


def test_it_carries_chunks_over_where_actions_follow_the_state() -> None:
    # The action is always one step ahead of the state: the carried-over neighbour is exact.
    state = np.random.default_rng(0).uniform(-1, 1, (60, 2))
    chunks = state[:, None] + np.array([0.1, 0.2])[None, :, None]
    found = NearestNeighbour(memory(state, chunks, no_pictures(60)), np.ones(2), same_names=True)
    assert found.choice.relative
    assert found.choice.error == pytest.approx(0.0, abs=1e-6)
    query = np.array([[0.3, -0.7]], np.float32)
    np.testing.assert_allclose(found.predict(query, no_pictures(1))[0], [[0.4, -0.6], [0.5, -0.5]], atol=1e-5)


def test_it_takes_chunks_as_they_are_where_they_do_not() -> None:
    random = np.random.default_rng(1)
    chunks = np.repeat(np.where(np.arange(60) % 2, 1.0, -1.0)[:, None, None], 3, axis=1)
    state = chunks[:, 0] + 0.3 * random.standard_normal((60, 1))  # tells which of two actions is due
    found = NearestNeighbour(memory(state, chunks, no_pictures(60)), np.ones(1), same_names=True)
    assert not found.choice.relative
    assert found.single.neighbours == 1
    assert found.single.error >= found.choice.error
    np.testing.assert_allclose(found.predict(np.array([[1.1]]), no_pictures(1)), np.ones((1, 3, 1)))


def test_other_names_are_never_carried_over() -> None:
    state = np.random.default_rng(2).uniform(-1, 1, (60, 1))
    found = NearestNeighbour(memory(state, state[:, None], no_pictures(60)), np.ones(1), same_names=False)
    assert not found.choice.relative


def test_pictures_count_where_they_tell_what_the_state_does_not() -> None:
    random = np.random.default_rng(3)
    kind = random.integers(0, 2, 100)
    state = random.standard_normal((100, 1))
    thumbs = np.repeat(kind[:, None], 12, axis=1) + 0.01 * random.standard_normal((100, 12))
    chunks = (2.0 * kind - 1)[:, None, None]
    found = NearestNeighbour(memory(state, chunks, thumbs), np.ones(1), same_names=False)
    assert found.choice.picture_weight > 0
    np.testing.assert_allclose(found.predict(np.zeros((1, 1)), np.ones((1, 12))), [[[1.0]]], atol=1e-6)


def test_an_episode_does_not_help_itself() -> None:
    # Every episode repeats one random action: only its own steps know it, and they are left out.
    random = np.random.default_rng(4)
    action = np.repeat(random.standard_normal(20), 10)[:, None]
    state = np.repeat(random.standard_normal(20), 10)[:, None]
    found = NearestNeighbour(memory(state, action[:, None], no_pictures(200)), np.ones(1), same_names=False)
    assert found.choice.error > 0.3  # with its own steps it would be 0


def test_thumbnails_are_means_of_areas() -> None:
    picture = np.zeros((1, 32, 40, 3), np.uint8)
    picture[0, :2, :2] = 255  # exactly the first of 16 x 20 areas
    thumbs = thumbnails(
        DemoBatch({"front.rgb": torch.from_numpy(picture)}, torch.zeros(1, 1, 1), torch.ones(1, 1).bool())
    )
    assert thumbs.shape == (1, 16 * 20 * 3)
    assert thumbs[0, :3].tolist() == [1.0, 1.0, 1.0]
    assert thumbs[0, 3:].sum() == 0
