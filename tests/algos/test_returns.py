"""Returns and targets, by hand."""

import pytest
import torch

from robot_rl.algos.returns import (
    chunk_return,
    episode_weight,
    gae,
    group_advantage,
    kept_groups,
    progress_score,
    td_target,
)


def test_chunk_return() -> None:
    reward = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
    valid = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    terminated = torch.tensor([False, True, False])
    got, bootstrap = chunk_return(reward, valid, terminated, gamma_step=0.5)
    # 1 + 2/2 + 4/4 = 3 and 1/8; 1 + 2/2 = 2 and the task ended; 3 and 1/2 (a time limit goes on).
    torch.testing.assert_close(got, torch.tensor([3.0, 2.0, 3.0]))
    torch.testing.assert_close(bootstrap, torch.tensor([0.125, 0.0, 0.5]))


def test_n_step_by_nesting() -> None:
    # Two steps, gamma 0.9, rewards 1 and 2, last value 5:  1 + 0.9 * (2 + 0.9 * 5) = 6.85
    reward, bootstrap = chunk_return(
        torch.tensor([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([False]), 0.9
    )
    assert td_target(reward, bootstrap, torch.tensor([5.0])).item() == pytest.approx(6.85)


def test_td_target() -> None:
    got = td_target(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0]), torch.tensor([8.0, 8.0]))
    assert got.tolist() == [5.0, 1.0]  # 1 + 8/2; the task ended: 1


def test_gae_over_one_step_decisions() -> None:
    # gamma 0.5, lambda 0.5, rewards 1, 2, values 4, 6, value after 8.
    # delta_1 = 2 + 8/2 - 6 = 0; delta_0 = 1 + 6/2 - 4 = 0 + 0: both zero, so the advantages are zero.
    # With reward 3 at the end: delta_1 = 1, A_1 = 1, A_0 = 0 + 0.25 * 1 = 0.25.
    advantage, target = gae(
        torch.tensor([[1.0, 3.0]]),
        torch.tensor([[0.5, 0.5]]),
        torch.tensor([[4.0, 6.0]]),
        torch.tensor([[6.0, 8.0]]),
        torch.tensor([[False, False]]),
        lam=0.5,
        gamma_step=0.5,
    )
    assert advantage.tolist() == [[0.25, 1.0]]
    assert target.tolist() == [[4.25, 7.0]]


def test_a_time_limit_keeps_its_value_and_carries_nothing_back() -> None:
    # Row 0 is truncated at t = 0, row 1 terminated there; t = 1 belongs to the next episode.
    # Values 4 and 6, value of the final observation 10, gamma 0.5, lambda 1, rewards 1 and 100.
    # Truncated: delta_0 = 1 + 10/2 - 4 = 2. Terminated: delta_0 = 1 - 4 = -3. No share of the 100.
    advantage, _ = gae(
        torch.tensor([[1.0, 100.0], [1.0, 100.0]]),
        torch.tensor([[0.5, 0.5], [0.0, 0.5]]),
        torch.tensor([[4.0, 6.0], [4.0, 6.0]]),
        torch.tensor([[10.0, 0.0], [10.0, 0.0]]),
        torch.tensor([[True, False], [True, False]]),
        lam=1.0,
        gamma_step=0.5,
    )
    assert advantage[:, 0].tolist() == [2.0, -3.0]


def test_gae_over_chunks_discounts_by_executed_steps() -> None:
    # Chunk 0 ran 2 control steps (bootstrap 0.25), chunk 1 one. gamma 0.5, lambda 0.5.
    # delta_1 = 3 + 0.5 * 0 - 1 = 2; delta_0 = 1 + 0.25 * 1 - 0 = 1.25; A_0 = 1.25 + 0.25 * 0.5 * 2 = 1.5.
    advantage, _ = gae(
        torch.tensor([[1.0, 3.0]]),
        torch.tensor([[0.25, 0.5]]),
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[False, False]]),
        lam=0.5,
        gamma_step=0.5,
        steps_BT=torch.tensor([[2, 1]]),
    )
    assert advantage.tolist() == [[1.5, 2.0]]


def test_advantages_in_a_group() -> None:
    # 1, 0, 0, 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4: 1.5 and -0.5. 0.2, 0.4: +-0.1 / 0.1414.
    got = group_advantage(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert got[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert group_advantage(torch.tensor([[0.2, 0.4], [0.0, 0.0]])).tolist() == [
        pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5),
        [0.0, 0.0],
    ]


def test_a_long_episode_weighs_as_much_as_a_short_one() -> None:
    # 1 and 3 decisions, 2 on average; the third episode was dropped.
    valid = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    weight = episode_weight(valid)
    assert weight.tolist() == [[2, 0, 0], [pytest.approx(2 / 3)] * 3, [0, 0, 0]]
    assert float(weight[valid].mean()) == pytest.approx(1.0)


def test_groups_with_contrast() -> None:
    # 0, 1, 9 and 10 successes of 10: the bounds are included.
    success = torch.arange(10) < torch.tensor([0, 1, 9, 10])[:, None]
    score = success.float()
    assert kept_groups(success, score, (0.1, 0.9)).tolist() == [False, True, True, False]
    assert kept_groups(success, score, (0.2, 0.8)).tolist() == [False] * 4
    # Scores that differ make a group of failures worth it, if its share of successes is allowed.
    score[0] = torch.rand(10, generator=torch.Generator().manual_seed(0))
    assert kept_groups(success, score, (0.0, 1.0)).tolist() == [True, True, True, False]


def test_progress_where_there_is_nothing_to_compare() -> None:
    features = torch.tensor(
        [[0.0, 7.0], [1.0, 7.0], [-1.0, 7.0]]
    )  # the second does not vary: it is no distance
    failed, solved = torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
    assert progress_score(failed, features).tolist() == [0.0] * 3
    assert progress_score(solved, features).tolist() == [1.0] * 3
    # Both failures are as far: 0.6 * sigmoid(0) = 0.3.
    one = torch.tensor([True, False, False])
    assert progress_score(one, features).tolist() == pytest.approx([1.0, 0.3, 0.3])
