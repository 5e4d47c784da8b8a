"""The ears of the small VLA: an instruction's bytes to a few tokens, once for each distinct text.

B observations, U distinct instructions, L bytes, W token width, Q tokens.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from robot_rl.policies.vla.attention import Attention, Block

CACHED_TEXTS = 256
"""Encoded instructions that are kept while the weights stay as they are."""


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
            # Whoever asks for gradients changes the weights next, and a fused optimiser leaves no trace.
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
