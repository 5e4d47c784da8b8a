"""Ensembles of small networks, and what critics do with their answers.

A 256 x 256 network takes a batch of 256 in less time than autograd needs to keep its books, so an
ensemble is one node of the graph, with its way back written out (a test holds it against
numerical differences). N networks, B batch, F inputs, W width, O outputs, A action dim.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.optim import Matmul, follow, matmul_precision

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
        matmul: Matmul = "bf16",
        generator: Generator | None = None,
    ) -> None:
        """Draws weights and biases from +-1/sqrt(fan in), as torch's Linear does."""
        super().__init__()
        self._shape = _Shape(num, layernorm, matmul)
        sizes = [inputs, *[width] * depth, outputs]
        self.layers = nn.ParameterList()
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            weight, bias = torch.empty(num, fan_in, fan_out), torch.empty(num, fan_out)
            for parameter in (weight, bias):
                parameter.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator)
            if i == 0:  # side by side: what all networks read is multiplied once
                weight, bias = weight.transpose(0, 1).reshape(fan_in, -1).clone(), bias.flatten()
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


class _Norm(NamedTuple):
    """What a layer norm needs on the way back."""

    before: Tensor
    mean: Tensor
    rstd: Tensor


class _Ensemble(torch.autograd.Function):
    """All networks as one node of the graph.

    The first layer is one product for all. From there each network is computed to its end before
    the next one begins, both ways: its matrices then stay in the second-level cache, where a batched
    product of all networks would not (measured: 1.5 times slower). Only the square products are
    worth bfloat16, which costs some 20 us to enter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: _Shape, *layers: Tensor) -> Tensor:
        weights, biases = layers[::2], layers[1::2]
        before_BNW = torch.addmm(biases[0], x, weights[0]).view(len(x), shape.num, -1)
        first_BNW, norm = _activate(before_BNW, shape.layernorm)
        out_NBO = x.new_empty(shape.num, len(x), biases[-1].shape[-1])
        reads: list[list[Tensor]] = []
        norms: list[list[_Norm | None]] = []
        for n in range(shape.num):
            reads.append([first_BNW[:, n]])
            norms.append([norm])
            for weight, bias in zip(weights[1:-1], biases[1:-1], strict=True):
                with matmul_precision(shape.matmul):
                    before = torch.addmm(bias[n], reads[n][-1], weight[n])
                hidden, norm_n = _activate(before, shape.layernorm)
                reads[n].append(hidden)
                norms[n].append(norm_n)
            torch.addmm(biases[-1][n], reads[n][-1], weights[-1][n], out=out_NBO[n])
        # Plain attributes: these tensors are nobody else's, and the parameters must not change
        # between the way there and the way back, which the saved weights verify.
        ctx.shape, ctx.first, ctx.reads, ctx.norms = shape, first_BNW, reads, norms
        ctx.save_for_backward(x, *weights)
        return out_NBO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shape: _Shape = ctx.shape
        x, *weights = ctx.saved_tensors
        learns = any(ctx.needs_input_grad[2:])
        to_weights = [torch.empty_like(weight) for weight in weights] if learns else []
        to_biases = (
            [weight.new_empty(weight.shape[0], weight.shape[-1]) for weight in weights] if learns else []
        )
        to_first_BNW = torch.empty_like(ctx.first)
        for n in range(shape.num):
            grad = grads[0][n]
            for i in range(len(weights) - 1, 0, -1):
                read = ctx.reads[n][i - 1]
                with matmul_precision(shape.matmul if i < len(weights) - 1 else "fp32"):
                    if learns:
                        torch.mm(read.T, grad, out=to_weights[i][n])
                        torch.sum(grad, 0, out=to_biases[i][n])
                    if i > 1:
                        grad = torch.mm(grad, weights[i][n].T)
                    else:
                        torch.mm(grad, weights[i][n].T, out=to_first_BNW[:, n])
                if i > 1:
                    grad = _activate_backward(grad, read, ctx.norms[n][i - 1])
        to_first = _activate_backward(to_first_BNW, ctx.first, ctx.norms[0][0]).flatten(1)
        if learns:
            to_weights[0] = torch.mm(x.T, to_first)
            to_biases[0] = to_first.sum(dim=0)
        to_x = torch.mm(to_first, weights[0].T) if ctx.needs_input_grad[0] else None
        pairs = zip(to_weights, to_biases, strict=True) if learns else ()
        to_layers = [grad for pair in pairs for grad in pair] if learns else [None] * (2 * len(weights))
        return to_x, None, *to_layers


def _activate(before: Tensor, layernorm: bool) -> tuple[Tensor, _Norm | None]:
    """Returns ReLU of the layer norm of `before`; without layer norm, in place."""
    if not layernorm:
        return before.relu_(), None
    normalised, mean, rstd = torch.native_layer_norm(before, before.shape[-1:], None, None, _EPS)
    return normalised.relu_(), _Norm(before, mean, rstd)


def _activate_backward(grad: Tensor, activated: Tensor, norm: _Norm | None) -> Tensor:
    """Returns the gradient before the activation; overwrites `grad`."""
    torch.ops.aten.threshold_backward.grad_input(grad, activated, 0, grad_input=grad)
    if norm is None:
        return grad
    return torch.ops.aten.native_layer_norm_backward(
        grad, norm.before, norm.before.shape[-1:], norm.mean, norm.rstd, None, None, [True, False, False]
    )[0]
