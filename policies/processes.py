"""Noise processes: how noise becomes a chunk of actions, and how likely each step of that path was.

Conventions, for every process here:

- Time t runs from 1 (noise) to 0 (action). Step k = 0..K-1 takes x_k to x_{k+1}; x_0 is the
  initial noise and x_K the chunk. The network sees t_k, the time *before* step k.
- Flow: x_t = (1 - t) action + t noise; the network predicts the velocity v = noise - action, so
  an Euler step is x - (t_k - t_{k+1}) v.
- Diffusion: x_i = sqrt(abar_i) action + sqrt(1 - abar_i) noise at training step i in 0..T-1; the
  network sees t = (i + 1) / T and predicts the noise, or sqrt(abar_i) noise - sqrt(1 - abar_i) action.
- Log-probabilities are averaged over H and A: the ratio of a PPO learner is then the (H A)-th root
  of the density ratio, which is the convention behind published clip ranges.

The sampler and the scorer use one `TimeGrid`, which the chain carries: scoring on another grid
gives ratios unlike 1 without any error, and `robot_rl.policies.chain.score` refuses it.
B envs, H chunk length, A action dim, K denoising steps, S scored transitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor

    Step = tuple[Tensor, float | Tensor | None]
    """Mean and standard deviation of x_{k+1}; None where the step is deterministic."""

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class TimeGrid:
    """The times of one denoising path, and every coefficient its steps use."""

    process: str
    """The process and its options, as text: two grids are equal only if these are."""
    times: tuple[float, ...]
    """K + 1 times from 1 to 0."""
    columns: Mapping[str, tuple[float, ...]]
    """One number per step, by name."""

    @property
    def steps(self) -> int:
        """K, the number of denoising steps."""
        return len(self.times) - 1

    def at(self, column: str, k: int | Tensor, like: Tensor) -> float | Tensor:
        """Returns the coefficient of step `k`: a float, or (N, 1, 1) for steps (N,)."""
        values = self.columns[column]
        if isinstance(k, int):
            return values[k]
        return _on_device(values, like.dtype, like.device)[k].view(-1, 1, 1)


@cache
def _on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns coefficients as a tensor, made once: to copy numbers to a device is to wait for it."""
    import torch

    with torch.inference_mode(False):  # for those that learn, too
        return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class Corrupted:
    """Training input: noisy actions, their times, and what the network has to predict."""

    x: Tensor
    """(B, H, A)"""
    time: Tensor
    """(B,)"""
    target: Tensor
    """(B, H, A)"""


