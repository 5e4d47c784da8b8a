"""Attention and the plain transformer block, as small as the small VLA needs them.

B rows, T queries, S keys, W token width, N heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
