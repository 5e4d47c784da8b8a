"""A run learns on an arm of another machine while cables are cut and processes die; no step may be lost.

    python tests/faults/node_campaign.py --faults 30 [--seed 0] [--json]

Three machines: a hub, a lab with an arm (simulated, with its station's processes, in real time) and an office
with the learner. As root they are network namespaces: lab and office each have a cable to the hub and none to
each other, nothing listens in the lab, and all talk through TLS. Otherwise they share the loopback, and no
cable is cut. A fault is one of

    cut      the cable of the lab or of the office carries nothing for some seconds, and nobody hears of it
    hub      is killed and begun again
    agent    is killed and begun again
    asleep   the agent is stopped for some seconds (SIGSTOP)
    job      the process that acts is killed: the run ends without it, and is resumed
    learner  is killed and resumed

Wrong would be

    gaps        a turn that the run never got, though one after it arrived
    disorder    a turn that came twice to one learner, or after a later one
    overlaps    a turn that was made before the one ahead of it in number: two processes acted
    two leases  two leases of the arm at once in the lab's lease file
    standstill  nothing learned within two minutes after a fault
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from robot_rl.config import build, dump
from robot_rl.real.inventory import enter
from robot_rl.sched.leases import LeaseStore
from robot_rl.train.config import RunConfig
from tests.runs import SMALL, patient_station

WRONG = ("gaps", "disorder", "overlaps", "two leases", "standstill")
PORT, ALONE_S, LIMIT_S = 8699, 4.0, 120.0
_COMMAND = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
_LEARN = """
import sys, time
from pathlib import Path
from robot_rl.config import read
from robot_rl.rollout.on_node import _Remote
from robot_rl.rollout.wire import decode_turn
from robot_rl.train import phases
from robot_rl.train.config import RunConfig

config, folder, log = Path(sys.argv[1]), sys.argv[2], open(sys.argv[3], "a")
arrive = _Remote._arrive

def noted(remote, number, octets):
    before = remote.received
    arrive(remote, number, octets)
    if remote.received != before:
        print(number, decode_turn(octets).segment.stamp_ns, file=log, flush=True)

_Remote._arrive = noted
print("learner", file=log, flush=True)
if folder:
    phases.resume(folder)
else:
    phases.run(read(RunConfig, config))
