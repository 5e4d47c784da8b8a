"""Settings of reading a dataset: names, episodes, cameras, and damaged episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from robot_rl.data.spans import pairs, spans_of

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
