"""The process of a model of others, and the arrays that it shares.

The process is `serving.py`; arrays of a batch lie in shared memory, a question is one message each way.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from robot_rl.core.errors import CheckpointError, ConfigError, ModelError
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.envs import foreign
from robot_rl.envs.foreign import EnvError
from robot_rl.envs.process import SHARED, Worker, close_all, program, shared, unnamed_file
from robot_rl.worlds import serving
from robot_rl.worlds.config import ServedConfig
from robot_rl.worlds.history import Array


@dataclass(frozen=True, kw_only=True)
class PicturesSpec:
    """What pictures a model of others shows."""

    cameras: tuple[str, ...]
    """Empty: the state alone."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels, of all cameras."""
    code_shape: tuple[int, int, int] = (0, 0, 0)
    """Channels, height and width of the code of a moment, over all cameras."""
    members: int = 1
    """Members, or samples, of the codes; one has no disagreement."""


class Channel:
    """Asks a process; it ends with this object."""

    def __init__(self, served: ServedConfig, meta: EpisodesMeta, *, version: str | None = None) -> None:
        """Starts the process.

        Args:
            served: which model.
            meta: what it is to predict.
            version: that which was measured; None: any.

        Raises:
            ConfigError: no such Python or model, or one of another state or action.
            CheckpointError: it is of another version than that which was measured.
            StorageError: its arrays are larger than the shared memory that is free.
        """
        self.at = f"served.id {served.id}"
        python = program(served.python, at="served.python")
        served = replace(served, python=None if served.python is None else os.path.abspath(python))
        hello = {
            "protocol": serving.PROTOCOL,
            "model": served.id,
            "settings": served.settings,
            **asdict(meta),
        }
        memory = unnamed_file(SHARED)
        settings = {"serves": serving.__file__, "setting": "served.timeout_s"}
        asks: list[str] = [json.dumps(hello), ""]  # the second is known once it says its sizes
        worker = Worker(python, memory, asks, served.timeout_s, self.at, **settings)
        self.close = weakref.finalize(self, close_all, [worker], memory)
        """Ends the process."""
        try:
            spec = _spec_of(worker, self.at, meta)
            self.served, self.version, self._worker = served, str(spec["version"]), worker
            if version is not None and version != self.version:
                raise CheckpointError(
                    f"{self.at}: the model says version {self.version!r}, but {version!r} was measured. "
                    "Serve that again, or measure this one: robot-rl worlds fit served.id=... out=<folder>."
                )
            self.members, self.stride = int(spec["members"]), int(spec["stride"])
            self.pictures = _pictures_of(spec, self.at)
            layout = self._layout(served.rows, len(meta.state_names), len(meta.action_names))
            setting = f"served.rows={served.rows}"
            buffer = shared(memory, foreign.size_of(layout), at=self.at, setting=setting)
            self._arrays = foreign.placed(layout, buffer)
            asks[1] = json.dumps(
                {name: (*layout[name], _offset(array, buffer)) for name, array in self._arrays.items()}
            )
            worker.share()
        except EnvError as error:
            self.close()
            raise _ours(self.at, error) from error
        except BaseException:
            self.close()
            raise

    def _layout(self, rows: int, s: int, a: int) -> foreign.Layout:
        m, k, shown = self.members, self.stride, self.pictures
        layout: foreign.Layout = {
            "state": ((rows, s), "f4"),
            "past_state": ((rows, s), "f4"),
            "past_action": ((rows, k, a), "f4"),
            "has_past": ((rows,), "?"),
            "actions": ((rows, k, a), "f4"),
            "steps": ((rows,), "i8"),
            "mean": ((m, rows, s), "f4"),
            "std": ((m, rows, s), "f4"),
        }
        if shown.cameras:
            code = (rows, *shown.code_shape)
            layout |= {name: (code, "f4") for name in ("code", "now", "past", "reference")}
            layout |= {"after": ((rows, s), "f4"), "codes": ((shown.members, *code), "f4")}
            layout |= {
                f"{camera}{serving.PICTURE}": ((rows, *shown.size, 3), "u1") for camera in shown.cameras
            }
        return layout

    def ask(self, method: str, asked: Mapping[str, Array], answers: tuple[str, ...]) -> list[Array]:
        """Returns the arrays of these names that a method answers, a row for each row asked.

        Args: asked: (B, ...) each; more rows than `served.rows` are asked for one part after the other.

        Raises:
            ConfigError: what is asked is of another shape or dtype than the model's.
            ModelError: the process ended, is late, or says what is no answer, or what is not finite.
        """
        count = len(next(iter(asked.values())))
        parts = [
            self._ask(
                method,
                {name: value[begin : begin + self.served.rows] for name, value in asked.items()},
                answers,
            )
            for begin in range(0, count, self.served.rows)
        ]
        axes = [int(name in serving.BY_MEMBER) for name in answers]
        return [
            np.concatenate(part, axis=axis) for axis, part in zip(axes, zip(*parts, strict=True), strict=True)
        ]

    def _ask(self, method: str, asked: Mapping[str, Array], answers: tuple[str, ...]) -> list[Array]:
        if not self.close.alive:
            raise ModelError(f"{self.at}: its process has ended. Load the world model again.")
        count = len(next(iter(asked.values())))
        for name, value in asked.items():
            into = self._arrays[name][:count]
            if value.shape != into.shape or not np.can_cast(value.dtype, into.dtype, "same_kind"):
                raise ConfigError(
                    f"{self.at}: {method}: {name} is given as {value.dtype} of shape {value.shape}, allowed: "
                    f"{into.dtype} of shape {into.shape}."
                )
            into[:] = value
        try:
            self._worker.send(f"{method} {count}".encode())
            is_done = self._worker.answers()
        except EnvError as error:
            self.close()
            raise _ours(self.at, error) from error
        except BaseException:  # Ctrl-C: its answer must not be that of the next question
            self.close()
            raise
        if not is_done:
            end = self._worker.end()
            self.close()
            raise ModelError(f"{self.at}: {end}")
        found = list[Array]()
        for name in answers:
            array = self._arrays[name]
            part = (array[:, :count] if name in serving.BY_MEMBER else array[:count]).copy()
            if not np.isfinite(part).all():
                raise ModelError(f"{self.at}: {method}: {name} is not finite.")
            found.append(part)
        return found


