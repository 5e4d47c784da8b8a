"""Two jobs want one arm, again and again: one has it and gives way, or does not; the other is more urgent.

    python tests/faults/preempt_campaign.py --races 10000 [--arms 8] [--seed 0] [--json]
    tests/faults/ray_races.sh --races 10000         # the two are on two nodes of a Ray cluster

Each arm has a lease file and two processes. The holder commands the arm every few ms under its lease. The
rival, of a larger priority, asks for it and gives the holder some tenths of a second. Three holders of four
give way in time; one goes on until its lease is over. Every command goes through the arm's fence, a locked
file, which knows nothing of leases but their tokens. A race is one asking. Wrong would be

    a command that the arm obeyed while the other had the lease, by the clocks of both
    a rival that did not get the arm, or whom it did not obey, or a holder that did not get it back

A holder that the machine stopped between its look at the lease and its command may be late: the fence refuses
that command, and it is counted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, cast

import numpy as np

from robot_rl.core.errors import LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched import held as holding
from robot_rl.sched import leases
from robot_rl.sched.leases import HeldLease, LeaseStore
from robot_rl.sched.preemption import PreemptedError

ARM = DeviceSpec(name="arm", kind="robot")
WAIT_S = 60.0
_COMMANDS_S = 0.003
WRONG = ("obeyed both at once", "lost jobs")


class Arm:
    """Obeys the newest token alone, and counts what older ones wanted of it."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self.obeyed_s = 0.0
        """When it obeyed this process last, while the file was locked."""

    @contextmanager
    def _newest(self) -> Generator[list[int]]:
        with self._path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = [int(file.read() or 0)]
            yield known
            file.seek(0)
            file.write(str(known[0]))

    def obeys(self, token: int) -> bool:
        """Commands the arm; returns whether it obeyed."""
        with self._newest() as known:
            obeyed = token >= known[0]
            known[0] = max(known[0], token)
            self.obeyed_s = time.monotonic() if obeyed else self.obeyed_s
        return obeyed


Found = tuple["Counter[str]", list[float], str]
"""Counts, seconds from each asking to the lease, and the network namespace of the process."""


def holder(folder: Path, rounds: int, seed: int) -> Found:
    """Has the arm whenever the rival has not."""
    _hurry()
    until_s = time.monotonic() + WAIT_S
    while not (folder / "listens").exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the rival did not begin")
        time.sleep(0.01)
    with Client(str(folder / "say")) as say:
        return _hold(folder, rounds, seed, say), [], _network()


def rival(folder: Path, rounds: int, seed: int) -> Found:
    """Asks for the arm again and again, whenever the holder has it."""
    _hurry()
    with Listener(str(folder / "say")) as listener:
        own: Any = listener
        own._listener._socket.settimeout(WAIT_S)  # there is no other way to give up on a holder
        (folder / "listens").touch()
        with listener.accept() as heard:
            return *_ask(folder, rounds, seed, heard), _network()


def _hurry() -> None:
    """Looks more often than usual, and logs nothing: a lease that was taken is what is wanted here."""
    holding._LOOK_S, leases._POLL_S = 0.02, 0.01
    holding.logger.disabled = True


def _network() -> str:
    return os.readlink("/proc/self/ns/net")


def _hold(folder: Path, rounds: int, seed: int, say: Connection) -> Counter[str]:
    store, arm, chance = LeaseStore(folder / "leases.db"), Arm(folder / "arm"), random.Random(seed)
    found = Counter[str]()
    while True:
        gives_way = chance.random() < 0.75
        with store.hold(ARM, holder="holder", wait_s=WAIT_S, preemptible=True) as held:
            say.send(None)  # the rival may ask
            refused, last_s = _commands(held, arm, gives_way)
        say.send(last_s)
        found["late, and refused by the fence"] += refused
        found["gave way" if gives_way else "did not give way"] += 1
        if (rounds := rounds - 1) <= 0:
            return found


