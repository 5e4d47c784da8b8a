"""An ensemble of independent networks that predict the state after a stride of control steps.

Each member is its own network with its own weights (heads on a shared trunk agree for the wrong reason), with
layer norm (NEUBAY, arXiv 2512.04341, section 4) and a Gaussian likelihood of its own; members differ by their
weights at first and by the order of their batches.

A member reads the present state, the stride before it and up to k actions, and predicts the state after m of
them, 1 <= m <= k. So every control step of a stride can be looked at, while errors compound once a stride.
Next to the hidden layers is a linear map from the inputs, which begins at its least-squares solution: most of
what an arm does in a stride is linear in its actions, and layer norm learns that slowly. Elements that never
change within an episode, such as a goal, are copied and never predicted.

What moves does not read marks, which nothing can touch. Whoever collected episodes knew the goal and acted
for it, so a network that reads it learns that things go there, touched or not, and all members agree (causal
confusion; de Haan et al. 2019, arXiv 1905.11979, found it in policies). A second, small network reads
everything and predicts only elements that say where a mark is (`goal_in_tool`).
B rows, M members, S state elements, A action dim, k control steps of a stride.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from robot_rl.worlds.config import EnsembleConfig
from robot_rl.worlds.dynamics import Prediction, Scaled, tensors_of
from robot_rl.worlds.history import Array, Window

LOG_STD_RANGE = (-6.0, 1.0)
"""Of a prediction's standard deviation, in units of the change in a whole stride."""
_RIDGE = 1e-3
_ASIDE = (64,)
"""Hidden layer of what predicts where marks are."""
_SMALL = 0.1
"""Of the weights behind the hidden layers at first."""


class Layer(nn.Module):
    """One linear layer of every member, with layer norm and SiLU behind it if `is_hidden`."""

    def __init__(
        self, members: int, inputs: int, outputs: int, *, is_hidden: bool, rng: torch.Generator
    ) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.rand(shape, generator=rng) * 2 - 1) * bound)

        self.weight, self.bias = drawn(members, inputs, outputs), drawn(members, 1, outputs)
        self.is_hidden = is_hidden
        if is_hidden:
            self.gain = nn.Parameter(torch.ones(members, 1, outputs))
            self.shift = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, x_MBF: Tensor) -> Tensor:
        y = torch.baddbmm(self.bias, x_MBF, self.weight)
        if not self.is_hidden:
            return y
        y = nn.functional.layer_norm(y, y.shape[-1:])
        return nn.functional.silu(torch.addcmul(self.shift, y, self.gain))

    def by_member(self) -> zip[tuple[Tensor, ...]]:
        """Returns the parameters of each member: bias, weight, and gain and shift if `is_hidden`."""
        norm = (self.gain.squeeze(1), self.shift.squeeze(1)) if self.is_hidden else ()
        return zip(*(part.unbind() for part in (self.bias, self.weight, *norm)), strict=True)


def through(layers: Sequence[Layer], x_MBF: Tensor) -> Tensor:
    """Returns the output (M, B, n) of the last of some layers.

    Without gradients a CPU computes one member after the other, so that its rows stay in the cache.
    """
    if torch.is_grad_enabled() or not x_MBF.is_cpu:
        for layer in layers:
            x_MBF = layer(x_MBF)
        return x_MBF
    parameters = zip(*(layer.by_member() for layer in layers), strict=True)
    return torch.stack([_of_member(own, x) for own, x in zip(parameters, x_MBF.unbind(), strict=True)])


def _of_member(layers: Sequence[tuple[Tensor, ...]], x: Tensor) -> Tensor:
    """Returns the output (B, n) of the last of one member's layers, given as `Layer.by_member` does."""
    for bias, weight, *norm in layers:
        x = torch.addmm(bias, x, weight)
        if norm:
            gain, shift = norm
            x = nn.functional.silu(nn.functional.layer_norm(x, x.shape[-1:], gain, shift), inplace=True)
    return x


def num_inputs(stride: int, state_dim: int, action_dim: int) -> int:
    """Returns F of `window_inputs`."""
    return 2 * state_dim + 2 * stride * action_dim + stride + 1


def window_inputs(model: Scaled, window: Mapping[str, Tensor], actions: Tensor, steps: Tensor) -> Tensor:
    """Returns the inputs (B, F) of a member: `window` as in `Window`, actions (B, k, A), steps m (B,)."""
    k = len(model.prefix)
    state, past = window["state"], window["past_state"]
    number = torch.arange(k, device=state.device)
    used = (number < steps[:, None])[..., None]
    return torch.cat(
        [
            (state - model.centre) / model.spread_of_states,
            (state - past) / model.scale,
            window["past_action"].flatten(1),
            (actions * used).flatten(1),
            (number == steps[:, None] - 1).to(state.dtype),
            window["has_past"].to(state.dtype)[:, None],
        ],
        dim=1,
    )


