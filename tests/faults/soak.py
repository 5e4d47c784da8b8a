"""One run over four simulated arms and two simulators, in which something breaks again and again.

    python tests/faults/soak.py --minutes 120 --every 20 [--seed 0] [--out FILE]

`robot-rl train` learns `reach` from two batches of simulations in processes (a Panda, a gantry) and from four
stations in real time, each with driver and supervisor. Every 20 s on average one of `FAULTS` strikes. Where
the run ends, it is resumed. At the end

    the run has finished, with every source's budget to the step
    every recorded step can be read again, and the checksums of all stores are right
    no arm had orders from two holders: the supervisors' journals say under which token each order was

and the report says what the faults cost: control steps per second before the first and after it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from wall_clock import WallClock

from robot_rl.data.store.check import verify
from robot_rl.data.store.reader import open_source
from robot_rl.real.claim import device_of
from robot_rl.real.station import load_station
from robot_rl.sched.leases import LeaseStore
from tests.runs import patient_station

QUIET_S = 60.0
"""Time without faults at the beginning, for comparison."""
ARMS = ("north", "east", "south", "west")
ORDERS = {"reset", "start"}
"""Events of a supervisor's journal that a client ordered."""
_PREEMPTS_S, _KEEPS_S = 20.0, 3.0


@dataclass
class Rival:
    """A time in which another holder had an arm."""

    arm: str
    token: int
    since_s: float
    until_s: float
    handed_over_s: float


