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
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DeviceError, RobotRLError, require
from robot_rl.core.files import replace_file
from robot_rl.core.lock import HeldError, ProcessLock
from robot_rl.fleet.kept import Kept
from robot_rl.fleet.shown import ShownArms
from robot_rl.fleet.state import FleetState, clear_device, stop_arm
from robot_rl.real.remote import back_off
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import BACK_OFF_S, NAME, Connection, Pace, TakenError, connected
from robot_rl.rollout.spool import Spool
from robot_rl.sched.lease_file import default_path

logger = logging.getLogger(__name__)

_PROGRAM = "robot_rl.train.improve.at_node"
_LOOK_S = 1.0
"""How often the hub is shown what is here."""
_RUNS_S = 10.0
"""How often runs are read: their files are long, and the arms of this machine need its processors."""
_AWAY = 64
"""Turns that may be on their way to a run; it acknowledges those that it has."""
_UNSENT = 6000
"""Turns that a run may leave unfetched while it is there: five minutes of an arm at 20 Hz."""
_LOG_S = 0.2
"""How often what a job logs is looked at."""
_TAKEN_S = 6.0
"""How long a name may be taken as the agent begins: the hub lets that of a killed one go after 4 s."""
_END_S = 40.0
"""How long a job may take to bring its arm to rest."""
_CLEAN_S = 3600.0
"""How often the folders of jobs are looked through for what is too old."""
_WORDS = 20
"""What an arm has to say to a run that is away: the newest of it."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Which hub, and under which name."""

    hub: HubConfig = field(default_factory=HubConfig)
    name: str = field(default_factory=lambda: socket.gethostname().split(".")[0])
    """Of this machine: what runs need with `needs.node`."""
    runs: str = "runs"
    """Folder of run folders, which the hub shows."""
    keep_days: float = 14.0
    """Steps that no run has fetched for so long are deleted, and recordings to which nothing was added."""

    def __post_init__(self) -> None:
        require(self.keep_days > 0, "keep_days", self.keep_days, "above 0")
        pictures, allowed = self.hub.pictures, "send, as if left out: the run says where its pictures stay"
        require(pictures == "send", "hub.pictures", pictures, allowed)
        require(self.hub.address is not None, "hub.address", None, "https://<host>:8642 of `robot-rl fleet`")
        require(NAME.fullmatch(self.name) is not None, "name", self.name, "letters, digits, '.', '_' and '-'")


