"""Turns single bits over in run folders and stores, and cuts their files; says what their readers make of it.

    python tests/faults/flip_runs.py --run-flips 500 --finetune-flips 200 --store-flips 400 --cuts 100

Every case copies a folder that is whole, damages one file, and reads everything that this file is part of.
A reading is a table of names and values. It is

    noticed     an error of ours was raised, or a word was said, and all values that were read are right
    harmless    every value is there and right
    wrong       a value that is not the one written, or one that is missing without a word
    traceback   any other exception

Files are drawn with equal chances, the byte and the bit within. Runs are those of `train` and of `finetune`.
Left out are what nobody reads back (pages, pictures, TensorBoard's copy) and sealed datasets, which have rows
of their own; a page is drawn again of what is damaged.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from robot_rl.cli import replay
from robot_rl.cli.evaluate import _recorded as read_evaluation
from robot_rl.config import build
from robot_rl.core.errors import RobotRLError
from robot_rl.core.files import listed
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.writer import StoreWriter
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.spec import full_spec
from robot_rl.telemetry.metrics import FILE_NAME, MetricsWriter, read_metrics
from robot_rl.telemetry.report import write_report
from robot_rl.telemetry.runs import load_run
from robot_rl.train import phases
from robot_rl.train.checkpoint import CheckpointStore, read_state
from robot_rl.train.config import RunConfig
from robot_rl.train.finetune import run as finetuning
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.record import load_config
from tests.runs import SMALL, SMALL_FINETUNING, folder_of
from tests.train.finetune.conftest import write_dataset

Values = dict[str, Any]
Reading = Callable[[Path], "Read"]

UNREAD = ("demos/", "experience/", "tensorboard/", "videos/", "report.html")
"""Of a run folder: what no program reads back, or what has rows of its own."""
_PICTURES = (".png", ".jpg", ".mp4", ".svg")
_ARRAYS = (np.ndarray, np.generic, torch.Tensor)

META = EpisodesMeta(
    task="Flips",
    robot="gantry",
    control_hz=100.0,
    instruction="survive",
    state_names=("q0", "q1"),
    action_names=("dx",),
)
FEATURES = {"state": Feature("float32", (2,)), "front.rgb": Feature("uint8", (6, 8, 3))}


@dataclass(frozen=True)
class Read:
    """What a reader returned."""

    values: Values
    told: tuple[str, ...] = ()
    """What it said of damage, where it goes on without a part."""


# --- what there is to read -----------------------------------------------------------------------


def make_run(folder: Path) -> Path:
    """Trains a tiny run and returns its folder."""
    phases.run(build(RunConfig, SMALL | {"out": str(folder)}))
    return folder_of(folder)


def make_finetune_run(folder: Path) -> Path:
    """Fine-tunes on seven made-up episodes and returns the run's folder; ACT is left out: 10 s to import."""
    dataset = write_dataset(folder.with_name("dataset"), list(range(7)))
    words = {"dataset": str(dataset), "out": str(folder)}
    words |= {"checkpoint": SMALL_FINETUNING["checkpoint"] | {"keep": 6}}  # some of the midst of training
    config = build(FinetuneConfig, SMALL_FINETUNING | words)
    with mock.patch("robot_rl.train.finetune.act.find_spec", return_value=None):
        finetuning.run(config)
    return folder_of(folder)


def make_store(folder: Path) -> Path:
    """Records a store of several segments, with an instruction of its own for every episode."""
    rng = np.random.default_rng(0)
    how: dict[str, Any] = {"flush_s": 1e6, "segment_bytes": 3_000, "picture": "png"}
    for life in range(2):  # the second opens what the first has closed
        with StoreWriter(folder, META, FEATURES, **how) as writer:
            for episode in range(6):
                writer.begin_episode(instruction=f"task {life} {episode}", device=f"arm {episode % 3}")
                for step in range(12):
                    obs: Values = {"state": rng.normal(size=2).astype(np.float32)}
                    if step % 3 == 0:
                        obs["front.rgb"] = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
                    is_last = step == 11
                    writer.append(
                        obs=obs,
                        action=rng.normal(size=1),
                        reward=float(step),
                        terminated=is_last,
                        stamp_ns=step,
                    )
                    if step % 4 == 3:
                        writer.flush()
    return folder


