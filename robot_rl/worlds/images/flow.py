"""How codes of pictures go on: one U-Net that expects the next code, or draws it by a flow.

The model of the state goes first: the U-Net reads the state now and the one that was predicted (of a real
robot: what it measures of itself), and the actions in between. It also sees the code now, that of a stride
before, and the code of the episode's first picture, which never gets noise (WoVR, arXiv 2602.13977, ablates
that reference frame). Noise on the other codes in training lets it live with its own predictions.

It predicts by how much the code changes, so a still picture is its zero. Half of the rows of a batch have no
noise and t = 0, where the answer is the mean; the others learn a rectified flow (arXiv 2209.03003).
B rows, C channels over all cameras, h x w cells, S state elements, A action dim, k control steps of a stride.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_TIMES = 1000.0
"""The U-Net's clock at t = 1."""


@dataclass(frozen=True)
class Context:
    """What the next code follows from."""

    now: Tensor
    """(B, C, h, w)"""
    past: Tensor
    """(B, C, h, w): a stride before; the first code where the episode is younger."""
    reference: Tensor
    """(B, C, h, w): of the episode's first picture."""
    facts: Tensor
    """(B, F): of states, actions, and how many of them are executed; see `num_facts`."""


def num_facts(stride: int, state_dim: int, action_dim: int) -> int:
    """Returns F: state now, state next, k actions, and which of them are executed."""
    return 2 * state_dim + stride * (action_dim + 1)


class LatentFlow(nn.Module):
    """One member."""

    def __init__(self, channels: int, facts: int, *, width: int) -> None:
        """Args: channels: C; facts: F; width: channels of the U-Net's first level, twice as many below."""
        # takes seconds, and only pictures need it
        from diffusers.models.unets.unet_2d import UNet2DModel

        super().__init__()
        self.unet = UNet2DModel(
            in_channels=4 * channels + 2,
            out_channels=channels,
            layers_per_block=1,
            block_out_channels=(width, 2 * width),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
            add_attention=False,
            class_embed_type="identity",
            resnet_time_scale_shift="scale_shift",
        )
        size = 4 * width
        self.read = nn.Sequential(nn.Linear(facts, size), nn.SiLU(), nn.Linear(size, size))
        nn.init.zeros_(self.unet.conv_out.weight)  # a still picture
        assert self.unet.conv_out.bias is not None
        nn.init.zeros_(self.unet.conv_out.bias)

    def clean(self, context: Context, noisy: Tensor, t: Tensor) -> Tensor:
        """Returns the change of the code that is expected behind a noisy one, (B, C, h, w).

        Args: noisy: (B, C, h, w); t: (B,), 0 where there is nothing but noise, up to 1.
        """
        (rows, _, height, width), device = noisy.shape, noisy.device
        y = torch.linspace(-1, 1, height, device=device)[:, None].expand(rows, 1, height, width)
        x = torch.linspace(-1, 1, width, device=device).expand(rows, 1, height, width)
        seen = torch.cat([noisy, context.now, context.past, context.reference, y, x], dim=1)
        return self.unet(seen, t * _TIMES, class_labels=self.read(context.facts)).sample

    def loss(self, context: Context, change: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Returns the squared error of the change (B, C, h, w), in units of its deviation.

        Args: noise: (B, C, h, w), of deviation 1, or 0 where the mean is asked for; t: (B,), then 0 too.
        """
        at = t[:, None, None, None]
        return (self.clean(context, (1.0 - at) * noise + at * change, t) - change).square().mean()

    def drawn(self, context: Context, noise: Tensor, steps: int) -> Tensor:
        """Returns where the flow takes noise (B, C, h, w), by Euler steps."""
        y = noise
        for number in range(steps):
            t = torch.full_like(noise[:, 0, 0, 0], number / steps)
            y = y + (self.clean(context, y, t) - y) / (steps - number)
        return y

    def mean(self, context: Context) -> Tensor:
        """Returns the change that is expected, (B, C, h, w)."""
        still = torch.zeros_like(context.now)
        return self.clean(context, still, still[:, 0, 0, 0])
