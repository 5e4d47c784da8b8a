"""What a newcomer waits for: help, the doctor, and the answer to a mistake, as installed (with bytecode)."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.benchmark

LIMIT_S = 1.0
ROUNDS = 5

MISTAKES = {
    "train": ["train", "recipe=smoke", "sed=3"],
    "finetune": ["finetune", "dataset=/no/such"],
    "finetune policy": ["finetune", "dataset=.", "policy=smal_vla"],
    "collect": ["collect", "task=pick_cub", "out=x"],
    "collect policy": ["collect", "policy=/no/such", "out=x"],
    "evaluate": ["evaluate", "run=/no/such"],
    "evaluate policy": ["evaluate", "policy=/no/such"],
    "report": ["report", "run=/no/such"],
    "deploy": ["deploy", "run=/no/such", "station=sim_arm"],
    "bench": ["bench", "policy", "sample=3"],
    "replay": ["replay", "info", "/no/such"],
    "reward": ["reward", "train", "data=/no/such", "out=x"],
    "serve-policy": ["serve-policy", "run=/no/such", "token_file=x"],
}

LATER_MISTAKES = {
    "held out": ["finetune", "dataset=demos", "heldout=30"],
    "rename": ["finetune", "dataset=demos", "rename=a:b"],
    "horizon": ["finetune", "dataset=demos", "horizon=5000"],
    "task": ["train", "recipe=pick_cube", "demos.path=demos"],
    "camera": ["train", "recipe=reach", "env.cameras=[frnt]"],
    "reuse": ["train", "recipe=pick_cube", "replay.reuse=demos"],
    "env": ["train", "recipe=crossq", "env.id=Hoper-v5"],
}
"""What a dataset or an environment decides: PyArrow, MuJoCo or Gymnasium are needed to answer."""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns an environment in which Python keeps bytecode; nothing is compiled twice, as for a user."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode"))}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "demos"
    words = ["collect", "task=reach", "episodes=3", f"out={folder}"]
    subprocess.run([sys.executable, "-m", "robot_rl.cli.main", *words], check=True, env=env)
    return folder


def measured(words: Sequence[str], env: dict[str, str], *, code: int) -> tuple[float, float]:
    """Returns the least processor and wall-clock seconds of a command; the first round compiles."""
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "robot_rl.cli.main", *words], capture_output=True, env=env
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == code, done.stderr
        spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        found.append((spent_s, time.perf_counter() - began))
    return min(spent for spent, _ in found[1:]), min(took for _, took in found[1:])


@pytest.mark.parametrize("words", [["--help"], ["doctor"], ["train", "--help"]], ids=" ".join)
def test_help_and_doctor_cost_a_second_of_the_processor_at_most(
    words: list[str], env: dict[str, str], record_property: Any
) -> None:
    spent_s, _ = measured(words, env, code=0)
    record_property("cpu_s", {" ".join(words): spent_s})
    assert spent_s <= LIMIT_S


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_answered_within_a_second(
    mistake: str, env: dict[str, str], tmp_path: Path, record_property: Any
) -> None:
    words = [word.replace("/no/such", str(tmp_path / "none")) for word in MISTAKES[mistake]]
    _, took_s = measured(words, env, code=2)
    record_property("wall_s", {mistake: took_s})
    assert took_s <= LIMIT_S


@pytest.mark.parametrize("mistake", list(LATER_MISTAKES))
def test_a_mistake_that_a_dataset_or_an_environment_decides_costs_a_second_of_the_processor_at_most(
    mistake: str, env: dict[str, str], demos: Path, record_property: Any
) -> None:
    words = [word.replace("=demos", f"={demos}") for word in LATER_MISTAKES[mistake]]
    spent_s, _ = measured(words, env, code=2)
    record_property("cpu_s", {mistake: spent_s})
    assert spent_s <= LIMIT_S
