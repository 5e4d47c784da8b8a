"""Runs several jobs of a sweep at once, each in its own process with a log, as far as devices have slots."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from robot_rl.cli.command import stopped_by_signals
from robot_rl.sched.leases import LeaseStore
from robot_rl.telemetry.progress import RUN_FOLDER

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec

Result = tuple[int, dict[str, Any]]
"""Number of a job, from 0, and its result."""

_POLL_S = 0.2
_END_S = 60.0
"""Time for an interrupted job to finish its step and to release its devices."""
_TAIL_BYTES = 1 << 20
"""Bytes read at the end of a log: enough for its last line, a summary."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command line of a sweep."""

    words: Sequence[str]
    label: str
    """The words that differ between jobs."""
    devices: Sequence[tuple[DeviceSpec, int]]
    """Devices, and the number of slots on each."""


def held_slots() -> Counter[str]:
    """Returns the number of leased slots of each device."""
    held = Counter[str]()
    for lease in LeaseStore().active():
        held[lease.device] += len(lease.slot_ids)
    return held


def fit_together(jobs: Sequence[Job], held: Mapping[str, int]) -> bool:
    """Returns whether the devices have slots for all jobs; `held` are the slots of other programs."""
    taken, slots = Counter(held), dict[str, int]()
    for spec, count in (wanted for job in jobs for wanted in job.devices):
        taken[spec.name] += count
        slots[spec.name] = spec.slots
    return all(taken[name] <= slots[name] for name in slots)


def run_side_by_side(
    command: str, jobs: Sequence[Job], folder: Path, *, at_once: int, held: Mapping[str, int]
) -> Iterator[Result]:
    """Runs the jobs in order, as many at once as fit, and yields the result of each when it ends.

    Args:
        command: the `robot-rl` command.
        jobs: one for each combination of the sweep.
        folder: for the logs.
        at_once: largest number of jobs at once.
        held: slots that other programs hold, by device name.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM stopped the jobs; a note has the commands that resume them.
    """
    waiting, running = list(enumerate(jobs)), list[_Process]()
    with stopped_by_signals() as stop, _Lines(len(jobs)) as lines:
        try:
            while waiting or running:
                while waiting and len(running) < at_once and _fits(waiting[0][1], running, held):
                    number, job = waiting.pop(0)
                    running.append(_Process(command, number, job, folder))
                    lines.write(f"job {number + 1}/{len(jobs)}: robot-rl {command} {shlex.join(job.words)}")
                lines.show(running)
                if stop.wait(_POLL_S):
                    break
                for process in [process for process in running if process.has_ended()]:
                    running.remove(process)
                    lines.show([process])
                    yield process.number, process.result()
            if stop.is_set():
                lines.write(f"interrupted: waiting for {len(running)} jobs to stop")
                yield from _stop(running, stop)
                raise _interrupt(command, running, [job for _, job in waiting])
        finally:  # leave no process behind
            for process in running:
                process.kill()


def _fits(job: Job, running: Sequence[_Process], held: Mapping[str, int]) -> bool:
    """Returns whether a job may start: alone always, since it then waits for slots or fails by itself."""
    return not running or fit_together([job, *(process.job for process in running)], held)


def _stop(running: list[_Process], stop: threading.Event) -> Generator[Result]:
    """Interrupts the processes and waits; yields results of those that finished. A second Ctrl-C kills."""
    stop.clear()
    for process in running:
        process.interrupt()
    until_s = time.monotonic() + _END_S
    while not all([process.has_ended() for process in running]):
        if stop.wait(_POLL_S) or time.monotonic() > until_s:
            break
    for process in list(running):
        process.kill()
        found = process.result()
        if "error" not in found:
            running.remove(process)
            yield process.number, found


def _interrupt(command: str, stopped: Sequence[_Process], waiting: Sequence[Job]) -> KeyboardInterrupt:
    interrupt = KeyboardInterrupt()
    resumed = {process: process.resumed() for process in stopped}
    found = [how for how in resumed.values() if how]
    again = [process.job for process, how in resumed.items() if not how] + list(waiting)
    found += [f"robot-rl {command} {shlex.join(job.words)}" for job in again]
    interrupt.add_note("\n  ".join(["Continue with:", *found]))
    return interrupt


class _Process:
    """A running job, in its own session, so that it does not get our signals."""

    def __init__(self, command: str, number: int, job: Job, folder: Path) -> None:
        self.number, self.job = number, job
        self._command = command
        self._path = folder / f"job-{number + 1}.log"
        with self._path.open("wb") as log:
            self._process = subprocess.Popen(
                [*program(), command, *job.words, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kills the job and all processes that it started, if it still runs."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def lines(self) -> list[str]:
        """Returns the last lines of the log."""
        with self._path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def last_line(self) -> str:
        """Returns the last line for people, not the JSON result of a finished job."""
        return next((line for line in reversed(self.lines()) if not line.startswith("{")), "")

    def resumed(self) -> str | None:
        """Returns the command that resumes a stopped job, if the job has a run folder."""
        with self._path.open(encoding="utf-8", errors="replace") as log:
            found = (line.rstrip().removeprefix(RUN_FOLDER) for line in log if line.startswith(RUN_FOLDER))
            folder = next(found, None)
        if folder is None or not Path(folder).is_dir():
            return None
        return f"robot-rl {self._command} resume={shlex.quote(folder)}"

    def result(self) -> dict[str, Any]:
        """Returns the result of the job, or its error."""
        code = self._process.wait()
        last = self.lines()[-1:]
        found: Any = None
        with contextlib.suppress(ValueError):
            found = json.loads("".join(last))
        if isinstance(found, dict) and (code == 0 or "error" in found):
            return found
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        resume = self.resumed()
        return {"error": f"{how}; see {self._path}" + (f"; `{resume}` goes on" if resume else "")}


def program() -> list[str]:
    """Returns the command line of `robot-rl`."""
    return [sys.executable, "-m", "robot_rl.cli.main"]


class _Lines:
    """Shows a line for each running job on stderr: updated in place in a terminal, appended in a log."""

    def __init__(self, num_jobs: int) -> None:
        self._num_jobs = num_jobs
        self._console = Console(stderr=True)
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, transient=True, auto_refresh=False) if live else None
        self._shown: dict[int, str] = {}

    def __enter__(self) -> _Lines:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def write(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, processes: Sequence[_Process]) -> None:
        now = {process.number: self._line(process) for process in processes}
        if self._live:
            rows = [Text(line, no_wrap=True, overflow="ellipsis") for line in now.values()]
            self._live.update(Text("\n", no_wrap=True, overflow="ellipsis").join(rows), refresh=True)
        else:
            for number, line in now.items():
                if line != self._shown.get(number):
                    self.write(line)
        self._shown |= now

    def _line(self, process: _Process) -> str:
        text = process.last_line() or "begins"
        return f"job {process.number + 1}/{self._num_jobs} ({process.job.label}): {text}"
