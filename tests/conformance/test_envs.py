"""Every environment that acts in a run keeps the rules of `VectorEnv`, and every device those of `Device`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest

from robot_rl.core.arrays import Kind
from robot_rl.core.registry import resolve, table
from robot_rl.envs.gym import GymVectorEnv
from robot_rl.envs.process import ProcessVectorEnv
from robot_rl.hal.conformance import check_device, check_vector_env
from robot_rl.hal.device import Device
from robot_rl.hal.leased import EnvDevice
from robot_rl.hal.vector import VectorEnv
from robot_rl.real.claim import device_of
from robot_rl.real.station import load_station
from robot_rl.rollout.envs import simulation
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.testing.devices import FakeRobot
from tests.train.deploy.conftest import CONFIG, make_env

Autoreset = Literal["same_step", "disabled"]
MakeEnv = Callable[[int, Autoreset], VectorEnv]

OTHER_ROBOTS = (("reach", "viperx"), ("reach", "gantry"), ("reach", "so_arm100"), ("push_cube", "gantry"))
IN_TENSORS = ("reach", "pick_cube", "gantry_peg")
"""Of every task, tests/sim/test_arrays.py compares the numbers with those of numpy arrays."""
VARYING = tuple(name for name in sorted(table("task")) if resolve("task", name).variation is not None)
GYM: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {"max_episode_steps": 20},
    "MountainCarContinuous-v0": {"max_episode_steps": 20},
    "Hopper-v5": {},
}


def task(
    name: str,
    num_envs: int,
    autoreset: Autoreset,
    *,
    array: Kind = "numpy",
    **settings: Any,
) -> VectorEnv:
    config = EnvConfig(task=name, horizon_s=0.5, randomize=True, num_threads=1, **settings)
    return SimVectorEnv(config, num_envs, autoreset=autoreset, array=array)


def gym(name: str, num_envs: int, autoreset: Autoreset) -> VectorEnv:
    return GymVectorEnv(name, num_envs, autoreset=autoreset, settings=GYM[name])


def processes(name: str, num_envs: int, autoreset: Autoreset) -> VectorEnv:
    workers = 2 if autoreset == "disabled" else 1
    return ProcessVectorEnv(name, num_envs, autoreset=autoreset, settings=GYM[name], workers=workers)


ENVS: dict[str, MakeEnv] = {
    **{name: partial(task, name) for name in sorted(table("task"))},
    **{f"{name} on {robot}": partial(task, name, robot=robot) for name, robot in OTHER_ROBOTS},
    **{f"{name} in tensors": partial(task, name, array="torch") for name in IN_TENSORS},
    **{f"{name} varied": partial(task, name, variation="varied") for name in VARYING},
    "pick_cube varied in tensors": partial(task, "pick_cube", variation="varied", array="torch"),
    **{name: partial(gym, name) for name in GYM},
    "Pendulum-v1 in processes": partial(processes, "Pendulum-v1"),
}


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
@pytest.mark.parametrize("name", ENVS)
def test_every_env_conforms(name: str, autoreset: Autoreset) -> None:
    check_vector_env(lambda num_envs: ENVS[name](num_envs, autoreset))


def test_an_arm_conforms_as_an_env() -> None:
    config = replace(CONFIG, horizon_s=0.5)
    check_vector_env(lambda _: make_env(config=config)[0], num_envs=1, deterministic=False)


def mujoco() -> Device:
    return simulation(EnvConfig(task="reach", horizon_s=0.5, num_threads=1), 2, autoreset="same_step")


def gymnasium() -> Device:
    return simulation(EnvConfig(kind="gym", id="Pendulum-v1"), 2, autoreset="same_step")


def process() -> Device:
    config = EnvConfig(kind="process", id="Pendulum-v1", workers=1)
    return simulation(config, 2, autoreset="same_step")


def station() -> Device:
    short = replace(CONFIG, horizon_s=0.5)
    return EnvDevice(device_of(load_station("sim_in_process")), lambda _: make_env(config=short)[0])


DEVICES: dict[str, Callable[[], Device]] = {
    "mujoco": mujoco,
    "gymnasium": gymnasium,
    "gymnasium in a process": process,
    "station": station,
    "fake robot": FakeRobot,
}


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_conforms(name: str) -> None:
    check_device(DEVICES[name], deterministic=name != "station")
