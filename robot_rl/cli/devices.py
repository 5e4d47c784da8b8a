"""`robot-rl devices`: lists the devices of this machine, or of a fleet's machines, and their leases."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.table import Table

from robot_rl.cli.command import parser_of
from robot_rl.core.errors import ConfigError, DeviceError, require
from robot_rl.hal.device import KINDS, DeviceSpec
from robot_rl.real.found import Found, on_graph, ports
from robot_rl.real.inventory import enter, leave, stations
from robot_rl.real.inventory import specs as station_specs
from robot_rl.real.ros2.node import open_node
from robot_rl.sched.inventory import discover
from robot_rl.sched.lease import wall_s
from robot_rl.sched.leases import Lease, LeaseStore
from robot_rl.sched.needs import Taken
from robot_rl.worlds.inventory import specs as world_specs

SUMMARY = "list CPU, GPUs, simulators and robots, and the programs that hold them"

_ABOUT = """\
After a real arm has stopped (protective stop, limit, or a supervisor or driver that died), no run can
lease it, even after a restart. Look at the arm, then end the stop:

  robot-rl devices clear=<device> by=<your name>

Arms are listed once their station is entered; `robot-rl deploy station=any` chooses among them:

  robot-rl devices add=my_cell.yaml      or the name of a shipped station
  robot-rl devices remove=my_cell        by the name in the file

What is connected and could be a station, with what its file would have to say:

  robot-rl devices find=all              serial ports, and arms on the ROS 2 graph
  robot-rl devices find=servos           asks the Feetech servos on free ports for their numbers

Devices of all machines of a fleet, as `robot-rl fleet` knows them; hub.ca=<file> as for `robot-rl agent`:

  robot-rl devices hub.address=https://<host>:8642 hub.token_file=<file>
