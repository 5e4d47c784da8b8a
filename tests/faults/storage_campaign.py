"""Lets every call that reaches the disk fail once, and cuts the power at random; says what was left.

    python tests/faults/storage_campaign.py [--cuts 500] [--only store] [--quick] [--audit] [--json]

Each part that writes has a workload (`storage_targets.py`, `storage_runs.py`) that acknowledges what it
was told is on the disk. A library that is preloaded (`storage_shim.c`) counts its calls: open, write, fsync,
rename, link, unlink, mkdir, truncate, map. Each of them fails once, with ENOSPC, EIO or ENOMEM,
or by writing half, and each large allocation once. Then the power is cut at random places (`power_cut.py`):
what was not synced is there, gone or torn. After each case another process opens what is left, compares it
with what was acknowledged, runs the workload once more and compares again; after a failed call another
compares what a power cut at the end would have left.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from power_cut import Call, Disk, Op
from storage_audit import unseen
from storage_cases import (
    ERRORS,
    HERE,
    PATIENCE_S,
    Case,
    Found,
    Outcome,
    Shim,
    build,
    cut_case,
    fault_case,
    prepared,
    site,
    target_of,
    under_shim,
)

TARGETS = (
    "store", "seal", "repair", "writer", "compact", "edit", "collect", "upgrade",
    "leases", "checkpoints", "run",
)  # fmt: skip
QUICK_CALLS, QUICK_CUTS = 20, 25
_INSIDE = "ROBOT_RL_STORAGE_SHIM"


@dataclass
class Row:
    """One target in the table."""

    target: str
    calls: int = 0
    """That can fail."""
    sites: int = 0
    """Kinds of them: call and kind of file."""
    allocations: int = 0
    faults: int = 0
    """Cases in which one failed."""
    cuts: int = 0
    errors: int = 0
    """That our own calls raised."""
    repaired: int = 0
    killed: int = 0
    lost: int = 0
    wrong: int = 0
    untold: int = 0
    stuck: int = 0
    not_reached: int = 0
    seconds: float = 0.0

    def add(self, found: Found) -> None:
        for name in ("errors", "repaired", "killed", "not_reached"):
            setattr(self, name, getattr(self, name) + getattr(found, name))
        for name in ("lost", "wrong", "untold", "stuck"):
            setattr(self, name, getattr(self, name) + bool(getattr(found, name)))

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.untold or self.stuck or self.not_reached)


def run_target(
    shim: Shim, name: str, place: Path, cuts: Sequence[int], given: argparse.Namespace
) -> tuple[Row, list[str]]:
    """Runs all cases of one target."""
    began, row, problems = time.monotonic(), Row(name), list[str]()
    target, template = target_of(name), place / "template"
    template.mkdir(parents=True)
    before = prepared(target, template, place)
    strace = place / "strace" if given.audit else None
    outcome = recorded(shim, name, target, place, before, strace)
    calls = outcome.calls
    row.calls, row.allocations = outcome.num_calls, outcome.num_allocations
    row.sites = len({site(call) for call in calls if call.ordinal})
    cases: list[Case] = []
    if strace is None:
        cases += cases_of(calls, outcome.num_allocations, given)
        row.faults, row.cuts = len(cases), len(cuts)
        cases += [Case(kind="cut", number=seed) for seed in cuts]
    else:
        for text in unseen(calls, strace, place / "recording", site):
            row.wrong += 1
            problems.append(f"{name}: past the shim: {text}")

    def one(case: Case, at: Path) -> Found:
        if case.kind == "cut":
            return cut_case(shim, target, template, before, calls, case, at)
        return fault_case(shim, target, template, before, case, at)

    for case, found in in_children(one, cases, place, given.jobs, f"{name:12}"):
        row.add(found)
        for what in ("lost", "wrong", "untold", "stuck"):
            problems += [f"{name}: {what}: {text}" for text in getattr(found, what)]
        if found.not_reached:
            problems.append(f"{name}: call {case.number} ({case.site}) did not come")
    row.seconds = round(time.monotonic() - began, 1)
    return row, problems


def recorded(
    shim: Shim, name: str, target: Any, place: Path, before: dict[str, Any], strace: Path | None
) -> Outcome:
    """Runs a workload without a fault; what it calls has to explain every byte that it leaves."""
    template, folder = place / "template", place / "recording"
    shutil.copytree(template, folder)
    none = Case(kind="none", number=0)
    outcome = under_shim(shim, target, folder, before, none, place / "notes", strace=strace)
    if outcome.gave_up or outcome.num_errors or outcome.killed:
        raise AssertionError(f"{name}: fails without a fault: {outcome.gave_up or outcome.errors}")
    disk = Disk(template)
    disk.play(outcome.calls)
    if missed := disk.differs_from(folder):
        raise AssertionError(f"{name}: the shim missed a call: {missed}")
    return outcome


def cases_of(calls: Sequence[Call], allocations: int, given: argparse.Namespace) -> Iterator[Case]:
    """Yields every call with one of the errors, or with each, and every large allocation.

    Of a quick run, the last call of each of some kinds.
    """
    failing = [call for call in calls if call.ordinal]
    if given.quick:
        kinds = {site(call): call for call in failing}
        failing = list(kinds.values())[:: max(1, -(-len(kinds) // QUICK_CALLS))]
        allocations = 0
    for turn, call in enumerate(failing, start=given.seed):
        names = [*ERRORS, *(["short"] if call.op == Op.WRITE and call.aux > 1 else [])]
        for name in names if given.every_error else [names[turn % len(names)]]:
            yield Case(kind=name, number=call.ordinal, site=site(call))
    for number in range(1, allocations + 1):
        yield Case(kind="memory", number=number, site=f"allocation {number}")


def in_children(
    act: Callable[[Case, Path], Found], cases: Sequence[Case], place: Path, jobs: int, what: str
) -> Iterator[tuple[Case, Found]]:
    """Runs cases in children of this process, which has loaded everything, some at a time."""
    waiting, running = list(reversed(list(enumerate(cases)))), dict[int, tuple[int, Case]]()
    done, bar = 0, sys.stderr.isatty()
    while waiting or running:
        while waiting and len(running) < jobs:
            number, case = waiting.pop()
            at = place / f"case-{number}"
            at.mkdir()
            child = os.fork()
            if child == 0:
                _in_child(act, case, at)
            running[child] = (number, case)
        child, status = os.wait()
        number, case = running.pop(child)
        at = place / f"case-{number}"
        if status:
            text = (
                f"{case.kind} at {case.site or case.number}: the checker died, status {status} (kept: {at})"
            )
            found = Found(stuck=[text])
        else:
            found = Found(**json.loads((at / "found.json").read_text()))
        if found.is_good:
            shutil.rmtree(at, ignore_errors=True)
        done += 1
        if bar and (done % 20 == 0 or done == len(cases)):
            print(f"\r{what} {done} of {len(cases)}", end="", file=sys.stderr)
        yield case, found
    if bar:
        print("\r\033[K", end="", file=sys.stderr)


def _in_child(act: Callable[[Case, Path], Found], case: Case, at: Path) -> None:
    code = 1
    try:
        signal.alarm(2 * PATIENCE_S)
        logging.disable(logging.CRITICAL)  # every recovery warns, as it should
        (at / "found.json").write_text(json.dumps(asdict(act(case, at))))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything was lost, wrong, untold or stuck."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=500, help="power cuts, over all targets")
    parser.add_argument("--only", action="append", choices=TARGETS, help="a target, instead of all")
    parser.add_argument("--every-error", action="store_true", help="each call fails with every error")
    parser.add_argument(
        "--quick", action="store_true", help="a sample of the calls, 25 cuts: under 2 minutes"
    )
    parser.add_argument(
        "--audit", action="store_true", help="compare with strace what the shim sees, no faults"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args(words)
    if _INSIDE not in os.environ:
        return _again_under_shim(sys.argv[1:] if words is None else words)
    place = Path(os.environ[_INSIDE])
    chosen = tuple(given.only or TARGETS)
    num_cuts = min(given.cuts, QUICK_CUTS) if given.quick else given.cuts
    rows, problems, shim = list[Row](), list[str](), Shim()
    for i, name in enumerate(chosen):
        cuts = range(given.seed + i, given.seed + num_cuts, len(chosen))
        row, found = run_target(shim, name, place / name, cuts, given)
        rows.append(row)
        problems += found
        print(line(row), flush=True)
        alike = Counter(re.sub(r"/\S*/case-\d+|0x[0-9a-f]+", "", text) for text in found)
        for text, count in alike.most_common():
            print(f"{count:4} x {text}", flush=True)
    report(rows)
    if given.json:
        print(json.dumps({"targets": [asdict(row) for row in rows], "problems": problems}))
    return 0 if all(row.is_good for row in rows) else 1


def line(row: Row) -> str:
    return (
        f"{row.target}: {row.calls} calls at {row.sites} sites, {row.allocations} allocations; "
        f"{row.faults} faults, {row.cuts} power cuts; {row.lost} lost, {row.wrong} wrong, "
        f"{row.untold} without a remedy, {row.stuck} stuck, {row.not_reached} not reached "
        f"({row.seconds:.0f} s)"
    )


def report(rows: Sequence[Row]) -> None:
    """Prints the table."""
    total = Row("all")
    for row in rows:
        for name, value in asdict(row).items():
            if name != "target":
                setattr(total, name, getattr(total, name) + value)
    names = list(asdict(total))
    print("\n" + " ".join(f"{name.replace('_', ' '):>11}" for name in names))
    for row in (*rows, total):
        print(
            " ".join(
                f"{value:>11,.0f}" if name != "target" else f"{value:>11}"
                for name, value in asdict(row).items()
            )
        )


def _again_under_shim(words: Sequence[str]) -> int:
    """Starts this program once more with the library preloaded."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="robot-rl-storage-", dir=memory if memory.is_dir() else None))
    environment = os.environ | {
        _INSIDE: str(place),
        "LD_PRELOAD": str(build(place)),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]]),
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # its allocations are malloc's then
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # no thread before a fork
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    try:
        return subprocess.run(
            [sys.executable, str(HERE / "storage_campaign.py"), *words], env=environment, check=False
        ).returncode
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
