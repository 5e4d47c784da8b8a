"""The agent of one machine: it shows the hub what is here, carries out orders, and runs jobs on arms.

A job is a process of its own (`robot_rl.train.improve.at_node`) that acts for a run on another machine, under
a lease of this machine's lease file. Its steps lie in a spool on the disk until the run has them. So an agent
that is cut off loses nothing: the job acts on for `alone_s`, comes to rest, and its steps are sent as soon as
the run is back. The agent is not in the way of safety: a station's supervisor holds the arm whatever dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgpack

from robot_rl.core.errors import DeviceError, RobotRLError, require
from robot_rl.core.files import replace_file
from robot_rl.fleet.state import FleetState, clear_device, stop_arm
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_line import NAME, HubRefusedError, connected, frame
from robot_rl.rollout.spool import Spool
from robot_rl.sched.lease_file import default_path

logger = logging.getLogger(__name__)

_PROGRAM = "robot_rl.train.improve.at_node"
_LOOK_S = 1.0
"""How often the hub is shown what is here."""
_AWAY = 64
"""Turns that may be on their way to a run; it acknowledges those that it has."""
_UNSENT = 6000
"""Turns that a run may leave unfetched while it is there: five minutes of an arm at 20 Hz."""
_END_S = 40.0
"""How long a job may take to bring its arm to rest."""
_PAUSES_S = (0.5, 10.0)
"""Between two attempts to reach the hub: the first and the longest pause."""
_TAKEN = 409
"""Status of a name that is connected, as ours may still be after a cut."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Which hub, and under which name."""

    hub: HubConfig = field(default_factory=HubConfig)
    name: str = field(default_factory=lambda: socket.gethostname().split(".")[0])
    """Of this machine: what runs need with `needs.node`."""

    def __post_init__(self) -> None:
        require(self.hub.address is not None, "hub.address", None, "https://<host>:8642 of `robot-rl fleet`")
        require(NAME.fullmatch(self.name) is not None, "name", self.name, "letters, digits, '.', '_' and '-'")


class Job:
    """A process that acts here for a run elsewhere, and the steps that the run does not have yet."""

    def __init__(self, folder: Path, alone_s: float) -> None:
        self.folder, self.alone_s = folder, alone_s
        self.spool = Spool(folder / "turns")
        self.process: asyncio.subprocess.Process | None = None
        self.alone_since_s: float | None = None
        """When its run was there last; None while it is."""
        self.news = asyncio.Event()
        """Set when there is something to send."""
        self.failure = ""
        """Why the process ended, if the run does not know yet."""
        self.is_ending = self.has_failed = False

    @property
    def acts(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def begin(self, say: Callable[[str], None]) -> None:
        """Starts the process; its standard output is what it has to say, in lines of JSON."""
        with (self.folder / "log.txt").open("ab") as log:
            command = [sys.executable, "-m", _PROGRAM, str(self.folder), str(os.getpid())]
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the agent, which ends it
            )
        self.failure, self.is_ending = "", False
        self._listener = asyncio.create_task(self._listen(self.process, say))

    async def _listen(self, process: asyncio.subprocess.Process, say: Callable[[str], None]) -> None:
        assert process.stdout is not None
        failure = ""
        async for line in process.stdout:
            word = json.loads(line)
            if "turn" in word:
                self.spool.newest = word["turn"]
                if self.alone_since_s is None and self.spool.newest - self.spool.taken > _UNSENT:
                    failure = f"the run leaves {_UNSENT} turns unfetched: lower method.utd"
                    self.end()
            elif "failed" in word:
                failure = word["failed"]
            else:
                say(f"{self.folder.name}: {word['says']}")
            self.news.set()
        code = await process.wait()
        if not (failure or self.is_ending):
            failure = f"the process that acts ended with exit code {code} and gave no reason"
        self.failure, self.has_failed = failure, bool(failure)
        self.news.set()

    def end(self) -> None:
        """Tells the process to bring its arm to rest."""
        if self.acts and not self.is_ending and self.process is not None:
            self.is_ending = True
            self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> None:
        """Waits until the process has ended; the supervisor holds the arm of one that had to be killed."""
        self.end()
        if self.process is None:
            return
        try:
            await asyncio.wait_for(self.process.wait(), _END_S)
        except TimeoutError:
            logger.error("%s: did not end within %g s, killed", self.folder.name, _END_S)
            self.process.kill()
        await self._listener


