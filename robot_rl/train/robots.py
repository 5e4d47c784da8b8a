"""Several sources in one run, each with a budget and a share of batches: robots, tasks, arms, world models.

    sources:
      gantry:    {robot: gantry, num_envs: 16, env_steps: 12000}     simulations
      bench:     {station: sim_arm, env_steps: 7200}                 the arm of a station, in real time
      watched:   {real_time: true, human: true, env_steps: 7200}     a simulated arm that a person watches
      imagined:  {world: worlds/reach, num_envs: 64, env_steps: 50000}

One policy serves all of them, so they have to observe the same elements and to take the same actions. Without
torch, MuJoCo and numpy, so that mistakes are refused at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robot_rl.core.errors import ConfigError, require
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.sched.needs import ANY, NeedsConfig, check_needs
from robot_rl.sim.config import check_names, check_num_envs

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """What collects: simulations of a robot that does a task, one arm, or a world model."""

    task: str | None = None
    """A name of `robot-rl doctor --list task`; that of `env` if None. The policy reads which one with
    `env.instruction=task`."""
    robot: str | None = None
    """A name of `robot-rl doctor --list robot`, or the path of a robot file; the task's own if None."""
    cameras: tuple[str, ...] | None = None
    """Its cameras, of `env.cameras`: what the others would show is black. All of them if None."""
    control_hz: float | None = None
    """Its control steps per second, with `env.robots`; those of `env` if None."""
    env_steps: int
    """Its budget: control steps over all its envs. It collects no more then, the others go on."""
    num_envs: int | None = None
    """Its simulations that collect, 16 if None; an arm is one."""
    station: str | None = None
    """A station by name or path, whose arm collects in the place of simulations."""
    needs: NeedsConfig = field(default_factory=NeedsConfig)
    """With station=any: what the arm must have."""
    real_time: bool = False
    """One simulated arm that acts at the task's rate and does not wait for the learner."""
    human: bool = False
    """Whether the person of `human.input` watches this arm."""
    world: str | None = None
    """Folder of a world model, in which episodes are imagined; their steps are not recorded."""
    share: float | None = None
    """Of the part of each batch that is no demonstration, what comes from it; equal shares if None."""

    @property
    def is_arm(self) -> bool:
        """Whether it is one arm, perhaps with a person, and no batch of simulations."""
        return self.station is not None or self.real_time or self.human

    @property
    def named(self) -> str | None:
        """The station, if it is one and not any."""
        return None if self.station == ANY else self.station

    @property
    def keeps_time(self) -> bool:
        """Whether it acts in real time, in a process of its own."""
        return self.station is not None or self.real_time

    @property
    def batch(self) -> int:
        """How many envs it has."""
        return 1 if self.is_arm else self.num_envs or 16


def check_sources(
    sources: Mapping[str, SourceConfig], task: str, cameras: Collection[str], *, is_apart: bool
) -> None:
    """Refuses wrong names, robots, numbers and shares.

    Args:
        sources: by name.
        task: of those that say none.
        cameras: of all.
        is_apart: whether each acts in a process of its own, so that two may simulate the same.

    Raises:
        ConfigError: the message says which.
    """
    pairs = dict[tuple[str, str | None], str]()
    once = dict[tuple[str, str], str]()
    for name, source in sources.items():
        at = f"sources.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{at}: got the name {name!r}, allowed: small letters, digits, _ and -")
        doing = source.task or task
        check_names(doing, source.robot, at=f"{at}.")
        hz = source.control_hz
        require(hz is None or 0 < hz < math.inf, f"{at}.control_hz", hz, "above 0")
        has_own = set(source.cameras or ()) <= set(cameras)
        require(has_own, f"{at}.cameras", source.cameras, f"names of env.cameras, {list(cameras)}")
        require(source.env_steps >= 1, f"{at}.env_steps", source.env_steps, "1 or more")
        _check_kind(source, at)
        if source.num_envs is not None:
            require(source.num_envs >= 1, f"{at}.num_envs", source.num_envs, "1 or more")
            check_num_envs(source.num_envs, at=f"{at}.num_envs")
        for key, given in (("station", source.station), ("world", source.world)):
            if given in (None, ANY):
                continue
            other = once.setdefault((key, str(Path(given))), name)
            require(
                other == name, f"{at}.{key}", getattr(source, key), f"another one than sources.{other} has"
            )
        pair = doing, source.robot
        is_here = not (source.is_arm or source.world or is_apart)
        if is_here and (other := pairs.setdefault(pair, name)) != name:
            raise ConfigError(
                f"{at}.robot: got {source.robot!r}, which sources.{other} has, allowed: a robot once with a "
                f"task and transport=inline. Raise sources.{other}.num_envs and env_steps instead."
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


def _check_kind(source: SourceConfig, at: str) -> None:
    """Refuses a source that is two things at once."""
    if source.is_arm:
        require(source.world is None, f"{at}.world", source.world, "none with an arm or a person")
        require(source.num_envs in (None, 1), f"{at}.num_envs", source.num_envs, "1 with an arm or a person")
    if source.world is not None:
        for key in ("cameras", "control_hz"):
            given = getattr(source, key)
            require(given is None, f"{at}.{key}", given, "none with a world model, which has its own")
    check_needs(source.station, source.needs, f"{at}.")
    allowed = "false with a station, which keeps its own time"
    require(source.station is None or not source.real_time, f"{at}.real_time", source.real_time, allowed)


def check_nodes(sources: Mapping[str, SourceConfig], hub: HubConfig, given: str) -> None:
    """Refuses arms of other machines without a hub, inputs that do not work there, and a hub without use.

    Args:
        sources: by name.
        hub: where machines meet.
        given: `human.input`.
    """
    elsewhere = {name: source for name, source in sources.items() if source.needs.node is not None}
    for name, source in elsewhere.items():
        at = f"sources.{name}." if name else ""
        allowed = "null without hub.address, which is that of `robot-rl fleet`"
        require(hub.address is not None, f"{at}needs.node", source.needs.node, allowed)
        allowed = "gamepad or scripted with needs.node: the person is at the arm, where no terminal is"
        works = not source.human or given in ("none", "gamepad", "scripted")
        require(works, "human.input", given, allowed)
    require(bool(elsewhere) or hub == HubConfig(), "hub", hub, "left out without needs.node")


def check_person(sources: Mapping[str, SourceConfig], given: str) -> None:
    """Refuses a person who watches no arm, or more than one with one keyboard; `given`: `human.input`."""
    watched = [name for name, source in sources.items() if source.human]
    if given == "none":
        allowed = "false without a person: human.input=keyboard, gamepad, leader or scripted"
        require(not watched, f"sources.{watched[0]}.human" if watched else "", True, allowed)
    elif not watched:
        example = next(iter(sources))
        raise ConfigError(
            f"human.input: got {given!r} with sources, allowed: none, unless one of them has "
            f"a person, as sources.{example}.human=true"
        )
    elif given != "scripted":
        require(
            len(watched) == 1,
            "human.input",
            given,
            f"scripted with {len(watched)} sources that have a person",
        )


def shares(sources: Mapping[str, SourceConfig]) -> dict[str, float]:
    """Returns what each source has of the part of a batch that is no demonstration."""
    return {name: 1.0 / len(sources) if s.share is None else s.share for name, s in sources.items()}
