"""What the machine says is read right: quotas, GPUs, packages."""

import os
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path

import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched import inventory


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_a_quota_of_a_parent_group_counts(tmp_path: Path) -> None:
    # Own group: none. Its parent: 150 ms of every 100 ms, 1.5 cores. The root: 4 cores.
    write(tmp_path / "lab" / "job", cpu__max="max 100000")
    write(tmp_path / "lab", cpu__max="150000 100000")
    write(tmp_path, cpu__max="400000 100000")
    assert inventory.cgroup_cores(tmp_path, {"": "/lab/job"}) == 1.5


def test_version_1_quotas_are_read_too(tmp_path: Path) -> None:
    # 300 ms of every 100 ms in the own group; -1 means none at the root.
    write(tmp_path / "cpu" / "job", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert inventory.cgroup_cores(tmp_path, {"cpu": "/job"}) == 3.0


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert inventory.cgroup_cores(tmp_path / "missing", {}) is None


def test_the_cpu_has_a_slot_for_each_usable_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Allowed on 4 cores, a quota of 2.5: 2 whole slots. Without a quota 4; with 0.5 still 1.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5}, raising=False)
    assert inventory.cpu_spec(cgroup=tmp_path).slots == 4
    write(tmp_path, cpu__max="250000 100000")
    spec = inventory.cpu_spec("lab1", cgroup=tmp_path)
    assert (spec.name, spec.kind, spec.slots, spec.node) == ("cpu", "cpu", 2, "lab1")
    assert spec.labels["cgroup_quota"] == "2.5"
    write(tmp_path, cpu__max="50000 100000")
    assert inventory.cpu_spec(cgroup=tmp_path).slots == 1


NVIDIA_SMI = """\
0, GPU-aaaa1111, 81559, NVIDIA H100 80GB HBM3
1, GPU-bbbb2222, 24564, NVIDIA GeForce RTX 4090, Founders Edition
"""


def test_nvidia_smi_lines_become_rows() -> None:
    rows = inventory.parse_nvidia_smi(NVIDIA_SMI)
    assert rows[0] == {
        "index": "0",
        "uuid": "GPU-aaaa1111",
        "memory_mib": "81559",
        "model": "NVIDIA H100 80GB HBM3",
    }
    assert rows[1]["model"] == "NVIDIA GeForce RTX 4090, Founders Edition"  # a name may hold commas
    assert inventory.parse_nvidia_smi("No devices were found\n") == []


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_gpus_are_asked_of_the_driver_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tmp_path / "answer"
    answer.write_text(NVIDIA_SMI)
    fake_nvidia_smi(tmp_path, monkeypatch, f'while read -r line; do echo "$line"; done < {answer}')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    specs = inventory.gpu_specs("lab1")
    assert [(spec.name, spec.kind, spec.slots) for spec in specs] == [("gpu0", "gpu", 1), ("gpu1", "gpu", 1)]
    assert specs[0].labels == {
        "uuid": "GPU-aaaa1111",
        "memory_mib": "81559",
        "model": "NVIDIA H100 80GB HBM3",
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [spec.name for spec in inventory.gpu_specs()] == ["gpu1"]


def test_without_the_program_the_driver_table_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, "exit 9")  # a driver that does not answer
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = "Model: \t\t NVIDIA L4\nIRQ:   \t\t 77\nGPU UUID: \t GPU-cccc3333"
    write(tmp_path / "gpus" / "0000:01:00.0", information=text)
    [spec] = inventory.gpu_specs(proc=tmp_path / "gpus")
    assert (spec.name, spec.labels) == ("gpu0", {"uuid": "GPU-cccc3333", "model": "NVIDIA L4"})
    assert inventory.gpu_specs(proc=tmp_path / "missing") == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [True, False]),
        ("1,0", [True, True]),
        ("GPU-bbbb", [False, True]),
        ("", [False, False]),
        ("-1", [False, False]),
        ("0,-1,1", [True, False]),  # what follows an entry that names nothing is hidden
    ],
)
def test_hidden_gpus_are_not_counted(visible: str, expected: list[bool]) -> None:
    rows = inventory.parse_nvidia_smi(NVIDIA_SMI)
    assert [inventory.is_visible(row, visible) for row in rows] == expected


def test_simulators_are_found_by_package_metadata() -> None:
    installed = {"mujoco": "4.0.0", "genesis-world": "0.3.1"}

    def find(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    specs = inventory.simulator_specs("lab1", cpu_slots=8, num_gpus=2, find=find)
    assert [(spec.name, spec.slots, spec.labels["version"]) for spec in specs] == [
        ("mujoco", 64, "4.0.0"),
        ("genesis", 2, "0.3.1"),
    ]
    assert all(spec.kind == "sim" and "batch" in spec.caps for spec in specs)


def test_everything_is_discovered_under_one_node_and_distinct_names() -> None:
    specs = inventory.discover()
    names = [spec.name for spec in specs]
    assert names[0] == "cpu"
    assert "mujoco" in names
    assert len(set(names)) == len(names)
    assert len({spec.node for spec in specs}) == 1


def cell() -> list[DeviceSpec]:
    return [DeviceSpec(name="arm1", kind="robot", real=True)]


def broken_cell() -> list[DeviceSpec]:
    raise OSError("no bus")


def entry_point(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    point = EntryPoint("cell", f"{__name__}:{function}", inventory.ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[function])
    monkeypatch.setattr(
        inventory, "entry_points", lambda group: [point] if group == "robot_rl.devices" else []
    )


def test_other_packages_add_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(monkeypatch, "cell")
    assert inventory.discover()[-1].name == "arm1"


def test_a_package_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(monkeypatch, "broken_cell")
    with pytest.raises(DeviceError, match=r"the entry point 'cell' .* failed: OSError\('no bus'\)"):
        inventory.discover()
