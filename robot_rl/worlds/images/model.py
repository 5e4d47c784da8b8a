"""The picture part of a world model: from codes, states and actions to the next codes, with its own gate.

Every network predicts the change of the code; how much they differ is the disagreement about pictures.
B rows, M networks, C channels over all cameras, h x w cells, S state elements, A action dim, k control steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.worlds.config import SHRINK, ImagesConfig, check_pixels
from robot_rl.worlds.history import Array, History
from robot_rl.worlds.images.codec import Codec, in_blocks
from robot_rl.worlds.images.flow import Context, LatentFlow, num_facts
from robot_rl.worlds.images.pictures import STD_FLOOR, Moments, Pictures, disagreement


class Images(Pictures):
    """Codec and networks of some cameras."""

    def __init__(
        self,
        config: ImagesConfig,
        size: tuple[int, int],
        *,
        stride: int,
        state_dim: int,
        action_dim: int,
        seed: int = 0,
    ) -> None:
        """Args: size: height and width in pixels; stride: k.

        Raises:
            ConfigError: pictures whose sides the codec cannot halve three times, and the networks once.
        """
        check_pixels(size, "images.cameras", "image_size=64,64, or 128,128, when you collect")
        channels = config.channels * len(config.cameras)
        super().__init__(
            config.cameras,
            size,
            stride=stride,
            members=config.members,
            code_shape=(channels, size[0] // SHRINK, size[1] // SHRINK),
        )
        self.config, self.state_dim, self.action_dim = config, state_dim, action_dim
        facts = num_facts(stride, state_dim, action_dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.codec = Codec(config.channels, config.codec_width)
            self.members = nn.ModuleList(
                LatentFlow(channels, facts, width=config.width) for _ in range(config.members)
            )
        for name, value in (
            ("state_centre", torch.zeros(state_dim)),
            ("state_spread", torch.ones(state_dim)),
        ):
            self.register_buffer(name, value)
        self.state_centre: Tensor
        self.state_spread: Tensor

    @property
    def device(self) -> torch.device:
        return self.rest.device

    # Pictures and codes

    def encode(self, pictures: Mapping[str, Array]) -> Array:
        """Returns the codes (B, C, h, w) of pictures: camera -> (B, height, width, 3) uint8."""
        return np.concatenate([self.codec.encode(pictures[name]) for name in self.config.cameras], axis=1)

    def decode(self, codes: Array) -> dict[str, Array]:
        """Returns the pictures of codes (B, C, h, w)."""
        parts = np.split(codes, len(self.config.cameras), axis=1)
        return {name: self.codec.decode(part) for name, part in zip(self.config.cameras, parts, strict=True)}

    @torch.no_grad()
    def fit_scales(self, history: History, rows: Array) -> None:
        """Measures states and changes of codes in these rows (n,) of a history, k steps before others."""
        states = history.state[rows]
        self.state_centre.copy_(torch.from_numpy(states.mean(axis=0)))
        self.state_spread.copy_(torch.from_numpy(np.maximum(states.std(axis=0), STD_FLOOR)))
        self.fit_rest(rows)

    # Predictions

    def context(self, at: Moments) -> Context:
        """Returns what the networks see."""
        known = (np.arange(self.stride) < at.steps[:, None]).astype(np.float32)
        given = np.concatenate([(at.actions * known[..., None]).reshape(len(known), -1), known], axis=1)
        now, past, reference, state, after, facts = (
            torch.from_numpy(np.ascontiguousarray(part, np.float32)).to(self.device)
            for part in (at.now, at.past, at.reference, at.state, at.after, given)
        )
        states = [(part - self.state_centre) / self.state_spread for part in (state, after)]
        return Context(now, past, reference, torch.cat([*states, facts], dim=1))

    @torch.no_grad()
    def means(self, at: Moments) -> tuple[Array, Array]:
        """See `Pictures.means`."""

        def predicted(rows: Array) -> Array:
            context = self.context(_some(at, rows))
            changes = torch.stack([self.member(i).mean(context) for i in range(len(self.members))], dim=1)
            return changes.cpu().numpy()

        changes = in_blocks(predicted, len(at.steps)).swapaxes(0, 1)
        return at.now + changes * self.rest.cpu().numpy(), disagreement(changes)

    @torch.no_grad()
    def drawn(self, at: Moments, member: Array, noise: Array) -> Array:
        """Returns codes (B, C, h, w) that the flow of each row's network draws from noise (B, C, h, w)."""
        found = np.empty_like(at.now)
        for number in np.unique(member):
            mine = np.flatnonzero(member == number)
            found[mine] = self._drawn_by(int(number), _some(at, mine), noise[mine])
        return found

    def _drawn_by(self, number: int, at: Moments, noise: Array) -> Array:
        flow, start = self.member(number), noise.astype(np.float32)

        def changed(rows: Array) -> Array:
            begin = torch.from_numpy(start[rows]).to(self.device)
            change = flow.drawn(self.context(_some(at, rows)), begin, self.config.denoise)
            return (change * self.rest).cpu().numpy()

        return at.now + in_blocks(changed, len(start))

    def member(self, number: int) -> LatentFlow:
        """Returns the network of that number."""
        member = self.members[number]
        assert isinstance(member, LatentFlow)
        return member

    def to_json(self) -> dict[str, Any]:
        """Returns what `Images` is made from again, but its weights and codes."""
        return {"config": asdict(self.config), "size": list(self.size)}


def _some(at: Moments, rows: Array) -> Moments:
    return Moments(**{name: value[rows] for name, value in vars(at).items()})
