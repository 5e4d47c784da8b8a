"""One case of the storage campaign: a fault of a call, an allocation or the power, and what it left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from power_cut import SHORT, Call, Disk, Op, read_notes
from storage_audit import traced

HERE = Path(__file__).resolve().parent
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "ENOMEM": errno.ENOMEM}
LARGE_BYTES = 64 << 10
"""An allocation of at least as much is refused once; Python itself does not outlive that of small ones."""
PATIENCE_S = 60


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault: of a call, of an allocation, or of the power."""

    kind: str
    """Name of the error, `short`, `memory`, `cut`."""
    number: int
    """Of the call or the allocation, from 1; seed of a cut."""
    site: str = ""
    """Call and file, for the table."""


@dataclass
class Found:
    """What one case came to."""

    lost: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])
    untold: list[str] = field(default_factory=list[str])
    """Errors that are not ours, or do not say what to do."""
    stuck: list[str] = field(default_factory=list[str])
    """What could not be opened or gone on with afterwards."""
    not_reached: int = 0
    """The call did not come."""
    errors: int = 0
    repaired: int = 0
    killed: int = 0
    """The process did not survive a refused allocation; what it had acknowledged counts."""

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.wrong or self.untold or self.stuck or self.not_reached)


class Shim:
    """The preloaded library, in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.shim_arm.argtypes = (
            [ctypes.c_char_p] + [ctypes.c_int] * 2 + [ctypes.c_uint32, ctypes.c_int, ctypes.c_size_t]
        ) + [ctypes.c_uint32]

    def arm(self, folder: Path, notes: int, case: Case) -> None:
        """Begins to note what happens below a folder; the call of the case fails."""
        call = case.number if case.kind in ERRORS or case.kind == "short" else 0
        refused = case.number if case.kind == "memory" else 0
        error = ERRORS.get(case.kind, SHORT)
        self._library.shim_arm(os.fsencode(folder), notes, -1, call, error, LARGE_BYTES, refused)

    def disarm(self) -> tuple[int, int]:
        """Ends it; returns how many calls and large allocations there were."""
        self._library.shim_disarm()
        return int(self._library.shim_calls()), int(self._library.shim_allocations())

    def ack(self, text: str) -> None:
        content = text.encode()
        self._library.shim_ack(content, len(content))


def build(folder: Path) -> Path:
    """Compiles the library."""
    library = folder / "storage_shim.so"
    words = ["cc", "-shared", "-fPIC", "-O2", "-pthread", "-o", str(library), str(HERE / "storage_shim.c")]
    subprocess.run([*words, "-ldl"], check=True)
    return library


def target_of(name: str) -> Any:
    """Returns a target; those that import torch are imported when they come."""
    import storage_targets as light

    classes = {"store": "Store", "seal": "Seal", "repair": "Repair", "writer": "Writer", "compact": "Compact"}
    classes |= {"edit": "Edit", "collect": "Collect", "upgrade": "Upgrade"}
    if name in classes:
        return getattr(light, classes[name])()
    import storage_runs as heavy

    return getattr(heavy, {"leases": "Leases", "checkpoints": "Checkpoints", "run": "RunFolder"}[name])()


# --- one case, in processes of its own -----------------------------------------------------------------


@dataclass
class Outcome:
    """What a workload did under the shim."""

    calls: list[Call]
    num_calls: int = 0
    num_allocations: int = 0
    errors: list[str] = field(default_factory=list[str])
    """Of ours that do not say what to do."""
    num_errors: int = 0
    repaired: int = 0
    gave_up: str = ""
    """The error that ended the workload."""
    killed: int = 0
    """Signal that ended it."""


def under_shim(
    shim: Shim,
    target: Any,
    folder: Path,
    promised: dict[str, Any],
    case: Case,
    notes: Path,
    *,
    strace: Path | None = None,
) -> Outcome:
    """Runs a workload in a child of this process, with one fault; `strace` is a file for what that sees."""
    told = notes.with_suffix(".json")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if strace is not None:
                os.kill(os.getpid(), signal.SIGSTOP)
            _work(shim, target, folder, promised, case, notes, told)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    tracer = None
    if strace is not None:
        os.waitpid(child, os.WUNTRACED)
        tracer = traced(child, strace)
    _, status = os.waitpid(child, 0)
    if tracer is not None:
        tracer.wait()
    outcome = Outcome(read_notes(notes))
    if os.WIFSIGNALED(status):
        outcome.killed = os.WTERMSIG(status)
    elif os.WEXITSTATUS(status):
        raise AssertionError(f"the campaign's own process failed at {case}")
    else:
        for name, value in json.loads(told.read_text()).items():
            setattr(outcome, name, value)
    return outcome


def _work(
    shim: Shim, target: Any, folder: Path, promised: dict[str, Any], case: Case, notes: Path, told: Path
) -> None:
    from storage_targets import Run

    faulthandler.dump_traceback_later(PATIENCE_S - 5)
    signal.alarm(PATIENCE_S)
    run = Run(promised, shim.ack)
    handle = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if case.kind == "memory":  # C++ says a word before it ends the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gave_up = None
    shim.arm(folder, handle, case)
    try:
        target.work(folder, run)
    except Exception as error:
        gave_up = error
    calls, allocations = shim.disarm()
    errors = [*run.errors, *([gave_up] if gave_up is not None else [])]
    content = {
        "num_calls": calls,
        "num_allocations": allocations,
        "errors": [text for error in errors if (text := untold(error, folder))],
        "num_errors": len(errors),
        "repaired": run.repaired,
        "gave_up": "" if gave_up is None else f"{type(gave_up).__name__}: {gave_up}",
    }
    told.write_text(json.dumps(content))


def untold(error: BaseException, folder: Path) -> str:
    """Returns why an error is no help: not ours, does not say where, or not what to do. Empty if it is."""
    from robot_rl.core.errors import RobotRLError

    text = str(error)
    at = "".join(traceback.format_tb(error.__traceback__)[-1:]).strip().replace("\n", " ")
    if not isinstance(error, RobotRLError):
        return f"{type(error).__name__}: {text} [{at}]"
    if str(folder) not in text:
        return f"does not say where: {text} [{at}]"
    if not re.search(r"[.:;,] .*\w.*\.$", text.replace(str(folder), ""), re.DOTALL):
        return f"does not say what to do: {text}"
    return ""


def look(target: Any, folder: Path, run: Any, found: Found, at: str, *, once: bool = False) -> None:
    """Checks what is left; unless `once`, runs the workload once more and checks again."""
    from storage_targets import LostError, WrongError

    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        ("opened", lambda: target.check(folder, run)),
        ("run again", lambda: target.work(folder, run)),
        ("opened after that", lambda: target.check(folder, run)),
    )
    for what, step in steps[:1] if once else steps:
        try:
            step()
        except LostError as error:
            found.lost.append(f"{at}, {what}: {error}")
        except (WrongError, AssertionError) as error:
            found.wrong.append(f"{at}, {what}: {error!r}")
        except Exception as error:
            lines = traceback.format_tb(error.__traceback__)[-1:]
            where = "".join(lines).strip().replace("\n", " ")
            found.stuck.append(f"{at}, {what}: {type(error).__name__}: {error} [{where}]")
        else:
            continue
        break
    found.repaired += run.repaired
    found.errors += len(run.errors)
    found.untold += [f"{at}, run again: {text}" for error in run.errors if (text := untold(error, folder))]


def prepared(target: Any, template: Path, place: Path) -> dict[str, Any]:
    """Makes what is there before, in a child, since threads that this process had could not be forked.

    The child also runs the workload once, and says what it imported: this process imports it too, so that
    no case pays for it.
    """
    told = place / "prepared.json"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            from storage_targets import Run

            promised = target.prepare(template)
            shutil.copytree(template, place / "warm")
            look(target, place / "warm", Run(promised), Found(), "")
            told.write_text(json.dumps([promised, list(sys.modules)]))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the workload cannot be prepared"
    promised, modules = json.loads(told.read_text())
    for name in modules:
        if name not in sys.modules and not name.startswith("_"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children do not go through what all of them share
    return promised


def promised_at(disk: Disk, before: dict[str, Any]) -> dict[str, Any]:
    return json.loads(disk.acks[-1]) if disk.acks else before


def fault_case(
    shim: Shim, target: Any, template: Path, before: dict[str, Any], case: Case, place: Path
) -> Found:
    """Lets one call fail; then looks at what is left, and at what a power cut would have left."""
    from storage_targets import Run

    found, folder = Found(), place / "case"
    shutil.copytree(template, folder)
    outcome = under_shim(shim, target, folder, before, case, place / "notes")
    at = f"{case.kind} at {case.site or case.number}"
    found.errors, found.untold, found.repaired = outcome.num_errors, list(outcome.errors), outcome.repaired
    found.untold = [f"{at}: {text}" for text in found.untold]
    if outcome.killed == signal.SIGALRM:
        found.stuck.append(f"{at}: hangs")
    elif outcome.killed:
        if case.kind == "memory":
            found.killed = 1
        else:
            found.stuck.append(f"{at}: killed by {signal.Signals(outcome.killed).name}")
    elif not any(call.failed for call in outcome.calls):
        found.not_reached = 1
    disk = Disk(template)
    disk.play(outcome.calls)
    promised = promised_at(disk, before)
    unseen = "" if outcome.killed else disk.differs_from(folder)
    if unseen:
        found.wrong.append(f"{at}: the shim missed a call: {unseen}")
    look(target, folder, Run(promised), found, at)
    rng = random.Random(case.number)
    if case.kind != "memory":
        disk.cut(rng, place / "cut")
        look(target, place / "cut", Run(promised), found, f"{at}, and a power cut at the end", once=True)
    return found


def cut_case(
    shim: Shim,
    target: Any,
    template: Path,
    before: dict[str, Any],
    calls: Sequence[Call],
    case: Case,
    place: Path,
) -> Found:
    """Cuts the power at a random place; one time in three, once more while the workload runs again."""
    from storage_targets import Run

    found, rng = Found(), random.Random(case.number)
    disk, promised, at, begun = Disk(template), before, f"cut {case.number}", template
    again = rng.random() < 1 / 3
    for turn in range(1 + again):
        acks = [i + 1 for i, call in enumerate(calls) if call.op == Op.ACK]
        end = rng.choice(acks) if acks and rng.random() < 0.4 else rng.randint(0, len(calls))
        disk.play(calls[:end])
        promised = promised_at(disk, promised)
        last = next((call for call in reversed(calls[:end]) if call.op != Op.ACK), None)
        at += f" after call {end} of {len(calls)}" + (f" ({site(last)})" if last else "")
        begun = place / f"cut-{turn}"
        disk.cut(rng, begun)
        if turn < again:
            kept = place / "before"
            shutil.copytree(begun, kept, copy_function=os.link)
            kept = place / "before-copy"
            shutil.copytree(begun, kept)
            outcome = under_shim(shim, target, begun, promised, Case(kind="none", number=0), place / "notes")
            if outcome.gave_up or outcome.killed:
                found.stuck.append(f"{at}, run again: {outcome.gave_up or outcome.killed}")
                return found
            calls, disk = outcome.calls, Disk(kept)
            at += ", again"
    look(target, begun, Run(promised), found, at)
    return found


def site(call: Call) -> str:
    """Returns a call and its file, the same for all files of a kind."""
    path = re.sub(r"\d{8}-\d{6}", "<time>", call.path)
    path = re.sub(r"\.writing-\d+", ".writing", path)
    return f"{call.op.name.lower()} {re.sub(r'[0-9]+', 'N', path)}"
