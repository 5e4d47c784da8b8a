"""Sweeps whose jobs run at once: processes of their own, as many as the devices have slots for."""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from robot_rl.cli import main as cli
from robot_rl.cli import side_by_side
from robot_rl.cli.main import main
from robot_rl.cli.side_by_side import Job, fit_together
from robot_rl.core.errors import ConfigError
from robot_rl.hal.device import DeviceSpec
from robot_rl.sched.leases import LeaseStore

CORES = DeviceSpec(name="cores", kind="cpu", slots=2)

FAKE = """
import json, os, signal, sys, time
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
seed, out = int(words["seed"]), Path(words["out"])
(out / f"{seed}.began").write_text(repr(time.monotonic()))
folder = out / f"run-{seed}"
folder.mkdir()
print(f"run folder: {folder}", file=sys.stderr)
print(f"residual  50%  {seed}/10 steps", file=sys.stderr, flush=True)
if seed == 1:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where memory ends
if seed == 3:
    print("error: the arm is gone", file=sys.stderr)
    print(json.dumps({"error": "the arm is gone"}))
    sys.exit(2)
try:
    if seed >= 7:
        time.sleep(60)
    time.sleep(0.3)
except KeyboardInterrupt:
    print("interrupted.", file=sys.stderr)
    if seed == 8:
        folder.rmdir()  # nothing was done yet
    sys.exit(130)
print("reach: success 90.0% after")
(out / f"{seed}.ended").write_text(repr(time.monotonic()))
print(json.dumps({"task": "reach", "final_success": 0.9, "run": None}))
"""
"""A `robot-rl train` without learning: seed 1 is killed, seed 3 refused, from seed 7 on it takes a minute."""


@dataclass(frozen=True)
class Settings:
    out: str