def run_readings() -> dict[str, Reading]:
    """Returns everything that a program reads of a run folder, by name."""
    return {
        "config": lambda folder: Read({"config": repr(load_config(folder))}),
        **_READINGS,
        "base": lambda folder: read_policy(folder / "policy/base"),
        "final": lambda folder: read_policy(folder / "policy/final"),
        "evaluation base": lambda folder: Read(flat(read_evaluation(folder, "base"))),
        "evaluation final": lambda folder: Read(flat(read_evaluation(folder, "final"))),
        **_RESUMED,
    }


def finetune_readings() -> dict[str, Reading]:
    """Returns everything that a program reads of the folder of a fine-tuning run, by name."""
    return {
        "config": lambda folder: Read({"config": repr(finetuning.load_config(folder))}),
        **_READINGS,
        "policy": lambda folder: read_policy(folder / "policy"),
        "page": read_page,
        **_RESUMED,
    }


def checkpoints(folder: Path) -> list[Path]:
    return listed(folder / "checkpoints", "[0-9]*-*")


def read_policy(folder: Path) -> Read:
    policy, meta = load_policy(folder)
    module: Any = policy
    return Read(flat({"spec": full_spec(policy), "meta": asdict(meta), "state": module.state_dict()}))


def read_report(folder: Path) -> Read:
    record = load_run(folder)
    rows = {f"row {row!r}": True for row in record.rows}
    failures = {f"failure {failure!r}": True for failure in record.failures}
    values = flat({"summary": record.summary, "config": record.config}) | rows | failures
    return Read(values, tuple(record.missing))


def resume_metrics(folder: Path) -> Read:
    """Opens the rows as a resumed run does, and reads what that leaves."""
    state = CheckpointStore(folder / "checkpoints").load()
    assert state is not None
    with MetricsWriter(folder, tensorboard=False) as writer:
        writer.load_state_dict(state["metrics"])
    return Read({f"row {row!r}": True for row in read_metrics(folder / FILE_NAME)})


def read_page(folder: Path) -> Read:
    """Draws the page again; one that says what it lacks may be any other page."""
    report = write_report([folder], folder / "drawn.html")
    drawn, _, _ = report.path.read_text().replace(folder.name, "<run>").partition("<footer>")  # it has a date
    return Read({} if report.missing else {"page": drawn}, report.missing)


_READINGS: dict[str, Reading] = {
    "checkpoint": lambda folder: Read(flat(CheckpointStore(folder / "checkpoints").load())),
    "older checkpoint": lambda folder: Read(flat([read_state(path) for path in checkpoints(folder)])),
    "report": read_report,
}
"""Of the runs of both commands."""
_RESUMED: dict[str, Reading] = {"metrics of a resumed run": resume_metrics}
"""The last: it takes a torn row out of the file."""


def read_store(folder: Path) -> Read:
    """Reads every step; an episode that cannot be read is told of by its error."""
    reader = StoreReader(folder)
    values: Values = {"meta": repr(reader.meta), "features": repr(dict(reader.features))}
    told: list[str] = []
    for i in range(len(reader)):
        try:
            episode = reader.read(i)
            columns = {name: getattr(episode, name) for name in ("action", "reward", "stamp_ns", "source")}
            columns |= {"state": episode.obs["state"][:], "front.rgb": episode.obs["front.rgb"][:]}
        except RobotRLError as error:
            told.append(str(error))
            continue
        columns["taken"] = episode.picture_stamp_ns["front.rgb"]
        for row in range(len(episode)):
            at = f"episode {reader.store_episode(i)}, step {reader.first_step(i) + row}"
            values[f"{at}: words"] = (episode.meta.instruction, episode.device)
            values |= {f"{at}: {name}": plain(column[row]) for name, column in columns.items()}
    return Read(values, tuple(told))


