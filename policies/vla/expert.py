"""The action expert: a transformer over the chunk's actions that reads the context, at several horizons.

Mixture of Horizons runs one expert on several chunk lengths at once: each sees the first h actions
only, a linear gate weighs their velocities at every step, and each Euler step takes the mix. Where
the horizons disagree, the chunk should be planned again. The horizons lie behind one another in one
sequence, with a mask that keeps them apart, so one forward pass serves all.

B rows, G noisy chunks per row that share one context, H chunk length, A action dim, W token width,
M horizons, P = sum of the horizons, S context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robot_rl.policies.vla.encoders import Attention, feed_forward

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of the context, (B, heads, S, W / heads) each, for every layer."""


class Velocities(NamedTuple):
    """What the expert predicts for one noisy chunk."""

    mix: Tensor
    """(B, G, H, A): the gated mix, which the denoising follows."""
    each: Tensor
    """(B, G, M, H, A): every horizon's own; zero beyond it."""
    gate: Tensor
    """(B, G, M, H): weights that sum to 1 over the horizons that reach the step."""


class ActionExpert(nn.Module):
    """Predicts the velocity of a noisy chunk from the cached context, the time and the state."""

    def __init__(
        self, horizons: Sequence[int], action_dim: int, *, width: int, depth: int, heads: int
    ) -> None:
        """Args: horizons: ascending; the last is H. One horizon is the plain expert, without a gate."""
        super().__init__()
        self.action_in = nn.Linear(action_dim, width)
        self.position = nn.Parameter(torch.zeros(horizons[-1], width))
        self.blocks = nn.ModuleList(ExpertBlock(width, heads) for _ in range(depth))
        self.norm = AdaptiveNorm(width)
        self.out = nn.Linear(width, action_dim)
        self.gate = nn.Linear(width, 1) if len(horizons) > 1 else None
        lengths = torch.tensor(tuple(horizons))
        member = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        reached = torch.arange(horizons[-1]) < lengths[:, None]
        self.reached = nn.Buffer(reached, persistent=False)  # (M, H)
        self.step = nn.Buffer(reached.nonzero()[:, 1], persistent=False)  # (P,)
        self.same = nn.Buffer(member[:, None] == member, persistent=False)  # (P, P)

    def cache(self, context: Tensor) -> Cache:
        """Returns the context's keys and values: computed once per chunk, not once per step."""
        return [block.cross.keys_values(context) for block in self._blocks()]

    def forward(self, x: Tensor, condition: Tensor, cache: Cache) -> Velocities:
        """Predicts the velocities of chunks (B, G, H, A), given `condition` (B, G, W)."""
        groups, mask = x.shape[1], None if self.gate is None else self.same
        tokens = (self.action_in(x) + self.position)[:, :, self.step]
        for block, (keys, values) in zip(self._blocks(), cache, strict=True):
            tokens = block(tokens, condition, keys, values, mask=mask)
        tokens = self.norm(tokens, condition[:, :, None])
        packed = self.out(tokens)
        if self.gate is None:
            gate = self.reached.to(x.dtype).expand(len(x), groups, -1, -1)
            return Velocities(packed, packed[:, :, None], gate)
        each = packed.new_zeros((*x.shape[:2], *self.reached.shape, x.shape[-1]))
        each[:, :, self.reached] = packed
        logits = packed.new_full(each.shape[:-1], -torch.inf)
        logits[:, :, self.reached] = self.gate(tokens).squeeze(-1)
        gate = logits.softmax(dim=2)
        return Velocities(fuse(each, gate), each, gate)

    def _blocks(self) -> list[ExpertBlock]:
        return [block for block in self.blocks if isinstance(block, ExpertBlock)]


