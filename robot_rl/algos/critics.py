"""Ensembles of small networks, and what critics do with their answers.

A 256 x 256 network takes a batch of 256 in less time than autograd and Python need to keep its
books, so the way back is written out (tests hold it against numerical differences and against
autograd), and learners call it directly, under `torch.no_grad()`. N networks, B batch, F inputs,
W width, O outputs, A action dim.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.optim import Matmul, follow, matmul_precision

Aggregate = Literal["min", "mean"]
"""How several critics' values become one: `min` (TD3, SAC), or `mean`, without pessimism."""

_EPS = 1e-5  # of the layer norm
_LARGE = 128  # rows and columns from which a product is worth bfloat16, which takes some 20 us to enter


class Path(NamedTuple):
    """What one network's way back needs of its way there."""

    reads: list[Tensor]
    """What each layer read: (B, F), then (B, W)."""
    norms: list[tuple[Tensor, Tensor, Tensor]]
    """Input, mean and 1 / std of each layer norm."""


class EnsembleMLP(nn.Module):
    """N multilayer perceptrons of the same shape, ReLU, optionally with layer norm.

    Each network is computed to its end before the next one begins, both ways: its matrices then
    stay in the second-level cache, where a batched product of all networks would not (measured:
    1.5 times slower). The layer norm has no scale and shift of its own: the next layer can learn
    them, and they would cost two more passes over the activations.
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
        self.num = num
        self._layernorm = layernorm
        sizes = [inputs, *[width] * depth, outputs]
        self.layers = nn.ParameterList()
        for fan_in, fan_out in itertools.pairwise(sizes):
            bound = 1.0 / math.sqrt(fan_in)
            for shape in ((num, fan_in, fan_out), (num, fan_out)):
                self.layers.append(
                    nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))
                )
        self._precisions: list[Matmul] = [
            matmul if min(pair) >= _LARGE else "fp32" for pair in itertools.pairwise(sizes)
        ]
        self._bind()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, F), the same for all networks, to (N, B, O)."""
        return _Ensemble.apply(x, self, *self.in_order)  # type: ignore[no-any-return]

    def answer(self, x: Tensor, only: Sequence[int] | None = None) -> tuple[Tensor, list[Path]]:
        """Returns what `forward` does, without autograd, and the way back of each network.

        Args:
            x: inputs, (B, F).
            only: the networks to ask; None asks all.
        """
        nets = self._nets if only is None else [self._nets[n] for n in only]
        out_NBO = x.new_empty(len(nets), len(x), nets[0][-1].shape[-1])
        return out_NBO, [self._there(x, net, out) for net, out in zip(nets, out_NBO, strict=True)]

    def gradients(self, to_out_NBO: Tensor, paths: Sequence[Path]) -> list[Tensor]:
        """Returns the gradients of the parameters, in their order, given that of the answer."""
        to_layers = [torch.empty_like(parameter) for parameter in self.in_order]
        to_nets = zip(*(to_layer.unbind() for to_layer in to_layers), strict=True)
        for net, to_out, path, to_net in zip(self._nets, to_out_NBO, paths, to_nets, strict=True):
            self._back(to_out, path, net, to_net)
        return to_layers

    def input_gradient(self, to_out_NBO: Tensor, paths: Sequence[Path]) -> Tensor:
        """Returns the gradient (B, F) of the input, given that of the answer."""
        to_x: Tensor | None = None
        for net, to_out, path in zip(self._nets, to_out_NBO, paths, strict=True):
            grad = self._back(to_out, path, net, ())
            to_x = torch.mm(grad, net[0].T) if to_x is None else to_x.addmm_(grad, net[0].T)
        assert to_x is not None, "an ensemble without networks"
        return to_x

    def _bind(self) -> None:
        """Looks up what every call needs: walking a ParameterList and slicing it takes 30 us."""
        self.in_order = list(self.layers)
        with torch.no_grad():
            self._nets = [[layer.detach()[n] for layer in self.in_order] for n in range(self.num)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._bind()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("in_order", "_nets")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def _there(self, x: Tensor, layers: Sequence[Tensor], out: Tensor) -> Path:
        """Writes the answer of one network to `out`."""
        reads, norms = [x], []
        hidden = x
        for i, precision in enumerate(self._precisions[:-1]):
            # Product and sum apart: one call for both first copies the bias to every row.
            with matmul_precision(precision):
                hidden = torch.mm(hidden, layers[2 * i])
            hidden.add_(layers[2 * i + 1])
            if self._layernorm:
                before = hidden
                hidden, mean, rstd = torch.native_layer_norm(before, before.shape[-1:], None, None, _EPS)
                norms.append((before, mean, rstd))
            reads.append(hidden.relu_())
        torch.mm(hidden, layers[-2], out=out).add_(layers[-1])
        return Path(reads, norms)

    def _back(
        self, grad: Tensor, path: Path, layers: Sequence[Tensor], to_layers: Sequence[Tensor]
    ) -> Tensor:
        """Returns the gradient before the first activation; writes those of the layers, if asked to."""
        for i in range(len(layers) // 2 - 1, -1, -1):
            read = path.reads[i]
            with matmul_precision(self._precisions[i]):
                if to_layers:
                    torch.mm(read.T, grad, out=to_layers[2 * i])
                    torch.sum(grad, 0, out=to_layers[2 * i + 1])
                if i == 0:
                    break
                grad = torch.mm(grad, layers[2 * i].T)
            torch.ops.aten.threshold_backward.grad_input(grad, read, 0, grad_input=grad)
            if self._layernorm:
                before, mean, rstd = path.norms[i - 1]
                grad = torch.ops.aten.native_layer_norm_backward(
                    grad, before, before.shape[-1:], mean, rstd, None, None, [True, False, False]
                )[0]
        return grad


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
        self._action_dim = action_dim

    def q(self, features: Tensor, action: Tensor) -> Tensor:
        """Returns the estimates (N, B) of features (B, F) and actions (B, A), without gradient."""
        return self.answer(torch.cat([features, action], dim=-1))[0].squeeze(-1)

    def pessimistic(self, features: Tensor, action: Tensor, generator: Generator) -> Tensor:
        """Returns the smaller estimate (B,) of two critics drawn for this batch (REDQ, Chen et al. 2021).

        Args:
            features: (B, F).
            action: (B, A).
            generator: draws the two, on the CPU; only they are asked.
        """
        drawn = torch.randperm(self.num, generator=generator)[:2].tolist()
        out_NBO, _ = self.answer(torch.cat([features, action], dim=-1), drawn)
        return out_NBO.amin(dim=0).squeeze(-1)

    def td_gradients(self, features: Tensor, action: Tensor, target_B: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the errors q - target (N, B) and the gradients of `losses.td_loss` at them."""
        out_NBO, paths = self.answer(torch.cat([features, action], dim=-1))
        error_NB = out_NBO.squeeze(-1) - target_B
        return error_NB, self.gradients((error_NB * (2.0 / len(target_B))).unsqueeze(-1), paths)

    def action_gradient(self, features: Tensor, action: Tensor, how: Aggregate) -> tuple[Tensor, Tensor]:
        """Returns the value (B,) of each action, and its derivative (B, A) by the action.

        Args:
            features: (B, F).
            action: (B, A).
            how: over the critics.
        """
        out_NBO, paths = self.answer(torch.cat([features, action], dim=-1))
        if how == "mean":
            value, share = out_NBO.mean(dim=0), torch.full_like(out_NBO, 1.0 / self.num)
        else:
            value, smallest = out_NBO.min(dim=0)
            share = torch.zeros_like(out_NBO).scatter_(0, smallest.unsqueeze(0), 1.0)
        to_x = self.input_gradient(share, paths)
        return value.squeeze(-1), to_x[:, -self._action_dim :]

    def target(self) -> Self:
        """Returns a copy that `follow_online` moves."""
        return copy.deepcopy(self).requires_grad_(False)

    def follow_online(self, online: Critics, tau: float) -> None:
        """Moves these weights a share `tau` of the way to the online critics'."""
        follow(self.in_order, online.in_order, tau)


class _Ensemble(torch.autograd.Function):
    """The whole ensemble as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: EnsembleMLP, *parameters: Tensor) -> Tensor:
        out_NBO, ctx.paths = net.answer(x)
        ctx.net = net
        ctx.save_for_backward(*parameters)  # autograd then verifies that they have not changed
        return out_NBO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        net: EnsembleMLP = ctx.net
        parameters = ctx.saved_tensors
        to_x = net.input_gradient(grads[0], ctx.paths) if ctx.needs_input_grad[0] else None
        learns = any(ctx.needs_input_grad[2:])
        to_layers = net.gradients(grads[0], ctx.paths) if learns else [None] * len(parameters)
        return to_x, None, *to_layers
