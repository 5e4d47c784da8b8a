"""How the small VLA sees with keypoints: one token for each camera, and one for all that it knows.

A grid of picture tokens takes many demonstrations before it shows where small things are. Keypoints show it
after few, and one network over keypoints, state and instruction says what they mean for the task.
B rows, h and w pixels, S state dim, W token width, Q tokens of an instruction, P elements of the privileged
state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robot_rl.policies.networks import MLP, KeypointEncoder

HIDDEN = 256
"""Units of the two hidden layers of each network."""


class KeypointContext(nn.Module):
    """Reads pictures as keypoints, and guesses what they show of what only a simulator knows."""

    def __init__(
        self, cameras: int, state_dim: int, *, width: int, text_tokens: int, privileged_dim: int = 0
    ) -> None:
        """Args: privileged_dim: P elements that are guessed; 0: no guess."""
        super().__init__()
        self.images = nn.ModuleList(KeypointEncoder() for _ in range(cameras))
        each = KeypointEncoder().dim
        self.camera_token = nn.ModuleList(nn.Linear(each, width) for _ in range(cameras))
        # Texts begin nearly equal: only the norm makes their difference large enough to learn from.
        self.text_norm = nn.LayerNorm(text_tokens * width)
        known = state_dim + cameras * each + text_tokens * width
        self.guess = (
            MLP(known, privileged_dim, width=HIDDEN, depth=2, layernorm=True) if privileged_dim else None
        )
        self.meaning = MLP(known + privileged_dim, width, width=HIDDEN, depth=2, layernorm=True)

    def forward(
        self, state: Tensor, texts: Tensor, pictures: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns tokens (B, cameras + 1, W), the last of them alone (B, W), and the guess (B, P).

        Args:
            state: (B, S), standardised.
            texts: (B, Q, W), of the instruction.
            pictures: pixels (B, 3, h, w) of each camera, in [-1, 1].
        """
        seen = [
            encoder.of_pixels(picture) for encoder, picture in zip(self._encoders(), pictures, strict=True)
        ]
        known = torch.cat([state, *seen, self.text_norm(texts.flatten(1))], dim=-1)
        guess = None if self.guess is None else self.guess(known)
        meaning = self.meaning(known if guess is None else torch.cat([known, guess], dim=-1))
        tokens = [token(one) for token, one in zip(self.camera_token, seen, strict=True)]
        return torch.stack([*tokens, meaning], dim=1), meaning, guess

    def _encoders(self) -> list[KeypointEncoder]:
        return [encoder for encoder in self.images if isinstance(encoder, KeypointEncoder)]
