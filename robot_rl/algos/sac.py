"""Soft actor-critic with twin critics and automatic temperature (Haarnoja et al. 2018, v2).

B batch, A action dim, N critics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.critics import Critics, EnsembleMLP, Path
from robot_rl.algos.optim import METRICS_EVERY, Matmul, Optimiser, keep_freed_memory
from robot_rl.algos.returns import td_target
from robot_rl.core.errors import require
from robot_rl.data.replay import TransitionBatch

LOG_STD_RANGE = (-20.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class SACConfig:
    """Sizes and rates; the defaults are the paper's."""

    width: int = 256
    depth: int = 2
    num_critics: int = 2
    layernorm: bool = False
    """Normalises the critics' hidden layers (RLPD does)."""
    actor_lr: float = 3e-4
    critic_lr: float = 3e-4
    temperature_lr: float = 3e-4
    initial_temperature: float = 1.0
    target_entropy_per_action: float = -1.0
    """Entropy aimed at, per action element."""
    gamma_step: float = 0.99
    n_step: int = 1
    tau: float = 0.005
    """Share of the way that the target critics follow at each update."""
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can; `fp32`: never."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "num_critics", "n_step"):
            require(getattr(self, name) >= 1, f"sac.{name}", getattr(self, name), "1 or more")
        for name in ("actor_lr", "critic_lr", "temperature_lr", "initial_temperature"):
            require(getattr(self, name) > 0, f"sac.{name}", getattr(self, name), "above 0")
        require(0 <= self.gamma_step <= 1, "sac.gamma_step", self.gamma_step, "0 to 1")
        require(0 < self.tau <= 1, "sac.tau", self.tau, "above 0, at most 1")
        require(self.matmul in ("bf16", "fp32"), "sac.matmul", self.matmul, "bf16, fp32")


class Squashed(NamedTuple):
    """A sample of the actor, and what its way back needs."""

    action: Tensor
    """(B, A) in (-1, 1)."""
    log_prob: Tensor
    """(B,)"""
    noise: Tensor
    std: Tensor
    within: Tensor
    """Where the log std was inside its range, and moves with its network."""
    path: Path

    def rows(self, rows: slice) -> Squashed:
        """Returns some rows of a sample without layer norm."""
        path = Path([read[rows] for read in self.path.reads], [])
        return Squashed(
            self.action[rows], self.log_prob[rows], self.noise[rows], self.std[rows], self.within[rows], path
        )