@dataclass
class Soak:
    """The run, its machine, and what happened so far."""

    folder: Path
    minutes: float
    chance: random.Random
    clock: WallClock
    process: subprocess.Popen[bytes] | None = None
    struck: Counter[str] = field(default_factory=Counter[str])
    resumed: list[str] = field(default_factory=list[str])
    rivals: list[Rival] = field(default_factory=list[Rival])

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def run(self) -> Path | None:
        """The run's folder, once there is one."""
        return next((path.parent for path in self.runs.glob("*/config.yaml")), None)

    def station(self, arm: str) -> Path:
        return self.folder / f"{arm}.yaml"

    # The run

    def begin(self) -> None:
        """Begins the run, or goes on with it."""
        words = [*self._words(), "lease_wait_s=60"] if self.run is None else [f"resume={self.run}"]
        environment = {**os.environ, **self.clock.environment, "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "robot_rl.cli.main", "train", *words]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _words(self) -> list[str]:
        arm_steps = round(0.5 * 20 * 60 * self.minutes)
        words = [
            "recipe=two_robots",
            "transport=process",
            "silence_s=40",
            "restarts=1000",
            "method.utd=0.05",
            "method.batch=64",
            "method.capacity=20000",
            "evaluate.every_env_steps=0",
            "evaluate.episodes=20",
            "evaluate.num_envs=10",
            "video.episodes=0",
            "video.failures=0",
            "checkpoint.every_s=20",
            f"out={self.runs}",
        ]
        for robot in ("panda", "gantry"):
            words += [f"sources.{robot}.num_envs=2", f"sources.{robot}.env_steps={2 * arm_steps}"]
        for arm in ARMS:
            words += [f"sources.{arm}.robot=panda", f"sources.{arm}.env_steps={arm_steps}"]
            words += [f"sources.{arm}.station={self.station(arm)}"]
        return [*words, *(f"sources.{name}.share={1 / 6}" for name in ("panda", "gantry", *ARMS))]

    def steps(self) -> int:
        """Returns the control steps of the newest row of metrics."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            folder = self.run or self.folder
            return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    # Victims

    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def actors(self) -> list[int]:
        found = [(pid, parent) for pid, parent, words in processes() if "forkserver" in words]
        servers = [pid for pid, parent in found if parent == self.pid()]
        return [pid for pid, parent in found if parent in servers]

    def of_stations(self, module: str) -> list[int]:
        """Returns the drivers' hosts or the supervisors."""
        return [pid for pid, _, words in processes() if module in words and str(self.runs) in words]


def processes() -> Iterator[tuple[int, int, str]]:
    """Yields process, parent and command line."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(path.name), parent, words


# Faults: each returns whether there was something to strike.


def kill_actor(soak: Soak) -> bool:
    return _signal(soak, soak.actors(), signal.SIGKILL)


def hang_actor(soak: Soak) -> bool:
    """Never continued: the run has to notice its silence."""
    return _signal(soak, soak.actors(), signal.SIGSTOP)


def slow_actor(soak: Soak) -> bool:
    found = soak.actors()
    if not found:
        return False
    victim = soak.chance.choice(found)
    os.kill(victim, signal.SIGSTOP)
    time.sleep(2.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGCONT)
    return True


def disconnect(soak: Soak) -> bool:
    """The driver of an arm is gone."""
    return _signal(soak, soak.of_stations("drivers.host"), signal.SIGKILL)


def kill_supervisor(soak: Soak) -> bool:
    return _signal(soak, soak.of_stations("supervisor.main"), signal.SIGKILL)


def kill_learner(soak: Soak) -> bool:
    return _signal(soak, [soak.pid()], signal.SIGKILL)


def corrupt_weights(soak: Soak) -> bool:
    """A bit flips in the memory through which weights go."""
    maps = Path(f"/proc/{soak.pid()}/maps").read_text()
    found = sorted({line.split()[-1] for line in maps.splitlines() if "/dev/shm/psm_" in line})
    if not found:
        return False
    with Path(found[0]).open("r+b") as memory:
        size = memory.seek(0, os.SEEK_END)
        where = soak.chance.randrange(size)
        memory.seek(where)
        (octet,) = memory.read(1)
        memory.seek(where)
        memory.write(bytes([octet ^ (1 << soak.chance.randrange(8))]))
    return True


def fill_disk(soak: Soak) -> bool:
    """The disk of the run folder is full for a while."""
    if not soak.runs.is_mount():
        return False
    filler = soak.runs / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    time.sleep(5.0)
    filler.unlink()
    return True


def step_clock(soak: Soak) -> bool:
    soak.clock.set(soak.chance.choice([-3600, 0, 3600]))
    return True


def preempt(soak: Soak) -> bool:
    """Another holder, of a larger priority, takes an arm for a while."""
    arm = soak.chance.choice(ARMS)
    spec, asked_s = device_of(load_station(str(soak.station(arm)))), time.monotonic()
    how: dict[str, Any] = {"priority": 1, "wait_s": 60.0, "preempt_s": _PREEMPTS_S}
    with LeaseStore().hold(spec, holder="rival", **how) as held:
        since_s = time.monotonic()
        time.sleep(_KEEPS_S)
        soak.rivals.append(Rival(arm, held.token, since_s, time.monotonic(), since_s - asked_s))
    return True


FAULTS: dict[str, Callable[[Soak], bool]] = {
    "an actor is killed": kill_actor,
    "an actor hangs": hang_actor,
    "an actor stands still for 2 s": slow_actor,
    "a driver is killed": disconnect,
    "a supervisor is killed": kill_supervisor,
    "the learner is killed": kill_learner,
    "a bit of the weights flips": corrupt_weights,
    "the disk is full for 5 s": fill_disk,
    "the wall clock steps by an hour": step_clock,
    "a larger priority takes an arm": preempt,
}


def _signal(soak: Soak, found: list[int], number: signal.Signals) -> bool:
    if not found:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(soak.chance.choice(found), number)
    return True


# The soak


def run(soak: Soak, every_s: float) -> dict[str, Any]:
    """Strikes until the run has finished; returns the report."""
    soak.begin()
    while _goes_on(soak) and not (soak.steps() and len(soak.actors()) >= len(ARMS)):
        time.sleep(0.5)
    began_s, first = time.monotonic(), soak.steps()
    _wait(soak, QUIET_S)
    quiet = (soak.steps() - first) / (time.monotonic() - began_s)
    struck_s, before = time.monotonic(), soak.steps()
    last_s, last = struck_s, before
    while _goes_on(soak):
        _wait(soak, soak.chance.uniform(0.5, 1.5) * every_s)
        if (now := soak.steps()) > last:
            last_s, last = time.monotonic(), now
        name = soak.chance.choice(list(FAULTS))
        with contextlib.suppress(OSError):
            soak.struck[name] += FAULTS[name](soak)
    loud = (last - before) / max(1.0, last_s - struck_s)
    return {
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "faults": dict(soak.struck),
        "times the run was resumed": len(soak.resumed),
        "why": soak.resumed,
        "hand-over s": sorted(round(rival.handed_over_s, 2) for rival in soak.rivals),
        "control steps/s without faults": round(quiet, 1),
        "control steps/s with faults": round(loud, 1),
        **audit(soak),
    }


def _wait(soak: Soak, seconds: float) -> None:
    """Waits, and resumes a run that ended."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and _goes_on(soak):
        time.sleep(0.2)


def _goes_on(soak: Soak) -> bool:
    """Resumes a run that ended before it was finished; returns whether it is not finished."""
    assert soak.process is not None
    code = soak.process.poll()
    if code is None:
        return True
    if code == 0:
        return False
    lines = (soak.folder / "log").read_text(errors="replace").strip().splitlines()
    soak.resumed.append(f"exit code {code}: {lines[-1][:200] if lines else ''}")
    assert len(soak.resumed) < 1000, "the run does not come back"
    time.sleep(1.0)
    soak.begin()
    return True


def audit(soak: Soak) -> dict[str, Any]:
    """Returns what is wrong with what the run left."""
    folder = soak.run
    assert folder is not None
    config = yaml.safe_load((folder / "config.yaml").read_text())["sources"]
    summary = json.loads((folder / "summary.json").read_text())["sources"]
    wrong = list[str]()
    for name, source in config.items():
        store = folder / "experience" / name
        if problems := verify(store).problems:
            wrong.append(f"{name}: {problems}")
        record = open_source(store)
        rows = sum(len(record.read(number)) for number in range(len(record)))
        for what, got in (("summary", summary[name]["env_steps"]), ("record", rows)):
            if got != source["env_steps"]:
                wrong.append(f"{name}: {got:,} control steps in the {what}, of {source['env_steps']:,}")
    return {"corrupted or incomplete": wrong, "arms with two holders": doubly_driven(soak, folder)}


def doubly_driven(soak: Soak, folder: Path) -> list[str]:
    """Returns the orders that an arm had under one token within the time of another."""
    found = list[str]()
    for arm in ARMS:
        times: dict[int, list[float]] = {}
        journal, token = folder / arm / "station" / "events.jsonl", -1
        for line in journal.read_text().splitlines():
            with contextlib.suppress(ValueError):  # torn by a kill
                event = json.loads(line)
                token = event.get("token", token) if event["event"] == "begin" else token
                if event["event"] in ORDERS:
                    times.setdefault(token, []).append(event["monotonic_s"])
        for rival in (rival for rival in soak.rivals if rival.arm == arm):
            times[rival.token] = [rival.since_s, rival.until_s]
        spans = sorted((token, min(at), max(at)) for token, at in times.items())
        found += [
            f"{arm}: token {one[0]} until {one[2]:.2f} s, token {other[0]} since {other[1]:.2f} s"
            for one, other in itertools.pairwise(spans)
            if one[2] > other[1]
        ]
    return found


@contextlib.contextmanager
def disk(folder: Path) -> Generator[None]:
    """Gives the runs a small disk of their own, where this process may."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1g", "none", str(folder)], check=False
    ).returncode
    try:
        yield
    finally:
        if made == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file of the report")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="robot-rl-soak-"))
    os.environ["ROBOT_RL_STATE"] = str(folder / "state")
    for arm in ARMS:
        settings = yaml.safe_load(patient_station(folder).read_text())
        (folder / f"{arm}.yaml").write_text(yaml.safe_dump({**settings, "name": arm}))
    soak = Soak(folder, options.minutes, random.Random(options.seed), WallClock(folder))
    try:
        with disk(soak.runs):
            report = run(soak, options.every)
            print(json.dumps(report, indent=1))
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1))
            bad = bool(report["corrupted or incomplete"] or report["arms with two holders"])
    finally:
        if soak.process is not None:
            soak.process.kill()
    if not bad:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
