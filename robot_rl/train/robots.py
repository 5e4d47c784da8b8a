"""Several robots in one run: each is a source of its own, with envs, a budget and a share of the batches.

One policy serves all of them, so they have to observe the same elements and to take the same actions. Without
torch and MuJoCo, so that a mistake is answered at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from robot_rl.core.errors import ConfigError, require
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.fit import misfit
from robot_rl.sim.config import check_names, check_num_envs

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A robot that does the run's task."""

    robot: str
    """A name of `robot-rl doctor --list robot`, or the path of a robot file."""
    env_steps: int
    """Its budget: control steps over all its envs. It collects no more then, the others go on."""
    num_envs: int = 16
    """Its simulations that collect."""
    share: float | None = None
    """Of the part of each batch that is no demonstration, what comes from it; equal shares if None."""


def check_sources(sources: Mapping[str, SourceConfig], task: str) -> None:
    """Refuses names, robots, numbers and shares that cannot be.

    Raises:
        ConfigError: the message says which.
    """
    robots: dict[str, str] = {}
    for name, source in sources.items():
        at = f"sources.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{at}: got the name {name!r}, allowed: small letters, digits, _ and -")
        check_names(task, source.robot, at=f"{at}.")
        require(source.env_steps >= 1, f"{at}.env_steps", source.env_steps, "1 or more")
        require(source.num_envs >= 1, f"{at}.num_envs", source.num_envs, "1 or more")
        check_num_envs(source.num_envs, at=f"{at}.num_envs")
        other = robots.setdefault(source.robot, name)
        if other != name:
            raise ConfigError(
                f"{at}.robot: got {source.robot!r}, which sources.{other} has, allowed: a robot once. "
                f"Raise sources.{other}.num_envs and env_steps instead."
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


def check_spaces(metas: Mapping[str, EpisodesMeta], features: Mapping[str, Mapping[str, Feature]]) -> None:
    """Refuses sources that one policy and one mixture of replays cannot serve.

    Args:
        metas: what the episodes of each source are of.
        features: what each source observes.

    Raises:
        ConfigError: says which elements differ, and what to show instead.
    """
    first, *others = metas
    for other in others:
        problem = misfit(metas[other], metas[first])
        if problem is None and features[other] != features[first]:
            problem = f"it observes {dict(features[other])}, not {dict(features[first])}"
        if problem is not None:
            raise ConfigError(
                f"sources: one policy cannot serve {first} and {other}. {other} beside {first}: {problem}. "
                f"{_remedy(metas)}"
            )


def _remedy(metas: Mapping[str, EpisodesMeta]) -> str:
    """Says which beginnings of names all sources share."""
    lists = [meta.state_names for meta in metas.values()]
    beginnings = dict.fromkeys(name.split(".")[0] for name in lists[0])

    def are_equal(beginning: str) -> bool:
        return len({tuple(name for name in names if name.startswith(beginning)) for names in lists}) == 1

    common = [beginning for beginning in beginnings if are_equal(beginning)]
    if all(names == lists[0] for names in lists) or not common:
        return "Train them in a run each."
    return f"Show what all of them have: env.state=[{','.join(common)}]."