class Process(Protocol):
    """A way from noise to a chunk; steps take `k` as an int, or as a tensor with one per row."""

    def check(self, steps: int) -> None:
        """Refuses a number of denoising steps that the process cannot have."""
        ...

    def grid(self, steps: int) -> TimeGrid:
        """Returns the grid of `steps` denoising steps."""
        ...

    def step(self, net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Step:
        """Returns mean and standard deviation of x_{k+1}."""
        ...

    def ode_step(self, net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Tensor:
        """Returns x_{k+1} of the deterministic path."""
        ...

    def stochastic_index(self, grid: TimeGrid, batch: int, generator: Generator | None) -> Tensor:
        """Returns which steps of each row are stochastic, and scored: (B, S), ascending."""
        ...

    def corrupt(self, actions: Tensor, noise: Tensor, generator: Generator | None) -> Corrupted:
        """Draws a time per row and returns the training input for clean `actions` (B, H, A)."""
        ...


@dataclass(frozen=True, kw_only=True)
class FlowODE:
    """Flow matching with Euler steps: the chunk is a deterministic function of the noise."""

    def check(self, steps: int) -> None:
        _flow_times(steps)

    def grid(self, steps: int) -> TimeGrid:
        times = _flow_times(steps)
        return TimeGrid(str(self), times, {"delta": _differences(times)})

    def step(self, net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Step:
        return _euler(net_out, x, grid, k), None

    def ode_step(self, net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Tensor:
        return _euler(net_out, x, grid, k)

    def stochastic_index(self, grid: TimeGrid, batch: int, generator: Generator | None) -> Tensor:
        import torch

        return torch.empty((batch, 0), dtype=torch.long)

    def corrupt(self, actions: Tensor, noise: Tensor, generator: Generator | None) -> Corrupted:
        return _flow_corrupt(actions, noise, generator)


@dataclass(frozen=True, kw_only=True)
class FlowSDE(FlowODE):
    """Flow matching with noise that keeps the marginals of the ODE (Flow-GRPO, pi_RL).

    sigma = eta sqrt(t / (1 - t)), where the first step takes the next time instead of t = 1;
    mean = Euler step - sigma^2 delta / (2 t) (x + (1 - t) v), std = sigma sqrt(delta).
    At eta = 0 every step is the Euler step, to the bit.
    """

    eta: float = 0.5
    """Strength of the noise, at least 0."""
    stochastic_steps: str = "one"
    """`one`: a random step of each chunk is stochastic, the others are ODE steps; or `all`."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and self.eta >= 0):
            raise ValueError(f"FlowSDE: eta must be at least 0, got {self.eta}")
        if self.stochastic_steps not in ("one", "all"):
            raise ValueError(
                f"FlowSDE: stochastic_steps must be 'one' or 'all', got {self.stochastic_steps!r}"
            )

    def check(self, steps: int) -> None:
        if steps == 1:
            raise ValueError(
                "FlowSDE: needs at least 2 denoising steps, got 1: its first step takes its noise "
                "from the next time, where there is none left. Use 2 or more, or FlowODE."
            )
        _flow_times(steps)

    def grid(self, steps: int) -> TimeGrid:
        self.check(steps)
        times = _flow_times(steps)
        deltas = _differences(times)
        noisy = [times[max(k, 1)] for k in range(steps)]
        sigmas = [self.eta * math.sqrt(t / (1 - t)) for t in noisy]
        pulls = [s * s * d / (2 * t) for s, d, t in zip(sigmas, deltas, times[:-1], strict=True)]
        stds = tuple(s * math.sqrt(d) for s, d in zip(sigmas, deltas, strict=True))
        columns = {
            "delta": deltas,
            "pull": tuple(pulls),
            "velocity_to_noise": tuple(1 - t for t in times[:-1]),
            "std": stds,
            "score_std": stds,
        }
        return TimeGrid(str(self), times, columns)

    def step(self, net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Step:
        noise = x + grid.at("velocity_to_noise", k, x) * net_out
        mean = _euler(net_out, x, grid, k) - grid.at("pull", k, x) * noise
        return mean, (grid.at("std", k, x) if self.eta > 0 else None)

    def stochastic_index(self, grid: TimeGrid, batch: int, generator: Generator | None) -> Tensor:
        import torch

        if self.eta == 0:
            return torch.empty((batch, 0), dtype=torch.long)
        if self.stochastic_steps == "all":
            return torch.arange(grid.steps, device=_where(generator)).expand(batch, -1)
        return torch.randint(grid.steps, (batch, 1), generator=generator, device=_where(generator))


def flow_process(name: str, *, eta: float, stochastic_steps: str) -> FlowODE:
    """Returns the process `flow_ode` or `flow_sde`; the ODE has no options."""
    return FlowODE() if name == "flow_ode" else FlowSDE(eta=eta, stochastic_steps=stochastic_steps)


@dataclass(frozen=True, kw_only=True)
class FlowNoise(FlowODE):
    """Flow matching with learned noise in every Euler step (ReinFlow, Zhang et al. 2025).

    x_{k+1} = Euler step + sigma(observation, t_k) noise. The policy has the net of sigma, which
    keeps it within the bounds; the ODE leaves it out. Deviations: the mean is not clipped, so that
    the density is that of what was drawn; the upper bound stays where it is; the density of x_0,
    which no weights change, is left out of the mean over steps.
    """

    sigma_min: float = 0.08
    """Smallest standard deviation, above 0."""
    sigma_max: float = 0.16
    """Largest."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min <= self.sigma_max:
            raise ValueError(
                f"FlowNoise: got sigma_min {self.sigma_min} and sigma_max {self.sigma_max}, "
                "allowed: 0 < sigma_min <= sigma_max"
            )

    def stochastic_index(self, grid: TimeGrid, batch: int, generator: Generator | None) -> Tensor:
        import torch

        return torch.arange(grid.steps, device=_where(generator)).expand(batch, -1)


@dataclass(frozen=True, kw_only=True)
class FlowCFM(FlowODE):
    """Flow matching that is scored by its own training loss (FPO, McAllister et al. 2025).

    The path is the ODE's: what explores is its initial noise. For `pairs` draws of (noise, t), kept
    with the chain, minus the error of the velocity at (1 - t) chunk + t noise stands in for the
    log-probability; its mean over the pairs makes the ratio of FPO.
    """

    pairs: int = 8
    """S, the draws of (noise, t) for each chunk."""

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"FlowCFM: pairs must be at least 1, got {self.pairs}")


@dataclass(frozen=True, kw_only=True)
class DDIM:
    """Diffusion with steps of chosen randomness (Song et al. 2021, equations 12 and 16).

    eta = 0 is deterministic, eta = 1 is DDPM's posterior. The predicted action is clipped to
    [-1, 1] before it is used, and the noise is derived again from the clipped one.
    """

    eta: float = 1.0
    """Randomness of a step, in [0, 1]."""
    train_steps: int = 20
    """T, the number of noise levels in training."""
    std_floor: float = 0.1
    """Smallest noise of a stochastic step (DPPO: exploration must not die in the last steps)."""
    log_prob_std_floor: float = 0.1
    """Smallest noise in the log-probability (DPPO)."""
    tuned_steps: int = 0
    """Only the last so many steps are noisy, and scored; 0: all. DPPO draws noise before them, too."""
    prediction: str = "noise"
    """What the network predicts: the `noise`, or the `velocity` (Salimans and Ho 2022, appendix D)."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 <= self.eta <= 1:
            raise ValueError(f"{name}: eta must be in [0, 1], got {self.eta}")
        if self.train_steps < 1:
            raise ValueError(f"{name}: train_steps must be at least 1, got {self.train_steps}")
        for field in ("std_floor", "log_prob_std_floor"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{name}: {field} must be above 0, got {getattr(self, field)}")
        if self.tuned_steps < 0:
            raise ValueError(f"{name}: tuned_steps must be at least 0, got {self.tuned_steps}")
        if self.prediction not in ("noise", "velocity"):
            raise ValueError(f"{name}: prediction must be 'noise' or 'velocity', got {self.prediction!r}")

    def check(self, steps: int) -> None:
        if not 1 <= steps <= self.train_steps:
            raise ValueError(
                f"{type(self).__name__}: {steps} denoising steps, allowed 1 to "
                f"train_steps = {self.train_steps}. Lower the one or train with more of the other."
            )
        if self.tuned_steps > steps:
            raise ValueError(
                f"{type(self).__name__}: tuned_steps {self.tuned_steps}, "
                f"allowed 0 to {steps}, the denoising steps"
            )

    def grid(self, steps: int) -> TimeGrid:
        self.check(steps)
        levels = [round(self.train_steps * (steps - k) / steps) - 1 for k in range(steps)]
        abar = alphas_cumprod(self.train_steps)
        rows = [
            self._coefficients(abar[level], abar[after] if after >= 0 else 1.0)
            for level, after in zip(levels, [*levels[1:], -1], strict=True)
        ]
        columns = {name: tuple(row[name] for row in rows) for name in rows[0]}
        times = tuple((level + 1) / self.train_steps for level in levels)
        return TimeGrid(str(self), (*times, 0.0), columns)

    def step(self, net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Step:
        action = _predicted_action(net_out, x, grid, k)
        mean = grid.at("action_gain", k, x) * action + grid.at("x_gain", k, x) * x
        return mean, (grid.at("std", k, x) if self.eta > 0 else None)

    def ode_step(self, net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Tensor:
        action = _predicted_action(net_out, x, grid, k)
        return grid.at("action_gain_ode", k, x) * action + grid.at("x_gain_ode", k, x) * x

    def stochastic_index(self, grid: TimeGrid, batch: int, generator: Generator | None) -> Tensor:
        import torch

        if self.eta == 0:
            return torch.empty((batch, 0), dtype=torch.long)
        first = grid.steps - (self.tuned_steps or grid.steps)
        return torch.arange(first, grid.steps, device=_where(generator)).expand(batch, -1)

    def corrupt(self, actions: Tensor, noise: Tensor, generator: Generator | None) -> Corrupted:
        import torch

        device = generator.device if generator is not None else actions.device
        level = torch.randint(self.train_steps, (len(actions),), generator=generator, device=device)
        level = level.to(actions.device)
        table = torch.tensor(alphas_cumprod(self.train_steps), device=actions.device)
        abar = table[level].to(actions.dtype).view(-1, 1, 1)
        x = abar.sqrt() * actions + (1 - abar).sqrt() * noise
        if self.prediction == "velocity":
            noise = abar.sqrt() * noise - (1 - abar).sqrt() * actions
        return Corrupted(x, (level + 1).to(actions.dtype) / self.train_steps, noise)

    def _coefficients(self, abar: float, abar_next: float) -> dict[str, float]:
        """Returns the numbers of the step from noise level `abar` down to `abar_next`."""
        variance = (1 - abar_next) / (1 - abar) * (1 - abar / abar_next)
        std = self.eta * math.sqrt(variance)
        gain = math.sqrt(max(1 - abar_next - std * std, 0.0) / (1 - abar))
        gain_ode = math.sqrt((1 - abar_next) / (1 - abar))
        floored = max(std, self.std_floor)
        root = math.sqrt(abar)
        return {
            "x_to_action": root if self.prediction == "velocity" else 1 / root,
            "out_to_action": -math.sqrt(1 - abar) / (1 if self.prediction == "velocity" else root),
            "action_gain": math.sqrt(abar_next) - gain * math.sqrt(abar),
            "x_gain": gain,
            "action_gain_ode": math.sqrt(abar_next) - gain_ode * math.sqrt(abar),
            "x_gain_ode": gain_ode,
            "std": floored,
            "score_std": max(floored, self.log_prob_std_floor),
        }


@dataclass(frozen=True, kw_only=True)
class DDPM(DDIM):
    """Diffusion with DDPM's posterior (Ho et al. 2020, equations 6 and 7); on fewer steps too."""

    def __post_init__(self) -> None:
        if self.eta != 1:
            raise ValueError(f"DDPM: eta is 1 by definition, got {self.eta}. Use DDIM to choose it.")
        super().__post_init__()


def _where(generator: Generator | None) -> torch.device | str:
    """Returns the device of what a generator draws."""
    return "cpu" if generator is None else generator.device


def gaussian_log_prob(value: Tensor, mean: Tensor, std: float | Tensor) -> Tensor:
    """Returns log N(value; mean, std) averaged over the last two dimensions."""
    from torch import Tensor

    log_std = std.log() if isinstance(std, Tensor) else math.log(std)
    deviation = (value - mean) / std
    return (-0.5 * deviation.square() - log_std - _HALF_LOG_2PI).mean(dim=(-2, -1))


def gaussian_entropy(std: float | Tensor, *, like: Tensor) -> Tensor:
    """Returns the entropy of N(., std), shaped as `like` (..., H, A), averaged over H and A."""
    import torch
    from torch import Tensor

    log_std = std.log() if isinstance(std, Tensor) else math.log(std)
    return (torch.zeros_like(like) + log_std + 0.5 + _HALF_LOG_2PI).mean(dim=(-2, -1))


def normal_like(x: Tensor, generator: Generator | None) -> Tensor:
    """Returns standard normal noise shaped as `x`, drawn on the generator's device."""
    import torch

    device = generator.device if generator is not None else x.device
    noise = torch.randn(x.shape, dtype=x.dtype, device=device, generator=generator)
    return noise.to(x.device)


@cache
def alphas_cumprod(train_steps: int) -> tuple[float, ...]:
    """Returns abar_i of the cosine schedule (Nichol and Dhariwal 2021), i = 0..T-1."""
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler  # seconds to import

    scheduler = DDPMScheduler(num_train_timesteps=train_steps, beta_schedule="squaredcos_cap_v2")
    return tuple((1.0 - scheduler.betas.double()).cumprod(dim=0).tolist())


def _flow_times(steps: int) -> tuple[float, ...]:
    if steps < 1:
        raise ValueError(f"flow: denoising steps must be at least 1, got {steps}")
    return tuple(1 - k / steps for k in range(steps + 1))


def _differences(times: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a - b for a, b in pairwise(times))


def _euler(net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Tensor:
    return x - grid.at("delta", k, x) * net_out


def _predicted_action(net_out: Tensor, x: Tensor, grid: TimeGrid, k: int | Tensor) -> Tensor:
    action = grid.at("x_to_action", k, x) * x + grid.at("out_to_action", k, x) * net_out
    return action.clamp(-1.0, 1.0)


def flow_between(actions: Tensor, noise: Tensor, time: Tensor) -> Corrupted:
    """Returns the points at `time` (N,) on the lines from `actions` to `noise`, (N, H, A) each."""
    t = time.view(-1, 1, 1)
    return Corrupted((1 - t) * actions + t * noise, time, noise - actions)


def _flow_corrupt(actions: Tensor, noise: Tensor, generator: Generator | None) -> Corrupted:
    import torch

    device = generator.device if generator is not None else actions.device
    time = torch.rand(len(actions), dtype=actions.dtype, device=device, generator=generator)
    return flow_between(actions, noise, time.to(actions.device))
