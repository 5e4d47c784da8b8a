"""Pictures of a model of others, in the process that predicts its states.

    ServedImages(Served(...).channel, ["top"])

Codes are the model's own, of any meaning: latents of a video model, or the pixels themselves. It codes real
pictures, says how codes go on, and draws them where somebody looks. Codes are standardised here, channel by
channel, as ours are: classifiers of success read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robot_rl.core.errors import ConfigError, DatasetError, ModelError
from robot_rl.worlds.channel import Channel
from robot_rl.worlds.history import TRAIN, Array, History, Windows
from robot_rl.worlds.images.pictures import Moments, Pictures, disagreement, units_of
from robot_rl.worlds.serving import PICTURE

_MEAN_OF = 512
"""Moments behind the scales of codes."""


class ServedImages(Pictures):
    """The cameras of a model of others; see the module."""

    kind = "served"

    def __init__(self, channel: Channel, cameras: Sequence[str]) -> None:
        """Checks that the model shows these cameras.

        Raises:
            ConfigError: it shows none, or others.
        """
        shows = channel.pictures
        if set(cameras) != set(shows.cameras):
            there = ", ".join(shows.cameras)
            remedy = (
                f"has {there}. Give images.cameras={there.replace(' ', '')}, or none"
                if there
                else (
                    "has no cameras. Leave images.cameras out, or let the model show them: docs/worlds.md, A "
                    "model of your own"
                )
            )
            raise ConfigError(f"images.cameras: got {', '.join(cameras)}, {channel.at} {remedy}.")
        super().__init__(
            shows.cameras,
            shows.size,
            stride=channel.stride,
            members=shows.members,
            code_shape=shows.code_shape,
        )
        self.channel = channel
        self.register_buffer("centre", torch.zeros(shows.code_shape[0], 1, 1))
        self.register_buffer("spread", torch.ones(shows.code_shape[0], 1, 1))
        self.centre: Tensor
        self.spread: Tensor

    def read(self, history: History) -> None:
        """Codes a history, which has its pictures, and measures the scales of its codes.

        Raises:
            DatasetError: pictures of another size than the model's.
            ModelError: the process fails, or a code is too far from the others to be kept.
        """
        for camera in self.cameras:
            size = history.pictures[camera].shape[1:3]
            if size != self.size:
                (height, width), (own, wide) = size, self.size
                raise DatasetError(
                    f"{self.channel.at}: its pictures of {camera} are {own} x {wide}, the episodes have "
                    f"{height} x {width}. Collect with image_size={own},{wide}, or serve a model of theirs."
                )
        rows = np.flatnonzero(np.isin(history.episode, history.split(TRAIN)))
        some = rows[:: max(1, len(rows) // _MEAN_OF)]
        codes = self.encode({name: history.shown(name, some) for name in self.cameras})
        over: dict[str, Any] = {"axis": (0, 2, 3), "dtype": np.float64}
        centre, spread = codes.mean(**over), units_of(codes.std(**over))
        for buffer, value in ((self.centre, centre), (self.spread, spread)):
            buffer.copy_(torch.from_numpy(value)[:, None, None])
        with np.errstate(over="ignore"):
            self.codes = self.kept_codes(history.pictures)
        if not np.isfinite(self.codes).all():
            raise ModelError(
                f"{self.channel.at}: encode: some codes are over {np.finfo(np.float16).max:.0f} "
                "deviations from their channel's mean, allowed: less. Clip them, or take their logarithm."
            )
        self.fit_rest(Windows(history, history.split(TRAIN), stride=self.stride).rows)

    def encode(self, pictures: Mapping[str, Array]) -> Array:
        """See `Pictures.encode`. Raises `ModelError` if the process fails; so do all that follow."""
        asked = {f"{name}{PICTURE}": pictures[name] for name in self.cameras}
        return self._standard(self.channel.ask("encode", asked, ("code",))[0])

    def decode(self, codes: Array) -> dict[str, Array]:
        """See `Pictures.decode`."""
        names = tuple(f"{name}{PICTURE}" for name in self.cameras)
        shown = self.channel.ask("decode", {"code": self._own(codes)}, names)
        return dict(zip(self.cameras, shown, strict=True))

    def means(self, at: Moments) -> tuple[Array, Array]:
        """See `Pictures.means`."""
        codes = {name: self._own(getattr(at, name)) for name in ("now", "past", "reference")}
        found = self._standard(self.channel.ask("predict_codes", {**vars(at), **codes}, ("codes",))[0])
        return found, disagreement((found - at.now) / self.rest.cpu().numpy())

    def _standard(self, codes: Array) -> Array:
        """Returns the model's codes (..., C, h, w) with mean 0 and deviation 1."""
        return (codes - self.centre.cpu().numpy()) / self.spread.cpu().numpy()

    def _own(self, codes: Array) -> Array:
        """Returns standardised codes (B, C, h, w) as the model has them."""
        return codes.astype(np.float32) * self.spread.cpu().numpy() + self.centre.cpu().numpy()

    def to_json(self) -> dict[str, Any]:
        """Returns what the model must show when it is loaded again; its process is that of the state."""
        return {"kind": self.kind, **asdict(self.channel.pictures)}
