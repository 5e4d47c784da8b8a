"""Settings of reading a dataset: names, episodes, cameras, and damaged episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from robot_rl.core.errors import ConfigError

OnDamage = Literal["raise", "skip"]


class ReadOptions(TypedDict, total=False):
    """Options of `Dataset` and `open_source`."""

    rename: dict[str, str]
    episodes: list[int]
    cameras: list[str]
    on_damage: OnDamage


@dataclass(frozen=True, kw_only=True)
class ReadingConfig:
    """Selects what of a dataset is read, and under which names."""

    rename: tuple[str, ...] = ()
    """Names in the dataset that are not LeRobot's, each `<name there>:<LeRobot's name>`: `actions:action`."""
    episodes: str | None = None
    """The only episodes that are read: `0-79,82`; None: all."""
    cameras: tuple[str, ...] | None = None
    """The only cameras that are read; None: all."""
    on_damage: OnDamage = "raise"
    """`skip`: damaged episodes are found at the start, named and left out."""

    def options(self, at: str = "") -> ReadOptions:
        """Returns the options that differ from the defaults.

        Raises:
            ConfigError: texts that are no names or no episodes; `at` and the field begin the message.
        """
        found = ReadOptions()
        if self.rename:
            found["rename"] = pairs(self.rename, f"{at}rename")
        if self.episodes is not None:
            found["episodes"] = spans_of(self.episodes, f"{at}episodes")
        if self.cameras is not None:
            found["cameras"] = list(self.cameras)
        if self.on_damage != "raise":
            found["on_damage"] = self.on_damage
        return found


def spans_of(text: str, at: str) -> list[int]:
    """Returns the numbers of `0-9,12`.

    Raises:
        ConfigError: a text that is no number, or a number twice; `at` begins the message.
    """
    numbers: list[int] = []
    for span in text.split(","):
        first, dash, last = span.partition("-")
        begin = whole_number(first, at)
        end = whole_number(last, at) if dash else begin
        if end < begin:
            raise ConfigError(f"{at}: got {span!r}, allowed: the smaller number first, {end}-{begin}")
        numbers += range(begin, end + 1)
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ConfigError(f"{at}: got {twice} twice in {text!r}, allowed: each number once")
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
        if old in found:
            raise ConfigError(f"{at}: got {old!r} twice, allowed: one new name for each")
        found[old] = new
    return found
