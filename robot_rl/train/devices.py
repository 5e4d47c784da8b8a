"""What a run takes of this machine, in slots of its devices: without torch, for sweeps to plan by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.inventory import cpu_spec, simulator_specs

if TYPE_CHECKING:
    from robot_rl.train.config import RunConfig
    from robot_rl.train.finetune.config import FinetuneConfig


def devices_of_training(config: RunConfig) -> list[tuple[DeviceSpec, int]]:
    """Returns which devices a run of `robot-rl train` leases, and how many slots of each.

    The learner takes a slot of the CPU per thread, the simulator one per thread it was given, or
    one if it may use what is idle (`env.num_threads` 0). So as many runs fit on a machine as it
    has cores, and the next one is told who has them. A station's arm has one slot.
    """
    cpu = cpu_spec()
    used = "mujoco" if config.env.kind == "sim" else None  # a Gymnasium environment takes the learner's core
    simulators = [spec for spec in simulator_specs(cpu_slots=cpu.slots) if spec.name == used]
    wanted = [(cpu, config.torch_threads), *((spec, config.env.num_threads or 1) for spec in simulators)]
    found = [(spec, min(slots, spec.slots)) for spec, slots in wanted]
    if config.station is not None:
        from robot_rl.real.claim import device_of  # only where a station is used
        from robot_rl.real.station import load_station

        found.append((device_of(load_station(config.station)), 1))
    return found


def devices_of_finetuning(config: FinetuneConfig) -> list[tuple[DeviceSpec, int]]:
    """Returns which devices a run of `robot-rl finetune` leases: a slot of the CPU per thread."""
    cpu = cpu_spec()
    return [(cpu, min(config.torch_threads, cpu.slots))]


def gpu_of(device: str) -> list[tuple[DeviceSpec, int]]:
    """Returns the GPU of a learner, if it has one; nobody leases it, but sweeps put one run on each."""
    if not device.startswith("cuda"):
        return []
    name = device if ":" in device else f"{device}:0"
    return [(DeviceSpec(name=name, kind="gpu"), 1)]