def _commands(held: HeldLease, arm: Arm, gives_way: bool) -> tuple[bool, float]:
    """Commands until the lease is given up, or over.

    Returns: whether the arm refused a command, and when it obeyed the last one.
    """
    refused, last_s = False, 0.0
    try:
        while True:
            held.check()
            if gives_way:
                held.give_way()
            if arm.obeys(held.token):
                last_s = arm.obeyed_s
            else:
                refused = True
            time.sleep(_COMMANDS_S)
    except (PreemptedError, LeaseError):
        return refused, last_s


def _ask(folder: Path, rounds: int, seed: int, ours: Connection) -> tuple[Counter[str], list[float]]:
    store, arm, chance = LeaseStore(folder / "leases.db"), Arm(folder / "arm"), random.Random(seed + 1)
    found, handed_over_s = Counter[str](), list[float]()
    for _ in range(rounds):
        ours.recv()
        time.sleep(chance.uniform(0.0, 0.02))
        within_s, asked_s = chance.uniform(0.1, 0.3), time.monotonic()
        try:
            with store.hold(ARM, holder="rival", priority=1, wait_s=WAIT_S, preempt_s=within_s) as held:
                handed_over_s.append(time.monotonic() - asked_s)
                found["races"] += 1
                found["lost jobs"] += not arm.obeys(held.token)
                first_s = arm.obeyed_s
                time.sleep(0.005)
                found["lost jobs"] += not arm.obeys(held.token)
        except LeaseError as error:
            print(error, file=sys.stderr)
            found["lost jobs"] += 1
            first_s = float("inf")
        found["obeyed both at once"] += ours.recv() > first_s
    return found, handed_over_s


Call = tuple[Callable[[Path, int, int], Found], Path, int, int]


def here(calls: Sequence[Call]) -> list[Found]:
    """Makes all calls at once, each in a process of its own."""
    with ProcessPoolExecutor(len(calls), mp_context=multiprocessing.get_context("fork")) as pool:
        return [made.result() for made in as_completed([pool.submit(*call) for call in calls])]


def on_ray(address: str, calls: Sequence[Call]) -> list[Found]:
    """Makes all calls at once: holders on one node of a Ray cluster, rivals on another."""
    import ray

    ray.init(address=address, log_to_driver=False)
    made, remote = list[Any](), cast("Any", ray.remote)
    for call, *words in calls:
        machine = {"machine": "one" if call is holder else "two"}
        made.append(remote(call).options(num_cpus=0, label_selector=machine, max_retries=0).remote(*words))
    return ray.get(made)


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--races", type=int, default=10_000)
    parser.add_argument("--arms", type=int, default=8, help="raced for at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ray", help="address of a Ray cluster with nodes labelled machine=one and machine=two"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args(words)
    folder = Path(
        tempfile.mkdtemp(prefix="robot-rl-preempt-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    )
    calls, began_s = list[Call](), time.monotonic()
    for number in range(given.arms):
        (folder / str(number)).mkdir()
        rounds = given.races // given.arms + (number < given.races % given.arms)
        calls += [(call, folder / str(number), rounds, given.seed + 2 * number) for call in (rival, holder)]
    try:
        found = here(calls) if given.ray is None else on_ray(given.ray, calls)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    total, handed_over_s = Counter[str](), list[float]()
    for counts, times, _ in found:
        total.update(counts)
        handed_over_s += times
    middle, most = np.quantile(handed_over_s, [0.5, 1.0])
    row: dict[str, Any] = {**total, "hand-over s, median": middle, "longest": most}
    row |= {"machines": len({network for *_, network in found})}
    row |= {name: total[name] for name in WRONG} | {"seconds": time.monotonic() - began_s}
    for name, value in row.items():
        print(f"{name:<24}{value:,.3g}" if isinstance(value, float) else f"{name:<24}{value:,}")
    if given.json:
        print(json.dumps(row))
    return int(any(total[name] for name in WRONG) or row["machines"] != (1 if given.ray is None else 2))


if __name__ == "__main__":
    sys.exit(main())
