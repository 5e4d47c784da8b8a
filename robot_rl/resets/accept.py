"""Which starts are taken: each is simulated for a while, and tests say why others are not taken.

B simulations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.poses import compose, inverse

Array = NDArray[Any]

TESTS = (
    "unreachable", "diverged", "lost", "moved", "moving", "penetrating", "solved", "failed",
)  # fmt: skip
"""In the order in which they are asked; a start counts for the first that it fails."""


class NoStartsError(ConfigError):
    """Nothing that was tried, or too little, has passed its tests: starts of a class, grasps, or ways."""

    def __init__(self, message: str, rejected: Array) -> None:
        """Takes `rejected` (n, num_state): some of the states that did not pass, to look at."""
        super().__init__(message)
        self.rejected = rejected


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """What a start may be off, and must be."""

    settle_steps: int = 14
    """Control steps that it is simulated, at 20 Hz 0.7 s."""
    calm_steps: int = 5
    """The last of these, in which nothing may move fast."""
    joint_speed: float = 0.1
    """rad/s of a hinge, m/s of a slide."""
    thing_m_s: float = 0.05
    thing_rad_s: float = 1.0
    reached_m: float = 0.015
    """Distance of the tool from where it was wanted."""
    reached_rad: float = 0.15
    penetration_m: float = 0.002
    in_hand_m: float = 0.01
    """How far a held thing slips in the hand."""
    below_m: float = 0.03
    """A thing deeper than this below the table is lost."""


@dataclass(kw_only=True)
class Put:
    """What a generator has put into the simulations, and what must hold once it has settled."""

    tool: Array
    """(B, 7): where the tool should be."""
    left: Array
    """(B, 2): metres and radians by which inverse kinematics missed it."""
    in_hand: Array
    """(B,) bool: the thing is held, and must still be."""
    moves_at_most_m: float
    """How far the thing may move from where it was put; a slip in the hand is another test."""


def counted(rejected: Mapping[str, int]) -> str:
    """Returns `moved 12, solved 3`: how many each test has rejected, the most first."""
    most_first = sorted(rejected.items(), key=lambda item: -item[1])
    return ", ".join(f"{test} {count}" for test, count in most_first if count)


def settle(bench: Workbench, put: Put, limits: Tolerances) -> tuple[Array, dict[str, int]]:
    """Simulates what was put; returns which are taken (B,), and how many each test rejected first."""
    bench.forward()
    in_hand = compose(inverse(bench.tool_pose()), bench.thing_pose())
    at = bench.thing_pose()[:, :3]
    calm = np.zeros(bench.num, int)

    def watch() -> None:
        most = np.array([limits.joint_speed, limits.thing_m_s, limits.thing_rad_s])
        calm[:] = np.where((bench.speeds() < most).all(axis=1), calm + 1, 0)

    diverged = bench.step(limits.settle_steps, watch)
    tool, thing = bench.tool_pose(), bench.thing_pose()
    away = np.linalg.norm(tool[:, :3] - put.tool[:, :3], axis=1)
    slipped = np.linalg.norm(compose(inverse(tool), thing)[:, :3] - in_hand[:, :3], axis=1)
    success, failed, _ = bench.env.judge()
    fails = {
        "unreachable": (put.left[:, 0] > limits.reached_m) | (put.left[:, 1] > limits.reached_rad),
        "diverged": diverged,
        "lost": (thing[:, 2] < -limits.below_m) | (put.in_hand & (slipped > limits.in_hand_m)),
        "moved": (np.linalg.norm(thing[:, :3] - at, axis=1) > put.moves_at_most_m)
        | (away > limits.reached_m),
        "moving": calm < limits.calm_steps,
        "penetrating": np.zeros(bench.num, bool),
        "solved": success,
        "failed": failed,
    }
    assert tuple(fails) == TESTS
    so_far = ~(fails["unreachable"] | fails["diverged"] | fails["lost"] | fails["moved"] | fails["moving"])
    ids = np.nonzero(so_far)[0]
    fails["penetrating"][ids] = bench.backend.penetration_m(ids) > limits.penetration_m
    taken, rejected = np.ones(bench.num, bool), dict[str, int]()
    for name, fail in fails.items():
        rejected[name] = int((taken & fail).sum())
        taken &= ~fail
    return taken, rejected
