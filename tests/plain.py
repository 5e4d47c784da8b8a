"""What the policies that tests make up share."""

from typing import Any

from torch import Tensor

from robot_rl.core.policy import Encoded


class Plain:
    """Sees observations as they are, the state as features, and corrects nothing although it is asked."""

    refines = True

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        return Encoded({**obs, "features": obs["state"]})

    def refine(self, encoded: Encoded, action: Tensor, **_: Any) -> Tensor:
        return action
