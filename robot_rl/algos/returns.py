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

from robot_rl.data.moments import RunningMoments


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


def group_advantage(score_PG: Tensor) -> Tensor:
    """Returns the advantage of each episode in its group, (P, G) (GRPO, Shao et al. 2024).

    (score - mean) / (std + 1e-6), with the sample's standard deviation (of G - 1). A group without
    differences gets zeros.
    """
    mean, std = score_PG.mean(dim=1, keepdim=True), score_PG.std(dim=1, keepdim=True)
    return (score_PG - mean) / (std + 1e-6)


def episode_weight(valid_NT: Tensor) -> Tensor:
    """Returns the weight of each decision, (N, T), in a mean over the valid ones that counts episodes alike.

    As in GRPO (Shao et al. 2024), where SimpleVLA-RL takes the mean over all decisions: failures last
    until the time limit, and would outweigh the successes of their group. Where none is valid: 0.
    """
    count_N = valid_NT.sum(dim=1)
    mean = count_N.sum() / (count_N > 0).sum().clamp_min(1)
    return valid_NT * (mean / count_N.clamp_min(1))[:, None]


def kept_groups(success_PG: Tensor, score_PG: Tensor, keep: tuple[float, float]) -> Tensor:
    """Returns which groups have something to learn from, (P,) bool (dynamic sampling, SimpleVLA-RL).

    Args:
        success_PG: bool, of each episode of each group.
        score_PG: what the episodes are compared by: a group whose scores are all the same is dropped.
        keep: the least and the largest share of successes, both included.
    """
    share_P = success_PG.double().mean(dim=1)
    is_mixed_P = (share_P >= keep[0] - 1e-9) & (share_P <= keep[1] + 1e-9)
    return is_mixed_P & (score_PG.amax(dim=1) > score_PG.amin(dim=1))


def progress_score(success_N: Tensor, features_NF: Tensor) -> Tensor:
    """Returns 1 for successes, for failures 0.6 sigmoid(10 (0.5 - d)), (N,) (SRPO).

    d is a failure's distance to the nearest success, scaled to 0 to 1 over the failures; 0.5 where
    these are all as far. Features are standardised over the N. Without any success, failures are 0.
    Deviation: SRPO measures to the nearest centre of a DBSCAN (eps 0.5, 2 members) of the successes;
    here each success is a centre.
    """
    score_N = success_N.to(features_NF.dtype)
    if success_N.all() or not success_N.any():
        return score_N
    std_F, mean_F = torch.std_mean(features_NF, dim=0, correction=0)
    scaled_NF = (features_NF - mean_F) / torch.where(std_F > 1e-6, std_F, 1.0)
    distance = torch.cdist(scaled_NF[~success_N], scaled_NF[success_N]).amin(dim=1)
    span = distance.amax() - distance.amin()
    d = (distance - distance.amin()) / span if span > 0 else torch.full_like(distance, 0.5)
    score_N[~success_N] = 0.6 * torch.sigmoid(10.0 * (0.5 - d))
    return score_N


class ReturnScale:
    """Running standard deviation of the discounted return so far, over all decisions (VecNormalize)."""

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        nothing = torch.zeros(1, dtype=torch.float64, device=device)
        self._moments = RunningMoments(nothing, nothing)
        self._returns: dict[int, Tensor] = {}
        """(N,) of the open episodes of each source."""

    def add(
        self, reward: Tensor, discount: Tensor, ended: Tensor, *, actor: int = 0, begins: bool = False
    ) -> Tensor:
        """Takes a rollout, (N, T) each, and returns the standard deviation; 1 while nothing varies.

        Args:
            reward: of each decision.
            discount: of what follows it.
            ended: bool, whether its episode ends there.
            actor: which source acted; the next rollout of that source goes on with its episodes,
            begins: unless all of them begin in that rollout.
        """
        if begins or actor not in self._returns:
            self._returns[actor] = reward.new_zeros(len(reward), dtype=torch.float64)
        so_far, seen = self._returns[actor], list[Tensor]()
        for t in range(reward.shape[1]):
            so_far = so_far * discount[:, t] + reward[:, t]
            seen.append(so_far)
            so_far = so_far * ~ended[:, t]
        self._returns[actor] = so_far
        self._moments.add(torch.stack(seen).view(-1, 1))
        std = self._moments.std[0]
        return torch.where(std > 0, std, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"returns": dict(self._returns), "moments": self._moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Checkpoints of earlier versions have one source.
        self._returns = dict(state["returns"] if "returns" in state else {0: state["return"]})
        self._moments.load_state_dict(state["moments"] if "moments" in state else _moments_of(state))


def _moments_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns moments as earlier versions saved them: plain numbers."""
    found = {name: torch.tensor([float(state[name])], dtype=torch.float64) for name in ("mean", "square")}
    return {**found, "count": torch.tensor(float(state["count"]), dtype=torch.float64)}
