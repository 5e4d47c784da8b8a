"""Parts of the state by their names."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from robot_rl.core.errors import ConfigError, nearest

PRIVILEGED = "privileged.state"
"""Key of what only a simulator knows, next to an observation: no policy reads it."""
EXECUTED_ACTION = "executed_action"
"""Group of a recording whose `action` is what an expert would have done: the action that was executed."""
APART = (PRIVILEGED, EXECUTED_ACTION)
"""Groups of a recording that are no part of an observation: a policy of others would take them for one."""
ENVIRONMENT = "environment_state"
"""Key of elements of the state that are shown once more, for policies that read them apart."""

GRIPPER, GRIPPER_STEP = "gripper", "gripper.step"
"""Elements of an action: how far the gripper is open; with `env.gripper_steps` how its command changes."""
GRIPPERS = (GRIPPER, GRIPPER_STEP)

PRESENT = ".present"
"""Ends the name of an element that is 1 where one of several robots is there, else 0: `panda.present` is of
`panda.joint1.pos`."""

LAST_ACTION = "last_action"
"""Ends the name of an element that is an action as it was sent last; alone it names those of all actions."""
_CHANGE = re.compile(r"(?P<name>.+)\.change_(?P<lag>\d+)")


class Meaning(NamedTuple):
    """What a name of the state is of."""

    of: str
    """An element of the state, or an action; empty for all actions."""
    is_action: bool
    """Whether it is the last action."""
    lag: int | None
    """Over how many control steps it is a change; None where it is no change."""


def parsed(name: str) -> Meaning:
    """Returns what a name of the state is of: `<name>`, `last_action` or a change of one of these."""
    found = _CHANGE.fullmatch(name)
    name, lag = (name, None) if found is None else (found["name"], int(found["lag"]))
    if name == LAST_ACTION or name.endswith(f".{LAST_ACTION}"):
        return Meaning(name.removesuffix(LAST_ACTION).removesuffix("."), True, lag)
    return Meaning(name, False, lag)


def without_past(names: Sequence[str]) -> tuple[str, ...]:
    """Returns those that are of the present: neither of the last action nor of a change."""
    return tuple(name for name in names if parsed(name) == (name, False, None))


def chosen(names: Sequence[str], beginnings: Sequence[str], *, at: str) -> list[int]:
    """Returns the indices of the names that begin with one of `beginnings`; all if there are none.

    Raises:
        ConfigError: no name begins so; `at` begins the message.
    """
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names):
            raise ConfigError(
                f"{at}: got {beginning!r}, with which no element of the state begins."
                f"{nearest(beginning, names)}"
            )
    prefixes = tuple(beginnings) or ("",)
    return [index for index, name in enumerate(names) if name.startswith(prefixes)]
