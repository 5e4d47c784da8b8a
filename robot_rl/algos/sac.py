"""Soft actor-critic with twin critics and automatic temperature (Haarnoja et al. 2018, v2).

The learner is `actor_critic`'s, of which this is the plainest setting.
"""

from __future__ import annotations

from dataclasses import dataclass

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.algos.actors import Squashed, TanhGaussian
from robot_rl.algos.config.cloning import Matmul
from robot_rl.algos.config.off_policy import LOG_STD_RANGE, ActorConfig, ActorCriticConfig, CriticConfig

__all__ = ["LOG_STD_RANGE", "SAC", "SACConfig", "Squashed", "TanhGaussian"]


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
    """`bf16`: products of float32 matrices in bfloat16 where the processor can (GPU: TF32); `fp32`: never."""

    def __post_init__(self) -> None:
        self.full()

    def full(self) -> ActorCriticConfig:
        """Returns the same for the learner, which checks it."""
        critic = CriticConfig(
            width=self.width,
            depth=self.depth,
            num=self.num_critics,
            drawn=self.num_critics,
            norm="layer" if self.layernorm else "none",
            tau=self.tau,
        )
        return ActorCriticConfig(
            actor=ActorConfig(width=self.width, depth=self.depth),
            critic=critic,
            actor_lr=self.actor_lr,
            critic_lr=self.critic_lr,
            temperature_lr=self.temperature_lr,
            initial_temperature=self.initial_temperature,
            target_entropy_per_action=self.target_entropy_per_action,
            gamma_step=self.gamma_step,
            n_step=self.n_step,
            matmul=self.matmul,
        )


class SAC(ActorCritic):
    """Learns an actor and critics over `obs["state"]`."""

    def __init__(self, feature_dim: int, action_dim: int, cfg: SACConfig, seed: int) -> None:
        super().__init__(feature_dim, action_dim, cfg.full(), seed)
