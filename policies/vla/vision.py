"""The eyes of the small VLA: pictures to tokens, from scratch, and how training pictures are varied.

B observations, h and w pixels, C channels, W token width, N tokens of a picture.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from robot_rl.policies.networks import spatial_soft_argmax

SMALLEST = 16
"""Pixels along each side that one token of the grid stands for: no picture may be smaller."""


class PictureEncoder(nn.Module):
    """Encodes the pictures of one camera as a grid of tokens, and one token of keypoints.

    Patches of 4 pixels, then two convolutions of stride 2, with group norm: acting must not depend
    on the batch. The grid says what is where; the last token holds where each channel is strongest
    (Levine et al. 2016), which is learned from few demonstrations.
    """

    def __init__(self, height: int, width: int, *, channels: int, outputs: int) -> None:
        """Args: channels: of the first layer; each later one has twice as many."""
        super().__init__()
        last = 4 * channels
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, channels, 4, stride=4),
            nn.GroupNorm(1, channels),
            nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.GroupNorm(2, 2 * channels),
            nn.SiLU(),
            nn.Conv2d(2 * channels, last, 3, stride=2, padding=1),
            nn.GroupNorm(4, last),
            nn.SiLU(),
        )
        self.grid_token = nn.Linear(last, outputs)
        self.keypoint_token = nn.Linear(2 * last, outputs)
        self.tokens = -(-(height // 4) // 4) * -(-(width // 4) // 4) + 1
        self.position = nn.Parameter(torch.zeros(self.tokens, outputs))

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps pixels (B, 3, h, w) in [-1, 1] to tokens (B, N, W)."""
        maps = self.convolutions(pixels)
        grid = self.grid_token(maps.flatten(2).transpose(1, 2))
        keypoints = self.keypoint_token(spatial_soft_argmax(maps))
        return torch.cat([grid, keypoints[:, None]], dim=1) + self.position


def to_pixels(pictures: Tensor) -> Tensor:
    """Maps pictures (B, h, w, 3) uint8 to pixels (B, 3, h, w) in [-1, 1]."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def jitter_colour(pixels: Tensor, strength: float, generator: Generator | None) -> Tensor:
    """Varies contrast, brightness and tint of each picture (B, 3, h, w) by up to `strength`."""
    device = generator.device if generator is not None else pixels.device
    draws = torch.rand((len(pixels), 5, 1, 1), generator=generator, device=device).to(pixels.device)
    draws = strength * (2.0 * draws - 1.0)
    contrast, brightness, tint = draws[:, :1], draws[:, 1:2], 0.5 * draws[:, 2:]
    return pixels * (1.0 + contrast) + brightness + tint


def dropped(tokens: Tensor, share: float, generator: Generator | None) -> Tensor:
    """Sets a share of the elements to zero and scales the others up (Srivastava et al. 2014)."""
    if share == 0.0:
        return tokens
    device = generator.device if generator is not None else tokens.device
    kept = torch.rand(tokens.shape, generator=generator, device=device).to(tokens.device) >= share
    return tokens * kept / (1.0 - share)