class Job:
    """A process that acts here for a run elsewhere, and the steps that the run does not have yet."""

    def __init__(
        self, folder: Path, show: Callable[[str], None] = lambda _: None, *, remedy: str = ""
    ) -> None:
        """Takes what was left in a folder.

        Args:
            folder: of the job.
            show: gets what the process logs, such as what a person at the arm is asked.
            remedy: ends the message about a run that fetches too few turns.
        """
        self.folder, self._show = folder, show
        self.spool = Spool(folder / "turns")
        self.process: asyncio.subprocess.Process | None = None
        self.alone_s = 0.0
        """How long it acts on without its run."""
        self.remedy = remedy
        self.alone_since_s: float | None = None
        """When its run was there last; None while it is."""
        self.news = asyncio.Event()
        """Set when there is something to send."""
        self.words = deque[str](maxlen=_WORDS)
        """What a person at the run may want to know: who has the arm, say."""
        self.failure = ""
        """Why the process ended by itself; it is not begun again before the run knows."""
        self.is_ending = False

    @property
    def acts(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def is_left(self, days: float) -> bool:
        """Whether it has rested without its run for so long, by a clock that nobody sets."""
        since_s = self.alone_since_s
        return not self.acts and since_s is not None and time.monotonic() - since_s > 86400.0 * days

    @property
    def pid(self) -> int | None:
        """Id of its process, which holds the lease of an arm."""
        return None if self.process is None else self.process.pid

    async def begin(self) -> None:
        """Starts the process; its standard output is what it has to say, in lines of JSON."""
        with (self.folder / "log.txt").open("ab") as log:
            begins = log.tell()
            command = [sys.executable, "-m", _PROGRAM, str(self.folder), str(os.getpid())]
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the agent, which ends it
            )
        self.is_ending = False
        self._listener = asyncio.create_task(self._listen(self.process))
        self._reader = asyncio.create_task(self._show_log(begins))

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            try:
                self._hear(json.loads(line))
            except (ValueError, KeyError, TypeError):  # another package printed it
                logger.warning("%s: %s", self.folder.name, line.decode(errors="replace").rstrip())
            self.news.set()
        code = await process.wait()
        if not (self.failure or self.is_ending):
            self.failure = f"the process that acts ended with exit code {code} and gave no reason"
        self.news.set()

    async def _show_log(self, begins: int) -> None:
        """Shows what the process logs, which it writes to its file itself, from a byte of that on."""
        left = b""
        with (self.folder / "log.txt").open("rb") as log:
            log.seek(begins)
            while True:
                acts = self.acts
                *lines, left = re.split(rb"[\r\n]+", left + log.read())
                if not acts:
                    lines.append(left)
                for line in filter(None, lines):
                    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
                        self._show(line.decode(errors="replace"))
                if not acts:
                    return
                await asyncio.sleep(_LOG_S)

    def _hear(self, word: dict[str, Any]) -> None:
        if "turn" in word:
            self.spool.newest = int(word["turn"])
            if self.alone_since_s is None and self.spool.newest - self.spool.taken > _UNSENT:
                self.failure = f"the run leaves {_UNSENT} turns unfetched: lower method.utd{self.remedy}"
                self.end()
        elif "failed" in word:
            self.failure = str(word["failed"])
        else:
            self.words.append(str(word["says"]))

    def end(self) -> None:
        """Tells the process to bring its arm to rest."""
        if self.acts and not self.is_ending and self.process is not None:
            self.is_ending = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> None:
        """Waits until the process has ended; the supervisor holds the arm of one that had to be killed."""
        self.end()
        if self.process is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        except TimeoutError:
            logger.error("%s: did not end within %g s, killed", self.folder.name, _END_S)
            self.process.kill()
        await asyncio.gather(self._listener, self._reader, return_exceptions=True)


