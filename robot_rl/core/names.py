"""Parts of the state by their names."""

from collections.abc import Sequence

from robot_rl.core.errors import ConfigError, nearest

PRIVILEGED = "privileged.state"
"""Key of what only a simulator knows, beside an observation: no policy reads it."""


def chosen(names: Sequence[str], beginnings: Sequence[str], *, at: str) -> list[int]:
    """Returns where in `names` those stand that begin with one of `beginnings`; all without any.

    Raises:
        ConfigError: a beginning that no name has; `at` begins the message.
    """
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in names):
            raise ConfigError(
                f"{at}: got {beginning!r}, with which no element of the state begins."
                f"{nearest(beginning, names)}"
            )
    prefixes = tuple(beginnings) or ("",)
    return [index for index, name in enumerate(names) if name.startswith(prefixes)]
