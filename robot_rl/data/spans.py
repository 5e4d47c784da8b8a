"""How episodes and names are written in one word: `0-9,12` and `actions:action,state:observation.state`."""

from __future__ import annotations

from collections.abc import Sequence

from robot_rl.core.errors import ConfigError


def spans_of(text: str, at: str) -> list[int]:
    """Returns the numbers of `0-9,12`.

    Raises:
        ConfigError: something that is no number; `at` begins the message.
    """
    numbers: list[int] = []
    for span in text.split(","):
        first, _, last = span.partition("-")
        begin = whole_number(first, at)
        numbers += range(begin, (whole_number(last, at) if last else begin) + 1)
    return numbers


def whole_number(text: str, at: str) -> int:
    """Returns a number that is 0 or more; raises `ConfigError` for anything else."""
    if not text.isdecimal():
        raise ConfigError(f"{at}: got {text!r}, allowed: a whole number")
    return int(text)


def pairs(texts: Sequence[str], at: str) -> dict[str, str]:
    """Returns the mapping of texts such as `actions:action`.

    Raises:
        ConfigError: a text without a colon, or with more than one; `at` begins the message.
    """
    found: dict[str, str] = {}
    for text in texts:
        old, colon, new = (part.strip() for part in text.partition(":"))
        if not colon or not old or not new or ":" in new:
            raise ConfigError(f"{at}: got {text!r}, allowed: <name there>:<LeRobot's name>, `actions:action`")
        found[old] = new
    return found