class Command(ModuleType):
    """What the parent sees of it: it never runs a job itself."""

    def __init__(self, out: Path) -> None:
        super().__init__("command")
        self.out, self.takes = out, 1

    def config(self, words: list[str]) -> Settings:
        if any(word.startswith("seed=-") for word in words):
            raise ConfigError("seed: got -1")
        return Settings(str(self.out / "runs"))

    def devices(self, config: Settings) -> list[tuple[DeviceSpec, int]]:
        return [(CORES, self.takes)]

    def result(self, words: list[str]) -> dict[str, Any]:
        return {"here": os.getpid()}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Stands where `train` stands; its jobs are processes that lie."""
    found = Command(tmp_path)
    monkeypatch.setitem(sys.modules, "tests_side_by_side", found)
    monkeypatch.setitem(cli.COMMANDS, "train", "tests_side_by_side")
    monkeypatch.setattr(side_by_side, "program", lambda: [sys.executable, "-SE", "-c", FAKE])
    monkeypatch.setattr(side_by_side, "_POLL_S", 0.01)
    return found


def ended(said: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """Returns the rows of the JSON object that ends a sweep, by their jobs."""
    return {row.pop("job"): row for row in json.loads(said.readouterr().out.splitlines()[-1])["jobs"]}


def moment(path: Path) -> float:
    return float(path.read_text())


def test_as_many_jobs_run_at_once_as_there_are_slots(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", "seed=0,2,4", f"out={tmp_path}", "--json"]) == 0
    assert list(ended(capsys)) == ["seed=0", "seed=2", "seed=4"]
    began = {seed: moment(tmp_path / f"{seed}.began") for seed in (0, 2, 4)}
    over = {seed: moment(tmp_path / f"{seed}.ended") for seed in (0, 2, 4)}
    assert max(began[0], began[2]) < min(over[0], over[2])
    assert began[4] > min(over[0], over[2])  # two slots: the third waits
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["job-1.log", "job-2.log", "job-3.log"]


def test_a_job_that_is_killed_ends_no_other(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", "seed=0,1,2,3", f"out={tmp_path}", "--json"]) == 1
    found = ended(capsys)
    (folder,) = (tmp_path / "runs").iterdir()
    good = {"task": "reach", "final_success": 0.9, "run": None}
    assert found == {
        "seed=0": good,
        "seed=1": {
            "error": f"was killed by SIGKILL; see {folder}/job-2.log; "
            f"`robot-rl train resume={tmp_path}/run-1` goes on"
        },
        "seed=2": good,
        "seed=3": {"error": "the arm is gone"},
    }


def test_a_job_has_a_line_that_says_where_it_stands(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", "seed=0,2", f"out={tmp_path}"]) == 0
    lines = capsys.readouterr().err.splitlines()
    for number, seed in ((1, 0), (2, 2)):
        told = [line for line in lines if line.startswith(f"job {number}/2")]
        assert told[0] == f"job {number}/2: robot-rl train seed={seed} out={tmp_path}"
        assert told[-2:] == [
            f"job {number}/2 (seed={seed}): residual  50%  {seed}/10 steps",
            f"job {number}/2 (seed={seed}): reach: success 90.0% after",
        ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_all_and_says_how_each_goes_on(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def interrupt() -> None:
        while not all((tmp_path / f"{seed}.began").is_file() for seed in (7, 8)):
            time.sleep(0.01)
        time.sleep(0.1)  # into their sleep
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main(["train", "-m", "seed=0,7,8,9", f"out={tmp_path}"]) == 130
    said = capsys.readouterr()
    assert "90.0%" in said.out  # seed 0 was done
    assert said.err.splitlines()[-6:] == [
        "interrupted: waiting for 2 jobs to stop",
        "1 of 4 jobs ended",
        "interrupted. Continue with:",
        f"  robot-rl train resume={tmp_path}/run-7",
        f"  robot-rl train seed=8 out={tmp_path}",
        f"  robot-rl train seed=9 out={tmp_path}",
    ]


@pytest.mark.parametrize(
    ("words", "takes"), [(["seed=0,2", "sweep.jobs=1"], 1), (["seed=0,2"], 2), (["seed=0"], 1)]
)
def test_jobs_that_are_not_to_run_at_once_run_here(
    command: Command, words: list[str], takes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command.takes = takes
    assert main(["train", "-m", *words, "--json"]) == 0
    assert all(row == {"here": os.getpid()} for row in ended(capsys).values())


def test_slots_that_others_hold_are_left_to_them(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    with LeaseStore().hold(CORES, holder="another", slots=1):
        assert main(["train", "-m", "seed=0,2", "--json"]) == 0
    assert all(row == {"here": os.getpid()} for row in ended(capsys).values())


@pytest.mark.parametrize("value", ["0", "many", "-1", ""])
def test_a_number_of_jobs_that_is_none(
    command: Command, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-m", "seed=0,2", f"sweep.jobs={value}"]) == 2
    assert capsys.readouterr().err == f"error: sweep.jobs: got {value!r}, allowed: 1 or more\n"


def test_a_command_that_takes_no_devices_runs_its_jobs_one_after_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["collect", "-m", "task=reach", "out=gone/a,gone/b", "sweep.jobs=2"]) == 2
    assert capsys.readouterr().err == (
        "error: sweep.jobs: got 2, allowed: 1: these jobs of robot-rl collect run one after another\n"
    )


def test_what_fits_together() -> None:
    gpus = [[(DeviceSpec(name=f"cuda:{i}", kind="gpu"), 1), (CORES, 1)] for i in (0, 0, 1)]
    first, same, other = (Job(words=(), label="", devices=wanted) for wanted in gpus)
    assert fit_together([first, other], {})
    assert not fit_together([first, same], {})  # one run on each GPU
    assert not fit_together([first, other], Counter(cores=1))  # 1 + 1 + 1 of 2
    assert fit_together([first], Counter(cores=1))


@pytest.mark.slow
def test_results_are_those_of_the_same_jobs_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(
        "robot_rl.train.devices.cpu_spec", lambda: DeviceSpec(name="cpu", kind="cpu", slots=2)
    )
    words = ["recipe=smoke", "seed=3,4", f"out={tmp_path}", "demos.episodes=4", "bc.updates=10"]
    words += [
        "method.env_steps=200",
        "method.explore_steps=60",
        "method.algorithm.critic_warmup=2",
        "evaluate.episodes=4",
        "evaluate.num_envs=4",
        "evaluate.every_env_steps=100",
    ]
    words += ["env.horizon_s=0.5", "env.num_threads=1", "num_envs=4", "video.episodes=0", "video.failures=0"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for at_once in ("1", "2"):
        assert main(["train", "-m", *words, f"sweep.jobs={at_once}", "--json"]) == 0
        found[at_once] = ended(capsys)
    assert len(list(tmp_path.glob("*-sweep/job-*.log"))) == 2
    for job, one in found["1"].items():
        two = found["2"][job]
        assert one["run"] != two["run"]
        for key in ("base_digest", "final_digest", "base_success", "final_success", "env_steps"):
            assert one[key] == two[key], key
        assert one["final_digest"] != one["base_digest"]  # it has learned
    assert found["1"]["seed=3"]["final_digest"] != found["1"]["seed=4"]["final_digest"]
