"""What a task says of the starts in a bank: the thing it moves, where that belongs, how it is held.

Four classes (after OmniReset, arXiv 2603.15789): `reaching`, the thing where the task puts it and the tool
anywhere; `near_object`, the tool near the thing, not holding it; `grasped`, the thing in the hand anywhere;
`near_goal`, the thing near its place at the goal. A fifth, `carried`, is ours: the thing in the hand on its
way to the goal, more of them the nearer it is, so that no start is far from one that is solved already.
docs/resets.md says what they mean where a task has no thing, or no grasp.
"""

from dataclasses import dataclass
from typing import Literal

from robot_rl.core.errors import ConfigError, require

USUAL = ("reaching", "near_object", "grasped", "near_goal")
CLASSES = (*USUAL, "carried")
_WITHOUT_THING = ("reaching", "near_goal")
TOOL = "tool"
Vector = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Resets:
    """A task's declaration; metres, in the world's axes unless it says so."""

    thing: str = TOOL
    """Body that the task moves, by a free joint or a slide; `tool`: the tool itself goes to the goal, and
    nothing is grasped: `hold` is then `none`."""
    goal: str = ""
    """Body in whose frame the thing's place is; none for a slide."""
    at_goal_m: Vector = (0.0, 0.0, 0.0)
    """Where the thing's origin is in the goal's frame when the task is done."""
    slide_goal_m: float = 0.0
    """Of a slide: the position at which the task is done."""
    near_goal_m: Vector = (0.05, 0.05, 0.05)
    """How far from its place the thing of `near_goal` is at most, along each axis; of a slide the first."""
    way: Literal["straight", "walk"] = "straight"
    """How `near_goal` is found: displacements, or for a thing that fits into another a random walk without
    friction out of its place."""
    hold: Literal["grasp", "held", "none"] = "grasp"
    """`grasp`: fingers can grasp the thing. `held`: every start of the task has it in the hand. `none`: it is
    pushed."""
    grip_m: Vector = (0.0, 0.0, 0.0)
    """Middle of the box that is grasped or pushed, in the thing's frame."""
    grip_half_m: Vector = (0.02, 0.02, 0.02)
    """Half sizes of that box. Fingers grasp it from above, by faces that are narrower than they open."""
    near_object_m: float = 0.06
    """How far from the thing the tool of `near_object` is at most; a held thing from its place, sideways, and
    twice as far above it."""
    workspace_m: tuple[Vector, Vector] = ((0.35, -0.25, 0.03), (0.65, 0.25, 0.35))
    """Where the tool may be: lowest and highest corner."""
    yaw_rad: float = 0.5
    """Largest turn of the tool about z from home, where the task's actions turn it."""
    rests_at_goal: bool = False
    """Whether the thing stays at the goal when it is let go: half of `near_goal` then begins with open
    fingers."""
    classes: tuple[str, ...] = USUAL
    """Those that make sense for the task, of these."""

    def __post_init__(self) -> None:
        """Checks the declaration where it is written.

        Raises:
            ConfigError: a class that does not exist, or one in which a hand holds what it cannot.
        """
        at = "resets of a task"
        require(set(self.classes) <= set(CLASSES), f"{at}: classes", self.classes, f"of {', '.join(CLASSES)}")
        if self.thing in ("", TOOL):
            self._check_tool(at)
        held = [name for name in self.classes if name in ("grasped", "carried")]
        if self.hold == "none" and held:
            raise ConfigError(
                f"{at}: got hold='none' with classes {', '.join(held)}, in which a hand holds "
                f"{self.thing!r}. Leave these classes out, or declare hold='grasp'."
            )

    def _check_tool(self, at: str) -> None:
        """Refuses what needs a thing of a task that has none."""
        got = f"hold={self.hold!r}, way={self.way!r}, classes={self.classes}"
        if self.hold != "none" or self.way != "straight" or not set(self.classes) <= set(_WITHOUT_THING):
            raise ConfigError(
                f"{at}: got no `thing` to grasp, {got}; allowed without a thing, where the tool itself goes "
                f"to the goal: hold='none', way='straight', classes of {_WITHOUT_THING}. Name the body "
                "that is moved, such as thing='cube', or declare these."
            )
