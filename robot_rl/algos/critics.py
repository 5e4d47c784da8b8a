"""Ensembles of small networks, and what critics do with their answers.

A 256 x 256 network takes a batch of 256 in less time than autograd needs to keep its books, so an
ensemble is one node of the graph, with its way back written out (a test holds it against
numerical differences). N networks, B batch, F inputs, W width, O outputs, A action dim.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.optim import Matmul, follow, matmul_precision

Aggregate = Literal["min", "min_of_2", "mean"]

_EPS = 1e-5  # of the layer norm
_LARGE = 128  # rows and columns from which a product is worth bfloat16


class EnsembleMLP(nn.Module):
    """N multilayer perceptrons of the same shape, ReLU, optionally with layer norm.

    The layer norm has no scale and shift of its own: the next layer can learn them, and they
    would cost two more passes over the activations.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        num: int = 1,
        width: int = 256,
        depth: int = 2,
        layernorm: bool = False,
        matmul: Matmul = "bf16",
        generator: Generator | None = None,
    ) -> None:
        """Draws weights and biases from +-1/sqrt(fan in), as torch's Linear does."""
        super().__init__()
        self._shape = _Shape(num, layernorm, matmul)
        sizes = [inputs, *[width] * depth, outputs]
        self.layers = nn.ParameterList()
        for fan_in, fan_out in itertools.pairwise(sizes):
            weight, bias = torch.empty(num, fan_in, fan_out), torch.empty(num, fan_out)
            for parameter in (weight, bias):
                parameter.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator)
            self.layers += [nn.Parameter(weight), nn.Parameter(bias)]

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """Maps (B, F), the same for all, to (N, B, O).

        Args:
            x: inputs.
            frozen: gradients reach `x` but not the weights, and none is computed for them.
        """
        layers = list(self.layers)
        if frozen:
            layers = [layer.detach() for layer in layers]
        return _Ensemble.apply(x, self._shape, *layers)  # type: ignore[no-any-return]


class Critics(EnsembleMLP):
    """N estimates of the value of (features, action)."""

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        *,
        num: int,
        width: int = 256,
        depth: int = 2,
        layernorm: bool = True,
        matmul: Matmul = "bf16",
        generator: Generator | None = None,
    ) -> None:
        super().__init__(
            feature_dim + action_dim,
            1,
            num=num,
            width=width,
            depth=depth,
            layernorm=layernorm,
            matmul=matmul,
            generator=generator,
        )

    def q(self, features: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Returns the estimates (N, B) of features (B, F) and actions (B, A)."""
        return self(torch.cat([features, action], dim=-1), frozen=frozen).squeeze(-1)

    def target(self) -> Self:
        """Returns a copy that `follow_online` moves."""
        return copy.deepcopy(self).requires_grad_(False)

    def follow_online(self, online: Critics, tau: float) -> None:
        """Moves these weights a share `tau` of the way to the online critics'."""
        follow(self.layers, online.layers, tau)


def aggregate(q_NB: Tensor, how: Aggregate, generator: Generator | None = None) -> Tensor:
    """Returns one value (B,) from N.

    Args:
        q_NB: the estimates.
        how: `min` (TD3); `min_of_2`, over two of them drawn for this batch (REDQ, Chen et al.
            2021); `mean`, without pessimism, for the policy's gradient.
        generator: draws the two.
    """
    if how == "mean":
        return q_NB.mean(dim=0)
    if how == "min_of_2" and len(q_NB) > 2:
        drawn = torch.randperm(len(q_NB), generator=generator, device=q_NB.device)[:2]
        q_NB = q_NB.index_select(0, drawn)
    return q_NB.amin(dim=0)


class _Shape(NamedTuple):
    num: int
    layernorm: bool
    matmul: Matmul


class _Ensemble(torch.autograd.Function):
    """All networks as one node of the graph.

    Each network is computed to its end before the next one begins, both ways: its matrices then
    stay in the second-level cache, where a batched product of all networks would not (measured: 1.5 times
    slower).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: _Shape, *layers: Tensor) -> Tensor:
        out_NBO = x.new_empty(shape.num, len(x), layers[-1].shape[-1])
        unbound = [layer.unbind() for layer in layers]
        ctx.paths = [
            _forward(x, [layer[n] for layer in unbound], shape, out_NBO[n]) for n in range(shape.num)
        ]
        ctx.shape = shape
        # Autograd verifies that saved tensors are unchanged on the way back.
        ctx.save_for_backward(x, *layers[::2])
        return out_NBO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape: _Shape = ctx.shape
        weights: Sequence[Tensor] = ctx.saved_tensors[1:]
        to_layers: list[Tensor | None] = [None] * (2 * len(weights))
        learns = any(ctx.needs_input_grad[2:])
        if learns:
            to_layers[::2] = [torch.empty_like(w) for w in weights]
            to_layers[1::2] = [w.new_empty(shape.num, w.shape[-1]) for w in weights]
        to_x: Tensor | None = None
        for n in range(shape.num):
            path = _Path(*ctx.paths[n])
            own = [layer[n] for layer in to_layers if layer is not None]
            grad = _backward(grads[0][n], path, [w[n] for w in weights], own, shape)
            if ctx.needs_input_grad[0]:
                first = weights[0][n].T
                to_x = torch.mm(grad, first) if to_x is None else to_x.addmm_(grad, first)
        return to_x, None, *to_layers


class _Path(NamedTuple):
    """What one network's way back needs of its way there."""

    reads: list[Tensor]
    """What each layer read, (B, F) or (B, W)."""
    norms: list[tuple[Tensor, Tensor, Tensor] | None]
    """Input, mean and 1 / std of each layer norm."""


def _forward(x: Tensor, layers: Sequence[Tensor], shape: _Shape, out: Tensor) -> _Path:
    """Writes the answer of one network to `out`."""
    path = _Path([x], [])
    hidden = x
    for i in range(0, len(layers) - 2, 2):
        with _square(layers[i], shape):
            hidden = torch.addmm(layers[i + 1], hidden, layers[i])
        norm = None
        if shape.layernorm:
            before = hidden
            hidden, mean, rstd = torch.native_layer_norm(before, before.shape[-1:], None, None, _EPS)
            norm = before, mean, rstd
        path.reads.append(hidden.relu_())
        path.norms.append(norm)
    torch.addmm(layers[-1], hidden, layers[-2], out=out)
    return path


def _backward(
    grad: Tensor, path: _Path, weights: Sequence[Tensor], to_layers: Sequence[Tensor], shape: _Shape
) -> Tensor:
    """Returns the gradient before the first activation; writes those of the layers, if there are any."""
    for i in range(len(weights) - 1, -1, -1):
        with _square(weights[i], shape):
            if to_layers:
                torch.mm(path.reads[i].T, grad, out=to_layers[2 * i])
                torch.sum(grad, 0, out=to_layers[2 * i + 1])
            if i == 0:
                break
            grad = torch.mm(grad, weights[i].T)
        torch.ops.aten.threshold_backward.grad_input(grad, path.reads[i], 0, grad_input=grad)
        norm = path.norms[i - 1]
        if norm is not None:
            before, mean, rstd = norm
            grad = torch.ops.aten.native_layer_norm_backward(
                grad, before, before.shape[-1:], mean, rstd, None, None, [True, False, False]
            )[0]
    return grad


def _square(weight: Tensor, shape: _Shape) -> AbstractContextManager[None]:
    """Allows bfloat16 for large products only: it costs some 20 us to enter."""
    return matmul_precision(shape.matmul if min(weight.shape) >= _LARGE else "fp32")
