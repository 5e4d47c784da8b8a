"""Learns codes of pictures, then how they go on; a kill costs the updates since the last checkpoint.

B rows, C channels over all cameras, h x w cells, k control steps of a stride.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robot_rl.core.errors import DatasetError
from robot_rl.worlds.config import ImagesConfig
from robot_rl.worlds.fit import drawn_windows, rate_left
from robot_rl.worlds.history import CALIBRATION, TRAIN, Array, History, Windows, stride_before
from robot_rl.worlds.images.codec import tensor_of
from robot_rl.worlds.images.model import Images
from robot_rl.worlds.images.pictures import Moments, Pictures

_LOOK_EVERY = 250
"""Updates between two looks at held-out episodes."""
_TESTED = 256
_MEAN_OF = 512
"""Pictures behind the mean picture of a camera, and behind the scales of codes."""


class ImageFitter:
    """Takes updates of the codec, then of the networks; `state_dict` and `load_state_dict` go on exactly."""

    def __init__(self, images: Images, history: History, *, seed: int, recent: float = 0.0) -> None:
        """Finds the windows.

        Args:
            images: on the device where it is to learn, before it learned anything; or with the codes of
                this history: then its codec has learned, and the networks alone go on.
            history: real experience with its pictures, which is split by episode; with codes it needs none.
            seed: of the batches.
            recent: share of the networks' batches from the newest quarter of the episodes.

        Raises:
            DatasetError: pictures of different sizes, or episodes too short.
        """
        self.images, self.history, self._recent = images, history, recent
        self._rng = np.random.default_rng(seed)
        self._train = np.flatnonzero(np.isin(history.episode, history.split(TRAIN)))
        self._windows = Windows(history, history.split(TRAIN), stride=images.stride)
        held_out = Windows(history, history.split(CALIBRATION), stride=images.stride).rows
        chosen = np.random.default_rng(0).choice(held_out, min(_TESTED, len(held_out)), replace=False)
        self._held_out = np.sort(chosen)
        self._some = self._train[:: max(1, len(self._train) // _MEAN_OF)]
        self._optimisers = [
            torch.optim.AdamW(part.parameters(), lr=images.config.lr)
            for part in (images.codec, images.members)
        ]
        self.updates = images.config.codec_updates if len(images.codes) else 0

    @property
    def config(self) -> ImagesConfig:
        return self.images.config

    @property
    def total(self) -> int:
        """Updates of codec and networks."""
        return self.config.codec_updates + self.config.updates

    def run(self, shown: Callable[[int, Mapping[str, float]], None] | None = None) -> None:
        """Takes all updates that are left.

        Args: shown: called now and then with the updates so far, and the error on held-out episodes: of
            pictures that were only coded, then of the change of the next code.
        """
        while self.updates < self.total:
            self.update()
            if shown is not None and (self.updates % _LOOK_EVERY == 0 or self.updates == self.total):
                shown(self.updates, {"held_out_error": self.held_out_error()})

    def update(self) -> float:
        """Takes one update of the codec, or of every network; returns the loss."""
        config, stage = self.config, int(self.updates >= self.config.codec_updates)
        begin, length = (0, config.codec_updates) if stage == 0 else (config.codec_updates, config.updates)
        for group in self._optimisers[stage].param_groups:
            group["lr"] = config.lr * rate_left((self.updates - begin) / length)
        loss = self._codec_loss() if stage == 0 else self._flow_loss()
        self._optimisers[stage].zero_grad(set_to_none=True)
        loss.backward()
        self._optimisers[stage].step()
        self.updates += 1
        if self.updates == config.codec_updates:
            self._code_history()
        return float(loss.detach())

    def _codec_loss(self) -> Tensor:
        camera = self.config.cameras[self.updates % len(self.config.cameras)]
        rows = self._train[self._rng.integers(0, len(self._train), self.config.batch)]
        pictures = tensor_of(self.history.shown(camera, rows), self.images.device)
        return self.images.codec.loss(pictures, self._mean[camera].expand_as(pictures))

    @cached_property
    def _mean(self) -> dict[str, Tensor]:
        """Camera -> (3, h, w), its mean picture in [-1, 1]."""
        mean = {name: self.history.shown(name, self._some).mean(axis=0) for name in self.config.cameras}
        return {
            name: torch.from_numpy(shown / 127.5 - 1.0).to(self.images.device, torch.float32).permute(2, 0, 1)
            for name, shown in mean.items()
        }

    def _code_history(self) -> None:
        """Codes all pictures; from here on nothing else is seen of them."""
        images, history = self.images, self.history
        shown = [history.shown(camera, self._some) for camera in self.config.cameras]
        images.codec.scale_codes(np.concatenate(shown))
        images.codes = images.kept_codes(history.pictures)
        images.fit_scales(history, self._windows.rows)

    def _flow_loss(self) -> Tensor:
        """Returns the sum over the networks, each with rows, noise and times of its own."""
        images, rng, batch = self.images, self._rng, self.config.batch
        loss = torch.zeros((), device=images.device)
        for number in range(len(images.members)):
            rows = drawn_windows(self._windows, rng, (batch,), self._recent)
            is_whole = rng.random(batch) < 0.5
            steps = np.where(is_whole, images.stride, rng.integers(1, images.stride + 1, batch))
            at = moments_at(images, self.history, rows, steps, after=self.history.state[rows + steps])
            change = self._tensor(images.codes[rows + steps].astype(np.float32) - at.now) / images.rest
            blur = rng.random((2, batch, 1, 1, 1)) * self.config.noise
            now, past = (
                part + share * rng.standard_normal(part.shape)
                for part, share in zip((at.now, at.past), blur, strict=True)
            )
            is_mean = rng.random(batch) < 0.5
            t = np.where(is_mean, 0.0, rng.random(batch))
            noise = rng.standard_normal(at.now.shape) * ~is_mean[:, None, None, None]
            # The change leads from the code as it is, whatever noise hides it.
            seen = replace(at, now=now, past=past)
            loss = loss + images.member(number).loss(
                images.context(seen), change, self._tensor(noise), self._tensor(t)
            )
        return loss

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.images.device)

    def held_out_error(self) -> float:
        """Returns the mean absolute error of coded pictures in levels of 255, or the error of changes.

        The latter is a root of a mean square in units of the change: 1 is what copying has.
        """
        images, rows = self.images, self._held_out
        if self.updates < self.config.codec_updates:
            true = {name: self.history.shown(name, rows[:64]) for name in self.config.cameras}
            drawn = images.decode(images.encode(true))
            return float(np.mean([np.abs(drawn[name] * 1.0 - true[name]).mean() for name in drawn]))
        steps = np.full(len(rows), images.stride)
        at = moments_at(images, self.history, rows, steps, after=self.history.state[rows + steps])
        error = images.means(at)[0][0] - images.codes[rows + images.stride]
        return float(np.sqrt(((error / images.rest.cpu().numpy()) ** 2).mean()))

    def state_dict(self) -> dict[str, Any]:
        return {
            "images": self.images.state_dict(),
            "codes": self.images.codes,
            "optimisers": [part.state_dict() for part in self._optimisers],
            "rng": self._rng.bit_generator.state,
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.images.load_state_dict(state["images"])
        self.images.codes = state["codes"]
        for part, saved in zip(self._optimisers, state["optimisers"], strict=True):
            part.load_state_dict(saved)
        self._rng.bit_generator.state = state["rng"]
        self.updates = int(state["updates"])


def new_images(config: ImagesConfig, history: History, *, stride: int, seed: int) -> Images:
    """Returns the picture part of a model for a history, before it learned anything.

    Raises:
        DatasetError: cameras have pictures of different sizes.
        ConfigError: of a size that the codec does not have.
    """
    sizes = {camera: history.pictures[camera].shape[1:3] for camera in config.cameras}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{camera} {height} x {width}" for camera, (height, width) in sizes.items())
        raise DatasetError(f"images.cameras: got pictures of {shown}, allowed: one size for all cameras")
    height, width = next(iter(sizes.values()))
    dims = {"state_dim": history.state.shape[1], "action_dim": history.action.shape[1]}
    return Images(config, (height, width), stride=stride, seed=seed, **dims)


def moments_at(images: Pictures, history: History, rows: Array, steps: Array, *, after: Array) -> Moments:
    """Returns what is known in these rows (B,) of a history, of which `images` has the codes.

    Args: steps: (B,), m; after: (B, S), states that are predicted for then.
    """
    k, first = images.stride, history.first[history.episode[rows]]
    actions = np.minimum(rows[:, None] + np.arange(k), len(history.action) - 1)
    past, _ = stride_before(history, rows, k)
    now, before, reference = (images.codes[at].astype(np.float32) for at in (rows, past, first))
    return Moments(
        now=now,
        past=before,
        reference=reference,
        state=history.state[rows],
        after=after,
        actions=history.action[actions],
        steps=steps,
    )
