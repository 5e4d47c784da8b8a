"""Ensembles of small networks as one batched product, and what critics do with their answers.

A 256x256 network on a batch of 256 takes less time to compute than autograd takes to keep its
books, so an ensemble is one node of the graph with its backward pass written out (a test holds it
against numerical differences). N networks, B batch, F inputs, W width, A action dim.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, Literal, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.optim import follow

Aggregate = Literal["min", "min_of_2", "mean"]

_EPS = 1e-5  # of the layer norm


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
        generator: Generator | None = None,
    ) -> None:
        """Draws weights and biases from +-1/sqrt(fan in), as torch's Linear does."""
        super().__init__()
        self.num = num
        self.layernorm = layernorm
        sizes = [inputs, *[width] * depth, outputs]
        self.layers = nn.ParameterList()
        for fan_in, fan_out in itertools.pairwise(sizes):
            bound = 1.0 / math.sqrt(fan_in)
            for shape in ((num, fan_in, fan_out), (num, 1, fan_out)):
                self.layers.append(
                    nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))
                )

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """Maps (B, F), the same for all, to (N, B, outputs).

        Args:
            x: inputs.
            frozen: gradients reach `x` but not the weights, and none is computed for them.
        """
        layers = list(self.layers)
        if frozen:
            layers = [layer.detach() for layer in layers]
        return _Ensemble.apply(x, self.layernorm, *layers)  # type: ignore[no-any-return]


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
        generator: Generator | None = None,
    ) -> None:
        super().__init__(
            feature_dim + action_dim,
            1,
            num=num,
            width=width,
            depth=depth,
            layernorm=layernorm,
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


class _Ensemble(torch.autograd.Function):
    """The whole network as one node: bmm, layer norm, ReLU, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layernorm: bool, *layers: Tensor) -> Tensor:
        weights, biases = layers[::2], layers[1::2]
        hidden = x.expand(len(weights[0]), *x.shape)
        kept: list[Tensor] = [hidden]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            hidden = torch.baddbmm(bias, hidden, weight)
            if layernorm:
                before = hidden
                hidden, mean, rstd = torch.native_layer_norm(before, before.shape[-1:], None, None, _EPS)
                kept += [before, mean, rstd]
            kept.append(hidden.relu_())
        ctx.layernorm = layernorm
        ctx.save_for_backward(*kept, *weights)
        return torch.baddbmm(biases[-1], hidden, weights[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        depth = len(ctx.needs_input_grad[2:]) // 2
        kept, weights = ctx.saved_tensors[:-depth], ctx.saved_tensors[-depth:]
        learns = any(ctx.needs_input_grad[2:])
        per_layer = 4 if ctx.layernorm else 1
        layers: list[Tensor | None] = []
        for i in range(depth - 1, -1, -1):
            below = kept[i * per_layer]
            if learns:
                layers = [torch.bmm(below.mT, grad), grad.sum(dim=1, keepdim=True), *layers]
            else:
                layers = [None, None, *layers]
            if i == 0 and not ctx.needs_input_grad[0]:
                return None, None, *layers
            grad = torch.bmm(grad, weights[i].mT)
            if i > 0:
                grad = torch.ops.aten.threshold_backward(grad, below, 0)
                if ctx.layernorm:
                    before, mean, rstd = kept[i * per_layer - 3 : i * per_layer]
                    grad = torch.ops.aten.native_layer_norm_backward(
                        grad, before, before.shape[-1:], mean, rstd, None, None, [True, False, False]
                    )[0]
        return grad.sum(dim=0), None, *layers
