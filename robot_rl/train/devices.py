"""The slots of this machine's devices that a run leases; without torch, for the planning of sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.inventory import cpu_spec
from robot_rl.worlds.inventory import device_spec

if TYPE_CHECKING:
    from robot_rl.train.config import RunConfig
    from robot_rl.train.finetune.config import FinetuneConfig


def devices_of_training(config: RunConfig) -> list[tuple[DeviceSpec, int]]:
    """Returns which devices a run of `robot-rl train` leases, and how many slots of each.

    The learner takes a slot of the CPU per thread, so as many runs fit on a machine as it has cores; the
    next one is refused, with the names of their holders. The simulator has more slots, for evaluations. The
    arms of stations are leased when their episodes are collected, by `BookedSource`.
    """
    cpu = cpu_spec()
    acting = [config.env_of(name) for name in config.acting]
    envs = [*acting, *(env.evaluated() for env in acting)]
    simulators = {spec.name: (spec, 1) for spec in map(device_spec, envs)}
    return [(cpu, min(config.torch_threads, cpu.slots)), *simulators.values()]


def devices_of_finetuning(config: FinetuneConfig) -> list[tuple[DeviceSpec, int]]:
    """Returns which devices a run of `robot-rl finetune` leases: a slot of the CPU per thread."""
    cpu = cpu_spec()
    return [(cpu, min(config.torch_threads, cpu.slots))]


def gpu_of(device: str) -> list[tuple[DeviceSpec, int]]:
    """Returns the GPU of a learner, if it has one. It is not leased; sweeps put one run on each."""
    if not device.startswith("cuda"):
        return []
    name = device if ":" in device else f"{device}:0"
    return [(DeviceSpec(name=name, kind="gpu"), 1)]
