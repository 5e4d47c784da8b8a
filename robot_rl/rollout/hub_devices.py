"""The devices of the fleet's machines, as the hub shows them, and which machine has what a run needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from robot_rl.core.errors import DeviceError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.needs import Need, choose


@dataclass(frozen=True)
class Occupied:
    """Slots of another machine's device that somebody has."""

    device: str
    slots: int
    holder: str


def spec_of(node: str, row: Mapping[str, Any]) -> DeviceSpec:
    """Returns a device of another machine; its name has the machine's."""
    return DeviceSpec(
        name=f"{row['name']}@{node}",
        kind=row["kind"],
        real=row["real"],
        caps=frozenset(row["caps"]),
        slots=row["slots"],
        control_hz=row["control_hz"],
        node=node,
        labels=row["labels"],
    )


def occupied(node: str, row: Mapping[str, Any]) -> list[Occupied]:
    """Returns who has which slots of a device of another machine."""
    return [Occupied(f"{row['name']}@{node}", held["slots"], held["holder"]) for held in row["held"]]


def nodes_for(need: Need, nodes: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Returns the machines that have what is needed, those with a free device first.

    With each comes how many jobs may already be there for a device to be free for one more; None where none
    is free. A job without a lease is about to take one.

    Args:
        need: what a job needs.
        nodes: what the hub knows of each machine.

    Raises:
        DeviceError: none has it; the message says what the nearest lacks, and who has that.
    """
    if not nodes:
        raise DeviceError("needs.node: no machine is connected to the hub. `robot-rl agent` joins one.")
    specs, taken = list[DeviceSpec](), list[Occupied]()
    for node in nodes:
        for row in node.get("devices", []):
            if row["kind"] == need.kind and not (row.get("stopped") or row.get("refusal")):
                specs.append(spec_of(node["name"], row))
                taken += occupied(node["name"], row)
    able = choose(need, specs, taken)
    used = Counter[str]()
    for one in taken:
        used[one.device] += one.slots
    free = Counter(spec.node for spec in able if spec.slots - used[spec.name] >= need.slots)
    most = dict[str, int | None]()
    for node in nodes:
        jobs: list[str] = node["jobs"]
        waiting = set(jobs) - set(node.get("acting", []))
        room = free[node["name"]] - len(waiting)
        most[node["name"]] = len(jobs) + room - 1 if room > 0 else None
    found = dict.fromkeys(spec.node for spec in able)
    return {node: most[node] for node in sorted(found, key=lambda node: most[node] is None)}
