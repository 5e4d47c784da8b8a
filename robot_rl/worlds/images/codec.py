"""Pictures as small codes: the autoencoder in whose codes a world model predicts.

diffusers' `AutoencoderTiny` with narrow blocks, none at full size: a picture of 64 x 64 pixels becomes a
code of 8 x 8 cells. It has no prior, so codes are standardised here, channel by channel.
B pictures, C channels of a code, h x w pixels, all cameras of one size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.worlds.history import Array

BLOCK = 16
"""Rows that a network sees at once: a row is then the same alone and among others, and fits the caches."""
_FLOOR = 1e-3
_ABSOLUTE = 0.2
"""Weight of the absolute error, which makes edges sharp."""


class Codec(nn.Module):
    """Turns pictures into codes and codes into pictures; `scale_codes` comes after it has learned."""

    def __init__(self, channels: int, width: int) -> None:
        """Args: channels: C; width: of all blocks."""
        # takes seconds, and only pictures need it
        from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

        super().__init__()
        blocks = (width,) * 4
        self.network = AutoencoderTiny(
            latent_channels=channels,
            encoder_block_out_channels=blocks,
            decoder_block_out_channels=blocks,
            num_encoder_blocks=(0, 1, 1, 1),
            num_decoder_blocks=(1, 1, 1, 0),
        )
        self.register_buffer("centre", torch.zeros(channels, 1, 1))
        self.register_buffer("spread", torch.ones(channels, 1, 1))
        self.centre: Tensor
        self.spread: Tensor

    @property
    def device(self) -> torch.device:
        return self.centre.device

    def loss(self, pictures: Tensor, mean: Tensor) -> Tensor:
        """Returns the error of pictures (B, 3, h, w) in [-1, 1], coded and drawn again: squared and absolute.

        Half of the weight is on what differs from the mean picture of its camera, (B, 3, h, w): a thing has
        a hundred times fewer pixels than the table on which it lies. The absolute error alone leaves out
        things of that size for thousands of updates.
        """
        differs = (pictures - mean).abs().mean(dim=1, keepdim=True)
        weight = 1.0 + differs / differs.mean().clamp(min=_FLOOR)
        error = self.network.decoder(self.network.encoder(pictures)) - pictures
        return (weight * (error.square() + _ABSOLUTE * error.abs())).mean()

    @torch.no_grad()
    def scale_codes(self, pictures: Array) -> None:
        """Measures mean and deviation of each channel on pictures (B, h, w, 3) uint8."""
        self.centre.zero_()
        self.spread.fill_(1.0)
        codes = torch.from_numpy(self.encode(pictures))
        self.centre.copy_(codes.mean(dim=(0, 2, 3))[:, None, None])
        self.spread.copy_(codes.std(dim=(0, 2, 3)).clamp(min=_FLOOR)[:, None, None])

    @torch.no_grad()
    def encode(self, pictures: Array) -> Array:
        """Returns the codes (B, C, h / 8, w / 8) float32 of pictures (B, h, w, 3) uint8, standardised."""

        def coded(rows: Array) -> Array:
            code = self.network.encoder(tensor_of(pictures[rows], self.device))
            return ((code - self.centre) / self.spread).cpu().numpy()

        return in_blocks(coded, len(pictures))

    @torch.no_grad()
    def decode(self, codes: Array) -> Array:
        """Returns the pictures (B, h, w, 3) uint8 of standardised codes (B, C, h / 8, w / 8)."""

        def drawn(rows: Array) -> Array:
            raw = torch.from_numpy(codes[rows].astype(np.float32)).to(self.device)
            picture = self.network.decoder(raw * self.spread + self.centre)
            levels = ((picture + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
            return levels.permute(0, 2, 3, 1).cpu().numpy()

        return in_blocks(drawn, len(codes))


def in_blocks(function: Callable[[Array], Array], count: int) -> Array:
    """Returns what a function of row numbers (BLOCK,) says of all rows, 0 to count - 1; count: 1 or more."""
    padded = np.minimum(np.arange(-(-count // BLOCK) * BLOCK), count - 1)
    return np.concatenate([function(rows) for rows in padded.reshape(-1, BLOCK)])[:count]


def tensor_of(pictures: Array, device: torch.device) -> Tensor:
    """Returns pictures (B, h, w, 3) uint8 as (B, 3, h, w) in [-1, 1]."""
    levels = torch.from_numpy(np.ascontiguousarray(pictures)).to(device)
    return levels.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0
