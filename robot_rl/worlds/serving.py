"""Serves a model of dynamics to `served.Served`, as a program of another Python.

It needs numpy and Python 3.9, and imports nothing of robot_rl. Messages on the pipe are JSON:

    host: protocol, model, settings, task, state_names, ...   ours: the model's description, or an error
    host: where each array lies in the shared memory          ours: empty
    host: how many rows to predict, again and again           ours: empty; the arrays hold the answer

docs/worlds.md shows a model.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # in the place of this folder, whose modules have common names

from typing import Any

import numpy as np

PROTOCOL = 1
ASKED = ("state", "past_state", "past_action", "has_past", "actions", "steps")
"""Arguments of a model's `predict`, by name, with a row for each moment; see `Window` and `Dynamics`."""
DESCRIBES = ("members", "stride", "state_names", "action_names", "version")
"""What a model says of itself."""


class ServingError(Exception):
    """What is wrong with a model: another setting would do (`config`), or the model itself (`env`)."""


def serve(host: Connection, memory: int) -> None:
    """Makes the model that the host asks for, and predicts until the host leaves.

    Args: memory: file descriptor of the shared arrays.
    """
    hello = json.loads(host.recv_bytes())
    if hello["protocol"] != PROTOCOL:
        raise ServingError("config", f"protocol {hello['protocol']}, this program has {PROTOCOL}.")
    model = _made(hello["model"], hello["settings"])
    host.send_bytes(
        json.dumps({"spec": {"protocol": PROTOCOL, **_described(hello["model"], model)}}).encode()
    )
    places = json.loads(host.recv_bytes())
    buffer = mmap.mmap(memory, 0)
    arrays: dict[str, Any] = {
        name: np.ndarray(shape, dtype, buffer=buffer, offset=offset)
        for name, (shape, dtype, offset) in places.items()
    }
    host.send_bytes(b"")
    while True:
        count = int(host.recv_bytes())
        asked = {name: arrays[name][:count].copy() for name in ASKED}
        mean, std = model.predict(**asked)
        for name, answer in (("mean", mean), ("std", std)):
            into, answer = arrays[name][:, :count], np.asarray(answer)
            if answer.shape != into.shape:
                raise ServingError(
                    "env",
                    f"predict: {name} is of shape {answer.shape}, allowed: {into.shape}.",
                )
            into[:] = answer
        host.send_bytes(b"")


def _made(name: str, settings: dict[str, Any]) -> Any:
    """Returns the model that a function of a module makes."""
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        make, why = None, f"{type(error).__name__}: {error}"
    else:
        why = f"{module} has no function {function!r}"
    if not callable(make):
        raise ServingError(
            "config",
            f"{why}. Give module:function; modules are those of its Python, or in the working folder.",
        )
    return make(**settings)


def _described(name: str, model: Any) -> dict[str, Any]:
    missing = [part for part in (*DESCRIBES, "predict") if not hasattr(model, part)]
    if missing:
        raise ServingError("config", f"{name} returns a {type(model).__name__} without {', '.join(missing)}.")
    return {
        "members": int(model.members),
        "stride": int(model.stride),
        "state_names": [str(part) for part in model.state_names],
        "action_names": [str(part) for part in model.action_names],
        "version": str(model.version),
    }


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's
    host = Connection(int(sys.argv[1]))
    try:
        serve(host, int(sys.argv[2]))
    except EOFError:
        pass  # the host has left
    except ServingError as error:
        host.send_bytes(json.dumps({"error": error.args}).encode())
    except Exception as error:  # whatever the model raises
        traceback.print_exc()
        message = f"it raised {type(error).__name__}: {error}."
        host.send_bytes(json.dumps({"error": ("env", message)}).encode())


if __name__ == "__main__":
    _main()