"""
_FIND = ("all", "ports", "servos", "ros2")
_FIND_S = 3.0
"""How long to look for arms on the ROS 2 graph, unless find_s= says so."""
_OF_HUB = ("hub.address", "hub.token_file", "hub.ca")
_SILENT_S = 4.0
"""An agent shows every second what is there."""


def run(argv: list[str]) -> int:
    """Prints the devices with their leases; with `--json` the last line is one JSON object."""
    parser = parser_of("devices", SUMMARY, _ABOUT)
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="clear=, by=, add=, remove=, find= or hub.*=, see below"
    )
    words = parser.parse_args(argv)
    given = {key: value for key, _, value in (word.partition("=") for word in words.words)}
    if given.keys() & set(_OF_HUB):
        return _list_fleet(given, is_json=words.json)
    store = LeaseStore()
    _change(store, given)
    specs, leases = [*discover(), *station_specs(), *world_specs()], store.active()
    console = Console()
    console.print(device_table(specs, leases))
    for lease in leases:
        console.print(f"{lease.device}: held by {lease.describe()}", markup=False, soft_wrap=True)
        if (wanted := store.preemption(lease)) is not None:
            line = f"{lease.device}: {wanted.by!r} takes it in {max(0.0, wanted.left_s):.0f} s"
            console.print(line, markup=False, soft_wrap=True)
    for spec in specs:
        if spec.refusal is not None and (why := spec.refusal()):
            console.print(why, markup=False, soft_wrap=True)
    for stop in store.stopped().values():
        console.print(stop.refusal(), markup=False, soft_wrap=True)
    total = sum(spec.slots for spec in specs)
    names = {spec.name for spec in specs}
    free = total - sum(lease.slots for lease in leases if lease.device in names)
    console.print(
        f"{len(specs)} devices, {free} of {total} slots free; leases in {store.path}", soft_wrap=True
    )
    found = _found(given, console) if "find" in given else None
    if words.json:
        more = {} if found is None else {"found": [vars(one) for one in found]}
        print(json.dumps(as_json(specs, leases, store) | more))
    return 0


def _list_fleet(given: Mapping[str, str], *, is_json: bool) -> int:
    """Prints the devices of all machines that a hub knows; with `is_json` the last line is one JSON object.

    Raises:
        ConfigError: another word, or no address.
        DeviceError: the hub cannot be reached, or does not let us in.
    """
    from robot_rl.rollout.hub_config import HubConfig  # msgpack: not for this machine's devices
    from robot_rl.rollout.hub_connection import fleet_state
    from robot_rl.rollout.hub_devices import occupied, spec_of

    for key in (one for one in given if one not in _OF_HUB):
        raise ConfigError(
            f"devices: got {key!r} with a hub, allowed: {', '.join(_OF_HUB)}. Clear, add and remove at the "
            "machine itself; the fleet page clears, too."
        )
    require("hub.address" in given, "hub.address", None, "https://<host>:8642 of `robot-rl fleet`")
    address, token_file, ca = (given.get(key) for key in _OF_HUB)
    nodes = _with_hub(fleet_state(HubConfig(address=address, token_file=token_file, ca=ca)))
    specs, taken, lines = list[DeviceSpec](), list[Taken](), list[str]()
    for node in nodes:
        for row in node.get("devices", []):
            if row["kind"] in KINDS:  # else it is leased, and is not there
                specs.append(spec_of(node["name"], row))
            taken += occupied(node["name"], row)
        lines += _notes(node)
    console = Console()
    console.print(device_table(specs, taken))
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    total, names = sum(spec.slots for spec in specs), {spec.name for spec in specs}
    free = total - sum(one.slots for one in taken if one.device in names)
    console.print(f"{len(specs)} devices of {len(nodes)} machines, {free} of {total} slots free")
    if is_json:
        print(json.dumps({"machines": nodes}))
    return 0


def _with_hub(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the machines of a fleet by name: the hub's own, too, once if it has an agent."""
    nodes: list[dict[str, Any]] = list(state["nodes"])
    if not any(node["is_here"] for node in nodes):
        host = next((row["node"] for row in state["devices"] if "node" in row), "hub")
        name = "hub" if any(node["name"] == host for node in nodes) else host
        shown = {key: state[key] for key in ("devices", "waiting", "arms", "problems")}
        nodes.append({**shown, "name": name, "silent_s": 0.0, "jobs": [], "is_here": True})
    return sorted(nodes, key=lambda node: node["name"])


