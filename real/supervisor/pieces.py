"""Plans for an arm that follows them by itself, in pieces that end soon: so long may nobody watch it.

n arm joints, H points of a plan. A piece begins with the interval of now and reaches as far ahead as
it may; the next one follows when half of that is left, before the arm slows down for the end.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from robot_rl.real.messages import Plan

_LEAST_ROWS = 4
"""Points of a full piece: longer periods are divided."""


class Pieces:
    """Cuts the newest plan."""

    def __init__(self, longest_s: float) -> None:
        """Takes how far ahead of now a piece may end."""
        self._longest_ns = round(1e9 * longest_s)
        self._plan: Plan | None = None
        self._end_row = 0
        self._end_ns = 0

    def follow(self, plan: Plan) -> None:
        """Begins another plan; its first piece is due as soon as its start is near enough."""
        self._plan, self._end_row = _divided(plan, self._longest_ns // _LEAST_ROWS), 0

    def drop(self) -> None:
        """Forgets the plan."""
        self._plan, self._end_ns = None, 0

    def is_done(self, now_ns: int) -> bool:
        """Whether the end of the plan is reached."""
        return self._plan is None and now_ns >= self._end_ns

    def due(self, now_ns: int) -> Plan | None:
        """Returns the piece that is to be sent now."""
        plan = self._plan
        if plan is None:
            return None
        first = max(0, (now_ns - plan.start_ns) // plan.period_ns)
        end = min(len(plan.gripper), (now_ns + self._longest_ns - plan.start_ns) // plan.period_ns)
        if first >= len(plan.gripper):  # too late for all of it
            self._plan = None
            return None
        is_early = self._end_row > 0 and 2 * (self._end_ns - now_ns) > self._longest_ns
        if end <= max(first, self._end_row) or (is_early and end < len(plan.gripper)):
            return None
        self._end_row, self._end_ns = end, plan.start_ns + end * plan.period_ns
        if end == len(plan.gripper):
            self._plan = None
        return replace(
            plan,
            start_ns=plan.start_ns + first * plan.period_ns,
            targets_rad=plan.targets_rad[first:end],
            gripper=plan.gripper[first:end],
        )


def _divided(plan: Plan, longest_ns: int) -> Plan:
    """Returns the same plan with shorter periods, on straight lines from its first target on."""
    parts = -(-plan.period_ns // longest_ns)
    if parts == 1:
        return plan
    ends = np.arange(1, len(plan.gripper) + 1)
    fine = np.arange(1, parts * len(plan.gripper) + 1) / parts
    targets = np.stack([np.interp(fine, ends, joint) for joint in plan.targets_rad.T], axis=1)
    return replace(
        plan,
        period_ns=plan.period_ns // parts,
        targets_rad=targets,
        gripper=np.repeat(plan.gripper, parts),
    )