def _spec_of(worker: Worker, at: str, meta: EpisodesMeta) -> dict[str, Any]:
    """Returns what the model says of itself, if it is what is to be predicted."""
    spec = worker.spec()
    for name, need in (("state_names", meta.state_names), ("action_names", meta.action_names)):
        if tuple(spec[name]) != need:
            raise ConfigError(f"{at}: its {name} are {spec[name]}, the episodes have {list(need)}.")
    if spec["members"] < 2 or not 1 <= spec["stride"] <= 32:
        raise ConfigError(
            f"{at}: it says {spec['members']} members and strides of {spec['stride']}, allowed: 2 or more "
            "members (samples, if one network draws them), strides of 1 to 32."
        )
    return spec


def _pictures_of(spec: dict[str, Any], at: str) -> PicturesSpec:
    """Returns which pictures the model says that it shows."""
    if not spec["cameras"]:
        return PicturesSpec(cameras=())
    if len(set(spec["cameras"])) < len(spec["cameras"]):
        raise ConfigError(f"{at}: its cameras are {spec['cameras']}, allowed: names that differ.")
    for name, count in (("image_size", 2), ("code_shape", 3)):
        if len(spec[name]) != count or not all(type(part) is int and part >= 1 for part in spec[name]):
            what = ("height and width", "channels, height and width")[count - 2]
            raise ConfigError(f"{at}: its {name} is {spec[name]}, allowed: {what}, whole numbers from 1 up.")
    if type(spec["code_members"]) is not int or spec["code_members"] < 1:
        raise ConfigError(f"{at}: its code_members are {spec['code_members']!r}, allowed: 1 or more.")
    height, width = spec["image_size"]
    channels, rows, columns = spec["code_shape"]
    return PicturesSpec(
        cameras=tuple(spec["cameras"]),
        size=(height, width),
        code_shape=(channels, rows, columns),
        members=spec["code_members"],
    )


def _offset(array: Array, buffer: mmap.mmap) -> int:
    return array.ctypes.data - np.frombuffer(buffer, np.uint8).ctypes.data


def _ours(at: str, error: EnvError) -> Exception:
    message = error.message if error.message.startswith(at) else f"{at}: {error.message}"
    return (ConfigError if error.kind == "config" else ModelError)(message)
