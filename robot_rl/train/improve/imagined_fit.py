"""A fit of the model in the loop of `imagined`: of the state, then of the pictures where it has any.

A refit goes on from the weights before. The codec learns once: from then on pictures are kept as its codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from robot_rl.train.improve.config import ImaginedSettings
from robot_rl.worlds.build import RealEnv
from robot_rl.worlds.diffusion import Learned
from robot_rl.worlds.fit import Fitter, new_model
from robot_rl.worlds.history import Array, History
from robot_rl.worlds.images.fit import ImageFitter, new_images
from robot_rl.worlds.images.model import Images
from robot_rl.worlds.saved import World

_AT_ONCE, _PICTURES_AT_ONCE = 50, 5
"""Updates in a turn of the loop, of the state and of pictures."""


class ModelFit:
    """Takes updates of one part after the other; `state_dict` and `load_state_dict` go on exactly."""

    def __init__(
        self,
        history: History,
        real: RealEnv,
        settings: ImaginedSettings,
        *,
        version: int,
        seed: int,
        before: World | None,
        codes: Array | None,
        device: str,
    ) -> None:
        """Begins with the weights of the model before, if there is one.

        Args:
            history: real experience; its pictures too, where there are no codes yet.
            real: what it is of.
            settings: of the method.
            version: of the model before; seeds what is drawn for new networks.
            seed: of the batches.
            before: the model of fewer episodes.
            codes: (N, C, h, w), of the pictures of the history, by the codec of the model before.
            device: where the networks learn.
        """
        fit, images = settings.world.fit, settings.world.images
        model = new_model(settings.world.model, history, marks=real.marks, seed=version).to(device)
        if before is not None:
            model.load_state_dict(before.model.state_dict())
            share = settings.refit_updates / fit.updates
            images = replace(images, updates=max(1, round(share * images.updates)))
            fit = replace(fit, updates=settings.refit_updates, recent=settings.recent)
        self._state = Fitter(model, history, fit, seed=seed)
        self._pictures: ImageFitter | None = None
        if images.cameras:
            begun = new_images(images, history, stride=model.config.stride, seed=version).to(device)
            if before is not None and before.images is not None and codes is not None:
                begun.load_state_dict(before.images.state_dict())
                begun.codes = codes
            self._pictures = ImageFitter(begun, history, seed=seed, recent=fit.recent)

    @property
    def model(self) -> Learned:
        return self._state.model

    @property
    def images(self) -> Images | None:
        return None if self._pictures is None else self._pictures.images

    @property
    def codes(self) -> Array | None:
        """(N, C, h, w): of the pictures of the history, once the codec has learned."""
        return self.images.codes if self.images is not None and len(self.images.codes) else None

    @property
    def owed(self) -> int:
        """How many updates are due in a turn of the loop; 0 once all are taken."""
        left = self._state.config.updates - self._state.updates
        if left or self._pictures is None:
            return min(_AT_ONCE, left)
        return min(_PICTURES_AT_ONCE, self._pictures.total - self._pictures.updates)

    @property
    def plan(self) -> str:
        """What is to be done in all."""
        words = f"{self._state.config.updates:,} updates"
        if self._pictures is None:
            return words
        config = self._pictures.config
        codec = "" if self.codes is not None else f"{config.codec_updates:,} of the codec and "
        return f"{words} of the state, {codec}{config.updates:,} of pictures"

    @property
    def doing(self) -> str:
        """Which part learns, and how far it is."""
        done, total = self._state.updates, self._state.config.updates
        if done < total or self._pictures is None:
            return f"model {done:,}/{total:,} updates"
        config, done = self._pictures.config, self._pictures.updates
        if done < config.codec_updates:
            return f"codec {done:,}/{config.codec_updates:,} updates"
        return f"pictures {done - config.codec_updates:,}/{config.updates:,} updates"

    def update(self) -> Mapping[str, torch.Tensor | float]:
        """Takes one update of the part that learns; returns its loss."""
        if self._state.updates < self._state.config.updates or self._pictures is None:
            return {"loss": self._state.update()}
        return {"pictures_loss": self._pictures.update()}

    def finish(self) -> None:
        """Puts the best weights of the state back, once all updates are taken."""
        self._state.run()
        self.model.eval()
        if self.images is not None:
            self.images.eval()

    def state_dict(self) -> dict[str, Any]:
        pictures = None if self._pictures is None else self._pictures.state_dict()
        return {"state": self._state.state_dict(), "pictures": pictures}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, also of versions whose models had no pictures."""
        self._state.load_state_dict(state.get("state", state))
        if self._pictures is not None:
            self._pictures.load_state_dict(state["pictures"])
