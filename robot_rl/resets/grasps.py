"""Grasps of a thing: closed-form candidates on its box, of which those that hold in simulation are kept.

The tool comes from above, as the tasks' actions hold it. A grasp is where the thing is in the tool's frame,
how far the fingers then are, and nothing else. G grasps, B simulations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.resets.accept import NoStartsError, Tolerances, counted
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.poses import compose, inverse

Array = NDArray[Any]

_JITTER_RAD, _JITTER_M = 0.15, 0.004
_DEPTH, _LENGTH = 0.6, 0.6
"""How far from the middle of the box the fingers are at most, up or down and along it, as shares of its half
sizes."""
_CLEAR_M = 0.006
"""The fingers open wider than the box by this, or it is no candidate."""
_CLOSING_STEPS, _SHAKE_STEPS = 10, 3
_SHAKE_WEIGHTS = 1.0
"""Force on the thing in each direction, in addition to its weight, as a multiple of that."""
_HOLDING_M = 0.003
"""Fingers that are nearer to each other hold nothing."""
_ROUNDS = 8


@dataclass(frozen=True)
class Grasps:
    """G grasps that hold."""

    tool_from_thing: Array
    """(G, 7)"""
    fingers: Array
    """(G, finger joints)"""
    tried: int

    def draw(self, rng: np.random.Generator, num: int) -> tuple[Array, Array]:
        """Returns grasps (num, 7) and their fingers, each drawn with the same probability."""
        chosen = rng.integers(len(self.fingers), size=num)
        return self.tool_from_thing[chosen], self.fingers[chosen]


def find_grasps(bench: Workbench, rng: np.random.Generator, wanted: int, limits: Tolerances) -> Grasps:
    """Returns at least one and about `wanted` grasps; of a held thing those in which the task begins.

    Raises:
        ConfigError: the box is wider than the fingers open.
        NoStartsError: no candidate holds; it has those of the last round, with the fingers open.
    """
    kept, fingers, tried, reasons = list[Array](), list[Array](), 0, Counter[str]()
    put = bench.backend.read_states()
    for _ in range(_ROUNDS):
        is_held = bench.declared.hold == "held"
        tool_from_thing, fails, put = _held(bench) if is_held else _grasped(bench, rng, limits)
        holds = np.ones(bench.num, bool)
        for name, fail in fails.items():
            reasons[name] += int((holds & fail).sum())
            holds &= ~fail
        kept.append(tool_from_thing[holds])
        fingers.append(bench.fingers()[holds])
        tried += bench.num
        if sum(map(len, kept)) >= wanted:
            break
    found = Grasps(np.concatenate(kept), np.concatenate(fingers), tried)
    if not len(found.fingers):
        raise NoStartsError(
            f"resets of {bench.task.name} on {bench.robot.name}: none of {tried} grasps of "
            f"{bench.declared.thing!r} holds; failed first by: {counted(reasons)}. "
            "Check `grip_m` and `grip_half_m` of its `resets`: the box that the fingers grasp from above.",
            put,
        )
    return found


def _held(bench: Workbench) -> tuple[Array, dict[str, Array], Array]:
    """Returns how the task's own starts hold the thing, no test that it fails, and these starts."""
    tool = bench.begin()
    return compose(inverse(tool), bench.thing_pose()), {}, bench.backend.read_states().copy()


def candidates(bench: Workbench, rng: np.random.Generator) -> Array:
    """Returns where the tool may be in the thing's frame, (B, 7): in its box, the fingers across it.

    Raises:
        ConfigError: the box is wider than the fingers open, by all faces.
    """
    declared, num, rows = bench.declared, bench.num, np.arange(bench.num)
    half = np.asarray(declared.grip_half_m)
    # Fingers open along the tool's y: across the box's y with the tool's x along its x, or a quarter turn on.
    across = [axis for axis in (1, 0) if 2 * half[axis] < bench.open_m - _CLEAR_M]
    if not across:
        raise ConfigError(
            f"resets of {bench.task.name}: {declared.thing!r} is {2e3 * half[0]:.0f} x "
            f"{2e3 * half[1]:.0f} mm, and the fingers of {bench.robot.name} open by "
            f"{1e3 * bench.open_m:.0f} mm: it has no grasp. "
            "Declare hold='none', or a smaller box of it."
        )
    axis = np.asarray(across)[rng.integers(len(across), size=num)]
    turn = np.where(axis == 1, 0.0, np.pi / 2) + np.pi * rng.integers(2, size=num)
    at = np.zeros((num, 3))
    at[rows, axis] = rng.uniform(-_JITTER_M, _JITTER_M, num)
    at[rows, 1 - axis] = rng.uniform(-_LENGTH, _LENGTH, num) * half[1 - axis]
    at[:, 2] = rng.uniform(-_DEPTH, _DEPTH, num) * half[2]
    at += np.asarray(declared.grip_m)
    yaw = turn + rng.uniform(-_JITTER_RAD, _JITTER_RAD, num)
    return np.concatenate([at, bench.pointing_down(yaw)], axis=1)


def _grasped(
    bench: Workbench, rng: np.random.Generator, limits: Tolerances
) -> tuple[Array, dict[str, Array], Array]:
    """Puts candidates, shuts the fingers, shakes the thing.

    Returns the grasps (B, 7), which tests they fail (B,), and the states (B, num_state) as they were put.
    """
    tool = bench.begin()
    thing_from_tool = candidates(bench, rng)
    if bench.is_slide:
        tool = bench.upright(compose(bench.thing_pose(), thing_from_tool))
    else:
        low, high = (np.asarray(corner) for corner in bench.declared.workspace_m)
        tool[:, :3] = 0.5 * (low + high)
        tool = bench.upright(tool)
    bench.put_fingers(bench.robot.gripper_open)
    left = bench.put_tool(tool)
    if not bench.is_slide:
        bench.put_thing(compose(bench.tool_pose(), inverse(thing_from_tool)))
    bench.command_gripper(np.ones(bench.num, bool))
    bench.forward()
    put = bench.backend.read_states().copy()
    bench.push_thing(np.array([0.0, 0.0, 1.0]))  # it floats while the fingers come
    diverged = bench.step(_CLOSING_STEPS)
    before = compose(inverse(bench.tool_pose()), bench.thing_pose())
    for direction in np.concatenate([np.eye(3), -np.eye(3)]):
        bench.push_thing(_SHAKE_WEIGHTS * direction)
        diverged |= bench.step(_SHAKE_STEPS)
    bench.push_thing(np.zeros(3))
    diverged |= bench.step(_SHAKE_STEPS)
    grasp = compose(inverse(bench.tool_pose()), bench.thing_pose())
    slipped = np.linalg.norm(grasp[:, :3] - before[:, :3], axis=1)
    fails = {
        "unreachable": left[:, 0] > limits.reached_m,
        "diverged": diverged,
        "slipping": slipped > limits.in_hand_m,
        "empty": bench.fingers().sum(axis=1) < _HOLDING_M,
        "penetrating": bench.backend.penetration_m(bench.all) > limits.penetration_m,
    }
    return grasp, fails, put
