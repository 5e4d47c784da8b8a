"""Dynamics that draw all states of a stride at once, by a flow from noise.

DWM (arXiv 2402.03570) predicts a chunk of future states at once by diffusion, so that errors do not
compound from step to step inside of it. Here the chunk is a stride of k control steps, 16 say; errors
compound once a stride. Where we deviate: rectified flow (arXiv 2209.03003) in the place of diffusion steps;
the states depend on the actions that are executed, not on a return that is wanted; an MLP in the place of a
U-Net, of M independent members.

The flow draws by how much a stride differs from a linear map, in units of its deviation. The network sees t,
the noisy stride and the inputs of the ensemble, and predicts the clean stride. A member's mean is where the
flow takes noise 0. Its deviation is half the distance between where it takes a fixed z and -z, each element
of which is 1 or -1. Both are exact where a stride is Gaussian with independent elements; where they are
correlated, the deviation is right on average over z, and calibration scales it for each element. So the same
question has the same answer.
B rows, M members, S state elements, A action dim, k control steps of a stride.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from robot_rl.worlds.config import EnsembleConfig
from robot_rl.worlds.dynamics import Prediction, Scaled, tensors_of
from robot_rl.worlds.ensemble import Ensemble, Layer, num_inputs, ridge, through, window_inputs
from robot_rl.worlds.history import Array, Window

_REST_FLOOR = 1e-3
"""Of the deviation of what the linear map leaves, in units of `scale`."""


class Diffusion(Scaled):
    """M independent members; see the module."""

    def __init__(self, config: EnsembleConfig, state_dim: int, action_dim: int, *, seed: int = 0) -> None:
        super().__init__(state_dim, action_dim, stride=config.stride)
        self.config = config
        k, rng = config.stride, torch.Generator().manual_seed(seed)
        inputs, size = num_inputs(k, state_dim, action_dim), k * state_dim
        sizes = [1 + size + inputs, *[config.width] * config.depth]
        self.layers = nn.ModuleDict()
        self.layers["hidden"] = nn.Sequential(
            *(
                Layer(config.members, fan_in, fan_out, is_hidden=True, rng=rng)
                for fan_in, fan_out in itertools.pairwise(sizes)
            )
        )
        self.layers["out"] = Layer(config.members, config.width, size, is_hidden=False, rng=rng)
        self.layers["straight"] = Layer(config.members, inputs, size, is_hidden=False, rng=rng)
        for parameter in self.layers["straight"].parameters():
            parameter.requires_grad_(False)  # the flow's target is what it leaves
        signs = torch.randint(0, 2, (config.members, 1, size), generator=rng) * 2.0 - 1.0
        for name, value in (("rest", torch.ones(k, state_dim)), ("signs", signs)):
            self.register_buffer(name, value)
        self.rest: Tensor
        """(k, S): deviation of what the linear map leaves of the changes, in units of `scale`."""
        self.signs: Tensor
        """(M, 1, k S): z, the noise whose way through the flow measures a deviation."""

    def inputs(self, window: Mapping[str, Tensor], actions: Tensor, steps: Tensor) -> Tensor:
        """Returns the inputs (B, F) of a member; see `window_inputs`."""
        return window_inputs(self, window, actions, steps)

    @torch.no_grad()
    def fit_straight(self, window: Mapping[str, Tensor], actions: Tensor, changes: Tensor) -> None:
        """Puts each member's linear maps at the ridge solutions of its windows, one for each control step.

        The map of a control step sees the actions before it alone.

        Args:
            window: as in `Window`, (M N, ...).
            actions: (M N, k, A).
            changes: (M N, k, S), in units of `scale`.
        """
        k, members, straight = self.config.stride, self.config.members, self._straight
        left = torch.zeros_like(changes)
        for step in range(k):
            x = self.inputs(window, actions, torch.full((len(changes),), step + 1, device=self.device))
            x_MNF, y_MNS = (part.view(members, -1, part.shape[-1]) for part in (x, changes[:, step]))
            weight, bias = ridge(x_MNF, y_MNS)
            columns = slice(step * self.state_dim, (step + 1) * self.state_dim)
            straight.weight[..., columns], straight.bias[..., columns] = weight, bias
            left[:, step] = (y_MNS - torch.baddbmm(bias, x_MNF, weight)).flatten(0, 1)
        self.rest.copy_(left.square().mean(dim=0).sqrt().clamp(min=_REST_FLOOR))

    @property
    def _straight(self) -> Any:
        return self.layers["straight"]

    def clean(self, x_MBF: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
        """Returns the stride that each member expects behind a noisy one, (M, B, k S), in units of `rest`.

        Args: x_MBF: inputs; noisy: (M, B, k S); t: (M, B, 1), 0 for noise alone, up to 1.
        """
        layers: Any = self.layers
        return through([*layers["hidden"], layers["out"]], torch.cat([t, noisy, x_MBF], dim=-1))

    def loss(self, x_MBF: Tensor, steps: Tensor, changes: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns the squared error of the clean stride, summed over members.

        Args:
            x_MBF: inputs, with the first m actions.
            steps: (M, B): m; what comes after is not predicted.
            changes: (M, B, k, S), in units of `scale`.
            noise: (M, B, k S), of deviation 1.
            t: (M, B, 1), in [0, 1).
        """
        clean = ((changes.flatten(2) - self._linear(x_MBF)) / self.rest.flatten()) * self._known(steps)
        noisy = ((1.0 - t) * noise + t * clean) * self._known(steps)
        error = (self.clean(x_MBF, noisy, t) - clean).square() * self._known(steps)
        return (error.sum(dim=-1) / self._known(steps).sum(dim=-1).clamp(min=1.0)).mean(dim=-1).sum()

    def _linear(self, x_MBF: Tensor) -> Tensor:
        return torch.baddbmm(self._straight.bias, x_MBF, self._straight.weight)

    def _known(self, steps: Tensor) -> Tensor:
        """Returns (..., k S): 1 up to control step m where the state moves, else 0."""
        before = torch.arange(self.config.stride, device=self.device) < steps[..., None]
        return (before[..., None] * self.moves).flatten(-2)

    def _flowed(self, x_MBF: Tensor, start: Tensor, known: Tensor) -> Tensor:
        """Returns where the flow takes noise (M, B, k S), by Euler steps."""
        y, count = start * known, self.config.denoise
        for number in range(count):
            t = torch.full_like(y[..., :1], number / count)
            y = y + (self.clean(x_MBF, y, t) * known - y) / (count - number)
        return y

    @torch.no_grad()
    def predict(self, window: Window, actions: Array, steps: Array) -> Prediction:
        """See `Dynamics.predict`."""
        given, rows = tensors_of(window, self.device), torch.arange(len(steps), device=self.device)
        m = torch.from_numpy(steps).to(self.device)
        x = self.inputs(given, torch.from_numpy(actions).to(self.device), m)
        x_MBF, known = x.expand(self.config.members, *x.shape), self._known(m)
        signs = self.signs.expand(-1, len(steps), -1)
        middle, up, down = (self._flowed(x_MBF, start, known) for start in (0.0 * signs, signs, -signs))

        def last(values: Tensor) -> Tensor:
            return values.unflatten(-1, self.rest.shape)[:, rows, m - 1]

        change = last(self._linear(x_MBF) + middle * self.rest.flatten()) * self.moves
        return self.prediction(given["state"], change, last((up - down).abs() * self.rest.flatten() / 2.0))

    def to_json(self) -> dict[str, Any]:
        """Returns what `Diffusion` is made from again."""
        return {**asdict(self.config), "state_dim": self.state_dim, "action_dim": self.action_dim}


Learned = Ensemble | Diffusion
"""What is fitted here."""


def untrained(
    config: EnsembleConfig, state_dim: int, action_dim: int, *, aside: Sequence[int] = (), seed: int = 0
) -> Learned:
    """Returns the model of `config.kind`, before it learned anything; `aside` as in `Ensemble`."""
    if config.kind == "diffusion":
        return Diffusion(config, state_dim, action_dim, seed=seed)
    return Ensemble(config, state_dim, action_dim, aside=aside, seed=seed)