def ridge(x_MNF: Tensor, y_MNS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns weight (M, F, S) and bias (M, 1, S) of each member's ridge regression."""
    centre, target = x_MNF.mean(dim=1, keepdim=True), y_MNS.mean(dim=1, keepdim=True)
    x, y = (x_MNF - centre).double(), (y_MNS - target).double()
    penalty = _RIDGE * x.shape[1] * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(x.mT @ x + penalty, x.mT @ y).to(y_MNS.dtype)
    return weight, target - centre @ weight


class Ensemble(Scaled):
    """M independent members; see the module."""

    def __init__(
        self,
        config: EnsembleConfig,
        state_dim: int,
        action_dim: int,
        *,
        aside: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        """Args: aside: elements of the state that say where marks are."""
        super().__init__(state_dim, action_dim, stride=config.stride)
        self.config, self.aside = config, tuple(aside)
        k, rng = config.stride, torch.Generator().manual_seed(seed)
        inputs = num_inputs(k, state_dim, action_dim)
        self.register_buffer("reads", torch.ones(inputs), persistent=False)
        self.reads: Tensor
        """(F,): 0 where an input says where a mark is."""
        for element in self.aside:
            self.reads[[element, state_dim + element]] = 0.0
        self.register_buffer("where", torch.tensor(self.aside, dtype=torch.long), persistent=False)
        self.where: Tensor
        """`aside`."""
        self.layers = nn.ModuleDict()
        self._add("", [inputs, *[config.width] * config.depth, state_dim], rng)
        if self.aside:
            self._add("aside_", [inputs, *_ASIDE, len(self.aside)], rng)

    def _add(self, prefix: str, sizes: list[int], rng: torch.Generator) -> None:
        """Adds the layers of one network of each member, from inputs to elements."""
        members, (*hidden, outputs) = self.config.members, sizes
        self.layers[f"{prefix}hidden"] = nn.Sequential(
            *(
                Layer(members, fan_in, fan_out, is_hidden=True, rng=rng)
                for fan_in, fan_out in itertools.pairwise(hidden)
            )
        )
        out = Layer(members, hidden[-1], 2 * outputs, is_hidden=False, rng=rng)
        self.layers[f"{prefix}out"] = out
        with torch.no_grad():  # the linear map says most of it at first
            out.weight.mul_(_SMALL)
        self.layers[f"{prefix}straight"] = Layer(members, hidden[0], outputs, is_hidden=False, rng=rng)

    @torch.no_grad()
    def fit_straight(self, x_MNF: Tensor, change_MNS: Tensor) -> None:
        """Puts each member's linear maps at the ridge solution of its windows; changes are in `scale`."""
        parts = [("straight", x_MNF * self.reads, change_MNS)]
        if self.aside:
            parts.append(("aside_straight", x_MNF, change_MNS[..., self.aside]))
        for name, x, change in parts:
            straight: Any = self.layers[name]
            weight, bias = ridge(x, change)
            straight.weight.copy_(weight)
            straight.bias.copy_(bias)

    def inputs(self, window: Mapping[str, Tensor], actions: Tensor, steps: Tensor) -> Tensor:
        """Returns the inputs (B, F) of a member; see `window_inputs`."""
        return window_inputs(self, window, actions, steps)

    def outputs(self, x_MBF: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and logarithm of the deviation of the change, (M, B, S), in units of `scale`.

        Args:
            x_MBF: inputs of each member; (1, B, F) if all have the same.
            steps: (B,) or (M, B), after how many control steps.
        """
        out, straight = self._answers("", x_MBF * self.reads)
        if self.aside:
            out_of_marks, straight_of_marks = self._answers("aside_", x_MBF)
            out = out.index_copy(-1, torch.cat([self.where, self.where + self.state_dim]), out_of_marks)
            straight = straight.index_copy(-1, self.where, straight_of_marks)
        bent, log_std = out.chunk(2, dim=-1)
        low, high = LOG_STD_RANGE
        log_std = low + 0.5 * (high - low) * (torch.tanh(log_std / 3.0) + 1.0)
        size = self.prefix[steps - 1]
        return (bent * size + straight) * self.moves, log_std + size.log()

    def _answers(self, prefix: str, x_MBF: Tensor) -> tuple[Tensor, Tensor]:
        """Returns of one network of each member bent and raw deviation (M, B, 2 n), straight (M, B, n)."""
        layers: Any = self.layers
        hidden, out, straight = (layers[f"{prefix}{name}"] for name in ("hidden", "out", "straight"))
        x = x_MBF.expand(self.config.members, -1, -1)
        return through([*hidden, out], x), through([straight], x)

    @torch.inference_mode()
    def predict(self, window: Window, actions: Array, steps: Array) -> Prediction:
        """Returns what all members say of the states after the first m actions.

        Args: actions: (B, k, A); steps: (B,) int64, m of each row, 1 to k.
        """
        given = tensors_of(window, self.device)
        m = torch.from_numpy(steps).to(self.device)
        x = self.inputs(given, torch.from_numpy(actions).to(self.device), m)
        change, log_std = self.outputs(x[None], m)
        return self.prediction(given["state"], change, log_std.exp())

    def to_json(self) -> dict[str, Any]:
        """Returns what `Ensemble` is made from again."""
        return {
            **asdict(self.config),
            "state_dim": self.state_dim,
            "action_dim": self.action_dim,
            "aside": self.aside,
        }
