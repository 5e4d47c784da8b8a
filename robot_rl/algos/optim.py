"""AdamW, learning rate, gradient clipping, averages of weights, and the precision of products."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from robot_rl.algos.config.cloning import Matmul
from robot_rl.core.arrays import multiplies_bfloat16

METRICS_EVERY = 10
"""Updates of an off-policy learner between two that report metrics: their means take as long as a layer."""


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
        beta1: float = 0.9,
    ) -> None:
        """Args: grad_clip: largest norm over all gradients; 0 leaves them. beta1: memory of the mean."""
        self.parameters = list(parameters)
        self._lr, self._weight_decay, self._grad_clip, self._beta1 = lr, weight_decay, grad_clip, beta1
        self._state = {
            "mean": [torch.zeros_like(p, requires_grad=False) for p in self.parameters],
            "square": [torch.zeros_like(p, requires_grad=False) for p in self.parameters],
            "steps": [torch.zeros((), dtype=torch.float32, device=p.device) for p in self.parameters],
        }

    @torch.no_grad()
    def apply(
        self, gradients: Sequence[Tensor], *, lr: float | Tensor | None = None, skips: Tensor | None = None
    ) -> None:
        """Takes one step along the gradients, clipped; a rate may be a tensor of their device.

        Where `skips`, () bool of the device, is true, nothing changes: the device decides, and nobody waits.
        """
        excess = None
        if self._grad_clip > 0:
            norms = torch._foreach_norm(list(gradients))  # pyright: ignore[reportPrivateImportUsage]
            excess = (torch.linalg.vector_norm(torch.stack(norms)) / self._grad_clip).clamp(min=1.0)
        # The function behind torch.optim.AdamW: the class around it costs 0.1 ms a step.
        adamw(
            list(self.parameters),
            list(gradients),
            self._state["mean"],
            self._state["square"],
            [],
            self._state["steps"],
            fused=True,
            amsgrad=False,
            beta1=self._beta1,
            beta2=0.999,
            lr=self._lr if lr is None else lr,
            weight_decay=self._weight_decay,
            eps=1e-8,
            maximize=False,
            found_inf=None if skips is None else skips.to(torch.float32),  # 1: the kernel leaves all as it is
            grad_scale=excess,  # divides them on the way: a pass over all gradients less
        )

    def step(self, loss: Tensor, *, lr: float | None = None, skips: Tensor | None = None) -> None:
        """Follows the gradient of `loss` with respect to these parameters only.

        Other parameters behind the loss get no gradient.
        """
        self.apply(torch.autograd.grad(loss, self.parameters), lr=lr, skips=skips)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the moments and the step counts."""
        return {name: [value.clone() for value in values] for name, values in self._state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, values in self._state.items():
            for value, saved in zip(values, state[name], strict=True):
                value.copy_(saved)


def follow(target: Iterable[Tensor], online: Iterable[Tensor], rate: float) -> None:
    """Moves each target a share `rate` of the way to the online tensor (exponential average)."""
    with torch.no_grad():
        torch._foreach_lerp_(list(target), list(online), rate)  # pyright: ignore[reportPrivateImportUsage]


def cosine_lr(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    """Returns the learning rate: linear from 0 to `peak` over `warmup`, cosine to `floor` at `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


class matmul_precision:  # noqa: N801 - reads as a word after `with`
    """Computes float32 products in less precision inside, with `bf16`.

    That is bfloat16 on a processor that has it in hardware, and TensorFloat-32 on a GPU, for any
    processor. Sums stay float32, and so do weights, moments and targets. The setting is torch's and global:
    it is put back on leaving, so that policies act with the same numbers in training as elsewhere.
    """

    __slots__ = ("_before", "_inside")

    def __init__(self, matmul: Matmul) -> None:
        self._inside = _lowest_precision() if matmul == "bf16" else None
        self._before = ""

    def __enter__(self) -> None:
        if self._inside is not None:
            self._before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(self._inside)

    def __exit__(self, *_: object) -> None:
        if self._inside is not None:
            torch.set_float32_matmul_precision(self._before)


def rounds_products(weight: Tensor) -> bool:
    """Whether products with this matrix are taken in bfloat16 under `bf16`: on a processor made for it."""
    return weight.device.type == "cpu" and _lowest_precision() == "medium"


@cache
def _lowest_precision() -> Literal["medium", "high"] | None:
    """Returns torch's name of the least precision that is fast here; None if float32 is.

    `medium` and `high` are one to a GPU, TensorFloat-32; on a processor `medium` is bfloat16, which only some
    have in hardware (emulation would be slower), and `high` leaves those that have not at float32.
    """
    if multiplies_bfloat16():
        return "medium"
    return "high" if torch.cuda.is_available() else None


@cache
def keep_freed_memory() -> None:
    """Tells glibc's malloc to keep what is freed instead of returning it to the system.

    A learner frees and takes the same megabytes at every update; handing them back each time costs
    a page fault for every 4 KB, 15 % of an update. Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
        mallopt(trim_threshold, 1 << 30)
        mallopt(top_pad, 64 << 20)
        mallopt(mmap_threshold, 32 << 20)
