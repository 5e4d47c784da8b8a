"""What every algorithm does with its parameters: AdamW, learning rate, gradient clipping, averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class Optimiser:
    """AdamW over some parameters, in one kernel, with gradients clipped to a norm.

    AdamW: Loshchilov and Hutter 2019. `fused` updates all tensors in one call.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        grad_clip: float = 0.0,
    ) -> None:
        """Args: grad_clip: largest norm over all gradients; 0 leaves them as they are."""
        self.parameters = list(parameters)
        self._grad_clip = grad_clip
        self._adam = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=weight_decay, fused=True)

    def step(self, loss: Tensor, *, lr: float | None = None) -> None:
        """Follows the gradient of `loss` with respect to these parameters only.

        Other parameters behind the loss (a critic, under an actor's loss) get no gradient, and
        none is computed for them.
        """
        if lr is not None:
            self._adam.param_groups[0]["lr"] = lr
        gradients = torch.autograd.grad(loss, self.parameters)
        if self._grad_clip > 0:
            clip(gradients, self._grad_clip)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._adam.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy: moments and step counts."""
        state = self._adam.state_dict()
        moments = {
            index: {name: value.clone() for name, value in tensors.items()}
            for index, tensors in state["state"].items()
        }
        return {"state": moments, "param_groups": state["param_groups"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._adam.load_state_dict(dict(state))


def clip(gradients: Iterable[Tensor], max_norm: float) -> None:
    """Scales gradients in place so that their common norm is at most `max_norm`; waits for nothing."""
    tensors = list(gradients)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
    torch._foreach_mul_(tensors, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def follow(target: Iterable[Tensor], online: Iterable[Tensor], rate: float) -> None:
    """Moves each target a share `rate` of the way to the online tensor (exponential average)."""
    torch._foreach_lerp_([t.data for t in target], [o.data for o in online], rate)


def cosine_lr(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    """Returns the learning rate: linear from 0 to `peak` over `warmup`, cosine to `floor` at `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


@contextmanager
def matmul_precision(matmul: str) -> Iterator[None]:
    """Computes float32 products in bfloat16 inside, with `bf16`, where the processor is made for it.

    Sums stay float32, and so do weights, moments and targets. The setting is torch's and global:
    it is put back on leaving, so that policies act with the same numbers in training as elsewhere.
    """
    if matmul == "fp32" or not _has_bf16_products():
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def _has_bf16_products() -> bool:
    """Returns whether the processor multiplies bfloat16 in hardware; emulation would be slower."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
