"""The shim and the power cut notice what they are made for; a sample of the campaign that uses them."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.data.store.reader import StoreReader

FAULTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the shim is for Linux, and cc compiles it"
)


def module(name: str) -> Any:
    """Loads a file beside this one, which is a program of its own and in no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FAULTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


power_cut = module("power_cut")

WORK = """
import ctypes, os, sys
folder, notes, fail, error = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
shim = ctypes.CDLL(None)
shim.shim_arm(folder.encode(), os.open(notes, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), -1, fail, error, 0, 0)
def ack(text):
    shim.shim_ack(text.encode(), len(text))
os.chdir(folder)
{work}
shim.shim_disarm()
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "storage_shim.so"
    words = ["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-O1", "-pthread", "-o", str(path)]
    subprocess.run([*words, str(FAULTS / "storage_shim.c"), "-ldl"], check=True)
    return path


class Shimmed:
    """Runs a piece of Python below the shim."""

    def __init__(self, library: Path, tmp_path: Path) -> None:
        self.library, self.folder, self.notes = library, tmp_path / "disk", tmp_path / "notes"
        self.folder.mkdir()

    def run(self, work: str, *, fail: int = 0, error: int = 5) -> list[Any]:
        """Returns the calls."""
        words = [sys.executable, "-c", WORK.format(work=work), str(self.folder), str(self.notes)]
        environment = {**os.environ, "LD_PRELOAD": str(self.library), "PYTHONPATH": str(FAULTS.parents[1])}
        subprocess.run([*words, str(fail), str(error)], env=environment, check=True, timeout=60)
        return power_cut.read_notes(self.notes)

    def cuts(self, calls: list[Any], count: int, place: Path) -> Counter[str]:
        """Cuts the power after the last call `count` times; returns what `file` held, and how often."""
        found: Counter[str] = Counter()
        for seed in range(count):
            disk = power_cut.Disk()
            disk.play(calls)
            disk.cut(random.Random(seed), place / str(seed))
            path = place / str(seed) / "file"
            found[path.read_bytes().strip(b"\0").decode() if path.exists() else "none"] += 1
        return found


@pytest.fixture
def shimmed(library: Path, tmp_path: Path) -> Shimmed:
    return Shimmed(library, tmp_path)


SYNCED = """
with open("file.new", "w") as file:
    file.write("content")
    file.flush()
    os.fsync(file.fileno())
os.rename("file.new", "file")
folder = os.open(".", os.O_RDONLY)
os.fsync(folder)
ack("1")
"""


def test_what_was_synced_survives_every_power_cut(shimmed: Shimmed, tmp_path: Path) -> None:
    calls = shimmed.run(SYNCED)
    assert [call.op.name for call in calls if call.ordinal] == [
        "OPEN",
        "WRITE",
        "SYNC",
        "RENAME",
        "OPEN",
        "SYNC",
    ]
    assert shimmed.cuts(calls, 30, tmp_path) == {"content": 30}


@pytest.mark.parametrize(
    ("forgotten", "left"),
    [("    os.fsync(file.fileno())\n", {"", "content"}), ("os.fsync(folder)\n", {"none", "content"})],
    ids=["the file", "its folder"],
)
def test_a_missing_sync_is_noticed(shimmed: Shimmed, tmp_path: Path, forgotten: str, left: set[str]) -> None:
    """A judge that cannot say no proves nothing: this one acknowledges what the disk may not have."""
    assert forgotten in SYNCED
    assert shimmed.cuts(shimmed.run(SYNCED.replace(forgotten, "")), 30, tmp_path).keys() == left


def test_a_write_that_fails_and_is_ignored_is_noticed(shimmed: Shimmed, tmp_path: Path) -> None:
    ignoring = SYNCED.replace(
        """    file.write("content")
    file.flush()
""",
        """    try:
        os.write(file.fileno(), b"content")
    except OSError as error:
        assert error.errno == 28
""",
    )
    calls = shimmed.run(ignoring, fail=2, error=28)
    assert [call.op.name for call in calls if call.failed] == ["WRITE"]
    assert [call.content for call in calls if call.op.name == "ACK"] == [b"1"]
    assert shimmed.cuts(calls, 10, tmp_path) == {"": 10}


def test_a_short_write_is_half_of_one(shimmed: Shimmed) -> None:
    shimmed.run(
        """
handle = os.open("file", os.O_CREAT | os.O_WRONLY)
assert os.write(handle, b"12345678") == 4
assert os.write(handle, b"5678") == 4
""",
        fail=2,
        error=255,
    )
    assert (shimmed.folder / "file").read_text() == "12345678"


def test_a_sync_after_one_that_failed_does_not_bring_the_same_pages(shimmed: Shimmed, tmp_path: Path) -> None:
    """As on Linux: the pages pass for clean, and the next fsync says that all is well."""
    again = SYNCED.replace(
        "    os.fsync(file.fileno())\n",
        """    try:
        os.fsync(file.fileno())
    except OSError:
        os.fsync(file.fileno())
