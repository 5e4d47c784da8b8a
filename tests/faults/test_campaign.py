"""A sample of the crash campaign; `make test-faults` runs all of it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")


def campaign(*words: str, program: Path = CAMPAIGN) -> subprocess.CompletedProcess[str]:
    """Runs a campaign as the program that it is: children are forked from a process without threads."""
    return subprocess.run(
        [sys.executable, str(program), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(CAMPAIGN.parents[2])},  # as the Makefile does
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_crashes_lose_nothing_that_was_flushed(seed: int) -> None:
    done = campaign("--kills", "10", "--truncations", "20", "--flips", "20", "--seed", str(seed))
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("10 kills", "20 truncations", "20 flips"):
        (line,) = [line for line in done.stdout.splitlines() if part in line]
        assert line.startswith(f"seed {seed}: 0 flushed steps lost, 0 corrupted")
        assert " 0 steps compared" not in line
    assert "verified by `robot-rl replay verify`: 0 damaged" in done.stdout


def test_the_campaign_notices_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A judge that cannot say no proves nothing: a step that is claimed and not there is counted."""
    spec = importlib.util.spec_from_file_location("fault_campaign", CAMPAIGN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    template = module.Template(tmp_path / "store", seed=3)
    outcome = module.Outcome("checks")
    steps = template.untouched(0, 0, 0)
    outcome.compare(template.folder, steps, "all")
    assert outcome.is_good
    assert outcome.counts["steps compared"] == len(steps) > 50
    outcome.compare(template.folder, {*steps, (10**6, 0)}, "one too many")
    assert not outcome.is_good
    assert "1 flushed steps are gone, first (1000000, 0)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "flips", "cuts"),
    [("run", "run folder", 30, 10), ("finetune", "fine-tuning run", 15, 5), ("store", "store", 30, 10)],
)
def test_no_damaged_file_of_a_run_or_a_store_is_read_as_if_it_were_whole(
    kind: str, name: str, flips: int, cuts: int
) -> None:
    counts = {"--run-flips": 0, "--finetune-flips": 0, "--store-flips": 0, f"--{kind}-flips": flips}
    words = [word for option, count in {**counts, "--cuts": cuts}.items() for word in (option, str(count))]
    done = campaign(*words, program=CAMPAIGN.with_name("flip_runs.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (f"{flips} flips of a {name}", f"{cuts} cuts of a {name}"):
        (line,) = [line for line in done.stdout.splitlines() if part in line]
        assert "0 wrong, 0 traceback" in line
        assert " 0 noticed" not in line