"""


class Machines:
    """Hub, lab and office: network namespaces with a cable each to the hub, or all of this machine."""

    def __init__(self, stack: ExitStack) -> None:
        self.has_cables = os.geteuid() == 0 and shutil.which("ip") is not None
        self._names, self._ports = dict[str, str](), dict[str, str]()
        for number, name in enumerate(("lab", "office"), 1):
            if not self.has_cables:
                return
            space = self._names[name] = f"rrl-{name}-{os.getpid()}"
            at, theirs = f"10.77.{number}", "eth0"
            ours = self._ports[name] = f"rrl{number}-{os.getpid()}"
            try:
                ip("netns", "add", space)
            except subprocess.CalledProcessError:  # a container without the right to
                self.has_cables = False
                return
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
            ip("addr", "add", f"{at}.1/30", "dev", ours)
            ip("link", "set", ours, "up")
            for words in (("addr", "add", f"{at}.2/30", "dev", theirs), ("link", "set", theirs, "up")):
                ip("-n", space, *words)
            ip("-n", space, "link", "set", "lo", "up")

    def hub_at(self, name: str) -> str:
        """Returns the address of the hub, as a machine sees it."""
        host = f"10.77.{1 + list(self._names).index(name)}.1" if self.has_cables else "127.0.0.1"
        return f"https://{host}:{PORT}"

    def on(self, name: str) -> list[str]:
        """Returns the words that run a command on a machine."""
        return ["ip", "netns", "exec", self._names[name]] if self.has_cables else []

    def cut(self, name: str, cut_s: float) -> None:
        """Lets the cable of a machine carry nothing for a while; neither end sees that.

        Frames go to a card that nobody has.
        """
        at = f"10.77.{1 + list(self._names).index(name)}"
        ends = ((), f"{at}.2", self._ports[name]), (("-n", self._names[name]), f"{at}.1", "eth0")
        for where, peer, port in ends:
            ip(
                *where,
                "neigh",
                "replace",
                peer,
                "lladdr",
                "02:00:00:00:00:01",
                "dev",
                port,
                "nud",
                "permanent",
            )
        time.sleep(cut_s)
        for where, peer, port in ends:
            ip(*where, "neigh", "del", peer, "dev", port)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Fleet:
    """The processes, the faults that befall them, and what the learner got."""

    def __init__(self, folder: Path, machines: Machines) -> None:
        self.folder, self._machines = folder, machines
        self.config = folder / "run.yaml"
        self.received = folder / "received.txt"
        self.received.touch()
        self._hub = self._agent = self._learner = None
        self.begin_hub()
        assert until((folder / "hub" / "fleet.token").exists, 60.0), f"no hub: {folder}"
        self.begin_agent()
        assert until(lambda: "connected" in (folder / "agent.log").read_text(), 60.0), f"no agent: {folder}"

    def _begin(
        self, name: str, state: str, words: list[str], on: str | None = None
    ) -> subprocess.Popen[bytes]:
        env = {**os.environ, "ROBOT_RL_STATE": str(self.folder / state), "PYTHONUNBUFFERED": "1"}
        command = [*(self._machines.on(on) if on else []), sys.executable, "-c", *words]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def begin_hub(self) -> None:
        names = "names=[10.77.1.1,10.77.2.1]"
        tls = [f"cert={self.folder / 'server.pem'}", f"key={self.folder / 'server.key'}"]
        words = [_COMMAND, "fleet", "host=0.0.0.0", f"port={PORT}", names, *tls, f"runs={self.folder}"]
        self._hub = self._begin("hub", "hub", words)

    def begin_agent(self) -> None:
        words = [_COMMAND, "agent", "name=lab", *(f"hub.{k}={v}" for k, v in self.hub_words("lab").items())]
        self._agent = self._begin("agent", "lab", words, on="lab")

    def begin_learner(self) -> None:
        runs = [path.parent for path in self.folder.glob("runs/*/config.yaml")]
        words = [_LEARN, str(self.config), str(runs[0]) if runs else "", str(self.received)]
        self._learner = self._begin("learner", "office", words, on="office")

    def hub_words(self, name: str) -> dict[str, str]:
        folder = self.folder
        return {
            "address": self._machines.hub_at(name),
            "token_file": str(folder / "hub" / "fleet.token"),
            "ca": str(folder / "authority.pem"),
        }

    def progress(self) -> int:
        """Returns how many turns have arrived."""
        return sum(1 for line in self.received.read_text().splitlines() if line != "learner")

    def strike(self, fault: str, random_s: float) -> None:
        """Makes a fault, and puts right what a person or a service manager would."""
        if fault == "cut":
            self._machines.cut(random.choice(("lab", "office")), 4 * random_s)
        elif fault == "hub":
            kill(self._hub)
            time.sleep(random_s)
            self.begin_hub()
        elif fault == "agent":
            kill(self._agent)
            time.sleep(random_s)
            self.begin_agent()
        elif fault == "asleep":
            signalled(self._agent, signal.SIGSTOP)
            time.sleep(3 * random_s)
            signalled(self._agent, signal.SIGCONT)
        elif fault == "job":
            for pid in jobs_of(self.folder):
                os.kill(pid, signal.SIGKILL)
        else:
            kill(self._learner)
            time.sleep(random_s)
        if self._learner is None or self._learner.poll() is not None:
            self.begin_learner()

    def go_on(self) -> None:
        """Resumes a run that ended, as it does where its only arm was lost."""
        if self._learner is not None and self._learner.poll() is not None:
            self.begin_learner()

    def end(self) -> None:
        for process in (self._learner, self._agent, self._hub):
            if process is not None:
                signalled(process, signal.SIGTERM)
        for process in (self._learner, self._agent, self._hub):
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20.0)
                signalled(process, signal.SIGKILL)


def kill(process: subprocess.Popen[bytes] | None) -> None:
    """Kills a process; what it has begun has to notice."""
    if process is not None:
        process.kill()
        process.wait()


def signalled(process: subprocess.Popen[bytes] | None, what: signal.Signals) -> None:
    assert process is not None
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(what)


def jobs_of(folder: Path) -> list[int]:
    """Returns the processes that act in the lab."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"robot_rl.train.improve.at_node" in words and any(str(folder).encode() in w for w in words):
                found.append(int(entry.name))
    return found


