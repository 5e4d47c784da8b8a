"""Training and evaluation seeds never meet; a draw depends on (seed, episode) and nothing else."""

from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.seeding import (
    EVAL_SEED_START,
    QUICK_EVAL_SEED_START,
    EpisodeRng,
    eval_seeds,
    quick_eval_seeds,
    train_seed,
)


@pytest.mark.parametrize("run_seed", [0, 1, 7, 99_999, 2**31 - 1])
def test_the_three_ranges_of_seeds_are_disjoint(run_seed: int) -> None:
    assert 0 <= train_seed(run_seed, "envs") < EVAL_SEED_START
    held_out = eval_seeds(run_seed, 10_000)
    assert held_out.min() >= EVAL_SEED_START
    assert held_out.max() < QUICK_EVAL_SEED_START
    assert quick_eval_seeds(run_seed, 10_000).min() >= QUICK_EVAL_SEED_START


def test_eval_seeds_of_two_runs_do_not_overlap() -> None:
    # Run k starts at 2^31 + 10000 k: run 0 ends at 2^31 + 9999, run 1 starts at 2^31 + 10000.
    assert eval_seeds(0, 10_000)[-1] == 2**31 + 9_999
    assert eval_seeds(1, 1)[0] == 2**31 + 10_000
    assert len(set(eval_seeds(3, 200).tolist())) == 200


def test_streams_and_runs_have_seeds_of_their_own() -> None:
    assert train_seed(0, "envs") == train_seed(0, "envs")
    assert (
        len({train_seed(run, stream) for run in range(10) for stream in ("envs", "demos", "learner")}) == 30
    )


def test_a_row_is_the_same_alone_and_among_many() -> None:
    seeds, episodes = np.arange(100), np.arange(100) % 3
    many = EpisodeRng(seeds, episodes).uniform(size=4)
    alone = EpisodeRng(42, 42 % 3).uniform(size=4)
    np.testing.assert_array_equal(many[42], alone[0])


def test_splitmix64_of_a_zero_state() -> None:
    # The published first output of SplitMix64 from state 0 is 0xE220A8397B1DCDAF: its state is then
    # the golden constant, which is what the generator mixes. Here: mix(0 + golden).
    from robot_rl.core.seeding import _GOLDEN, _mix

    assert int(_mix(np.array([_GOLDEN]))[0]) % 2**64 == 0xE220A8397B1DCDAF


def test_draws_lie_in_range_and_differ_by_episode_and_draw() -> None:
    rng = EpisodeRng(np.arange(1000), np.zeros(1000))
    low, high = np.array([-1.0, 2.0]), np.array([1.0, 3.0])
    drawn = rng.uniform(low, high, size=2)
    assert (drawn >= low).all()
    assert (drawn < high).all()
    # Uniform on [2, 3): mean 2.5, standard error 1/sqrt(12 * 1000) = 0.009; five of them is 0.046.
    assert drawn[:, 1].mean() == pytest.approx(2.5, abs=0.046)
    assert not np.array_equal(rng.uniform(low, high, size=2), drawn)
    assert not np.array_equal(EpisodeRng(np.arange(1000), np.ones(1000)).uniform(low, high, size=2), drawn)


def test_normal_has_mean_zero_and_variance_one() -> None:
    drawn = EpisodeRng(np.arange(20_000), np.zeros(20_000)).normal(size=1)
    # Standard error of the mean: 1/sqrt(20000) = 0.007; of the variance: sqrt(2/20000) = 0.01.
    assert drawn.mean() == pytest.approx(0.0, abs=0.035)
    assert drawn.var() == pytest.approx(1.0, abs=0.05)
    assert np.isfinite(drawn).all()


def test_tensors_draw_the_same_bits() -> None:
    seeds, episodes = np.array([0, 7, 2**31 + 3, 2**64 - 1], np.uint64), np.array([0, 1, 2, 3], np.uint64)
    ours = EpisodeRng(seeds, episodes)
    tensor: Any = torch.tensor
    theirs: Any = EpisodeRng(tensor(seeds.view(np.int64)), tensor(episodes.view(np.int64)))
    np.testing.assert_array_equal(theirs.key.numpy().view(np.uint64), ours.key)
    for low, high, size in ((0.0, 1.0, 1), ((0.4, -0.15, 0.02), (0.6, 0.15, 0.02), 3)):
        drawn = theirs.uniform(low, high, size=size)
        assert drawn.dtype == torch.float64
        np.testing.assert_array_equal(drawn.numpy(), ours.uniform(low, high, size=size))
    # Logarithm, root and cosine are torch's own, each right to an ulp or two.
    np.testing.assert_allclose(theirs.normal(size=2).numpy(), ours.normal(size=2), rtol=1e-14)
