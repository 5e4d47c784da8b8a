"""What critics read: the policy's features, and the privileged state of a simulation where they may.

Asymmetric actor-critic (Pinto et al. 2018). It takes no part in acting: what a policy reads stays the same.
B batch, F features, P elements of the privileged state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from robot_rl.core.names import PRIVILEGED
from robot_rl.data.normalize import Normaliser


class Seen:
    """Adds the privileged state, scaled, to features."""

    def __init__(self, privileged: Normaliser | None, device: torch.device) -> None:
        """Args: privileged: scales `privileged.state`; None where critics read the features alone."""
        self._scale = None if privileged is None else privileged.to(device)
        self.more: int = 0 if self._scale is None else self._scale.feature_dims[PRIVILEGED]
        """P, or 0."""

    def __call__(self, features: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        """Returns (B, F + P) of the features (B, F) and the observations that they are of."""
        if self._scale is None:
            return features
        return torch.cat([features, self._scale.obs({PRIVILEGED: obs[PRIVILEGED]})[PRIVILEGED]], dim=-1)
