"""Behaviour cloning: follow the demonstrations with the policy's own imitation loss.

The weights that act are an exponential average of the weights that learn (Ho et al. 2020; every
diffusion policy does): the last few updates of a denoiser are noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from robot_rl.algos.optim import Matmul, Optimiser, cosine_lr, follow, keep_freed_memory, matmul_precision
from robot_rl.core.policy import DemoBatch


class ClonablePolicy(Protocol):
    """A module with an imitation loss."""

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """How the base policy is cloned."""

    lr: float = 1e-3
    """Highest learning rate."""
    warmup_updates: int = 100
    """Updates over which the learning rate rises to `lr`."""
    final_lr_ratio: float = 0.01
    """Learning rate at the end of the cosine, as a share of `lr`."""
    weight_decay: float = 1e-6
    ema_decay: float = 0.995
    """Share of the average kept at each update; the average of the first updates is shorter."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 switches clipping off."""
    matmul: Matmul = "bf16"
    """`bf16`: products of float32 matrices in bfloat16 where the processor can; `fp32`: never."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "lr", self.lr, "above 0")
        _require(self.warmup_updates >= 0, "warmup_updates", self.warmup_updates, "0 or more")
        _require(0 <= self.final_lr_ratio <= 1, "final_lr_ratio", self.final_lr_ratio, "0 to 1")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "0 to below 1")
        _require(self.grad_clip >= 0, "grad_clip", self.grad_clip, "0 or more")
        _require(self.matmul in ("bf16", "fp32"), "matmul", self.matmul, "bf16, fp32")


class BehaviourCloning:
    """Minimises `policy.bc_loss`; acts with averaged weights."""

    def __init__(
        self, policy: ClonablePolicy, cfg: BCConfig, seed: int, *, total_updates: int = 4000
    ) -> None:
        """Starts from the policy's present weights, which the updates then change in place.

        Args:
            policy: what learns.
            cfg: learning rate, average, clipping.
            seed: seeds the noise of the loss.
            total_updates: length of the learning-rate schedule; it stays at its floor afterwards.
        """
        keep_freed_memory()
        self._policy, self._cfg, self._total_updates = policy, cfg, total_updates
        self._trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._trained.items()}
        self._optimiser = Optimiser(
            self._trained.values(), lr=cfg.lr, weight_decay=cfg.weight_decay, grad_clip=cfg.grad_clip
        )
        self._generator = Generator(next(policy.parameters()).device).manual_seed(seed)
        self._updates = 0

    def update(self, batch: DemoBatch) -> Mapping[str, Tensor | float]:
        """Takes one gradient step on a batch of demonstrations."""
        cfg = self._cfg
        lr = cosine_lr(
            self._updates,
            peak=cfg.lr,
            warmup=cfg.warmup_updates,
            total=self._total_updates,
            floor=cfg.lr * cfg.final_lr_ratio,
        )
        with matmul_precision(cfg.matmul):
            loss = self._policy.bc_loss(batch, self._generator)
            self._optimiser.step(loss, lr=lr)
        self._updates += 1
        # A long average would remember the first, random weights: it grows with the updates.
        decay = min(cfg.ema_decay, (1 + self._updates) / (10 + self._updates))
        follow(self._average.values(), self._trained.values(), 1.0 - decay)
        return {"loss": loss.detach(), "lr": lr}

    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the averaged weights, and the policy's buffers as they are."""
        return {**self._policy.state_dict(), **self._average}

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": {name: value.clone() for name, value in self._policy.state_dict().items()},
            "average": {name: value.clone() for name, value in self._average.items()},
            "optimiser": self._optimiser.state_dict(),
            "generator": self._generator.get_state(),
            "updates": self._updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        for name, value in self._average.items():
            value.copy_(state["average"][name])
        self._optimiser.load_state_dict(state["optimiser"])
        self._generator.set_state(state["generator"])
        self._updates = int(state["updates"])


def _require(holds: bool, key: str, got: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"bc.algorithm.{key}: got {got!r}, allowed: {allowed}")
