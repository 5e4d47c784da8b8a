"""How the small VLA reads: attention, pictures to tokens, an instruction's bytes to tokens.

B rows, h and w pixels, C channels, W token width, N tokens of a picture, Q of an instruction, U distinct
instructions, L bytes. In `Attention`: T queries, S keys, N heads.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Generator, Tensor, nn

from robot_rl.policies.networks import spatial_soft_argmax

SMALLEST = 16
"""Pixels along each side that one token of the grid stands for: no picture may be smaller."""
CACHED_TEXTS = 256
"""Encoded instructions that are kept while the weights stay as they are."""


class Attention(nn.Module):
    """Multi-head attention whose keys and values can be computed once and used many times."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys_values(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values (B, N, S, W / N) of tokens (B, S, W)."""
        keys, values = self.key_value(tokens).chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Maps (B, T, W) to (B, T, W); `mask` broadcasts to (B, N, T, S), True where a key is seen."""
        # Written out: for such short sequences torch's fused kernel takes 8 times as long backwards.
        queries = self._split(self.query(tokens)) * keys.shape[-1] ** -0.5
        scores = queries @ keys.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.out((scores.softmax(dim=-1) @ values).transpose(1, 2).flatten(2))

    def _split(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Self-attention, then a two-layer network; norms come first (Xiong et al. 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = feed_forward(width)

    def forward(self, tokens: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Maps tokens (B, T, W) to tokens (B, T, W)."""
        normed = self.norm_attention(tokens)
        tokens = tokens + self.attention(normed, *self.attention.keys_values(normed), mask=mask)
        return tokens + self.mlp(self.norm_mlp(tokens))


def feed_forward(width: int) -> nn.Sequential:
    """Returns the two-layer network of a transformer block."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))


class PictureEncoder(nn.Module):
    """Encodes the pictures of one camera as a grid of tokens, and one token of keypoints.

    Patches of 4 pixels, then two convolutions of stride 2, with group norm: acting must not depend
    on the batch. The grid tokens hold what is where, the last token where each channel is strongest
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


class InstructionEncoder(nn.Module):
    """Encodes UTF-8 bytes, zero-padded, with a small transformer that ignores the padding.

    Q learned queries read the text, so that a long instruction costs the policy no more than a short
    one. A text is encoded once per batch, and once at all while no gradient is asked for and the
    weights do not change.
    """

    def __init__(self, *, width: int, depth: int, heads: int, tokens: int, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.byte = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(max_bytes, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(torch.zeros(tokens, width))
        self.read = Attention(width, heads)
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self._known_weights: tuple[tuple[int, int], ...] = ()

    def forward(self, texts: Tensor) -> Tensor:
        """Maps texts (B, L) uint8 to tokens (B, Q, W)."""
        distinct, row = torch.unique(texts, dim=0, return_inverse=True)
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            # Training changes the weights next, and a fused optimiser does not raise their version counters.
            self._known.clear()
            return self.encode(distinct)[row]
        self._forget_old_weights()
        keys = [bytes(text) for text in distinct.cpu().numpy()]
        for key, text in zip(keys, distinct, strict=True):
            if key not in self._known:
                self._known[key] = self.encode(text[None])[0].detach()
            self._known.move_to_end(key)
        tokens = torch.stack([self._known[key] for key in keys])[row]
        while len(self._known) > CACHED_TEXTS:
            self._known.popitem(last=False)
        return tokens

    def encode(self, texts: Tensor) -> Tensor:
        """Maps texts (U, L) uint8 to tokens (U, Q, W), without looking anything up."""
        # Trailing zeros are padding in every row: cutting them changes nothing but the work.
        length = max(1, int((texts != 0).any(dim=0).sum()))
        texts = texts[:, :length]
        # An empty instruction attends to its first zero: a softmax over nothing would be NaN.
        visible = texts != 0
        visible[:, 0] = True
        mask = visible[:, None, None, :]
        h = self.byte(texts.long()) + self.position[:length]
        for block in self.blocks:
            h = block(h, mask=mask)
        keys, values = self.read.keys_values(self.norm(h))
        return self.read(self.queries.expand(len(texts), -1, -1), keys, values, mask=mask)

    def _forget_old_weights(self) -> None:
        weights = tuple((p.data_ptr(), p._version) for p in self.parameters())
        if weights != self._known_weights:
            self._known.clear()
            self._known_weights = weights
