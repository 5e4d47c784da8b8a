"""Environments in processes of another Python: their packages need not agree with ours.

    ProcessVectorEnv("gymnasium_robotics:FetchReach-v4", 8, python="venv/bin/python")

Each worker makes and steps some of the environments; arrays are shared, a step is one message each way. A
worker that ends, or does not answer in time, is started again: the episodes that it was asked to go on with
are cut off (`truncated`, with the last observation), its other episodes are played again.
B envs.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, StorageError, require
from robot_rl.core.machine import usable_cores
from robot_rl.envs import foreign
from robot_rl.envs.foreign import ADVISE, RESET, STEP, EnvError
from robot_rl.envs.gym import GymVectorEnv, as_ours

logger = logging.getLogger(__name__)

_TAIL_LINES, _TAIL_BYTES = 5, 4096
_LOG_BYTES = 2**20
"""Of what a worker printed; more is forgotten."""
_RESTARTS = 3
"""Restarts of a worker without an answer between them; after more it counts as failed."""
_OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that name this Python's packages."""
_START_S, _END_S = 600.0, 5.0
"""Longest time to import and to make environments, and to end."""
SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A folder in memory, where there is one."""


class ProcessVectorEnv(GymVectorEnv):
    """A `GymVectorEnv` whose environments are in processes of another Python."""

    def __init__(
        self,
        env_id: str,
        num_envs: int = 1,
        *,
        autoreset: Literal["same_step", "disabled"] = "same_step",
        settings: Mapping[str, Any] | None = None,
        expert: str | None = None,
        python: str | None = None,
        workers: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Starts the workers.

        Args:
            env_id: see `GymVectorEnv`; modules are those of the other Python, or in the working folder.
            num_envs: B.
            autoreset: see `GymVectorEnv`.
            settings: see `GymVectorEnv`.
            expert: see `GymVectorEnv`; it acts in the processes too.
            python: path of the other Python, 3.9 or later, with Gymnasium 0.29 or later; None: this one.
            workers: number of processes; 0: one for each core, at most B.
            timeout_s: longest time of a step or reset; a worker that takes longer is started again.

        Raises:
            ConfigError: no such Python, Gymnasium is missing there, or as `GymVectorEnv` does.
            StorageError: their arrays are larger than the shared memory that is free.
        """
        require(num_envs >= 1, f"{env_id}: num_envs", num_envs, "1 or more")
        path = program(python)
        count = min(num_envs, workers or usable_cores())
        with as_ours():
            what = (env_id, dict(settings or {}), expert)
            envs = Workers(path, what, num_envs, count, timeout_s)
        super().__init__(env_id, num_envs, autoreset=autoreset, expert=expert, envs=envs)


def program(python: str | None, *, at: str = "env.python") -> str:
    """Returns the path of a Python; None means this one. Raises `ConfigError` if it is no program."""
    path = sys.executable if python is None else os.path.expanduser(python)
    if not os.access(path, os.X_OK) or Path(path).is_dir():
        raise ConfigError(
            f"{at}: {path!r} is no program. Give the Python of a virtual environment that has the needed "
            f"packages: {at}=<folder>/bin/python."
        )
    return path


class Workers:
    """What `foreign.Envs` is, in processes."""

    may_lose = True

    def __init__(
        self,
        python: str,
        what: tuple[str, Mapping[str, Any], str | None],
        num: int,
        count: int,
        timeout_s: float,
    ) -> None:
        """Starts `count` processes; `what`: id, settings and expert of the `num` environments."""
        env_id, settings, expert = what
        ends = np.linspace(0, num, count + 1).round().astype(int).tolist()
        self._rows = [range(*pair) for pair in itertools.pairwise(ends)]
        self._memory = unnamed_file(SHARED)
        self._all: list[Worker] = []
        self.close = weakref.finalize(self, close_all, self._all, self._memory)
        """Ends the processes; so does losing this object."""
        try:
            for rows in self._rows:
                asks = json.dumps([env_id, len(rows), settings, expert]), json.dumps([num, rows.start])
                self._all.append(Worker(python, self._memory, asks, timeout_s, env_id))
            self.spec: dict[str, Any] = [worker.spec() for worker in self._all][-1]
            arrays = foreign.layout(self.spec, num)
            size, setting = foreign.size_of(arrays), f"num_envs={num}"
            self.arrays = foreign.placed(arrays, shared(self._memory, size, at=env_id, setting=setting))
            for worker in self._all:
                worker.share()
        except BaseException:
            self.close()
            raise

    def reset(self, rows: NDArray[Any]) -> Sequence[int]:
        """See `foreign.Envs.reset`."""
        return self._ask(RESET, rows)

    def step(self, rows: NDArray[Any]) -> Sequence[int]:
        """See `foreign.Envs.step`."""
        return self._ask(STEP, rows)

    def advise(self, rows: NDArray[Any]) -> Sequence[int]:
        """See `foreign.Envs.advise`."""
        return self._ask(ADVISE, rows)

    def picture(self, i: int) -> NDArray[Any]:
        """See `foreign.Envs.picture`."""
        which = next(n for n, rows in enumerate(self._rows) if i in rows)
        return self._all[which].picture(i - self._rows[which].start)

    def _ask(self, what: bytes, rows: NDArray[Any]) -> list[int]:
        """Asks the workers of these rows; returns all rows of workers that were started again."""
        asked = self.arrays["asked"]
        asked[:] = False
        asked[rows] = True
        busy = [n for n, own in enumerate(self._rows) if asked[own.start : own.stop].any()]
        for n in busy:
            self._all[n].send(what)
        lost = [n for n in busy if not self._all[n].answers()]
        for n in lost:
            self._all[n].restart()
        return [row for n in lost for row in self._rows[n]]


