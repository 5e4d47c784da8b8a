"""The devices of this machine: CPU cores, GPUs, installed simulators, and devices that packages add.

Nothing heavy is imported: GPUs come from the driver, simulators from the metadata of installed packages.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DeviceError
from robot_rl.core.machine import usable_cores
from robot_rl.hal.device import DeviceSpec

ENTRY_POINTS = "robot_rl.devices"
"""Group of entry points; each names a function without arguments that returns a list of DeviceSpec."""

PER_CORE = 8
"""Slots of a CPU simulator for each core: one for a run, the others for evaluations and collections."""
_SIMULATORS = (
    ("mujoco", "mujoco", frozenset({"set_state", "fork", "render", "batch"}), "cpu"),
    ("mujoco_warp", "mujoco-warp", frozenset({"set_state", "fork", "batch"}), "gpu"),
    ("gymnasium", "gymnasium", frozenset[str](), "cpu"),
    ("genesis", "genesis-world", frozenset({"set_state", "batch"}), "gpu"),
)
_NVIDIA_SMI_TIMEOUT_S = 10.0
_version = functools.cache(version)  # every env asks, and to parse the metadata of MuJoCo takes 4 ms


def discover() -> list[DeviceSpec]:
    """Returns every device of this machine, in the order CPU, GPUs, simulators, added ones."""
    node = socket.gethostname()
    cpu = cpu_spec(node)
    gpus = gpu_specs(node)
    return [cpu, *gpus, *simulator_specs(node, cpu_slots=cpu.slots, num_gpus=len(gpus)), *_added_specs()]


def cpu_spec(node: str = "localhost", *, cgroup: Path = Path("/sys/fs/cgroup")) -> DeviceSpec:
    """Returns the CPU with one slot for each core that this process may use."""
    affinity = usable_cores()
    quota = cgroup_cores(cgroup, _own_cgroups(Path("/proc/self/cgroup")))
    slots = affinity if quota is None else max(1, min(affinity, int(quota)))
    labels = {"cores": str(os.cpu_count() or 1)}
    if quota is not None and quota < affinity:
        labels["cgroup_quota"] = f"{quota:g}"
    return DeviceSpec(name="cpu", kind="cpu", slots=slots, node=node, labels=labels)


def _own_cgroups(table: Path) -> dict[str, str]:
    """Returns controller -> path of this process; the unified hierarchy has an empty key."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return {}
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def cgroup_cores(root: Path, own: Mapping[str, str]) -> float | None:
    """Returns the smallest CPU quota, in cores, of a process's control groups and their parents.

    Version 2 keeps `cpu.max` ("<quota> <period>" or "max <period>") in every group; version 1
    keeps cpu.cfs_quota_us (-1 for none) and cpu.cfs_period_us under the controller `cpu`.
    """
    quotas: list[float] = []
    for folder in _and_parents(root, own.get("", "/")):
        text = _read(folder / "cpu.max")
        if text and not text.startswith("max"):
            quota, period = text.split()
            quotas.append(int(quota) / int(period))
    for folder in _and_parents(root / "cpu", own.get("cpu", "/")):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _and_parents(root: Path, path: str) -> list[Path]:
    """Returns the group's folder and those of its parents; in a container only the root exists."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def gpu_specs(node: str = "localhost", *, proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[DeviceSpec]:
    """Returns the NVIDIA GPUs that this process may see (CUDA_VISIBLE_DEVICES), one slot each.

    They come from nvidia-smi; without it from the driver's own table, which has no memory size.
    """
    rows = _ask_nvidia_smi()
    if rows is None:
        rows = _read_driver_table(proc)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [
        DeviceSpec(
            name=f"gpu{row['index']}",
            kind="gpu",
            node=node,
            labels={key: value for key, value in row.items() if key != "index"},
        )
        for row in rows
        if visible is None or is_visible(row, visible)
    ]


def _ask_nvidia_smi() -> list[dict[str, str]] | None:
    """Returns the rows of nvidia-smi, or None if it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_nvidia_smi(answer.stdout) if answer.returncode == 0 else None


def parse_nvidia_smi(text: str) -> list[dict[str, str]]:
    """Returns one row per GPU from the lines `index, uuid, memory in MiB, name`."""
    rows: list[dict[str, str]] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",", 3)]
        if len(fields) == 4:
            index, uuid, memory_mib, name = fields
            rows.append({"index": index, "uuid": uuid, "memory_mib": memory_mib, "model": name})
    return rows


def _read_driver_table(proc: Path) -> list[dict[str, str]]:
    if not proc.is_dir():
        return []
    rows: list[dict[str, str]] = []
    for index, folder in enumerate(sorted(proc.iterdir())):
        lines = (_read(folder / "information") or "").splitlines()
        pairs = (line.partition(":") for line in lines)
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        uuid, model = facts.get("GPU UUID", ""), facts.get("Model", "unknown")
        rows.append({"index": str(index), "uuid": uuid, "model": model})
    return rows


def is_visible(row: Mapping[str, str], visible: str) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES names the GPU, by index or by the beginning of its UUID.

    As in CUDA, the first entry that names no GPU (an empty one, -1) hides itself and all after it.
    """
    for entry in (part.strip() for part in visible.split(",")):
        if not (entry.isdigit() or entry.startswith("GPU-")):
            return False
        if entry == row["index"] or (entry.startswith("GPU-") and row["uuid"].startswith(entry)):
            return True
    return False


def simulator_of(kind: str, engine: str = "mujoco") -> DeviceSpec:
    """Returns the device to lease for envs of a kind: sim, gym, process, or the kind of another package.

    Args: engine: what simulates envs of kind sim.
    """
    slots = cpu_spec().slots
    name = {"sim": engine, "gym": "gymnasium", "process": "gymnasium"}.get(kind, kind)
    found = [spec for spec in simulator_specs(cpu_slots=slots) if spec.name == name]
    return found[0] if found else DeviceSpec(name=name, kind="sim", slots=PER_CORE * slots)


def simulator_specs(
    node: str = "localhost", *, cpu_slots: int = 1, num_gpus: int = 0, find: Callable[[str], str] = _version
) -> list[DeviceSpec]:
    """Returns the installed simulators, by package metadata only.

    A CPU simulator has eight slots per core, a GPU simulator one per GPU, or one without any: it then
    runs on the CPU.
    """
    specs: list[DeviceSpec] = []
    for name, package, caps, runs_on in _SIMULATORS:
        try:
            labels = {"version": find(package), "runs_on": runs_on}
        except PackageNotFoundError:
            continue
        slots = PER_CORE * cpu_slots if runs_on == "cpu" else max(1, num_gpus)
        specs.append(DeviceSpec(name=name, kind="sim", caps=caps, slots=slots, node=node, labels=labels))
    return specs


def _added_specs() -> list[DeviceSpec]:
    """Returns the devices of other packages; a failure to list one is an error."""
    specs: list[DeviceSpec] = []
    for point in entry_points(group=ENTRY_POINTS):
        try:
            listed: Any = point.load()()
        except Exception as error:
            raise DeviceError(
                f"devices: the entry point {point.name!r} ({point.value}) failed: {error!r}. "
                "Repair or uninstall the package that brings it."
            ) from error
        specs.extend(listed)
    return specs
