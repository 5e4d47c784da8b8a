"""Ensembles of small networks, and critics.

For a 256 x 256 network and a batch of 256, autograd and Python take longer than the arithmetic. So the
backward pass is written out (tests compare it with numerical differences and with autograd), and learners
call it directly, under `torch.no_grad()`. N networks, B batch, F inputs,
W width, O outputs, A action dim.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.batch_renorm import BatchRenorm, Renormed
from robot_rl.algos.config.cloning import Matmul
from robot_rl.algos.config.off_policy import Aggregate
from robot_rl.algos.config.on_policy import ChainPPOConfig, PlainPPOConfig
from robot_rl.algos.heads import Head
from robot_rl.algos.optim import follow, matmul_precision, rounds_products

_EPS = 1e-5  # of the layer norm
_LARGE = 128  # rows and columns from which a product is worth bfloat16, which takes some 20 us to enter


class Path(NamedTuple):
    """What the backward pass needs of the forward pass."""

    reads: list[Tensor]
    """What each layer read: (B, F), or (N, B, F) behind a batch norm, then (N, B, W)."""
    norms: list[tuple[Tensor, Tensor, Tensor]]
    """Input, mean and 1 / std of each layer norm."""
    halves: dict[int, tuple[Tensor, Tensor]]
    """What a layer read, and its weights, in bfloat16: of the layers that are computed in it."""
    renorms: list[Renormed]
    """What the backward pass of each batch norm needs, one before every linear layer."""

    def rows(self, rows: slice) -> Path:
        """Returns the path of some rows; a batch that was normalised as one has no parts."""
        assert not self.renorms, "rows of a batch norm"
        norms = [(before[:, rows], mean[:, rows], rstd[:, rows]) for before, mean, rstd in self.norms]
        halves = {i: (read[..., rows, :], weight) for i, (read, weight) in self.halves.items()}
        return Path([read[..., rows, :] for read in self.reads], norms, halves, [])


class EnsembleMLP(nn.Module):
    """N multilayer perceptrons of the same shape, ReLU, optionally with layer norm or batch norm.

    All networks are computed at once, layer by layer. The layer norm has no scale and shift: the next
    layer can learn them, and they would cost two more passes over the activations. The batch norm (CrossQ)
    stands before every linear layer, the first one included, behind the activation, and has them; outside
    of training it is folded into that layer.
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
        batchnorm: bool = False,
        renorm_warmup: int = 100_000,
        matmul: Matmul = "bf16",
        generator: Generator | None = None,
    ) -> None:
        """Draws weights and biases from +-1/sqrt(fan in), as torch's Linear does.

        Args: renorm_warmup: training batches before batch norm becomes batch renormalisation.
        """
        super().__init__()
        assert not (layernorm and batchnorm), "layer norm and batch norm at once"
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
        self.renorms = nn.ModuleList(
            BatchRenorm(num, size, warmup=renorm_warmup) for size in (sizes[:-1] if batchnorm else ())
        )
        self._precisions: list[Matmul] = [
            matmul if min(pair) >= _LARGE else "fp32" for pair in itertools.pairwise(sizes)
        ]
        self._bind()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, F), the same for all networks, to (N, B, O)."""
        assert not self.renorms, "autograd has no backward pass of a batch norm: use `answer`"
        return _Ensemble.apply(x, self, *self.in_order)  # type: ignore[no-any-return]

    def answer(
        self, x: Tensor, only: Sequence[int] | None = None, *, trains: bool = False
    ) -> tuple[Tensor, Path]:
        """Returns what `forward` does, without autograd, and what the backward pass needs.

        Args:
            x: inputs, (B, F).
            only: the networks to ask; None asks all.
            trains: batch norm uses the statistics of this batch, and updates its averages; else its averages.
        """
        norms = cast("Sequence[BatchRenorm]", self.renorms if trains else ())
        layers, path, hidden = self._layers if norms else self.plain(), Path([], [], {}, []), x
        if only is not None and list(only) != list(range(self.num)):
            layers = [torch.stack([layer[n] for n in only]) for layer in layers]
        last = len(self._precisions) - 1
        for i in range(last + 1):
            if norms:
                hidden, kept = norms[i](hidden)
                path.renorms.append(kept)
            path.reads.append(hidden)
            # Product and sum apart: one call for both first copies the bias to every row.
            hidden = self._product(i, hidden, layers[2 * i], path).add_(layers[2 * i + 1].unsqueeze(1))
            if i == last:
                break
            if self._layernorm:
                before = hidden
                hidden, mean, rstd = torch.native_layer_norm(before, before.shape[-1:], *self._unit, _EPS)
                path.norms.append((before, mean, rstd))
            hidden = hidden.relu_()
        return hidden, path

    def gradients(self, to_out_NBO: Tensor, path: Path, to_x: Tensor | None = None) -> list[Tensor]:
        """Returns the gradients of the parameters, in their order, given that of the answer of all networks.

        A network with batch norm has to have been asked with `trains`.

        Args:
            to_out_NBO: gradient of the answer.
            path: of the forward pass.
            to_x: (B, F); the gradient of the input, summed over the networks, is added to it.
        """
        assert bool(path.renorms) == bool(self.renorms), "asked without trains"
        to_layers = [torch.empty_like(parameter) for parameter in self.in_order]
        grad = self._backward(to_out_NBO, path, self._layers, to_layers)
        if to_x is not None:
            to_x.add_(grad.sum(dim=0) if path.renorms else self._through_first(grad, self._layers[0]))
        return to_layers

    def input_gradient(self, to_out_NBO: Tensor, path: Path) -> Tensor:
        """Returns the gradient (B, F) of the input, given that of the answer of all networks.

        A network with batch norm has to have been asked without `trains`.
        """
        assert not path.renorms, "asked with trains"
        layers = self.plain()
        return self._through_first(self._backward(to_out_NBO, path, layers, ()), layers[0])

    def _through_first(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient (B, F) of the input, given that (N, B, W) before the first activation."""
        if not any(self._halved):
            return torch.bmm(grad, weight.mT).sum(dim=0)
        return torch.bmm(grad.bfloat16(), weight.bfloat16().mT).float().sum(dim=0)

    def follow_online(self, online: EnsembleMLP, tau: float) -> None:
        """Moves the weights, and the averages of batch norms, a share `tau` of the way to the online ones."""
        follow(self.in_order, online.in_order, tau)
        if self.renorms:
            follow(self._averages(), online._averages(), tau)

    @torch.no_grad()
    def scale_to_unit_weights(self) -> None:
        """Scales the weights of each hidden unit, without its bias, to Euclidean norm 1.

        That leaves what a network with batch norm answers, up to the norm's epsilon: the bias is divided by
        the same length, ReLU(x / c) = ReLU(x) / c, and the batch norm behind it takes c out; its averages
        are divided, too. Behind the last layer is no norm, so it keeps its weights.
        """
        assert self.renorms, "without a batch norm this would be another function"
        norms = cast("Sequence[BatchRenorm]", self.renorms)[1:]
        for weight, bias, norm in zip(self._layers[:-2:2], self._layers[1:-2:2], norms, strict=True):
            inverse_NW = torch.linalg.vector_norm(weight, dim=1).reciprocal_()
            weight *= inverse_NW.unsqueeze(1)
            bias *= inverse_NW
            norm.rescale(inverse_NW)

    def _averages(self) -> list[Tensor]:
        norms = (cast("BatchRenorm", norm) for norm in self.renorms)
        return [average for norm in norms for average in (norm.mean, norm.variance)]

    def _bind(self) -> None:
        """Looks up what every call needs: walking a ParameterList takes 30 us."""
        self.in_order = list(self.parameters())  # weights and biases, then those of the batch norms
        self._layers = [layer.detach() for layer in self.layers]
        # torch would round both matrices again for each product, at 60 us; see `_product`.
        self._halved = [
            precision == "bf16" and rounds_products(layer)
            for precision, layer in zip(self._precisions, self.layers[::2], strict=True)
        ]
        # Of the layer norm: torch has the faster loop for one that scales and shifts (22 against 42 us).
        bias = self.layers[1].detach()[0]
        self._unit = torch.ones_like(bias), torch.zeros_like(bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._bind()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value for key, value in self.__dict__.items() if key not in ("in_order", "_layers", "_unit")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def plain(self) -> list[Tensor]:
        """Returns weights and biases, in their order, of the same networks without batch norm."""
        if not self.renorms:
            return self._layers
        norms = cast("Sequence[BatchRenorm]", self.renorms)
        pairs = zip(norms, self._layers[::2], self._layers[1::2], strict=True)
        return [layer for norm, weight, bias in pairs for layer in norm.folded(weight, bias)]

    def _product(self, i: int, read: Tensor, weight: Tensor, path: Path) -> Tensor:
        """Returns what a layer reads, times its weights; `path` keeps what its gradient needs."""
        if not self._halved[i]:
            with matmul_precision(self._precisions[i]):
                return _products(_for_each(read, weight), weight)
        path.halves[i] = read, weight = read.bfloat16(), weight.bfloat16()
        return torch.bmm(_for_each(read, weight), weight).float()

    def _backward(
        self, grad: Tensor, path: Path, layers: Sequence[Tensor], to_layers: Sequence[Tensor]
    ) -> Tensor:
        """Returns the gradient before the first activation; writes those of the layers, if asked to.

        In networks with batch norm that were asked with `trains`, it is the gradient of the input.
        """
        count = len(layers) // 2
        for i in range(count - 1, -1, -1):
            goes_on = i > 0 or bool(path.renorms)
            if to_layers:
                torch.sum(grad, 1, out=to_layers[2 * i + 1])
            if half := path.halves.get(i):
                to_out = grad.bfloat16()
                if to_layers:
                    to_layers[2 * i].copy_(torch.bmm(_for_each(half[0], to_out).mT, to_out))
                to_read = torch.bmm(to_out, half[1].mT).float() if goes_on else grad
            else:
                with matmul_precision(self._precisions[i]):
                    if to_layers:
                        _products(_for_each(path.reads[i], grad).mT, grad, out=to_layers[2 * i])
                    to_read = _products(grad, layers[2 * i].mT) if goes_on else grad
            if path.renorms:
                norm = cast("BatchRenorm", self.renorms[i])
                to_read = norm.backward(to_read, path.renorms[i], *to_layers[2 * (count + i) :][:2])
            if i == 0:
                return to_read
            grad = self._through_activation(to_read, path, i)
        raise AssertionError("a network without layers")

    def _through_activation(self, grad: Tensor, path: Path, i: int) -> Tensor:
        """Returns the gradient before the activation whose answer layer `i` read, in the place of `grad`."""
        active = path.renorms[i].read if path.renorms else path.reads[i]
        torch.ops.aten.threshold_backward.grad_input(grad, active, 0, grad_input=grad)
        if not self._layernorm:
            return grad
        before, mean, rstd = path.norms[i - 1]
        return torch.ops.aten.native_layer_norm_backward(
            grad, before, before.shape[-1:], mean, rstd, None, None, [True, False, False]
        )[0]


def _for_each(read: Tensor, of: Tensor) -> Tensor:
    """Returns what every network of `of` (N, ...) reads, (N, B, F), from (B, F) if they all read the same."""
    return read.expand(len(of), -1, -1)


def _products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the products (N, B, O) of (N, B, I) and (N, I, O)."""
    if min(left.shape[1:] + right.shape[2:]) > 1:
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)
    # A matrix times a vector: torch takes eight times as long for a batch of them as for one after another.
    out = left.new_empty(len(left), left.shape[1], right.shape[2]) if out is None else out
    for a, b, product in zip(left, right, out, strict=True):
        torch.mm(a, b, out=product)
    return out


def value_net(feature_dim: int, cfg: ChainPPOConfig | PlainPPOConfig, seed: int) -> EnsembleMLP:
    """Returns a network from features (B, F) to one number, of the size that `cfg` has for values."""
    size: dict[str, Any] = {"width": cfg.width, "depth": cfg.depth, "matmul": cfg.matmul}
    return EnsembleMLP(feature_dim, 1, **size, generator=Generator().manual_seed(seed))


class Critics(EnsembleMLP):
    """N estimates of the value of (features, action), by one of the heads of `heads`."""

    def __init__(
        self,
        feature_dim: int,
        action_dim: int,
        *,
        num: int,
        layernorm: bool = True,
        head: Head | None = None,
        **network: Any,
    ) -> None:
        """Builds the networks.

        Args:
            feature_dim: F.
            action_dim: A.
            num: N.
            layernorm: see `EnsembleMLP`.
            head: of these `num` critics; None learns the mean return by squared error.
            network: width, depth, batch norm, matmul, generator: see `EnsembleMLP`.
        """
        head = head or Head()
        inputs = feature_dim + action_dim
        super().__init__(inputs, head.outputs, num=num, layernorm=layernorm, **network)
        self.head = head
        self._action_dim = action_dim

    def q(self, features: Tensor, action: Tensor) -> Tensor:
        """Returns the estimates (N, B) of features (B, F) and actions (B, A), without gradient."""
        return self.head.value(self.answer(torch.cat([features, action], dim=-1))[0])

    def pessimistic(self, features: Tensor, action: Tensor, generator: Generator) -> Tensor:
        """Returns the smaller estimate (B,) of two critics drawn for this batch (REDQ, Chen et al. 2021).

        Args:
            features: (B, F).
            action: (B, A).
            generator: draws the two, on the CPU; only they are asked.
        """
        return self.head.mean(self.distribution(features, action, self.draw(2, generator), "min"))

    def draw(self, drawn: int, generator: Generator) -> list[int]:
        """Returns which critics to ask: `drawn` of them, or all if there are no more."""
        if drawn >= self.num:
            return list(range(self.num))
        return torch.randperm(self.num, generator=generator)[:drawn].tolist()

    def distribution(self, features: Tensor, action: Tensor, only: Sequence[int], how: Aggregate) -> Tensor:
        """Returns the distribution (B, D) of the return, over the critics asked; see `aggregate`."""
        out_NBO, _ = self.answer(torch.cat([features, action], dim=-1), only)
        return self.aggregate(out_NBO, how)

    def aggregate(self, out_NBO: Tensor, how: Aggregate) -> Tensor:
        """Returns one distribution (B, D) for each row of the networks' outputs.

        `min`: that of the critic with the smallest mean (clipped double Q, FastTD3); `mean`: their
        average, which of probabilities is the mixture.
        """
        distribution_NBD = self.head.distribution(out_NBO)
        if how == "mean":
            return distribution_NBD.mean(dim=0)
        if distribution_NBD.shape[-1] == 1:
            return distribution_NBD.amin(dim=0)
        smallest_B = self.head.mean(distribution_NBD).argmin(dim=0)
        return distribution_NBD[smallest_B, torch.arange(len(smallest_B), device=smallest_B.device)]

    def td_gradients(
        self, features: Tensor, action: Tensor, target: Tensor, to_x: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the errors of the mean (N, B), and the parameters' gradients of the head's loss.

        Args:
            features: (B, F).
            action: (B, A).
            target: of `Head.target`; with the default head, returns (B,) and `losses.td_loss`.
            to_x: (B, F + A); the gradient by features and action, summed over the critics, is added to it.
        """
        out_NBO, path = self.answer(torch.cat([features, action], dim=-1), trains=True)
        error_NB, to_out_NBO = self.head.td(out_NBO, target)
        return error_NB, self.gradients(to_out_NBO, path, to_x)

    def joint_td_gradients(
        self,
        pairs: tuple[Tensor, Tensor],
        next_pairs: tuple[Tensor, Tensor],
        target: Callable[[Tensor], Tensor],
        to_x: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns what `td_gradients` does, without target critics (CrossQ, Bhatt et al. 2024).

        Present and next rows go through the networks as one batch, so that batch norm sees both.

        Args:
            pairs: features (B, F) and actions (B, A).
            next_pairs: those that they led to.
            target: returns the head's target, given the outputs (N, B, O) of the next rows.
            to_x: (2 B, F + A), as in `td_gradients`: next rows have one through the batch norm alone.
        """
        both = torch.cat([torch.cat(pairs, dim=-1), torch.cat(next_pairs, dim=-1)])
        out_NBO, path = self.answer(both, trains=True)
        now, after = out_NBO.chunk(2, dim=1)
        error_NB, to_now = self.head.td(now, target(after))
        to_out_NBO = torch.cat([to_now, torch.zeros_like(to_now)], dim=1)
        return error_NB, self.gradients(to_out_NBO, path, to_x)

    def action_gradient(self, features: Tensor, action: Tensor, how: Aggregate) -> tuple[Tensor, Tensor]:
        """Returns the value (B,) of each action, and its derivative (B, A) by the action.

        Args:
            features: (B, F).
            action: (B, A).
            how: over the critics.
        """
        out_NBO, path = self.answer(torch.cat([features, action], dim=-1))
        value_NB = self.head.value(out_NBO)
        if how == "mean":
            value, share_NB = value_NB.mean(dim=0), torch.full_like(value_NB, 1.0 / self.num)
        else:
            value, smallest = value_NB.min(dim=0)
            share_NB = torch.zeros_like(value_NB).scatter_(0, smallest.unsqueeze(0), 1.0)
        to_x = self.input_gradient(self.head.value_gradient(out_NBO, share_NB), path)
        return value, to_x[:, -self._action_dim :]

    def target(self) -> Self:
        """Returns a copy that `follow_online` moves."""
        return copy.deepcopy(self).requires_grad_(False)


class _Ensemble(torch.autograd.Function):
    """The whole ensemble as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: EnsembleMLP, *parameters: Tensor) -> Tensor:
        out_NBO, ctx.path = net.answer(x)
        ctx.net = net
        ctx.save_for_backward(*parameters)  # autograd then verifies that they have not changed
        return out_NBO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        net: EnsembleMLP = ctx.net
        parameters = ctx.saved_tensors
        to_x = net.input_gradient(grads[0], ctx.path) if ctx.needs_input_grad[0] else None
        learns = any(ctx.needs_input_grad[2:])
        to_layers = net.gradients(grads[0], ctx.path) if learns else [None] * len(parameters)
        return to_x, None, *to_layers