def _notes(node: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a person may want to know of a machine: leases, stops, and what is wrong."""
    if node["silent_s"] > _SILENT_S:
        yield f"{node['name']}: has been silent for {node['silent_s']:.0f} s; what is shown of it is old"
    for row in node.get("devices", []):
        at = f"{row['name']}@{node['name']}"
        for held in row["held"]:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held["since_s"]))
            yield f"{at}: held by {held['holder']!r} (pid {held['pid']} on {held['host']}) since {since}"
            if held["wanted_by"]:
                yield f"{at}: {held['wanted_by']!r} takes it soon"
        if row["stopped"]:
            yield f"{at}: stopped: {row['stopped']['reason']}, under {row['stopped']['holder']!r}"
        elif row["refusal"]:
            yield f"{at}: {row['refusal']}"
    for problem in node.get("problems", []):
        yield f"{node['name']}: {problem}"


def _change(store: LeaseStore, given: Mapping[str, str]) -> None:
    """Ends the stop of the device in `clear=`, enters the station in `add=`, or takes out that in `remove=`.

    Raises:
        ConfigError: another word, no name, the device is not stopped, or the station is not there.
    """
    for key in given:
        if key not in ("clear", "by", "add", "remove", "find", "find_s"):
            raise ConfigError(
                f"devices: got {key!r}, allowed: clear=<device> by=<your name>, add=<station>, "
                f"remove=<station>, find={'|'.join(_FIND)}, find_s=<seconds>, hub.address=<address>."
            )
    require("find" in given or "find_s" not in given, "find_s", given.get("find_s"), "with find= alone")
    if "add" in given:
        print(f"{enter(given['add']).name}: added")
    if "remove" in given:
        leave(given["remove"])
        print(f"{given['remove']}: removed")
    if "clear" in given or "by" in given:
        device, by = given.get("clear", ""), given.get("by", "")
        stop = store.clear(device, by)
        print(f"{device}: cleared by {by}, after: {stop.reason}")


def _found(given: Mapping[str, str], console: Console) -> list[Found]:
    """Returns and shows what is connected and could be a station.

    Raises:
        ConfigError: a wrong word.
        DeviceError: what was asked for by name needs a package.
    """
    what, text = given["find"], given.get("find_s", str(_FIND_S))
    require(what in _FIND, "find", what, ", ".join(_FIND))
    try:
        find_s = float(text)
    except ValueError:
        find_s = 0.0
    require(0.0 < find_s < math.inf, "find_s", text, "seconds, above 0")
    known = [station for _, station in stations()]
    found = ports(known, asks=what == "servos") if what != "ros2" else []
    if what in ("all", "ros2"):
        try:
            with closing(open_node(f"robot_rl_find_{os.getpid()}")) as node:
                found += on_graph(node, known, find_s=find_s)
        except DeviceError as error:
            if what == "ros2":
                raise
            console.print(f"ros2: not looked at: {error}", markup=False, soft_wrap=True)
    for one in found:
        whose = f"station {one.station}" if one.station else "no station"
        would = f". Its file would say: {one.remedy}" if one.remedy else ""
        line = f"{one.kind} {one.name}: {one.about}; {whose}{would}"
        # Anybody on the network can give a node a name.
        console.print("".join(c if c.isprintable() else "?" for c in line), markup=False, soft_wrap=True)
    if not found:
        console.print(f"find={what}: nothing", markup=False)
    return found


def device_table(specs: Sequence[DeviceSpec], leases: Sequence[Taken]) -> Table:
    """Returns one row for each device, also for a leased device that is no longer found."""
    table = Table(title="devices")
    for column in ("device", "kind", "free", "caps", "rate", "node", "labels", "held by"):
        table.add_column(column, justify="right" if column == "free" else "left")
    for spec in specs:
        held = [lease for lease in leases if lease.device == spec.name]
        free = spec.slots - sum(lease.slots for lease in held)
        table.add_row(
            spec.name.removesuffix(f"@{spec.node}"),  # of a fleet's machine
            "real robot" if spec.real else spec.kind,
            f"{free}/{spec.slots}",
            " ".join(sorted(spec.caps)) or "-",
            "-" if spec.control_hz is None else f"{spec.control_hz:g} Hz",
            spec.node,
            ", ".join(f"{key} {value}" for key, value in spec.labels.items()),
            ", ".join(lease.holder for lease in held) or "nobody",
        )
    for name in sorted({lease.device for lease in leases} - {spec.name for spec in specs}):
        holders = ", ".join(lease.holder for lease in leases if lease.device == name)
        table.add_row(name, "?", "?", "-", "-", "-", "not found", holders)
    return table


def as_json(specs: Sequence[DeviceSpec], leases: Sequence[Lease], store: LeaseStore) -> dict[str, Any]:
    """Returns devices, leases and stops for --json; times are seconds since 1970."""
    return {
        "devices": [spec.to_json() for spec in specs],
        "leases": [
            {
                "device": lease.device,
                "token": lease.token,
                "slots": list(lease.slot_ids),
                "exclusive": lease.exclusive,
                "holder": lease.holder,
                "pid": lease.process.pid,
                "host": lease.process.host,
                "command": lease.process.command,
                "since_s": wall_s(lease.since_s),
                "expires_s": wall_s(lease.expires_s),
            }
            for lease in leases
        ],
        "stopped": [vars(stop) for stop in store.stopped().values()],
        "state": str(store.path),
    }