class Worker:
    """One process of another Python, with a pipe and shared memory."""

    def __init__(
        self,
        python: str,
        memory: int,
        asks: Sequence[str],
        timeout_s: float,
        name: str,
        *,
        serves: str = foreign.__file__,
        setting: str = "env.timeout_s",
    ) -> None:
        """Starts it.

        Args:
            python: path of its Python.
            memory: file descriptor of the shared arrays.
            asks: its first message, which `spec` answers, and that which makes it use the arrays.
            timeout_s: longest time of an answer.
            name: of what it serves, for messages.
            serves: path of the program, which gets the descriptors of the pipe and of the memory.
            setting: that of `timeout_s`.
        """
        self._python, self._memory, self._asks, self._timeout_s = python, memory, asks, timeout_s
        self._name, self._serves, self._setting, self._failures = name, serves, setting, 0
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = unnamed_file()
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied meanwhile
        variables = {name: value for name, value in os.environ.items() if name not in _OF_THIS_PYTHON}
        with theirs:
            fds = (theirs.fileno(), self._memory)
            self._process = subprocess.Popen(
                [self._python, self._serves, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=variables,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C is ours
            )
        self._pipe, self._is_late = Connection(ours.detach()), False
        self.send(self._asks[0].encode())

    def spec(self) -> dict[str, Any]:
        """Returns what the environments are; raises `EnvError` if they cannot be made."""
        answer = self._answer(_START_S)
        if answer is None:
            raise EnvError("config", f"{self._name}: with {self._python}, {self.end()}")
        return answer["spec"]

    def share(self) -> None:
        """Makes it use the shared arrays."""
        self.send(self._asks[1].encode())
        if self._answer(_START_S) is None:
            raise EnvError("env", f"{self._name}: {self.end()}")

    def send(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended: there will be no answer
            self._pipe.send_bytes(what)

    def answers(self) -> bool:
        """Returns whether it did what it was asked for; raises `EnvError` if it says why not."""
        is_done = self._answer(self._timeout_s) is not None
        if is_done:
            self._failures = 0
            if os.fstat(self._log).st_size > _LOG_BYTES:
                os.truncate(self._log, 0)
        return is_done

    def _answer(self, within_s: float) -> dict[str, Any] | None:
        try:
            if self._pipe.poll(within_s):
                content = self._pipe.recv_bytes()
                answer: dict[str, Any] = json.loads(content) if content else {}
                if "error" in answer:
                    kind, message = answer["error"]
                    raise EnvError(kind, message + (self._printed() if kind == "env" else ""))
                return answer
            self._is_late = True
        except (EOFError, OSError):
            pass
        return None

    def restart(self) -> None:
        """Starts it again; raises `EnvError` if it has failed too often since it last answered."""
        self._failures += 1
        end = self.end()
        if self._failures > _RESTARTS:
            raise EnvError("env", f"{self._name}: {_RESTARTS} restarts did not help: {end}")
        logger.warning("%s: %s It is started again, its episodes are cut off.", self._name, end)
        self.close()
        self._start()
        self.spec()
        self.share()

    def picture(self, i: int) -> NDArray[Any]:
        self.send(str(i).encode())
        answer = self._answer(self._timeout_s)
        if answer is None:
            raise EnvError("render", f"{self._name}: {self.end()}")
        return np.frombuffer(self._pipe.recv_bytes(), np.uint8).reshape(answer["shape"])

    def end(self) -> str:
        """Returns how it ended, with the last lines that it printed."""
        if self._is_late:
            return (
                f"a process did not answer within {self._timeout_s:g} s ({self._setting}).{self._printed()}"
            )
        return f"a process ended with code {self._process.wait()}.{self._printed()}"

    def _printed(self) -> str:
        start = max(0, os.fstat(self._log).st_size - _TAIL_BYTES)
        printed = os.pread(self._log, _TAIL_BYTES, start).decode(errors="replace")
        lines = printed.strip().splitlines()[-_TAIL_LINES:]
        return f" It printed last: {' | '.join(lines)}" if lines else ""

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(0.0 if self._is_late else _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._log)


def close_all(workers: Sequence[Worker], memory: int) -> None:
    """Ends processes, and closes the memory that they share."""
    for worker in workers:
        worker.close()
    os.close(memory)


def unnamed_file(folder: str | None = None) -> int:
    """Returns the descriptor of a new file without a name: it is gone when the last process has ended."""
    file, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return file


def shared(memory: int, size: int, *, at: str, setting: str) -> mmap.mmap:
    """Returns `size` bytes of an unnamed file, which holds nothing yet, for arrays that processes share.

    Args:
        memory: descriptor of the file.
        size: in bytes.
        at: begins the message.
        setting: that which determines the size, as `name=value`.

    Raises:
        StorageError: it is larger than what is free: more would end a process when it is used.
    """
    there = os.fstatvfs(memory)
    free = there.f_bavail * there.f_frsize
    if size > free:
        raise StorageError(
            f"{at}: the arrays of {setting} take {size / 2**20:.0f} MB of shared memory, allowed: the "
            f"{free / 2**20:.0f} MB that are free. Give a smaller {setting.partition('=')[0]}, or more "
            "shared memory (docker run --shm-size)."
        )
    os.truncate(memory, size)
    return mmap.mmap(memory, 0)