def flat(tree: Any, at: str = "") -> Values:
    """Returns the leaves of a nest by their paths."""
    if isinstance(tree, Mapping):
        nodes = list(tree.items())
    elif isinstance(tree, list | tuple):
        nodes = list(enumerate(tree))
    else:
        return {at: plain(tree)}
    return {key: value for name, node in nodes for key, value in flat(node, f"{at}/{name}").items()}


def plain(value: Any) -> Any:
    """Returns what can be compared: NaN equals itself, arrays have their bytes."""
    if isinstance(value, _ARRAYS):
        array = np.asarray(value)
        return f"{array.dtype} {array.shape} {array.tobytes().hex()}"
    return repr(value)


# --- damage and judgement ------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of folder: one that is whole, and how it is read."""

    name: str
    folder: Path
    readings: Mapping[str, Reading]
    verify: bool
    """Whether `robot-rl replay verify` judges it as well."""

    def files(self) -> list[str]:
        """Returns the files that something is read from."""
        names = [str(path.relative_to(self.folder)) for path in listed(self.folder) if path.is_file()]
        return [
            name
            for name in names
            if not name.startswith(UNREAD)
            and not name.endswith(_PICTURES)
            and (self.folder / name).stat().st_size
        ]


class Ear(logging.Handler):
    """Hears what is said while something is read."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def read_all(kind: Kind, folder: Path) -> dict[str, Read | BaseException]:
    """Returns what every reading gave, or what it raised."""
    found: dict[str, Read | BaseException] = {}
    ear = Ear()
    ours = logging.getLogger("robot_rl")
    level, ours.propagate = ours.level, False
    ours.addHandler(ear)
    ours.setLevel(logging.WARNING)
    try:
        for name, reading in kind.readings.items():
            ear.heard.clear()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    read = reading(folder)
                found[name] = Read(read.values, (*read.told, *ear.heard))
            except Exception as error:
                found[name] = error
    finally:
        ours.removeHandler(ear)
        ours.setLevel(level)
        ours.propagate = True
    return found


def judge(whole: Read, got: Read | BaseException) -> tuple[str, str]:
    """Returns the verdict on one reading, and why."""
    if isinstance(got, RobotRLError):
        return "noticed", str(got)
    if isinstance(got, BaseException):
        return "traceback", "".join(traceback.format_exception_only(got)).strip()
    for name, value in got.values.items():
        if name not in whole.values:
            return "wrong", f"{name} was never written"
        if value != whole.values[name]:
            return "wrong", f"{name} is {str(value)[:60]}, {str(whole.values[name])[:60]} was written"
    told = [word for word in got.told if word not in whole.told]
    gone = [name for name in whole.values if name not in got.values]
    if told:
        return "noticed", told[0]
    return ("wrong", f"{gone[0]} is missing without a word") if gone else ("harmless", "")


_ORDER = ("harmless", "noticed", "wrong", "traceback")


class Campaign:
    """Damages one kind of folder again and again, and counts."""

    def __init__(self, kind: Kind, scratch: Path, *, shows: int = 20) -> None:
        self.kind = kind
        self.counts: Counter[str] = Counter(dict.fromkeys(_ORDER, 0))
        self._scratch = scratch
        self._left = shows
        whole = read_all(kind, kind.folder)
        for name, read in whole.items():
            if isinstance(read, BaseException):
                raise AssertionError(f"{kind.name}: {name} of the whole folder: {read!r}") from read
        self._whole = {name: read for name, read in whole.items() if isinstance(read, Read)}
        first = kind.files()[0]
        if self.case(first, (kind.folder / first).read_bytes(), "an equal copy") != "harmless":
            raise AssertionError(f"{kind.name}: an equal copy passes for damaged")
        self.counts.clear()
        self.counts.update(dict.fromkeys(_ORDER, 0))

    @property
    def is_good(self) -> bool:
        return not (self.counts["wrong"] or self.counts["traceback"])

    def run(self, count: int, seed: int, *, cut: bool) -> None:
        """Damages `count` files, one after another."""
        files = self.kind.files()
        for i in range(count):
            rng = np.random.default_rng((seed + i, int(cut)))
            name = files[int(rng.integers(len(files)))]
            content = bytearray((self.kind.folder / name).read_bytes())
            byte, bit = int(rng.integers(len(content))), int(rng.integers(8))
            if cut:
                del content[byte:]
            else:
                content[byte] ^= 1 << bit
            what = f"{name}, cut at byte {byte}" if cut else f"{name}, byte {byte}, bit {bit}"
            self.case(name, bytes(content), f"{what} (seed {seed + i})")

    def case(self, name: str, content: bytes, at: str) -> str:
        """Judges one damaged file."""
        copy = self._scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.kind.folder, copy)
        (copy / name).write_bytes(content)
        found = read_all(self.kind, copy)
        verdicts = {key: judge(whole, found[key]) for key, whole in self._whole.items()}
        if self.kind.verify:
            verdicts["verify"] = judge_verify(copy, [verdict for verdict, _ in verdicts.values()])
        key = max(verdicts, key=lambda key: _ORDER.index(verdicts[key][0]))
        verdict, why = verdicts[key]
        self.counts[verdict] += 1
        if verdict in ("wrong", "traceback") and self._left:
            self._left -= 1
            print(f"{verdict.upper()} {self.kind.name}: {at}: {key}: {why}")
        return verdict


def judge_verify(folder: Path, others: list[str]) -> tuple[str, str]:
    """Judges the command: it may not say sound where a reader noticed something."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = replay.run(["verify", str(folder)])
    except RobotRLError as error:
        return "noticed", str(error)
    except Exception as error:
        return "traceback", "".join(traceback.format_exception_only(error)).strip()
    if not code and any(verdict != "harmless" for verdict in others):
        return "wrong", "it says sound"
    return ("noticed", "") if code else ("harmless", "")


