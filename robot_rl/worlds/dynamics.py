"""What imagined episodes, calibration and trust need of a model of dynamics, whatever it is made of.

    Ensemble   independent networks, in this process (`ensemble`)
    Diffusion  networks that draw a whole stride at once (`diffusion`)
    Served     a model of others, in a process of another Python (`served`)

A model is asked: from these moments, after the first m of these actions, which states? Each of its members
answers. B rows, M members, S state elements, A action dim, k control steps of a stride.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.worlds.history import Array, History, Window, Windows

_STD_FLOOR = 1e-4
_SCALE_FLOOR = 1e-3
"""Metres, radians or metres per second: changes below it are of no consequence, and are not to be learned."""


@dataclass(frozen=True)
class Prediction:
    """What every member says."""

    mean: Tensor
    """(M, B, S): states."""
    std: Tensor
    """(M, B, S): of each member's own noise; 0 where copied."""
    spread: Tensor
    """(B, S): standard deviation of the members' means, in units of `scale`; 0 where copied."""
    uncertainty: Tensor
    """(B,): root of the mean square of `spread` over what is predicted."""


class Size(Protocol):
    """How a model is to be asked."""

    @property
    def members(self) -> int:
        """M, 2 or more: samples count as members, if each draws with noise of its own."""
        ...

    @property
    def stride(self) -> int:
        """k: most control steps that it predicts at once."""
        ...


class Dynamics(Protocol):
    """A model of dynamics; the same question has the same answer."""

    @property
    def config(self) -> Size: ...

    @property
    def centre(self) -> Tensor:
        """(S,): mean of the states; see `Scaled` for this and what follows."""
        ...

    @property
    def spread_of_states(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor: ...

    @property
    def moves(self) -> Tensor: ...

    def predict(self, window: Window, actions: Array, steps: Array) -> Prediction:
        """Returns what all members say of the states after the first m actions.

        Args: actions: (B, k, A); steps: (B,) int64, m of each row, 1 to k.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Returns what it is made from again, but its weights."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]:
        """Returns its weights and scales."""
        ...


class Scaled(nn.Module):
    """The scales of states and of their changes, which are measured on recorded episodes."""

    def __init__(self, state_dim: int, action_dim: int, *, stride: int) -> None:
        super().__init__()
        self.state_dim, self.action_dim = state_dim, action_dim
        for name, value in (
            ("centre", torch.zeros(state_dim)),
            ("spread_of_states", torch.ones(state_dim)),
            ("scale", torch.ones(state_dim)),
            ("prefix", torch.ones(stride, state_dim)),
            ("moves", torch.ones(state_dim)),
        ):
            self.register_buffer(name, value)
        self.centre: Tensor
        """(S,): mean of the states."""
        self.spread_of_states: Tensor
        """(S,): their standard deviation."""
        self.scale: Tensor
        """(S,): standard deviation of the change in a whole stride; the unit of errors and uncertainties."""
        self.prefix: Tensor
        """(k, S): of the change in 1 to k control steps, in that unit."""
        self.moves: Tensor
        """(S,): 1 where the state is predicted, 0 where it is copied."""

    @property
    def device(self) -> torch.device:
        return self.centre.device

    def fit_scales(self, history: History, episodes: Array) -> None:
        """Measures the scales on some episodes; what never changes within one is copied.

        Raises:
            DatasetError: none of them is as long as a stride.
        """
        k, states = len(self.prefix), history.state
        starts = Windows(history, episodes, stride=k).rows
        rows = np.isin(history.episode, episodes)
        within = (states - states[history.first[history.episode]])[rows]
        self.centre.copy_(torch.from_numpy(states.mean(axis=0)))
        self.spread_of_states.copy_(torch.from_numpy(np.maximum(states.std(axis=0), _STD_FLOOR)))
        change = np.stack([states[starts + m] - states[starts] for m in range(1, k + 1)])
        size = np.sqrt((change.astype(np.float64) ** 2).mean(axis=1))
        scale = np.maximum(size[-1], _SCALE_FLOOR)
        self.scale.copy_(torch.from_numpy(scale))
        self.prefix.copy_(torch.from_numpy(np.clip(size / scale, 0.05, None)))
        self.moves.copy_(torch.from_numpy((np.abs(within).max(axis=0) > 1e-6).astype(np.float32)))

    def prediction(self, state: Tensor, change: Tensor, std: Tensor) -> Prediction:
        """Returns what members say, from changes and deviations (M, B, S) in units of `scale`."""
        spread = ((change - change.mean(dim=0)).square().sum(dim=0) / (len(change) - 1)).sqrt()
        count = self.moves.sum().clamp(min=1.0)
        return Prediction(
            mean=state + change * self.scale,
            std=std * self.scale * self.moves,
            spread=spread,
            uncertainty=(spread.square().sum(dim=-1) / count).sqrt(),
        )


def tensors_of(window: Window, device: torch.device) -> dict[str, Tensor]:
    """Returns a window's arrays on a device."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(value)).to(device) for name, value in vars(window).items()
    }
