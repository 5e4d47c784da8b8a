"""Losses, each formula once (B rows, S scored transitions of a chain, N critics)."""

from __future__ import annotations

import torch
from torch import Tensor

from robot_rl.algos.config.on_policy import Reduction


def td_loss(q_NB: Tensor, target_B: Tensor) -> Tensor:
    """Returns the squared error to the common target: mean over the batch, summed over critics.

    The sum gives each critic the gradient it would have alone, whatever their number.
    """
    return (q_NB - target_B).square().mean(dim=1).sum()


def expectile_weight(error_B: Tensor, expectile: float) -> Tensor:
    """Returns |expectile - 1(error < 0)|, the weight of each squared error (Kostrikov et al. 2022, eq. 4).

    Args:
        error_B: what was found minus what was predicted.
        expectile: 0.5 makes the mean of it, towards 1 the largest that was found.
    """
    return torch.where(error_B < 0, 1.0 - expectile, expectile)


def chain_ratio(log_prob_BS: Tensor, old_log_prob_BS: Tensor, reduction: Reduction) -> Tensor:
    """Returns the probability ratio new / old of a chain.

    Log-probabilities are means over the elements of the executed actions: every published clip
    range assumes it.

    Args:
        log_prob_BS: of each scored transition under the weights that learn.
        old_log_prob_BS: under those from which ratios count, mostly the ones that acted.
        reduction: `per_step` (B, S), one ratio per transition (DPPO); `joint` (B, 1), one per
            chunk, of the mean over transitions (ReinFlow); `single` (B, 1), where one transition
            is stochastic (pi_RL).
    """
    difference_BS = log_prob_BS - old_log_prob_BS
    if reduction == "joint":
        difference_BS = difference_BS.mean(dim=1, keepdim=True)
    elif reduction == "single" and difference_BS.shape[1] != 1:
        raise ValueError(
            f"chain_ratio: reduction 'single' needs 1 scored transition, got {difference_BS.shape[1]}. "
            "Use 'joint' or 'per_step', or a process with one stochastic step."
        )
    return difference_BS.exp()


def ppo_loss(
    log_prob_BS: Tensor,
    old_log_prob_BS: Tensor,
    advantage_B: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor | None = None,
    reduction: Reduction = "per_step",
    denoising_discount: float = 1.0,
    weight_BS: Tensor | None = None,
) -> Tensor:
    """Returns PPO's clipped objective (Schulman et al. 2017), negated, over a chain.

    Args:
        log_prob_BS: of each scored transition, from the noisiest on, under the learning weights.
        old_log_prob_BS: under those from which ratios count, mostly the ones that acted.
        advantage_B: one per chunk.
        clip_low: the ratio is clipped at 1 - clip_low; (S,) for one range per transition.
        clip_high: and at 1 + clip_high (None: the same).
        reduction: see `chain_ratio`.
        denoising_discount: the advantage of transition s is weighted by this to the power of
            S - 1 - s (DPPO): the last, least noisy, counts in full.
        weight_BS: of each ratio, or (B, 1); None: 1.
    """
    ratio_BS = chain_ratio(log_prob_BS, old_log_prob_BS, reduction)
    count = ratio_BS.shape[1]
    weight_S = denoising_discount ** torch.arange(
        count - 1, -1, -1, dtype=ratio_BS.dtype, device=ratio_BS.device
    )
    advantage_BS = advantage_B[:, None] * weight_S
    high = clip_low if clip_high is None else clip_high
    dtype, device = ratio_BS.dtype, ratio_BS.device
    low_S, high_S = (
        # Filled on the device: a number that is copied there waits for it.
        bound if isinstance(bound, Tensor) else torch.full((), bound, dtype=dtype, device=device)
        for bound in (1.0 - clip_low, 1.0 + high)
    )
    clipped_BS = ratio_BS.clamp(low_S, high_S)
    gain_BS = torch.minimum(ratio_BS * advantage_BS, clipped_BS * advantage_BS)
    return -(gain_BS if weight_BS is None else weight_BS * gain_BS).mean()


def value_error(
    value_B: Tensor, old_value_B: Tensor, target_B: Tensor, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Returns the error of a value, (B,), and the derivative of its mean square, (B,) (PPO2).

    With a limit, that of the larger one of two errors: of the value, and of the value that moved by the limit
    at most.

    Args:
        value_B: of the weights that learn.
        old_value_B: before the updates on this rollout.
        target_B: what it should be.
        limit: largest move that still counts; None: any.
    """
    error = value_B - target_B
    towards = error * (2.0 / len(error))
    if limit is not None:
        moved = value_B - old_value_B
        clipped = old_value_B + moved.clamp(-limit, limit)
        # Where it is clipped and its error is the larger one, the derivative is 0. Within the limit
        # the two differ by rounding alone.
        is_worse = (clipped - target_B).abs() > error.abs()
        towards = torch.where((moved.abs() > limit) & is_worse, 0.0, towards)
    return error, towards


def clip_schedule(first: float, last: float, steps: int, *, rate: float = 3.0) -> Tensor:
    """Returns the clip range of each scored transition, (S,), rising exponentially (DPPO, appendix).

    Args:
        first: of the noisiest transition, s = 0.
        last: of the last one, s = S - 1.
        steps: S.
        rate: 0 or more; the larger, the later it rises.
    """
    share_S = torch.linspace(0.0, 1.0, steps) if steps > 1 else torch.ones(1)
    if rate > 0:
        share_S = torch.expm1(rate * share_S) / torch.expm1(torch.tensor(rate))
    return first + (last - first) * share_S
