"""Serves a model of dynamics, and of pictures, to `channel.Channel`, as a program of another Python.

It needs numpy and Python 3.9, and imports nothing of robot_rl. Messages on the pipe are JSON:

    host: protocol, model, settings, task, state_names, ...   ours: the model's description, or an error
    host: where each array lies in the shared memory          ours: empty
    host: "<method> <rows>", again and again                  ours: empty; the arrays hold the answer

Methods are `predict`, and of a model with cameras `encode`, `decode` and `predict_codes`; docs/worlds.md has
them. The pictures of a camera are the array `<camera>.rgb`.
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

PROTOCOL = 2
PICTURE = ".rgb"
"""Behind the name of a camera: the array of its pictures."""
ASKED = ("state", "past_state", "past_action", "has_past", "actions", "steps")
"""Arguments of a model's `predict`, by name, with a row for each moment; see `Window` and `Dynamics`."""
ASKED_CODES = ("now", "past", "reference", "state", "after", "actions", "steps")
"""Arguments of `predict_codes`, likewise; see `images.pictures.Moments`."""
BY_MEMBER = ("mean", "std", "codes")
"""Arrays that have members before rows."""
DESCRIBES = ("members", "stride", "state_names", "action_names", "version")
"""What a model says of itself."""
DESCRIBES_PICTURES = ("image_size", "code_shape", "code_members", "encode", "decode", "predict_codes")
"""What it has, too, if it names `cameras`."""


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
        method, _, count = host.recv_bytes().decode().partition(" ")
        _answer(model, method, arrays, int(count))
        host.send_bytes(b"")


def _answer(model: Any, method: str, arrays: dict[str, Any], count: int) -> None:
    """Writes what a method of the model returns for the first rows of the arrays."""

    def given(*names: str) -> dict[str, Any]:
        return {name: arrays[name][:count].copy() for name in names}

    shown = [name for name in arrays if name.endswith(PICTURE)]
    if method == "predict":
        mean, std = model.predict(**given(*ASKED))
        found = {"mean": mean, "std": std}
    elif method == "predict_codes":
        found = {"codes": model.predict_codes(**given(*ASKED_CODES))}
    elif method == "encode":
        pictures = given(*shown)
        found = {"code": model.encode({name[: -len(PICTURE)]: part for name, part in pictures.items()})}
    else:
        pictures = model.decode(given("code")["code"])
        if not isinstance(pictures, dict) or {f"{name}{PICTURE}" for name in pictures} != set(shown):
            got = ", ".join(map(str, pictures)) if isinstance(pictures, dict) else type(pictures).__name__
            allowed = ", ".join(name[: -len(PICTURE)] for name in shown)
            raise ServingError("env", f"decode: returns {got}, allowed: a dict of pictures of {allowed}.")
        found = {f"{name}{PICTURE}": part for name, part in pictures.items()}
    for name, answer in found.items():
        into, answer = arrays[name], np.asarray(answer)
        into = into[:, :count] if name in BY_MEMBER else into[:count]
        at = f"{method}: {name} is of"
        if answer.shape != into.shape:
            raise ServingError("env", f"{at} shape {answer.shape}, allowed: {into.shape}.")
        is_right = answer.dtype == np.uint8 if name in shown else answer.dtype.kind in "fiu"
        if not is_right:
            allowed = "uint8" if name in shown else "real numbers"
            raise ServingError("env", f"{at} dtype {answer.dtype}, allowed: {allowed}.")
        into[:] = answer


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
    cameras = getattr(model, "cameras", ())
    if not isinstance(cameras, (tuple, list)):
        raise ServingError(
            "config", f"{name}: its cameras are {cameras!r}, allowed: a tuple or list of names."
        )
    needed = (*DESCRIBES, "predict", *(DESCRIBES_PICTURES if cameras else ()))
    missing = [part for part in needed if not hasattr(model, part)]
    if missing:
        what = f"{type(model).__name__} {'with cameras, ' if cameras else ''}without {', '.join(missing)}"
        raise ServingError("config", f"{name} returns a {what}.")
    described: dict[str, Any] = {
        "members": int(model.members),
        "stride": int(model.stride),
        "state_names": [str(part) for part in model.state_names],
        "action_names": [str(part) for part in model.action_names],
        "version": str(model.version),
        "cameras": [str(part) for part in cameras],
    }
    if cameras:
        described["image_size"] = np.atleast_1d(model.image_size).tolist()
        described["code_shape"] = np.atleast_1d(model.code_shape).tolist()
        described["code_members"] = np.asarray(model.code_members).tolist()
    return described


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
