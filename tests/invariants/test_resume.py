"""Exact resume: a run that was cut short anywhere ends as the unbroken one, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import build
from robot_rl.core.files import without_checksum
from robot_rl.data.store.reader import open_source
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import killed_after, rows_of, undisturbed

pytestmark = pytest.mark.usefixtures("whole_runs")

TINY: dict[str, Any] = {
    "recipe": "tiny",
    "num_envs": 3,
    "n_exec": 4,
    "metrics_rows": 10,
    "env": {"task": "reach", "horizon_s": 0.8, "num_threads": 1},
    "demos": {"episodes": 5, "bias_m": 0.02},
    "policy": {"horizon": 8, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "bc": {"updates": 40, "batch": 16},
    "method": {
        "kind": "residual",
        "env_steps": 360,
        "utd": 0.5,
        "batch": 16,
        "explore_steps": 60,
        "capacity": 1000,
        "head": {"width": 16, "depth": 1},
        "algorithm": {"num_critics": 2, "width": 16, "depth": 1, "critic_warmup": 20},
    },
    "evaluate": {"episodes": 6, "num_envs": 4, "every_env_steps": 120, "quick_episodes": 4},
    "checkpoint": {"every_s": 0.0, "every_steps": 9},
    "video": {"episodes": 0, "failures": 0},
}


def tiny(out: Path) -> RunConfig:
    return replace(build(RunConfig, TINY), out=str(out))


def result(folder: Path) -> dict[str, Any]:
    """Returns everything a run came to, without what the clock says."""
    summary = without_checksum(json.loads((folder / "summary.json").read_text()))
    for name in (
        "train_minutes",
        "timing",
        "spent",
        "run",
        "command",
    ):  # clocks, and paths, which the command names
        del summary[name]
    return {
        "rows": rows_of(folder),
        "summary": summary,
        "base": (folder / "policy/base/policy.safetensors").read_bytes(),
        "final": (folder / "policy/final/policy.safetensors").read_bytes(),
        "experience": experience(folder),
    }


def experience(folder: Path) -> list[Any]:
    """Returns everything the run recorded, step by step."""
    source = open_source(folder / "experience")
    columns = ("action", "base_action", "reward", "terminated", "truncated", "success", "stamp_ns")
    episodes = [source.read(i) for i in range(len(source))]
    return [
        [
            *(getattr(episode, name).tobytes() for name in (*columns, "policy_version", "source")),
            episode.obs["state"].tobytes(),
            {key: value.tobytes() for key, value in episode.final_obs.items()},
        ]
        for episode in episodes
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    with undisturbed(out / "state"):
        return Path(phases.run(tiny(out)).run)


@pytest.fixture(scope="module")
def unbroken(finished: Path) -> dict[str, Any]:
    return result(finished)


def test_the_same_seed_twice_gives_the_same_bytes(tmp_path: Path, unbroken: dict[str, Any]) -> None:
    assert result(Path(phases.run(tiny(tmp_path)).run)) == unbroken


# Saves of the unbroken run: demos; 4 in the cloning loop and its end; base; 40 in the residual loop.
@pytest.mark.parametrize("saves", [0, 1, 3, 5, 6, 12, 33])
def test_a_run_cut_short_ends_as_the_unbroken_one(
    saves: int, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    with killed_after(saves):
        phases.run(tiny(tmp_path))
    (folder,) = tmp_path.glob("*-tiny-seed0")
    phases.resume(folder)
    assert result(folder) == unbroken


def test_a_finished_run_may_be_resumed_and_stays_as_it_is(finished: Path, unbroken: dict[str, Any]) -> None:
    phases.resume(finished)
    assert result(finished) == unbroken


def wait_for(folder: Path, phase: str, rows: int, process: subprocess.Popen[str]) -> None:
    """Waits until metrics.jsonl has so many rows of a phase."""
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        for path in folder.glob("*-tiny-seed0/metrics.jsonl"):
            if path.read_text().count(f'"phase": "{phase}"') >= rows:
                return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    raise AssertionError(f"no {rows} rows of {phase} in time")


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "rows"), [("demos", 1), ("bc", 4), ("residual", 3), ("residual", 9)])
def test_kill_9_and_resume_from_the_command_line(
    phase: str, rows: int, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    from robot_rl.config import dump

    # The command line has no recipe of this size: the run folder is made, then resumed and killed.
    folder = tmp_path / "20260101-000000-tiny-seed0"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(tiny(tmp_path)))
    program = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train", f"resume={folder}", "--json"]
    environment = {**os.environ, "ROBOT_RL_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    log = (tmp_path / "log").open("w")
    with log, subprocess.Popen(command, env=environment, text=True, stdout=log, stderr=log) as process:
        wait_for(tmp_path, phase, rows, process)
        process.send_signal(signal.SIGKILL)
    assert not (folder / "summary.json").exists()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["run"] == str(folder)
    assert result(folder) == unbroken
