"""Dynamics in a process of another Python: its own packages and weights, of any size.

    Served(ServedConfig(id="my_model:load", python="venv/bin/python"), meta)

The process is `serving.py`; arrays of a batch lie in shared memory, a prediction is one message each way. The
scales, and so the unit of the disagreement, are measured here, on recorded episodes.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from robot_rl.core.errors import CheckpointError, ConfigError, ModelError
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.envs import foreign
from robot_rl.envs.foreign import EnvError
from robot_rl.envs.process import SHARED, Worker, program, unnamed_file
from robot_rl.worlds import serving
from robot_rl.worlds.config import ServedConfig
from robot_rl.worlds.dynamics import Prediction, Scaled
from robot_rl.worlds.history import Array, Window


@dataclass(frozen=True)
class ServedSize:
    """How the model of others is to be asked."""

    members: int
    stride: int


class Served(Scaled):
    """A model of others; see the module. Its process ends with this object."""

    kind = "served"

    def __init__(self, served: ServedConfig, meta: EpisodesMeta, *, version: str | None = None) -> None:
        """Starts the process.

        Args:
            served: which model.
            meta: what it is to predict.
            version: that which was measured; None: any.

        Raises:
            ConfigError: no such Python or model, or one of another state or action.
            CheckpointError: it is of another version than that which was measured.
        """
        self._at = f"served.id {served.id}"
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
        worker = Worker(python, memory, asks, served.timeout_s, self._at, **settings)
        close = weakref.finalize(self, _close, worker, memory)
        try:
            spec = _spec_of(worker, self._at, meta)
            super().__init__(len(meta.state_names), len(meta.action_names), stride=spec["stride"])
            self.served, self.version, self._worker, self._close = served, spec["version"], worker, close
            if version is not None and version != self.version:
                raise CheckpointError(
                    f"{self._at}: the model says version {self.version!r}, but {version!r} was measured. "
                    "Serve that again, or measure this one: robot-rl worlds fit served.id=... out=<folder>."
                )
            self.config = ServedSize(spec["members"], spec["stride"])
            layout = self._layout(served.rows)
            os.truncate(memory, foreign.size_of(layout))
            buffer = mmap.mmap(memory, 0)
            self._arrays = foreign.placed(layout, buffer)
            asks[1] = json.dumps(
                {name: (*layout[name], _offset(array, buffer)) for name, array in self._arrays.items()}
            )
            worker.share()
        except EnvError as error:
            close()
            raise _ours(self._at, error) from error
        except BaseException:
            close()
            raise

    def _layout(self, rows: int) -> foreign.Layout:
        s, a, (m, k) = self.state_dim, self.action_dim, (self.config.members, self.config.stride)
        return {
            "state": ((rows, s), "f4"),
            "past_state": ((rows, s), "f4"),
            "past_action": ((rows, k, a), "f4"),
            "has_past": ((rows,), "?"),
            "actions": ((rows, k, a), "f4"),
            "steps": ((rows,), "i8"),
            "mean": ((m, rows, s), "f4"),
            "std": ((m, rows, s), "f4"),
        }

    def predict(self, window: Window, actions: Array, steps: Array) -> Prediction:
        """See `Dynamics.predict`.

        Raises:
            ModelError: the process ended, is late, or says what is no prediction.
        """
        asked = {**vars(window), "actions": actions, "steps": steps}
        parts = [
            self._ask({name: value[begin : begin + self.served.rows] for name, value in asked.items()})
            for begin in range(0, len(steps), self.served.rows)
        ]
        mean, std = (torch.from_numpy(np.concatenate(part, axis=1)) for part in zip(*parts, strict=True))
        state = torch.from_numpy(np.ascontiguousarray(window.state))
        state, mean, std = (part.to(self.device) for part in (state, mean, std))
        found = self.prediction(state, (mean - state) / self.scale * self.moves, std / self.scale)
        mean = torch.where(self.moves > 0, mean, state)  # bit for bit what it says, but what is copied
        return replace(found, mean=mean, std=std * self.moves)

    def _ask(self, asked: dict[str, Array]) -> tuple[Array, Array]:
        """Returns mean and deviation (M, n, S) of some rows."""
        if not self._close.alive:
            raise ModelError(f"{self._at}: its process has ended. Load the world model again.")
        count = len(asked["steps"])
        for name, value in asked.items():
            self._arrays[name][:count] = value
        self._worker.send(str(count).encode())
        try:
            is_done = self._worker.answers()
        except EnvError as error:
            self._close()
            raise _ours(self._at, error) from error
        if not is_done:
            end = self._worker.end()
            self._close()
            raise ModelError(f"{self._at}: {end}")
        mean, std = (self._arrays[name][:, :count].copy() for name in ("mean", "std"))
        if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std >= 0).all()):
            raise ModelError(f"{self._at}: a prediction is not finite, or a deviation is below 0.")
        return mean, std

    def close(self) -> None:
        """Ends the process."""
        self._close()

    def to_json(self) -> dict[str, Any]:
        """Returns what `Served` is made from again."""
        return {"kind": self.kind, **asdict(self.served), "version": self.version}


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


def _offset(array: Array, buffer: mmap.mmap) -> int:
    return array.ctypes.data - np.frombuffer(buffer, np.uint8).ctypes.data


def _ours(at: str, error: EnvError) -> Exception:
    message = error.message if error.message.startswith(at) else f"{at}: {error.message}"
    return (ConfigError if error.kind == "config" else ModelError)(message)


def _close(worker: Worker, memory: int) -> None:
    worker.close()
    os.close(memory)
