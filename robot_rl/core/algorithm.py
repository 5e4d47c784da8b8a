"""The algorithm contract: learn from a batch, hand out weights, save and restore everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(Protocol):
    """Anything that learns."""

    def update(self, batch: Any) -> Mapping[str, Tensor | float]:
        """Takes one learner update; metrics may stay tensors until they are read."""
        ...

    def policy_weights(self) -> Mapping[str, Tensor]:
        """Returns the weights that the acting policy needs."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns everything an exact resume needs: parameters, targets, optimisers, RNG."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
