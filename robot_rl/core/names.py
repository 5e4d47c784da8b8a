"""Parts of the state by their names."""

from collections.abc import Sequence

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
