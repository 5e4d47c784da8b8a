"""Progress: targets and falls by hand, values in closed form, of episodes that nobody learned from."""

import numpy as np
import pytest
import torch

from robot_rl.algos.config.cloning import FilterConfig
from robot_rl.algos.progress import (
    ProgressConfig,
    ProgressCritic,
    ProgressSampler,
    kept,
    largest_fall,
)
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.data.demos import ChunkSampler, Episodes, EpisodesMeta
from robot_rl.data.normalize import Normaliser

TINY = ProgressConfig(gamma_step=0.5, width=32, depth=1, num=1, lr=3e-3, tau=0.05)


def episodes(lengths: tuple[int, ...], succeeds: tuple[bool, ...]) -> Episodes:
    """State = (steps to go / 4, whether it will succeed), action = row / 10."""
    index = np.repeat(np.arange(len(lengths)), lengths)
    ends = np.cumsum(lengths)[index]
    rows, good = np.arange(len(index)), np.array(succeeds)[index]
    last = rows == ends - 1
    state = np.stack([(ends - rows) / 4, good], axis=1).astype(np.float32)
    return Episodes(
        meta=EpisodesMeta(
            task="t", robot="r", control_hz=20.0, instruction="",
            state_names=("to_go", "good"), action_names=("a",),
        ),
        obs={"state": state},
        action=(rows[:, None] / 10).astype(np.float32),
        reward=np.zeros(len(rows), np.float32),
        terminated=last & good,
        truncated=last & ~good,
        success=last & good,
        episode_index=index,
        final_obs={"state": np.zeros((len(lengths), 2), np.float32)},
    )  # fmt: skip


def test_chunks_and_their_successors_by_hand() -> None:
    data = episodes((4, 3), (True, False))
    batch = ProgressSampler(data, 2, TINY).rows(np.arange(7), fold=0)
    # H = 2, gamma = 1/2. Episode 0: rows 2 and 3 have the success in their chunk, as its 2nd and 1st step.
    assert batch.reward.tolist() == [0, 0, 0.5, 1, 0, 0, 0]
    # Rows 2, 3 and 5, 6 meet the end in their chunk; a failure ends at 0, although the clock ended it.
    assert batch.bootstrap.tolist() == [0.25, 0.25, 0, 0, 0.25, 0, 0]
    # Successors of rows 0, 1 and 4 begin two steps later; beyond the end the last action repeats.
    np.testing.assert_allclose(batch.next_action[[0, 1, 4], :, 0], [[0.2, 0.3], [0.3, 0.3], [0.6, 0.6]])
    np.testing.assert_allclose(batch.next_obs[[0, 1, 4], 0], [2 / 4, 1 / 4, 1 / 4])


def test_a_part_is_left_out_of_its_critics_batches() -> None:
    data = episodes((2,) * 6, (True, False) * 3)
    sampler, rng = ProgressSampler(data, 2, TINY), np.random.default_rng(0)
    drawn = [sampler.sample(64, rng) for _ in range(20)]
    for batch in drawn:
        # Episodes of two rows: row // 2 is the episode, and action 0 of the chunk is row / 10.
        episode = (batch.action[:, 0, 0] * 10).round().long() // 2
        assert (episode % 2 != batch.fold).all()
    assert {batch.fold for batch in drawn} == {0, 1}


def test_progress_is_the_discount_to_success() -> None:
    data = episodes((4,) * 8, (True, True, False, False) * 2)
    critic = ProgressCritic(TINY, normaliser=Normaliser.fit(data.obs, data.action), horizon=2, seed=0)
    sampler, rng = ProgressSampler(data, 2, TINY), np.random.default_rng(0)
    for _ in range(400):
        critic.update(sampler.sample(64, rng))
    found = critic.progress(data).reshape(8, 4)
    # Success in k steps is worth (1/2)^(k - 1), in episodes that the critics have not seen too.
    np.testing.assert_allclose(found[[0, 1, 4, 5]].mean(axis=0), [1 / 8, 1 / 4, 1 / 2, 1], atol=0.08)
    np.testing.assert_allclose(found[[2, 3, 6, 7]].mean(axis=0), [0, 0, 0, 0], atol=0.05)


def test_an_exact_resume_goes_on_with_the_same_numbers() -> None:
    data = episodes((4,) * 4, (True, False) * 2)
    normaliser = Normaliser.fit(data.obs, data.action)
    whole, begun = (ProgressCritic(TINY, normaliser=normaliser, horizon=2, seed=0) for _ in range(2))
    sampler, rng = ProgressSampler(data, 2, TINY), np.random.default_rng(0)
    batches = [sampler.sample(8, rng) for _ in range(6)]
    for batch in batches:
        whole.update(batch)
    for batch in batches[:3]:
        begun.update(batch)
    resumed = ProgressCritic(TINY, normaliser=normaliser, horizon=2, seed=1)
    resumed.load_state_dict(begun.state_dict())
    for batch in batches[3:]:
        resumed.update(batch)
    np.testing.assert_array_equal(resumed.progress(data), whole.progress(data))


def test_falls_by_hand() -> None:
    progress = np.array([0.2, 0.5, 0.1, 0.3, 0.9, 0.1, 0.2])
    index = np.array([0, 0, 0, 0, 0, 1, 1])
    # Within two frames: 0: 0.5 to 0.1; 1: 0.5 to 0.1; the rest rise to their episode's end, which 4 is.
    np.testing.assert_allclose(largest_fall(progress, index, 2), [0.4, 0.4, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(largest_fall(progress, index, 1), [0, 0.4, 0, 0, 0, 0, 0])


def test_frames_that_lose_progress_or_have_none_are_not_kept() -> None:
    progress, index = np.array([0.4, 0.5, 0.1, 0.0, 0.0]), np.zeros(5, int)
    falls = kept(FilterConfig(updates=1, max_fall=0.3), progress, index, 1)
    # GR-RL's rule: what has failed already has nothing to lose.
    assert falls.tolist() == [True, False, True, True, True]
    both = kept(FilterConfig(updates=1, max_fall=0.3, min_progress=0.05), progress, index, 1)
    assert both.tolist() == [True, False, True, False, False]


def test_cloning_draws_from_kept_frames_alone_and_sees_what_followed() -> None:
    data, kept = episodes((4, 3), (True, False)), np.array([0, 1, 0, 0, 0, 1, 0], bool)
    sampler = ChunkSampler(data, 3, kept)
    batch = sampler.sample(50, np.random.default_rng(0))
    assert len(sampler) == 2
    assert set((batch.actions[:, 0, 0] * 10).round().tolist()) == {1.0, 5.0}
    first = batch.actions[(batch.actions[:, 0, 0] - 0.1).abs() < 1e-6][0, :, 0]
    torch.testing.assert_close(first, torch.tensor([0.1, 0.2, 0.3]))  # rows 2 and 3 followed
    with pytest.raises(DatasetError, match="no step of the episodes is kept"):
        ChunkSampler(data, 3, np.zeros(7, bool))


def test_messages() -> None:
    with pytest.raises(DatasetError, match=r"got 1 episodes for algorithm\.folds=2, allowed: as many"):
        ProgressSampler(episodes((3,), (True,)), 2, TINY)
    with pytest.raises(ConfigError, match=r"demos\.filter\.max_fall: got 2, allowed: 0 to 1"):
        FilterConfig(max_fall=2)