def main(words: list[str] | None = None) -> int:
    """Runs the campaign; returns 1 if anything was read wrongly or ended in a traceback."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-flips", type=int, default=500)
    parser.add_argument("--finetune-flips", type=int, default=200)
    parser.add_argument("--store-flips", type=int, default=400)
    parser.add_argument("--cuts", type=int, default=100, help="of each of these that is flipped")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    flips = {"run": given.run_flips, "finetune": given.finetune_flips, "store": given.store_flips}
    return 0 if campaign(flips, given.cuts, given.seed) else 1


def campaign(flips: Mapping[str, int], cuts: int, seed: int) -> bool:
    """Damages run folders and stores; returns whether all was noticed or harmless.

    Args:
        flips: bits of each: `run`, `finetune`, `store`.
        cuts: files of each, but of those without flips, that are cut.
        seed: of the first case.
    """
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="robot-rl-flips-"))
    is_good = True
    kinds: list[tuple[Kind, int, bool]] = []
    with mock.patch.dict(os.environ, {"ROBOT_RL_STATE": str(scratch / "state")}):  # leases of its own
        for name, make in _KINDS.items():
            if flips[name]:
                kind = make(scratch)
                kinds += [(kind, flips[name], False), (kind, cuts, True)]
    for kind, count, cut in kinds:
        if not count:
            continue
        began, part = time.monotonic(), Campaign(kind, scratch)
        part.run(count, seed, cut=cut)
        told = ", ".join(f"{number:,} {verdict}" for verdict, number in part.counts.items())
        what, took_s = "cuts" if cut else "flips", time.monotonic() - began
        print(f"seed {seed}: {count} {what} of a {kind.name}: {told} ({took_s:.0f} s)", flush=True)
        is_good &= part.is_good
    if is_good:
        shutil.rmtree(scratch)
    else:
        print(f"kept: {scratch}")
    return is_good


_KINDS: dict[str, Callable[[Path], Kind]] = {
    "run": lambda at: Kind("run folder", make_run(at / "runs"), run_readings(), verify=False),
    "finetune": lambda at: Kind(
        "fine-tuning run", make_finetune_run(at / "finetuning"), finetune_readings(), verify=False
    ),
    "store": lambda at: Kind("store", make_store(at / "store"), {"steps": read_store}, verify=True),
}


if __name__ == "__main__":
    sys.exit(main())
