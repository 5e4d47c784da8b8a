"""Whether a policy fits a station: one message names all differences, before anything moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from robot_rl.core.errors import ConfigError, require
from robot_rl.core.registry import resolve
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.real.station import ObjectConfig, StationConfig
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import RunConfig

_HOME_RAD = 0.05
"""Largest difference from the home position of training."""
_SHOWN = 4


def env_at(station: StationConfig, run: RunConfig, source: str | None) -> EnvConfig:
    """Returns the env of the source that acts at a station.

    Args:
        station: where it acts.
        run: what the policy was trained in.
        source: its name; None for the only one, or the only one of the station's robot.

    Raises:
        ConfigError: there is no source of that name, or none is named where several fit.
    """
    scenes = run.scenes
    if "" in scenes:
        allowed = "left out: the run has one robot and one task"
        require(source is None, "robot", source, allowed)
        return scenes[""]
    if source is None:
        there = load_robot(station.robot).name
        fitting = [env for env in scenes.values() if _robot_of(env) == there]
        if len(fitting) == 1:
            return fitting[0]
    if source not in scenes:
        raise ConfigError(
            f"robot: got {source!r}, allowed: {' or '.join(scenes)}, the sources of the run. Name the "
            f"one that stands at station {station.name}, such as robot={next(iter(scenes))}."
        )
    return scenes[source]


def _robot_of(config: EnvConfig) -> str:
    task = resolve("task", config.task, at="env.task")
    return load_robot(config.robot or task.default_robot).name


def check_fit(meta: PolicyMeta, config: EnvConfig, station: StationConfig) -> None:
    """Passes a policy that was trained for what stands there.

    Args:
        meta: what the policy was made for.
        config: the env it was trained in.
        station: where it has to act.

    Raises:
        ConfigError: names everything that differs.
    """
    with closing(Mirror(config)) as mirror:
        problems = [*_of_policy(meta, config, mirror), *_of_station(config, station, mirror)]
    if problems:
        raise ConfigError(
            f"station {station.name} does not fit the policy: {'; '.join(problems)}. "
            "Deploy to the station it was trained for, correct the station file, or train for this one."
        )


def in_scene_of(config: EnvConfig, station: StationConfig) -> StationConfig:
    """Returns the station with the scene of this task if it simulates any task; others unchanged."""
    sim = station.sim
    if station.driver != "sim" or sim is None or sim.task is not None:
        return station
    with closing(Mirror(config)) as mirror:
        objects = {name: station.objects.get(name, ObjectConfig()) for name in mirror.objects}
    return replace(
        station, sim=replace(sim, task=config.task, robot=sim.robot or station.robot), objects=objects
    )


def _of_policy(meta: PolicyMeta, config: EnvConfig, mirror: Mirror) -> Iterator[str]:
    """Yields the differences between what training recorded and the task that is installed here."""
    env = mirror.env
    pairs = {
        "task": (env.task if meta.does(env.task) else meta.tasks or meta.task, env.task),
        "robot": (env.robot if meta.serves(env.robot) else meta.robot, env.robot),
        "control rate": (meta.rate_of(env.robot), env.control_hz),
        "observed": (meta.state_names, env.state_names),
        "actions": (meta.action_names, env.action_names),
    }
    yield from (_differs(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1])
    if meta.tasks and not config.instruction:
        yield (
            f"instruction: the words of one of {_words(meta.tasks)} in training, none there (env.instruction "
            "of the run is empty; the policy's own run has env.instruction=task)"
        )


def _of_station(config: EnvConfig, station: StationConfig, mirror: Mirror) -> Iterator[str]:
    env, robot = mirror.env, mirror.robot
    there: Robot = load_robot(station.robot)
    if there.name != robot.name:
        yield _differs("robot", robot.name, there.name)
    if not robot.gripper_actuator:
        yield f"gripper: {robot.name} has none, and a station's arm has one (docs/real.md, Station files)"
    if station.joints != robot.arm_joints:
        yield _differs("joints", robot.arm_joints, station.joints)
    elif np.abs(np.subtract(station.home_rad, robot.home_rad)).max() > _HOME_RAD:
        yield _differs("home_rad", robot.home_rad, station.home_rad)
    if station.supervisor.command_hz < env.control_hz:
        yield _differs("control rate in Hz", env.control_hz, station.supervisor.command_hz)
    lacking = [name for name in mirror.objects if name not in station.objects]
    if lacking:
        yield _differs("tracked objects", mirror.objects, tuple(station.objects))
    cameras = {name.removesuffix(".rgb") for name in station.cameras}
    if not set(config.own_cameras) <= cameras:
        yield _differs("cameras", config.own_cameras, tuple(sorted(cameras)))
    if config.depth:
        yield "it sees depth, which no station measures"
    if station.sim is not None and station.driver == "sim" and station.sim.task not in (None, env.task):
        yield _differs("task", env.task, station.sim.task)


def _differs(name: str, policy: Any, station: Any) -> str:
    return f"{name}: {_words(policy)} in training, {_words(station)} there"


def _words(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    names = [str(item) for item in value[:_SHOWN]]
    more = f", ... ({len(value)})" if len(value) > _SHOWN else ""
    return f"[{', '.join(names)}{more}]"
