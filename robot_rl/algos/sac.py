"""Soft actor-critic with twin critics and automatic temperature (Haarnoja et al. 2018, v2).

B batch, A action dim, N critics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.critics import Critics, EnsembleMLP, aggregate
from robot_rl.algos.losses import td_loss
from robot_rl.algos.optim import Matmul, Optimiser
from robot_rl.algos.returns import td_target
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
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("actor_lr", "critic_lr", "temperature_lr", "initial_temperature"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        _require(0 <= self.gamma_step <= 1, "gamma_step", self.gamma_step, "0 to 1")
        _require(0 < self.tau <= 1, "tau", self.tau, "above 0, at most 1")
        _require(self.matmul in ("bf16", "fp32"), "matmul", self.matmul, "bf16, fp32")


class TanhGaussian(nn.Module):
    """An actor: Gaussian, squashed to (-1, 1)."""

    def __init__(self, feature_dim: int, action_dim: int, **network: Any) -> None:
        """Args: network: width, depth, matmul, generator: see `EnsembleMLP`."""
        super().__init__()
        self.net = EnsembleMLP(feature_dim, 2 * action_dim, **network)

    def mean(self, features: Tensor) -> Tensor:
        """Returns the action (B, A) without noise."""
        return self.net(features)[0].chunk(2, dim=-1)[0].tanh()

    def sample(self, features: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Returns actions (B, A) and their log-probabilities (B,); gradients reach the weights."""
        mean, log_std = self.net(features)[0].chunk(2, dim=-1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        noise = torch.empty_like(mean).normal_(generator=generator)
        action = torch.addcmul(mean, log_std.exp(), noise).tanh()
        # log N(u; mean, std) - log(1 - tanh(u)^2), summed over A; 1e-6 keeps the log finite.
        log_prob = -(0.5 * noise.square() + log_std + torch.log1p(1e-6 - action.square()))
        return action, log_prob.sum(dim=-1) - 0.5 * math.log(2 * math.pi) * mean.shape[-1]


class SAC:
    """Learns an actor and critics over `obs["state"]`."""

    def __init__(self, feature_dim: int, action_dim: int, cfg: SACConfig, seed: int) -> None:
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

    def update(self, batch: TransitionBatch) -> Mapping[str, Tensor]:
        """Takes one step of the critics, the actor and the temperature."""
        obs, temperature = batch.obs["state"], self._log_temperature.detach().exp()
        target = self._target(batch, temperature)
        q_loss = td_loss(self.critics.q(obs, batch.action), target)
        self._optimisers["critics"].step(q_loss)
        action, log_prob = self.actor.sample(obs, self._generator)
        q = aggregate(self.critics.q(obs, action, frozen=True), "min")
        actor_loss = (temperature * log_prob - q).mean()
        self._optimisers["actor"].step(actor_loss)
        entropy = -log_prob.detach().mean()
        self._optimisers["temperature"].step(self._log_temperature * (entropy - self._target_entropy))
        self._targets.follow_online(self.critics, self._cfg.tau)
        return {
            "critic_loss": q_loss.detach(),
            "actor_loss": actor_loss.detach(),
            "q": q.detach().mean(),
            "entropy": entropy,
            "temperature": temperature,
        }

    @torch.no_grad()
    def _target(self, batch: TransitionBatch, temperature: Tensor) -> Tensor:
        next_obs = batch.next_obs["state"]
        action, log_prob = self.actor.sample(next_obs, self._generator)
        next_value = aggregate(self._targets.q(next_obs, action), "min") - temperature * log_prob
        return td_target(batch.reward, batch.bootstrap, next_value)

    @torch.no_grad()
    def act(self, state: Tensor, *, explore: bool, generator: Generator | None = None) -> Tensor:
        """Returns actions (B, A) for states (B, F)."""
        return self.actor.sample(state, generator)[0] if explore else self.actor.mean(state)

    def policy_weights(self) -> Mapping[str, Tensor]:
        return self.actor.state_dict()

    def state_dict(self) -> dict[str, Any]:
        modules = {"actor": self.actor, "critics": self.critics, "targets": self._targets}
        return {
            **{name: {k: v.clone() for k, v in m.state_dict().items()} for name, m in modules.items()},
            "log_temperature": self._log_temperature.detach().clone(),
            "optimisers": {name: optimiser.state_dict() for name, optimiser in self._optimisers.items()},
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actor.load_state_dict(state["actor"])
        self.critics.load_state_dict(state["critics"])
        self._targets.load_state_dict(state["targets"])
        self._log_temperature.data.copy_(state["log_temperature"])
        for name, optimiser in self._optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        self._generator.set_state(state["generator"])


def _require(holds: bool, key: str, got: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"sac.{key}: got {got!r}, allowed: {allowed}")