""",
    )
    calls = shimmed.run(again, fail=3)
    assert shimmed.cuts(calls, 40, tmp_path).keys() >= {"", "content"}


def test_the_shim_sees_every_way_to_write(shimmed: Shimmed) -> None:
    """What was played from the notes is what is there, byte by byte."""
    calls = shimmed.run("""
import mmap
with open("a", "wb") as file:
    file.write(b"x" * 9000)
    os.pwrite(file.fileno(), b"yy", 4095)
    os.writev(file.fileno(), [b"1", b"22"])
    file.truncate(9001)
    copy = os.dup(file.fileno())
    os.write(copy, b"through a copy")
    os.close(copy)
with open("a", "ab") as file:
    file.write(b"at the end")
with open("a", "rb") as source, open("b", "wb") as target:
    os.sendfile(target.fileno(), source.fileno(), 0, 5000)
    os.copy_file_range(source.fileno(), target.fileno(), 100)
with open("b", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    mapped[4000:4003] = b"map"
    mapped.flush()
os.mkdir("sub")
os.link("a", "sub/linked")
os.rename("b", "sub/renamed")
os.unlink("a")
handle = os.open("sub", os.O_RDONLY)
os.close(os.open("through", os.O_CREAT | os.O_WRONLY, dir_fd=handle))
os.rename("through", "other", src_dir_fd=handle, dst_dir_fd=handle)
libc = ctypes.CDLL(None)
libc.fopen.restype = libc.fdopen.restype = ctypes.c_void_p
whole = os.open("stdio", os.O_CREAT | os.O_WRONLY)
stream = ctypes.c_void_p(libc.fdopen(whole, b"w"))
libc.fwrite(b"0123456789", 2, 5, stream)
libc.fclose(stream)
""")
    disk = power_cut.Disk()
    disk.play(calls)
    assert disk.differs_from(shimmed.folder) == ""
    (shimmed.folder / "sub/renamed").write_bytes(b"past the shim")
    assert disk.differs_from(shimmed.folder).endswith("sub/renamed: other content than was noted")


STORE = """
import numpy as np
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.writer import StoreWriter
names = dict(state_names=("x",), action_names=("y",))
meta = EpisodesMeta(task="t", robot="r", control_hz=10.0, instruction="i", **names)
features = {"state": Feature("float32", (1,))}
with StoreWriter("runs/store", meta, features, flush_s=1e6, segment_bytes=900) as writer:
    for step in range(12):
        writer.append(obs={"state": [step]}, action=[-step], stamp_ns=step)
        if step % 3 == 2:
            writer.flush()
            ack(str(step + 1))
"""


def test_a_store_has_what_it_flushed_after_every_power_cut(shimmed: Shimmed, tmp_path: Path) -> None:
    """Steps go from 0 on; 25 cuts behind random calls, most with flushes behind them and one under way."""
    calls = shimmed.run(STORE)
    held: Counter[str] = Counter()
    for seed in range(25):
        rng = random.Random(seed)
        disk = power_cut.Disk()
        disk.play(calls[: rng.randint(0, len(calls))])
        promised = int(disk.acks[-1]) if disk.acks else 0
        store = tmp_path / str(seed) / "runs/store"
        disk.cut(rng, tmp_path / str(seed))
        if not promised and not (store / "meta/store.json").exists():
            continue
        reader = StoreReader(store)
        steps = np.concatenate(
            [reader.read(i).obs["state"][:, 0] for i in range(len(reader))] or [np.zeros(0)]
        )
        assert steps.tolist() == list(range(len(steps)))
        assert len(steps) >= promised
        held["more than promised" if len(steps) > promised else "promised"] += 1
    assert min(held.values()) >= 3


def campaign(*words: str) -> dict[str, Any]:
    """Runs the campaign as the program that it is; it has to find nothing."""
    program = [sys.executable, str(FAULTS / "storage_campaign.py"), *words, "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["target"]: row for row in json.loads(done.stdout.splitlines()[-1])["targets"]}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["store", "writer", "checkpoints"])
def test_faults_and_power_cuts_cost_nothing_that_was_acknowledged(target: str) -> None:
    row = campaign("--quick", "--only", target)[target]
    assert row["faults"] >= 10
    assert row["cuts"] == 25
    assert row["calls"] > row["sites"] > 10
    assert row["errors"] >= row["faults"] // 2  # most of them were felt


@pytest.mark.slow
def test_the_shim_sees_what_strace_sees() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not there")
    campaign("--audit", "--only", "writer", "--only", "leases")
