"""Losses, by hand."""

import math

import pytest
import torch

from robot_rl.algos.losses import chain_ratio, ppo_loss, td_loss


def test_td_loss_sums_over_critics() -> None:
    # Critic 0 errs by 1 and 3: (1 + 9) / 2 = 5. Critic 1 errs by 0 and 2: (0 + 4) / 2 = 2. Sum 7.
    q = torch.tensor([[2.0, 5.0], [1.0, 4.0]])
    assert td_loss(q, torch.tensor([1.0, 2.0])).item() == 7.0


def test_ratio_is_one_for_the_same_weights() -> None:
    log_prob = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(chain_ratio(log_prob, log_prob, "per_step"), torch.ones(5, 3))
    assert torch.equal(chain_ratio(log_prob, log_prob, "joint"), torch.ones(5, 1))
    assert torch.equal(chain_ratio(log_prob[:, :1], log_prob[:, :1], "single"), torch.ones(5, 1))


def test_reductions() -> None:
    new = torch.tensor([[math.log(2.0), math.log(8.0)]])
    old = torch.zeros(1, 2)
    # Per step 2 and 8; joint: the geometric mean, sqrt(2 * 8) = 4.
    torch.testing.assert_close(chain_ratio(new, old, "per_step"), torch.tensor([[2.0, 8.0]]))
    torch.testing.assert_close(chain_ratio(new, old, "joint"), torch.tensor([[4.0]]))
    with pytest.raises(
        ValueError, match=r"'single' needs 1 scored transition, got 2\. Use 'joint' or 'per_step'"
    ):
        chain_ratio(new, old, "single")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.5, 1.0, -1.2),  # a gain is clipped at 1.2
        (1.5, -1.0, 1.5),  # a loss is not
        (0.5, 1.0, -0.5),
        (0.5, -1.0, 0.8),  # clipped at 0.8
        (1.1, 2.0, -2.2),  # inside the range nothing happens
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float) -> None:
    new = torch.tensor([[math.log(ratio)]])
    got = ppo_loss(new, torch.zeros(1, 1), torch.tensor([advantage]), clip_low=0.2, reduction="single")
    assert got.item() == pytest.approx(loss)


def test_clip_ranges_may_differ() -> None:
    new = torch.tensor([[math.log(1.5)]])
    got = ppo_loss(new, torch.zeros(1, 1), torch.tensor([1.0]), clip_low=0.2, clip_high=0.28)
    assert got.item() == pytest.approx(-1.28)


def test_noisy_steps_count_less() -> None:
    # Three steps at ratio 1, advantage 8, discount 0.5: weights 1/4, 1/2, 1; mean of 2, 4, 8 = 14/3.
    zeros = torch.zeros(1, 3)
    got = ppo_loss(zeros, zeros, torch.tensor([8.0]), clip_low=0.1, denoising_discount=0.5)
    assert got.item() == pytest.approx(-14 / 3)