class Agent:
    """One connection to the hub at a time, and the jobs of this machine, which outlive it."""

    def __init__(self, config: AgentConfig, say: Callable[[str], None] = lambda _: None) -> None:
        self._config, self._say = config, say
        self._state = FleetState(Path(config.runs))
        self._folder = default_path().parent / "jobs"
        self._jobs = dict[str, Job]()
        self._here = set[str]()
        """Jobs whose run is there, by the newest message."""
        self._weights = dict[str, bytes]()
        """The newest weights of each job that were not written yet."""
        self._pumps = dict[str, asyncio.Task[None]]()
        self._hub: Connection | None = None
        self._pace = Pace(config.hub.most_mbit_s)
        """Of the steps of all jobs, and of scenes."""
        self._changing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """One change of a job at a time, in the order of messages: an arm may take long to come to rest."""
        self._tasks = set[asyncio.Task[None]]()
        self._shown = ShownArms(self._state, self._send_paced)
        self._kept = Kept(self._send_paced)

    async def run(self) -> None:
        """Serves until it is cancelled; then all jobs bring their arms to rest.

        Raises:
            HubRefusedError: the hub does not let this machine in: wrong token, or another version.
            TakenError: another machine has the name, and did not let it go within some seconds.
        """
        for name in await asyncio.to_thread(_left_over, self._folder):
            days = f"within {self._config.keep_days:g} days (keep_days)"
            self._say(f"{name}: has steps that its run did not fetch; resume it {days}, or remove the folder")
        watches = [asyncio.create_task(task) for task in (self._watch(), self._clean())]
        pauses, was_in = back_off(*BACK_OFF_S), False
        taken_s: float | None = None
        """Since when the name is another's."""
        try:
            while True:
                pause_s = next(pauses)
                try:
                    async with connected(self._config.hub, "agent", {"node": self._config.name}) as hub:
                        self._say(f"connected to {self._config.hub.address} as {self._config.name}")
                        pauses, was_in, taken_s = back_off(*BACK_OFF_S), True, None
                        pause_s = next(pauses)
                        await self._serve(hub)
                        self._say(f"{self._config.hub.address} is gone")
                except TakenError as error:  # perhaps by our own connection of before
                    now_s = time.monotonic()
                    if taken_s is None:
                        taken_s = now_s
                        self._say(f"{error} Perhaps an agent that is gone still has it: waits for it")
                    if not was_in and now_s - taken_s > _TAKEN_S:
                        raise
                except DeviceError as error:
                    self._say(f"{error} Trying again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(self._shown.close(), *(job.ended() for job in self._jobs.values()))

    async def _serve(self, hub: Connection) -> None:
        """Talks to the hub until the connection ends."""
        self._hub = hub
        shows = [asyncio.create_task(show) for show in (self._show(), self._show_runs())]
        try:
            async for message in hub.messages():
                try:
                    self._take(*message)
                except (ValueError, TypeError, KeyError) as error:
                    logger.warning("a message of the hub that is none of ours: %r", error)
        finally:
            self._hub = None
            self._shown.leave()
            for show in shows:
                show.cancel()
            for name in list(self._here):
                self._leave_alone(name)

    async def _show(self) -> None:
        while True:
            try:
                look = await asyncio.to_thread(self._state.machine)
                pids = {lease["pid"] for device in look["devices"] for lease in device["held"]}
                look["acting"] = [name for name, job in self._jobs.items() if job.pid in pids]
                look["kept"] = await asyncio.to_thread(self._kept.jobs)
            except (RobotRLError, OSError) as error:  # it is still here
                look = {"problems": [str(error)]}
            await self._send("", "look", look)
            await asyncio.sleep(_LOOK_S)

    async def _show_runs(self) -> None:
        """Shows the newest runs of this machine, whenever something about them has changed."""
        shown: Any = None
        while True:
            with contextlib.suppress(OSError):  # a folder that goes while it is read
                runs = await asyncio.to_thread(self._state.newest_runs)
                if runs != shown:
                    shown = runs
                    await self._send("", "runs", runs)
            await asyncio.sleep(_RUNS_S)

    async def _watch(self) -> None:
        """Ends jobs whose run was away for too long."""
        while True:
            await asyncio.sleep(0.5)
            for name, job in self._jobs.items():
                if not job.acts or job.is_ending or job.alone_since_s is None:
                    continue
                if time.monotonic() - job.alone_since_s > job.alone_s:
                    job.end()
                    self._say(f"{name}: its run was away for {job.alone_s:g} s; the arm rests")

    async def _clean(self) -> None:
        """Deletes, now and then, what no run has fetched for too long; never what a run or process uses."""
        days = self._config.keep_days
        while True:
            for name in await asyncio.to_thread(_old, self._folder, days):
                async with self._changing[name]:
                    job = self._jobs.get(name)
                    if name in self._here or (job is not None and not job.is_left(days)):
                        continue
                    self._jobs.pop(name, None)
                    turns = await asyncio.to_thread(_delete, self._folder / name)
                    if turns is not None:
                        what = f"with {turns} turns that its run did not fetch for {days:g} days (keep_days)"
                        self._say(f"{name}: deleted, {what}")
            for name in await asyncio.to_thread(self._kept.delete_old, days):
                self._say(f"{name}: its recording was deleted, {days:g} days old (keep_days)")
            await asyncio.sleep(_CLEAN_S)

    async def _send(self, job: str, kind: str, body: Any) -> bool:
        """Sends a message; what does not arrive of a job is sent again."""
        return self._hub is not None and await self._hub.send(job, kind, body)

    async def _send_paced(self, kind: str, body: Any) -> bool:
        """Sends something of a scene or of a recording; its bytes, when the line allows them."""
        if "octets" in body:
            await self._pace.wait(len(body["octets"]))
        return await self._send("", kind, body)

    def _take(self, name: str, kind: str, body: Any) -> None:
        """Begins what a message asks for; what belongs to one job is done in order."""
        if kind in ("stop", "clear"):
            self._do(self._carry_out(kind, int(body["number"]), str(body["device"]), str(body["by"])))
            return
        if kind in ShownArms.kinds:
            if (answer := self._shown.take(kind, body)) is not None:
                self._do(answer)
            return
        if kind in Kept.kinds:
            self._do(self._kept.answer(kind, body))
            return
        if NAME.fullmatch(name) is None:
            raise ValueError(f"a job named {name!r}")
        if kind == "begin":
            self._here.add(name)
            has = None if body["has"] is None else int(body["has"])
            self._do(self._begin(name, float(body["alone_s"]), has))
        elif kind == "content":
            self._weights.pop(name, None)
            self._do(self._start(name, body))
        elif kind == "weights":
            if not isinstance(body, bytes):
                raise TypeError(f"weights that are a {type(body).__name__}")
            is_due = name not in self._weights
            self._weights[name] = body
            if is_due:
                self._do(self._write_weights(name))
        elif kind == "has":
            self._do(self._acknowledge(name, int(body)))
        elif kind in ("rest", "end"):
            self._leave_alone(name)
            self._do(self._rest(name, forget=kind == "end"))
        elif kind == "alone":
            self._leave_alone(name)

    def _do(self, task: Coroutine[Any, Any, None]) -> None:
        """Does what takes long; meanwhile the connection is served."""
        self._tasks.add(doing := asyncio.create_task(task))
        doing.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the agent failed", exc_info=error)

    async def _carry_out(self, what: str, number: int, device: str, by: str) -> None:
        """Carries out an order of a person at the fleet page."""
        refusal = ""
        try:
            if what == "stop":
                await asyncio.to_thread(stop_arm, device, by)
            else:
                await asyncio.to_thread(clear_device, device, by)
        except RobotRLError as error:
            refusal = str(error)
        await self._send("", "done", {"number": number, "refusal": refusal})

    async def _begin(self, name: str, alone_s: float, has: int | None) -> None:
        """Goes on with a job from the turn that its run has, or asks for what it needs to begin."""
        async with self._changing[name]:
            try:
                job = self._jobs.get(name) or self._jobs.setdefault(name, self._job(name))
                job.alone_s = alone_s
                if job.is_ending:
                    await job.ended()
                if has is not None:
                    job.spool.take(has)
            except OSError as error:
                await self._send(name, "failed", str(error))
                return
            if name not in self._here:  # it has left meanwhile
                return
            job.alone_since_s = None
            self._stop_pump(name)  # before the answer: turns that precede it are of the connection before
            await self._send(name, "begun" if job.acts or job.failure else "needs", None)
            if name in self._here:
                self._pumps[name] = asyncio.create_task(self._pump(name, job))

    def _job(self, name: str) -> Job:
        remedy = ", or raise hub.most_mbit_s of this agent" if self._config.hub.most_mbit_s else ""
        return Job(self._folder / name, lambda line: self._say(f"{name}: {line}"), remedy=remedy)

    async def _start(self, name: str, content: dict[str, Any]) -> None:
        """Starts the process of a job with what the run has sent for it."""
        async with self._changing[name]:
            job = self._jobs.get(name)
            if job is None or job.acts or name not in self._here:
                return
            try:
                await asyncio.to_thread(_lay_out, job.folder, content)
                await job.begin()
            except (OSError, ValueError, TypeError, KeyError) as error:
                await self._send(name, "failed", f"{type(error).__name__}: {error}")
                return
            self._say(f"{name}: begins")
            await self._send(name, "begun", None)

    async def _write_weights(self, name: str) -> None:
        async with self._changing[name]:
            weights = self._weights.pop(name, None)
            if weights is not None and name in self._jobs:
                await asyncio.to_thread(replace_file, self._jobs[name].folder / "weights", weights)
        await self._send(name, "loaded", None)

    async def _acknowledge(self, name: str, has: int) -> None:
        async with self._changing[name]:
            if (job := self._jobs.get(name)) is not None:
                job.spool.take(has)
                job.news.set()

    async def _pump(self, name: str, job: Job) -> None:
        """Sends what a job has to say and its turns, in order, then why it ended, if it did."""
        sent = job.spool.taken
        while True:
            job.news.clear()
            while job.words:
                await self._send(name, "says", job.words.popleft())
            while sent < min(job.spool.newest, job.spool.taken + _AWAY):
                octets = job.spool.read(sent + 1)
                if octets is not None:
                    await self._pace.wait(len(octets))
                    await self._send(name, "turn", {"number": sent + 1, "turn": octets})
                sent += 1
            if job.failure and sent >= job.spool.newest:
                await self._send(name, "failed", job.failure)
            await job.news.wait()

    def _stop_pump(self, name: str) -> None:
        if (pump := self._pumps.pop(name, None)) is not None:
            pump.cancel()

    def _leave_alone(self, name: str) -> None:
        """Notes that nobody fetches a job's turns."""
        self._here.discard(name)
        self._stop_pump(name)
        if (job := self._jobs.get(name)) is not None and job.alone_since_s is None:
            job.alone_since_s = time.monotonic()

    async def _rest(self, name: str, *, forget: bool) -> None:
        """Ends the process of a job; with `forget` its run needs no more of it, else it may be resumed."""
        async with self._changing[name]:
            job = self._jobs.pop(name, None)
            if job is not None:
                await job.ended()
                self._say(f"{name}: ends")
                if forget:
                    has_failed = bool(job.failure)
                    await asyncio.to_thread(_forget, job, keep_logs=has_failed)
        await self._send(name, "ended", None)


def _lay_out(folder: Path, content: dict[str, Any]) -> None:
    """Writes what the process of a job reads: settings and base of the run, and which source it is."""
    base = folder / "policy" / "base"
    if any(NAME.fullmatch(file) is None for file in content["files"]):
        raise ValueError(f"job: got the files {sorted(content['files'])}, allowed: names without a folder")
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    for file, octets in content["files"].items():
        (base / file).write_bytes(octets)
    replace_file(folder / "config.yaml", content["config"])
    replace_file(folder / "weights", content["weights"])
    job = {"name": content["source"], "holder": content["holder"], "stays": content["stays"]}
    replace_file(folder / "source.json", json.dumps(job))


def _forget(job: Job, *, keep_logs: bool) -> None:
    """Removes what a job has left: all of it, or its turns."""
    if keep_logs:
        job.spool.take(job.spool.newest)
    else:
        shutil.rmtree(job.folder, ignore_errors=True)


def _left_over(folder: Path) -> list[str]:
    """Returns the jobs that have turns which no run has fetched; the others that nobody has are removed."""
    found = list[str]()
    for job in sorted(folder.glob("*")):
        try:
            lock = ProcessLock(job / "lock")
        except (HeldError, OSError):  # its process brings the arm to rest
            continue
        if any(one.name.isdigit() for one in (job / "turns").glob("*")):
            found.append(job.name)
        else:
            shutil.rmtree(job, ignore_errors=True)
        lock.release()
    return found


def _old(folder: Path, keep_days: float) -> list[str]:
    """Returns the jobs of which nothing was written or fetched for so long."""
    before_s = time.time() - 86400.0 * keep_days
    return [job.name for job in sorted(folder.glob("*")) if _touched_s(job) < before_s]


def _touched_s(job: Path) -> float:
    """Returns when turns came or went last, or settings or weights came, in seconds since 1970."""
    try:
        paths = [path for path in job.glob("*") if path.name != "lock"]  # each agent that begins takes that
        return max(path.stat().st_mtime for path in paths or [job])
    except OSError:  # it is being changed
        return math.inf


def _delete(job: Path) -> int | None:
    """Deletes a job's folder; returns how many turns were in it, or None if a process has it."""
    try:
        lock = ProcessLock(job / "lock")
    except (HeldError, OSError):  # its process brings the arm to rest
        return None
    turns = sum(one.name.isdigit() for one in (job / "turns").glob("*"))
    shutil.rmtree(job, ignore_errors=True)
    lock.release()
    return turns
