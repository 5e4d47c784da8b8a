"""Behaviour cloning: follow the demonstrations with the policy's own imitation loss.

The weights that act are an exponential average of the weights that learn (Ho et al. 2020; every
diffusion policy does): the last few updates of a denoiser are noise.

A batch may be taken in pieces whose gradients are added up (`accumulate`), and computed in half
precision (`precision`); weights, moments and averages stay as they are stored.
"""

from __future__ import annotations

from collections.abc import Generator as Yields
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor

from robot_rl.algos.config.cloning import BCConfig
from robot_rl.algos.learner import Learner, PolicyModule
from robot_rl.algos.optim import Optimiser, cosine_lr, follow, matmul_precision
from robot_rl.core.policy import DemoBatch
from robot_rl.core.renamed import use_present_names

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BehaviourCloning(Learner):
    """Minimises `policy.bc_loss`; acts with averaged weights."""

    def __init__(self, policy: PolicyModule, cfg: BCConfig, seed: int, *, total_updates: int = 4000) -> None:
        """Starts from the policy's present weights, which the updates then change in place.

        Args:
            policy: what learns.
            cfg: learning rate, average, clipping.
            seed: seeds the noise of the loss.
            total_updates: length of the learning-rate schedule; it stays at its floor afterwards.
        """
        super().__init__()
        self._policy, self._cfg, self._total_updates = policy, cfg, total_updates
        self._trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._trained.items()}
        self._optimiser = Optimiser(
            self._trained.values(), lr=cfg.lr, weight_decay=cfg.weight_decay, grad_clip=cfg.grad_clip
        )
        self._device = next(policy.parameters()).device
        self._generator = Generator(self._device).manual_seed(seed)
        self._scaler = LossScaler() if cfg.precision == "fp16" else None

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
            loss, gradients = self._gradients(batch)
        if self._scaler is None or self._scaler.unscale(gradients):
            self._optimiser.apply(gradients, lr=lr)
        self._updates += 1
        # A long average would remember the first, random weights: it grows with the updates.
        decay = min(cfg.ema_decay, (1 + self._updates) / (10 + self._updates))
        follow(self._average.values(), self._trained.values(), 1.0 - decay)
        return {"loss": loss, "lr": lr}

    def _gradients(self, batch: DemoBatch) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss of a batch and its gradients, added up over the pieces."""
        total, gradients = torch.zeros((), device=self._device), []
        num_valid = batch.valid.sum()
        for piece in _pieces(batch, self._cfg.accumulate):
            with self._autocast():
                loss = self._policy.bc_loss(piece, self._generator)
            if self._cfg.accumulate > 1:
                # By valid steps, which is how a loss averages: the sum is that of the whole batch.
                loss = loss * (piece.valid.sum() / num_valid)
            scaled = loss if self._scaler is None else loss * self._scaler.scale
            # A part that the loss does not reach (a head of a pretrained model) has gradient 0.
            found = torch.autograd.grad(scaled, self._optimiser.parameters, materialize_grads=True)
            gradients = [a + b for a, b in zip(gradients, found, strict=True)] if gradients else list(found)
            total += loss.detach()
        return total, gradients

    def _autocast(self) -> torch.autocast:
        dtype = _DTYPES[self._cfg.precision]
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype != torch.float32)

    @contextmanager
    def acting(self) -> Yields[None]:
        """Lends the policy its averaged weights, without a second copy of either."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._trained.items():
            parameter.data, self._average[name] = self._average[name], parameter.data

    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the averaged weights, and the policy's buffers as they are."""
        return {**self._policy.state_dict(), **self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        average = dict(state["average"])
        use_present_names(self._policy, average)
        super().load_state_dict({**state, "average": average})

    def _parts(self) -> Mapping[str, Any]:
        return {
            "policy": self._policy,
            "average": self._average,
            "optimiser": self._optimiser,
            "generator": self._generator,
            "scaler": self._scaler,
        }


class LossScaler:
    """Scales a float16 loss so that small gradients do not become zero (Micikevicius et al. 2018).

    A gradient that overflows halves the scale and its update is left out; a run of good ones doubles it.
    """

    def __init__(self, scale: float = 2.0**16, *, grow_after: int = 2000) -> None:
        self.scale = scale
        self._grow_after, self._good = grow_after, 0

    def unscale(self, gradients: list[Tensor]) -> bool:
        """Divides by the scale in place; returns whether the gradients are finite."""
        sums = torch.stack([gradient.div_(self.scale).sum() for gradient in gradients])
        if not bool(sums.isfinite().all()):
            self.scale, self._good = max(1.0, self.scale / 2), 0
            return False
        self._good += 1
        if self._good == self._grow_after:
            self.scale, self._good = self.scale * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self._good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self._good = float(state["scale"]), int(state["good"])


def _pieces(batch: DemoBatch, count: int) -> Iterator[DemoBatch]:
    """Yields `count` pieces of a batch, or its rows where there are fewer."""
    rows = len(batch.actions)
    if count == 1:
        yield batch
        return
    size = -(-rows // count)
    for start in range(0, rows, size):
        part = slice(start, start + size)
        obs = {key: value[part] for key, value in batch.obs.items()}
        yield DemoBatch(obs, batch.actions[part], batch.valid[part])