class ExpertBlock(nn.Module):
    """Self-attention within a chunk, cross-attention to the context, a two-layer network.

    Time and state modulate it by adaptive layer norm with gates that start at zero (Peebles and Xie
    2023): an untrained expert is a linear map of its input.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = AdaptiveNorm(width, gated=True), AdaptiveNorm(width, gated=True)
        self.attention, self.cross = Attention(width, heads), Attention(width, heads)
        self.norm_cross = nn.LayerNorm(width)
        self.mlp = feed_forward(width)

    def forward(
        self, tokens: Tensor, condition: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None
    ) -> Tensor:
        """Maps tokens (B, G, P, W) to the same; chunks of a row see the context, not one another."""
        batch, groups = tokens.shape[:2]
        condition = condition[:, :, None]
        normed, gate = self.norm_attention.with_gate(tokens, condition)
        normed = normed.flatten(0, 1)
        attended = self.attention(normed, *self.attention.keys_values(normed), mask=mask)
        tokens = tokens + gate * attended.unflatten(0, (batch, groups))
        # All chunks of a row are queries of one attention: their common context is not copied.
        read = self.cross(self.norm_cross(tokens).flatten(1, 2), keys, values)
        tokens = tokens + read.unflatten(1, (groups, -1))
        normed, gate = self.norm_mlp.with_gate(tokens, condition)
        return tokens + gate * self.mlp(normed)


class AdaptiveNorm(nn.Module):
    """Layer norm whose shift and scale, and a gate if asked, come from a condition (AdaLN)."""

    def __init__(self, width: int, *, gated: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Linear(width, (3 if gated else 2) * width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """Normalises tokens (..., W) by `condition` (..., W)."""
        shift, scale = self.modulate(condition).chunk(2, dim=-1)
        return torch.addcmul(shift, self.norm(tokens), 1.0 + scale)

    def with_gate(self, tokens: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the normalised tokens, and the gate for what is computed from them."""
        shift, scale, gate = self.modulate(condition).chunk(3, dim=-1)
        return torch.addcmul(shift, self.norm(tokens), 1.0 + scale), gate


def fuse(each: Tensor, gate: Tensor) -> Tensor:
    """Returns the mix (..., H, A) of (..., M, H, A), weighted by `gate` (..., M, H)."""
    return (each * gate[..., None]).sum(dim=-3)


def disagreement(found: Velocities) -> Tensor:
    """Returns the distance of the horizons' velocities from their mix, (B, H), for one chunk per row.

    The L1 distance, averaged over the action's elements and the horizons that reach the step.
    """
    distance = (found.each - found.mix[:, :, None]).abs().mean(dim=-1)
    reached = (found.gate > 0).to(distance.dtype)
    return ((distance * reached).sum(dim=2) / reached.sum(dim=2))[:, 0]


def balance_loss(gate: Tensor, reached: Tensor) -> Tensor:
    """Returns the squared coefficient of variation of the horizons' mean weights.

    Without it the gate picks one horizon early and the others stop learning to be mixed. Per step,
    the horizons that reach it are compared; the mean is over the steps where at least two do.

    Args:
        gate: (..., M, H).
        reached: (M, H), whether a horizon covers a step.
    """
    weight = gate.flatten(0, -3).mean(dim=0)
    count = reached.sum(dim=0)
    mean = 1.0 / count
    variance = ((weight - mean).square() * reached).sum(dim=0) / count
    shared = count > 1
    return (variance / mean.square())[shared].mean()


def agreed_prefix(disagreement: Tensor, reached: Tensor, *, ratio: float, first: int) -> Tensor:
    """Returns how many steps to execute before planning again, (B,) int64.

    The first `first` steps always; then on while at least two horizons reach the step and their
    disagreement stays below `ratio` times its mean over the first steps.

    Args:
        disagreement: (B, H), L1 distance of the horizons from their mix.
        reached: (M, H), whether a horizon covers a step.
        ratio: largest disagreement, as a multiple of that at the start.
        first: n, at least 1.
    """
    limit = ratio * disagreement[:, :first].mean(dim=1, keepdim=True)
    agreed = (disagreement <= limit) & (reached.sum(dim=0) > 1)
    agreed[:, :first] = True
    return agreed.long().cumprod(dim=1).sum(dim=1)
