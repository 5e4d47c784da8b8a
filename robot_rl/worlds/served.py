"""Dynamics in a process of another Python: its own packages and weights, of any size.

    Served(ServedConfig(id="my_model:load", python="venv/bin/python"), meta)

The scales, and so the unit of the disagreement, are measured here, on recorded episodes. Pictures of the same
process are `images.served.ServedImages`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from robot_rl.core.errors import ModelError
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.worlds.channel import Channel
from robot_rl.worlds.config import ServedConfig
from robot_rl.worlds.dynamics import Prediction, Scaled
from robot_rl.worlds.history import Array, Window


@dataclass(frozen=True)
class ServedSize:
    """How the model of others is to be asked."""

    members: int
    stride: int


class Served(Scaled):
    """A model of others; see the module. Its process ends with this object, and with its pictures."""

    kind = "served"

    def __init__(self, served: ServedConfig, meta: EpisodesMeta, *, version: str | None = None) -> None:
        """Starts the process; see `Channel`."""
        channel = Channel(served, meta, version=version)
        super().__init__(len(meta.state_names), len(meta.action_names), stride=channel.stride)
        self.channel, self.config = channel, ServedSize(channel.members, channel.stride)

    def predict(self, window: Window, actions: Array, steps: Array) -> Prediction:
        """See `Dynamics.predict`.

        Raises:
            ModelError: the process ended, is late, or says what is no prediction.
        """
        asked = {**vars(window), "actions": actions, "steps": steps}
        found = self.channel.ask("predict", asked, ("mean", "std"))
        if (found[1] < 0).any():
            raise ModelError(f"{self.channel.at}: predict: a deviation is below 0.")
        mean, std = (torch.from_numpy(part) for part in found)
        state = torch.from_numpy(np.ascontiguousarray(window.state))
        state, mean, std = (part.to(self.device) for part in (state, mean, std))
        predicted = self.prediction(state, (mean - state) / self.scale * self.moves, std / self.scale)
        mean = torch.where(self.moves > 0, mean, state)  # bit for bit what it says, but what is copied
        return replace(predicted, mean=mean, std=std * self.moves)

    def close(self) -> None:
        """Ends the process."""
        self.channel.close()

    def to_json(self) -> dict[str, Any]:
        """Returns what `Served` is made from again."""
        return {"kind": self.kind, **asdict(self.channel.served), "version": self.channel.version}
