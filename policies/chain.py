"""Walk a process from noise to a chunk, and score the walk afterwards.

The same steps, on the same `TimeGrid`, serve both. The path is stored unclamped.
B envs, H chunk length, A action dim, K denoising steps, S scored transitions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Generator, Tensor

from robot_rl.core.policy import Chain, Mode, Policy
from robot_rl.policies.processes import (
    Process,
    TimeGrid,
    gaussian_entropy,
    gaussian_log_prob,
    normal_like,
)
from robot_rl.policies.spec import check_chunk


class Net(Protocol):
    """The network as a step sees it: `rows` names the observation of each row of `x`."""

    def __call__(self, x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor: ...


class Std(Protocol):
    """A learned standard deviation (N, H, A) of step `k`; `rows` as for `Net`."""

    def __call__(self, k: int | Tensor, rows: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Path:
    """What `denoise` went through; everything but `x` is None unless recorded."""

    x: Tensor
    """(B, H, A), the end of the path, not clamped."""
    chain: Chain | None


def denoise(
    net: Net,
    process: Process,
    grid: TimeGrid,
    z: Tensor,
    *,
    explore: bool,
    record: bool,
    generator: Generator | None = None,
    action_dim: int | None = None,
    scored: int | None = None,
    learned_std: Std | None = None,
) -> Path:
    """Walks from noise `z` (B, H, A) to a chunk; stochastic where `explore` and the process are.

    Args:
        net: predicts what the process needs.
        process: takes the steps.
        grid: their times.
        z: the initial noise.
        explore: whether stochastic steps get their noise.
        record: whether to return the chain.
        generator: of the noise.
        action_dim: for a model that pads its actions: only the first so many of A get a step's noise
            and are scored, the others take the step of the ODE.
        scored: log-probabilities are of the first so many of H; None means all.
        learned_std: noise of the steps of a process that leaves it to the policy.
    """
    if not explore:
        index = torch.empty((len(z), 0), dtype=torch.long, device=z.device)
    else:
        index = process.stochastic_index(grid, len(z), generator).to(z.device)
    path, log_probs, x = [z], [], z
    for k in range(grid.steps):
        net_out = net(x, k)
        if index.shape[1] == 0:
            x = process.ode_step(net_out, x, grid, k)
        else:
            mean, std = process.step(net_out, x, grid, k)
            std = std if learned_std is None else learned_std(k)
            assert std is not None, "a process with stochastic steps returns their std, or it is learned"
            after = mean[..., :action_dim] + std * normal_like(x[..., :action_dim], generator)
            if action_dim is not None:
                padding = process.ode_step(net_out, x, grid, k)[..., action_dim:]
                after = torch.cat([after, padding], dim=-1)
            if index.shape[1] < grid.steps:
                chosen = (index == k).any(dim=1).view(-1, 1, 1)
                after = torch.where(chosen, after, process.ode_step(net_out, x, grid, k))
            if record:
                std = grid.at("score_std", k, x) if learned_std is None else std
                log_probs.append(gaussian_log_prob(*_scored(after, mean, std, scored, action_dim)))
            x = after
        path.append(x)
    if not record:
        return Path(x, None)
    log_prob = torch.stack(log_probs, dim=1).gather(1, index) if log_probs else z.new_empty(index.shape)
    return Path(x, Chain(x=torch.stack(path, dim=1), index=index, log_prob=log_prob, grid=grid))


def score(
    net: Net,
    process: Process,
    grid: TimeGrid,
    chain: Chain,
    *,
    action_dim: int | None = None,
    scored: int | None = None,
    learned_std: Std | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log-probability and entropy of the chain's stochastic steps, (B, S) each.

    `action_dim`, `scored` and `learned_std` are those that `denoise` had.

    Raises:
        ValueError: the chain was sampled on another grid, or has no stochastic step.
    """
    check_chain(chain, grid)
    batch, steps = chain.index.shape
    rows = torch.arange(batch, device=chain.x.device).repeat_interleave(steps)
    k = chain.index.flatten()
    x, after = chain.x[rows, k], chain.x[rows, k + 1]
    mean = process.step(net(x, k, rows), x, grid, k)[0]
    std = grid.at("score_std", k, x) if learned_std is None else learned_std(k, rows)
    after, mean, std = _scored(after, mean, std, scored, action_dim)
    log_prob = gaussian_log_prob(after, mean, std)
    return log_prob.view(batch, steps), gaussian_entropy(std, like=mean).view(batch, steps)


def initial_noise(
    policy: Policy, features: Tensor, z: Tensor | None, mode: Mode, generator: Generator | None
) -> Tensor:
    """Returns the noise (B, H, A) that a chunk begins with: `z`, or a draw if None; zero in mode `mean`.

    Raises:
        ValueError: `z` of another shape.
    """
    shape = (len(features), policy.horizon, policy.action_dim)
    if z is not None:
        check_chunk("sample", "z", z, shape)
    zeros = features.new_zeros(shape)
    if mode == "mean":
        return zeros
    return normal_like(zeros, generator) if z is None else z


def scored_grid(process: Process, steps: int, scored: int | None) -> TimeGrid:
    """Returns the grid of a path of so many steps; its name holds how much of a chunk is `scored`.

    So `score` refuses a chain whose log-probabilities are of another part of the chunk.
    """
    grid = process.grid(steps)
    return grid if scored is None else replace(grid, process=f"{grid.process} of {scored} actions")


def check_chain(chain: Chain, grid: TimeGrid) -> None:
    """Refuses a chain of another grid, or one with nothing to score."""
    if chain.grid is not grid and chain.grid != grid:
        raise ValueError(
            f"log_prob: the chain was sampled by {chain.grid.process} in {chain.grid.steps} steps, "
            f"this policy is {grid.process} in {grid.steps}. Score it with the policy that made it."
        )
    if chain.index.shape[1] == 0:
        raise ValueError(
            f"log_prob: the chain has no stochastic step ({grid.process}). Sample with mode='explore' "
            "from a process with noise: flow_sde, flow_noise, flow_cfm, ddpm, or ddim with eta > 0."
        )


def _scored(
    after: Tensor, mean: Tensor, std: float | Tensor, scored: int | None, action_dim: int | None
) -> tuple[Tensor, Tensor, float | Tensor]:
    """Returns the part of the chunk that log-probabilities are of."""
    if isinstance(std, Tensor) and std.shape[1:] == after.shape[1:]:
        std = std[:, :scored, :action_dim]
    return after[:, :scored, :action_dim], mean[:, :scored, :action_dim], std