@contextmanager
def watched_leases(path: Path, counts: Counter[str]) -> Generator[None]:
    """Looks at the lab's lease file all the time."""
    over = threading.Event()

    def look() -> None:
        store = LeaseStore(path)
        while not over.wait(0.05):
            counts["two leases"] += len(store.active("arm-sim_in_process")) > 1
            counts["looks at leases"] += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def judged(lines: list[str]) -> Counter[str]:
    """Returns what is wrong with the turns that the learners got, in the order in which they got them."""
    counts, newest, stamps = Counter[str](), 0, dict[int, int]()
    last: int | None = None
    for line in lines:
        if line == "learner":
            counts["learners"] += 1
            last = None  # the next one may get again what the one before had not acknowledged
            continue
        number, stamp = (int(word) for word in line.split())
        counts["turns"] += number > newest
        counts["gaps"] += max(0, number - newest - 1)
        counts["disorder"] += last is not None and number != last + 1
        counts["overlaps"] += number in stamps and stamps[number] != stamp
        counts["overlaps"] += number - 1 in stamps and stamps[number - 1] >= stamp
        last, newest, stamps[number] = number, max(newest, number), stamp
    return counts


def certify(folder: Path) -> None:
    """Makes a certificate of the hub, and the authority that signed it."""
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,IP:10.77.1.1,IP:10.77.2.1\n")
    signed = ["-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial", "-extfile", "names"]
    for words in (
        ["req", "-x509", *new, "-subj", "/CN=authority", "-keyout", "authority.key", "-out", "authority.pem"],
        ["req", *new, "-subj", "/CN=server", "-keyout", "server.key", "-out", "server.csr"],
        ["x509", "-req", "-in", "server.csr", "-days", "2", *signed, "-out", "server.pem"],
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def run_of(fleet: Fleet, folder: Path) -> RunConfig:
    learning = {**SMALL["method"], "utd": 0.1}
    learning.pop("env_steps")
    small = {name: value for name, value in SMALL.items() if name != "num_envs"}
    source = {"station": "any", "needs": {"node": "lab"}, "env_steps": 1_000_000}
    hub = {**fleet.hub_words("office"), "alone_s": ALONE_S}
    made = {"method": learning, "sources": {"arm": source}, "hub": hub, "out": str(folder / "runs")}
    return build(RunConfig, {**small, **made, "restarts": 10})


def until(true: Any, limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args(words)
    random.seed(given.seed)
    folder, counts, began_s = (
        Path(tempfile.mkdtemp(prefix="robot-rl-nodes-")),
        Counter[str](),
        time.monotonic(),
    )
    recovered_s = list[float]()
    with ExitStack() as stack:
        machines = Machines(stack)
        certify(folder)
        os.environ["ROBOT_RL_STATE"] = str(folder / "lab")
        enter(str(patient_station(folder)))
        fleet = Fleet(folder, machines)
        stack.callback(fleet.end)
        fleet.config.write_text(dump(run_of(fleet, folder).used()))
        fleet.begin_learner()
        stack.enter_context(watched_leases(folder / "lab" / "leases.db", counts))
        assert until(lambda: fleet.progress() >= 20, LIMIT_S), f"nothing learned: {folder}"
        faults = ["hub", "agent", "asleep", "job", "learner", *(["cut"] * 3 if machines.has_cables else [])]
        for number in range(given.faults):
            fault = faults[number % len(faults)] if given.faults < 2 * len(faults) else random.choice(faults)
            fleet.strike(fault, random.uniform(0.5, 3.0))
            counts[f"fault: {fault}"] += 1
            struck_s, before = time.monotonic(), fleet.progress()

            def is_back(before: int = before) -> bool:
                fleet.go_on()
                return fleet.progress() >= before + 20

            counts["standstill"] += not until(is_back, LIMIT_S)
            recovered_s.append(time.monotonic() - struck_s)
    counts += judged(fleet.received.read_text().splitlines())
    row: dict[str, Any] = {**counts, **{name: counts[name] for name in WRONG}}
    row |= {"cables": machines.has_cables, "20 turns later, s, longest": max(recovered_s)}
    row |= {"seconds": time.monotonic() - began_s}
    for name, value in row.items():
        print(f"{name:<28}{value:,.3g}" if isinstance(value, float) else f"{name:<28}{value:,}")
    if given.json:
        print(json.dumps(row))
    is_wrong = any(counts[name] for name in WRONG)
    if is_wrong or given.keep:
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
