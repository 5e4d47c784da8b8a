"""Returns and targets, each formula once (B rows, T decision times, N critics, n steps).

A decision time is a control step, or the start of a chunk that executed m <= h control steps:
reward R = sum of gamma^i r_i over its m steps, bootstrap = gamma^m, or 0 where the task ended. A
time limit keeps its bootstrap: the value goes on where the clock stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def chunk_return(
    reward_BT: Tensor, valid_BT: Tensor, terminated_B: Tensor, gamma_step: float
) -> tuple[Tensor, Tensor]:
    """Returns the discounted reward (B,) and the bootstrap (B,) of the executed control steps.

    Args:
        reward_BT: reward of each control step.
        valid_BT: which control steps were executed, a prefix of each row.
        terminated_B: whether the task ended at the last of them.
        gamma_step: discount per control step.
    """
    powers = gamma_step ** torch.arange(
        reward_BT.shape[1] + 1, dtype=reward_BT.dtype, device=reward_BT.device
    )
    reward_B = (reward_BT * valid_BT * powers[:-1]).sum(dim=1)
    return reward_B, powers[valid_BT.sum(dim=1)] * ~terminated_B


def td_target(reward_B: Tensor, bootstrap_B: Tensor, next_value_B: Tensor) -> Tensor:
    """Returns reward + bootstrap * next value."""
    return torch.addcmul(reward_B, bootstrap_B, next_value_B)


def gae(
    reward_BT: Tensor,
    bootstrap_BT: Tensor,
    value_BT: Tensor,
    next_value_BT: Tensor,
    ended_BT: Tensor,
    *,
    lam: float,
    gamma_step: float,
    steps_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns advantages and value targets, (B, T) each (Schulman et al. 2016, over chunks).

    delta_t = R_t + bootstrap_t V(s'_t) - V(s_t);
    A_t = delta_t + gamma^m_t lambda (1 - ended_t) A_t+1; target = A + V.

    Args:
        reward_BT: discounted reward of each decision time.
        bootstrap_BT: gamma^m, or 0 where the task ended.
        value_BT: value of the observation decided at.
        next_value_BT: value of what the chunk led to: the final observation where the episode ended.
        ended_BT: terminated or truncated: nothing is carried back over it.
        lam: lambda, per decision time.
        gamma_step: discount per control step.
        steps_BT: control steps m that were executed; None means one each.
    """
    delta_BT = td_target(reward_BT, bootstrap_BT, next_value_BT) - value_BT
    steps = torch.ones_like(reward_BT) if steps_BT is None else steps_BT.to(reward_BT.dtype)
    carry_BT = gamma_step**steps * lam * ~ended_BT
    advantage_BT = torch.empty_like(delta_BT)
    carried = torch.zeros_like(delta_BT[:, 0])
    for t in range(delta_BT.shape[1] - 1, -1, -1):
        carried = torch.addcmul(delta_BT[:, t], carry_BT[:, t], carried)
        advantage_BT[:, t] = carried
    return advantage_BT, advantage_BT + value_BT


class ReturnScale:
    """Running standard deviation of the discounted return so far, over all decisions (VecNormalize)."""

    def __init__(self, num_envs: int) -> None:
        self._return = torch.zeros(num_envs, dtype=torch.float64)
        self._count, self._mean, self._square = 0.0, 0.0, 0.0

    def add(self, reward: Tensor, discount: Tensor, ended: Tensor) -> float:
        """Takes a rollout, (N, T) each, and returns the standard deviation; 1 while nothing varies."""
        seen: list[Tensor] = []
        for t in range(reward.shape[1]):
            self._return = self._return * discount[:, t].cpu() + reward[:, t].cpu()
            seen.append(self._return)
            self._return = self._return * ~ended[:, t].cpu()
        values = torch.stack(seen)
        count, mean = float(values.numel()), float(values.mean())
        total, apart = self._count + count, mean - self._mean
        # Chan, Golub and LeVeque 1983: moments of the union of two samples.
        self._square += float((values - mean).square().sum()) + apart**2 * self._count * count / total
        self._mean += apart * count / total
        self._count = total
        return (self._square / total) ** 0.5 or 1.0

    def state_dict(self) -> dict[str, Any]:
        moments = {"count": self._count, "mean": self._mean, "square": self._square}
        return {"return": self._return.clone(), **moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._return = state["return"].clone()
        self._count, self._mean, self._square = (float(state[name]) for name in ("count", "mean", "square"))
