"""What a person wants of the arm now, whatever they hold in their hands.

A action dim of the policy, n arm joints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DeviceError

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One reading of a person's input."""

    takes_over: bool = False
    """The person drives: `action` or `joints_rad` goes to the arm, and not what the policy wants."""
    action: Array | None = None
    """(A,) in [-1, 1], in the policy's action space."""
    joints_rad: Array | None = None
    """(n,) joint targets, of leader arms; `gripper` goes with them."""
    gripper: float | None = None
    """-1 closed to +1 open, beside `joints_rad`."""
    verdict: Literal["success", "fail"] | None = None
    """The person ends the episode, and says how it went."""
    instruction: str | None = None
    """What the person typed: the instruction from now on."""
    stop: bool = False
    """The person wants the arm to stop and stay stopped."""


class Teleop(Protocol):
    """An input device in a person's hands, or a script in a person's place."""

    def begin(self) -> None:
        """Notes that an episode begins: verdicts and words from before no longer count."""
        ...

    def read(self, wanted: Array) -> Intent:
        """Returns what the person wants now; never waits. `wanted` (A,) is what the policy is about to do."""
        ...

    def ask(self, question: str) -> None:
        """Puts a request to the person and waits until they confirm."""
        ...

    def close(self) -> None:
        """Gives the device back."""
        ...


def check_intent(intent: Intent, action_dim: int) -> None:
    """Passes an intent that says how to move if it takes over.

    Raises:
        DeviceError: an input device that takes over with nothing, or with another robot's action.
    """
    if not intent.takes_over or intent.joints_rad is not None:
        return
    if intent.action is None or intent.action.shape != (action_dim,) or not np.isfinite(intent.action).all():
        got = "nothing" if intent.action is None else f"{intent.action}"
        raise DeviceError(
            f"teleop: took over with action {got}, allowed: {action_dim} finite numbers, or joint targets. "
            "Choose the input device that fits the policy's action space."
        )