def squashed_log_prob(action: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """Returns the log-probability (B,) of actions tanh(mean + std noise), (B, A) in (-1, 1)."""
    # log N(u; mean, std) - log(1 - tanh(u)^2), summed over A; 1e-6 keeps the log finite.
    log_prob = (1.0 + 1e-6 - action.square()).log_().add_(log_std).addcmul_(noise, noise, value=0.5)
    constant = 0.5 * math.log(2 * math.pi) * action.shape[-1]
    return log_prob.sum(dim=-1).add_(constant).neg_()


class TanhGaussian(nn.Module):
    """An actor: Gaussian, squashed to (-1, 1)."""

    def __init__(self, feature_dim: int, action_dim: int, **network: Any) -> None:
        """Args: network: width, depth, matmul, generator: see `EnsembleMLP`."""
        super().__init__()
        self.net = EnsembleMLP(feature_dim, 2 * action_dim, **network)

    @torch.no_grad()
    def mean(self, features: Tensor) -> Tensor:
        """Returns the action (B, A) without noise."""
        return self.net.answer(features)[0][0].chunk(2, dim=-1)[0].tanh()

    def sample(self, features: Tensor, generator: Generator | None = None) -> Squashed:
        """Draws actions: a = tanh(mean + std noise)."""
        out_NBO, (path,) = self.net.answer(features)
        mean, raw_log_std = out_NBO[0].chunk(2, dim=-1)
        log_std = raw_log_std.clamp(*LOG_STD_RANGE)
        std = log_std.exp()
        noise = torch.empty_like(std).normal_(generator=generator)
        action = torch.addcmul(mean, std, noise).tanh_()
        log_prob = squashed_log_prob(action, log_std, noise)
        return Squashed(action, log_prob, noise, std, log_std == raw_log_std, path)

    def gradients(self, sample: Squashed, to_action: Tensor, to_log_prob: Tensor) -> list[Tensor]:
        """Returns the gradients of the parameters, in their order.

        Args:
            sample: what `sample` returned.
            to_action: the loss's derivative by the action, (B, A).
            to_log_prob: its derivative by the log-probability, the same for all rows.
        """
        # u = mean + std noise: da/du = 1 - a^2; d log_prob / du = 2 a, and -1 by log std beside that.
        to_u = to_action * (1.0 - sample.action.square()) + sample.action * (2.0 * to_log_prob)
        to_log_std = (to_u * sample.noise).mul_(sample.std).sub_(to_log_prob).mul_(sample.within)
        return self.net.gradients(torch.cat([to_u, to_log_std], dim=-1).unsqueeze(0), [sample.path])


class SAC:
    """Learns an actor and critics over `obs["state"]`."""

    def __init__(self, feature_dim: int, action_dim: int, cfg: SACConfig, seed: int) -> None:
        keep_freed_memory()
        self._cfg = cfg
        self._generator = Generator().manual_seed(seed)
        size: dict[str, Any] = {"width": cfg.width, "depth": cfg.depth, "matmul": cfg.matmul}
        size["generator"] = self._generator
        self.actor = TanhGaussian(feature_dim, action_dim, **size)
        self.critics = Critics(feature_dim, action_dim, num=cfg.num_critics, layernorm=cfg.layernorm, **size)
        self._targets = self.critics.target()
        self._log_temperature = nn.Parameter(torch.tensor(math.log(cfg.initial_temperature)))
        self._target_entropy = cfg.target_entropy_per_action * action_dim
        self._optimisers = {
            "actor": Optimiser(self.actor.parameters(), lr=cfg.actor_lr),
            "critics": Optimiser(self.critics.parameters(), lr=cfg.critic_lr),
            "temperature": Optimiser([self._log_temperature], lr=cfg.temperature_lr),
        }
        self._updates = 0

    @torch.no_grad()
    def update(self, batch: TransitionBatch) -> Mapping[str, Tensor]:
        """Takes one step of the critics, the actor and the temperature."""
        obs, temperature = batch.obs["state"], self._log_temperature.exp()
        # The actor does not move before its own step: both samples in one go.
        both = self.actor.sample(torch.cat([obs, batch.next_obs["state"]]), self._generator)
        sample, next_sample = both.rows(slice(len(obs))), both.rows(slice(len(obs), None))
        target = self._target(batch, next_sample, temperature)
        error, gradients = self.critics.td_gradients(obs, batch.action, target)
        self._optimisers["critics"].apply(gradients)
        value, by_action = self.critics.action_gradient(obs, sample.action, "min")
        # Loss of the actor: mean of temperature * log_prob - value.
        share = 1.0 / len(value)
        self._optimisers["actor"].apply(self.actor.gradients(sample, by_action * -share, temperature * share))
        entropy = -sample.log_prob.mean()
        # Loss of the temperature: log temperature * (entropy - target entropy).
        self._optimisers["temperature"].apply([entropy - self._target_entropy])
        self._targets.follow_online(self.critics, self._cfg.tau)
        self._updates += 1
        if self._updates % METRICS_EVERY:
            return {}
        return {
            "critic_loss": error.square().mean(dim=1).sum(),
            "q": value.mean(),
            "target": target.mean(),
            "entropy": entropy,
            "temperature": temperature,
        }

    def _target(self, batch: TransitionBatch, after: Squashed, temperature: Tensor) -> Tensor:
        """Returns reward + bootstrap * (value of the next action + temperature * its surprise)."""
        next_value = self._targets.q(batch.next_obs["state"], after.action).amin(dim=0)
        return td_target(batch.reward, batch.bootstrap, next_value - temperature * after.log_prob)

    @torch.no_grad()
    def act(self, state: Tensor, *, explore: bool, generator: Generator | None = None) -> Tensor:
        """Returns actions (B, A) for states (B, F)."""
        return self.actor.sample(state, generator).action if explore else self.actor.mean(state)

    def policy_weights(self) -> Mapping[str, Tensor]:
        return self.actor.state_dict()

    def state_dict(self) -> dict[str, Any]:
        modules = {"actor": self.actor, "critics": self.critics, "targets": self._targets}
        return {
            **{name: {k: v.clone() for k, v in m.state_dict().items()} for name, m in modules.items()},
            "log_temperature": self._log_temperature.detach().clone(),
            "optimisers": {name: optimiser.state_dict() for name, optimiser in self._optimisers.items()},
            "generator": self._generator.get_state(),
            "updates": self._updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actor.load_state_dict(state["actor"])
        self.critics.load_state_dict(state["critics"])
        self._targets.load_state_dict(state["targets"])
        self._log_temperature.data.copy_(state["log_temperature"])
        for name, optimiser in self._optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        self._generator.set_state(state["generator"])
        self._updates = int(state["updates"])
