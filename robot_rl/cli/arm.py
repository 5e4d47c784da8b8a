"""`robot-rl arm`: shows the status of a running arm, and stops, clears, homes or parks it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from robot_rl.cli.command import parser_of
from robot_rl.core.errors import DeviceError
from robot_rl.core.files import at_home
from robot_rl.real.client import ArmClient
from robot_rl.real.launch import socket_folders
from robot_rl.real.link import LinkError
from robot_rl.real.messages import Status
from robot_rl.real.supervisor.main import SUPERVISOR_SOCKET

SUMMARY = "show the status of a running arm; stop, estop, clear, home, park"

_ABOUT = """\
status   prints the phase of the arm, and the reason if it is stopped
stop     brings the arm to rest and keeps it there until a person clears it
estop    as stop, but at once and without a ramp
clear    ends a stop, after you have looked at the arm: by=<your name>
home     moves the arm to the station's home pose
park     moves the arm to the station's safe pose, where it may be left alone

The command talks to the newest station on this machine, or to that of --folder. It is no safety
device: you still need an e-stop button.
"""
_OPERATIONS = ("status", "stop", "estop", "clear", "home", "park")


def run(argv: list[str]) -> int:
    """Runs one operation and prints the status of the arm; with `--json` the last line is one JSON object."""
    parser = parser_of("arm", SUMMARY, _ABOUT)
    parser.add_argument("operation", choices=_OPERATIONS)
    parser.add_argument("by", nargs="?", default="", help="by=<your name>")
    parser.add_argument("--folder", type=at_home, help="folder of the station's sockets")
    words = parser.parse_args(argv or ["--help"])
    with _connect(None if words.folder is None else Path(words.folder)) as client:
        if words.operation != "status":
            client.control(words.operation, by=words.by.removeprefix("by="))
        status = client.wait()
    print(_describe(status))
    if words.json:
        print(json.dumps(_facts(status)))
    return 0


def _connect(folder: Path | None) -> ArmClient:
    """Returns a client of the newest supervisor that answers."""
    for place in socket_folders() if folder is None else [folder]:
        try:
            return ArmClient(place / SUPERVISOR_SOCKET)
        except LinkError:
            continue  # the socket of a killed supervisor
    where = folder or f"{tempfile.gettempdir()}/robot-rl-*"
    raise DeviceError(
        f"arm: no supervisor runs at {where}. `robot-rl deploy` starts one. If its sockets are elsewhere, "
        "give --folder=<folder of its sockets>."
    )


def _describe(status: Status) -> str:
    why = f": {status.reason}" if status.reason else ""
    if status.unlogged:
        why += (
            f"\n{status.unlogged} entries of its log could not be written: look at the disk of its run folder"
        )
    if status.state is None:
        return f"{status.phase}{why}; no measurement yet"
    joints = ", ".join(f"{angle:.3f}" for angle in status.state.position_rad)
    return f"{status.phase}{why}\njoints {joints} rad, gripper {status.state.gripper:.4f}"


def _facts(status: Status) -> dict[str, object]:
    state = status.state
    return {
        "phase": status.phase,
        "reason": status.reason,
        "plan": status.plan,
        "unlogged": status.unlogged,
        "position_rad": None if state is None else state.position_rad.tolist(),
        "velocity_rad_s": None if state is None else state.velocity_rad_s.tolist(),
        "gripper": None if state is None else state.gripper,
    }