class Agent:
    """One connection to the hub at a time, and the jobs of this machine, which outlive it."""

    def __init__(self, config: AgentConfig, say: Callable[[str], None] = lambda _: None) -> None:
        self._config, self._say = config, say
        self._state = FleetState(Path("runs"))
        self._folder = default_path().parent / "jobs"
        self._jobs = dict[str, Job]()
        self._pumps = dict[str, asyncio.Task[None]]()
        self._line: aiohttp.ClientWebSocketResponse | None = None
        self._changing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """One change of a job at a time: an arm may take long to come to rest."""
        self._tasks = set[asyncio.Task[None]]()

    async def run(self) -> None:
        """Serves until it is cancelled; then all jobs bring their arms to rest.

        Raises:
            HubRefusedError: the hub does not let it in: wrong token, another version, a name that is taken.
        """
        watch, pause_s, was_in = asyncio.create_task(self._watch()), _PAUSES_S[0], False
        try:
            while True:
                try:
                    async with connected(self._config.hub, "agent", {"node": self._config.name}) as line:
                        self._say(f"connected to {self._config.hub.address} as {self._config.name}")
                        pause_s, was_in = _PAUSES_S[0], True
                        await self._serve(line)
                        self._say(f"{self._config.hub.address} is gone")
                except HubRefusedError as error:
                    if not (was_in and error.status == _TAKEN):
                        raise
                except DeviceError as error:
                    self._say(f"{error} Trying again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSES_S[1])
        finally:
            watch.cancel()
            await asyncio.gather(*(job.ended() for job in self._jobs.values()))

    async def _serve(self, line: aiohttp.ClientWebSocketResponse) -> None:
        """Talks to the hub until the connection ends."""
        self._line = line
        shows = asyncio.create_task(self._show())
        try:
            async for message in line:
                if message.type is aiohttp.WSMsgType.BINARY:
                    await self._take(*msgpack.unpackb(message.data))
        finally:
            self._line = None
            shows.cancel()
            for name in list(self._jobs):
                self._leave_alone(name)

    async def _show(self) -> None:
        while True:
            look = await asyncio.to_thread(self._state.machine)
            await self._send("", "look", look)
            await asyncio.sleep(_LOOK_S)

    async def _watch(self) -> None:
        """Ends jobs whose run was away for too long."""
        while True:
            await asyncio.sleep(0.5)
            for name, job in self._jobs.items():
                if not job.acts or job.is_ending or job.alone_since_s is None:
                    continue
                if time.monotonic() - job.alone_since_s > job.alone_s:
                    self._say(f"{name}: its run was away for {job.alone_s:g} s; the arm rests")
                    job.end()

    async def _send(self, job: str, kind: str, body: Any) -> None:
        if self._line is not None:
            with contextlib.suppress(ConnectionError):  # cut off now: what is not acknowledged is sent again
                await self._line.send_bytes(frame(job, kind, body))

    async def _take(self, name: str, kind: str, body: Any) -> None:
        """Does what a frame says."""
        if kind in ("stop", "clear"):
            self._do(self._carry_out(kind, body))
        elif kind == "begin":
            self._do(self._begin(name, body))
        elif (job := self._jobs.get(name)) is None:
            return
        elif kind == "weights":
            replace_file(job.folder / "weights", body)
        elif kind == "has":
            job.spool.take(body)
            job.news.set()
        elif kind == "alone":
            self._leave_alone(name)
        elif kind == "end":
            self._do(self._forget(name))

    def _do(self, task: Coroutine[Any, Any, None]) -> None:
        """Does what takes long; meanwhile the connection is served."""
        self._tasks.add(doing := asyncio.create_task(task))
        doing.add_done_callback(self._tasks.discard)

    async def _carry_out(self, what: str, body: dict[str, Any]) -> None:
        """Carries out an order of a person at the fleet page."""
        who, refusal = (str(body["device"]), str(body["by"])), ""
        try:
            if what == "stop":
                await asyncio.to_thread(stop_arm, *who)
            else:
                await asyncio.to_thread(clear_device, *who)
        except RobotRLError as error:
            refusal = str(error)
        await self._send("", "done", {"number": body["number"], "refusal": refusal})

    async def _begin(self, name: str, body: dict[str, Any]) -> None:
        """Begins a job, or goes on with the one that is there, from the turn that its run has."""
        async with self._changing[name]:
            if name not in self._jobs:
                self._jobs[name] = Job(self._folder / name, body["alone_s"])
            job = self._jobs[name]
            job.alone_since_s = None
            if job.is_ending:
                await job.ended()
            if body["has"] is not None:
                job.spool.take(body["has"])
            try:
                if not job.acts:
                    _lay_out(job.folder, body)
                    self._say(f"{name}: begins")
                    await job.begin(self._say)
            except (OSError, ValueError) as error:
                await self._send(name, "failed", str(error))
                return
            self._stop_pump(name)
            self._pumps[name] = asyncio.create_task(self._pump(name, job))

    async def _pump(self, name: str, job: Job) -> None:
        """Sends a job's turns in order, then why it ended, if it did."""
        sent = job.spool.taken
        while True:
            job.news.clear()
            while sent < min(job.spool.newest, job.spool.taken + _AWAY):
                octets = job.spool.read(sent + 1)
                if octets is not None:
                    await self._send(name, "turn", {"number": sent + 1, "turn": octets})
                sent += 1
            if job.failure and sent == job.spool.newest:
                await self._send(name, "failed", job.failure)
                job.failure = ""
            await job.news.wait()

    def _stop_pump(self, name: str) -> None:
        if (pump := self._pumps.pop(name, None)) is not None:
            pump.cancel()

    def _leave_alone(self, name: str) -> None:
        """Notes that nobody fetches a job's turns."""
        self._stop_pump(name)
        if (job := self._jobs.get(name)) is not None and job.alone_since_s is None:
            job.alone_since_s = time.monotonic()

    async def _forget(self, name: str) -> None:
        """Ends a job of which its run needs no more."""
        async with self._changing[name]:
            self._stop_pump(name)
            if (job := self._jobs.pop(name, None)) is not None:
                self._say(f"{name}: ends")
                await job.ended()
                job.spool.take(job.spool.newest)
                if not job.has_failed:  # else its logs say more
                    shutil.rmtree(job.folder, ignore_errors=True)
        await self._send(name, "ended", None)


def _lay_out(folder: Path, body: dict[str, Any]) -> None:
    """Writes what the process of a job reads: settings and base of the run, and which source it is."""
    base = folder / "policy" / "base"
    if any(NAME.fullmatch(file) is None for file in body["files"]):
        raise ValueError(f"job: got the files {sorted(body['files'])}, allowed: names without a folder")
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    for file, content in body["files"].items():
        (base / file).write_bytes(content)
    replace_file(folder / "config.yaml", body["config"])
    replace_file(folder / "weights", body["weights"])
    replace_file(folder / "source.json", json.dumps({"name": body["source"], "holder": body["holder"]}))
