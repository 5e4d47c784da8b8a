"""Several robots or tasks in one run: each is a source with its own envs, a budget and a share of batches.

One policy serves all of them, so they have to observe the same elements and to take the same actions. Without
torch, MuJoCo and numpy, so that mistakes are refused at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from robot_rl.core.errors import ConfigError, require
from robot_rl.sim.config import check_names, check_num_envs

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A robot that does a task."""

    task: str | None = None
    """A name of `robot-rl doctor --list task`; that of `env` if None. The policy reads which one with
    `env.instruction=task`."""
    robot: str | None = None
    """A name of `robot-rl doctor --list robot`, or the path of a robot file; the task's own if None."""
    env_steps: int
    """Its budget: control steps over all its envs. It collects no more then, the others go on."""
    num_envs: int = 16
    """Its simulations that collect."""
    share: float | None = None
    """Of the part of each batch that is no demonstration, what comes from it; equal shares if None."""


def check_sources(sources: Mapping[str, SourceConfig], task: str) -> None:
    """Refuses wrong names, robots, numbers and shares.

    Raises:
        ConfigError: the message says which.
    """
    pairs: dict[tuple[str, str | None], str] = {}
    for name, source in sources.items():
        at = f"sources.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{at}: got the name {name!r}, allowed: small letters, digits, _ and -")
        doing = source.task or task
        check_names(doing, source.robot, at=f"{at}.")
        require(source.env_steps >= 1, f"{at}.env_steps", source.env_steps, "1 or more")
        require(source.num_envs >= 1, f"{at}.num_envs", source.num_envs, "1 or more")
        check_num_envs(source.num_envs, at=f"{at}.num_envs")
        other = pairs.setdefault((doing, source.robot), name)
        if other != name:
            raise ConfigError(
                f"{at}.robot: got {source.robot!r}, which sources.{other} has, allowed: a robot once with a "
                f"task. Raise sources.{other}.num_envs and env_steps instead."
            )
    given = {name: source.share for name, source in sources.items() if source.share is not None}
    if given and (
        len(given) < len(sources)
        or min(given.values()) <= 0
        or not math.isclose(sum(given.values()), 1.0, abs_tol=1e-6)
    ):
        raise ConfigError(
            f"sources: got the shares {given}, allowed: one for each of {', '.join(sources)}, above 0, "
            "summing to 1; or none at all, for equal ones."
        )


def shares(sources: Mapping[str, SourceConfig]) -> dict[str, float]:
    """Returns what each source has of the part of a batch that is no demonstration."""
    return {name: 1.0 / len(sources) if s.share is None else s.share for name, s in sources.items()}
