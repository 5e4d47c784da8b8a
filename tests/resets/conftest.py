"""A small bank of the light task, made once."""

from pathlib import Path

import pytest

from robot_rl.resets.generate import GenerateSettings, generate
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.bank_files import Bank
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.vector import SimVectorEnv

ROWS = 24


@pytest.fixture(name="bank", scope="session")
def _bank() -> Bank:
    bench = Workbench(SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1), 32, autoreset="disabled"))
    return generate(bench, GenerateSettings(rows=ROWS, seed=3, classes=()))


@pytest.fixture(name="randomized", scope="session")
def _randomized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bank, Path]:
    """One class, with masses and frictions, and the folder that it is in."""
    config = EnvConfig(task="gantry_peg", num_threads=1, randomize=True)
    bench = Workbench(SimVectorEnv(config, 16, autoreset="disabled"))
    made = generate(bench, GenerateSettings(rows=12, seed=0, classes=("grasped",)))
    folder = tmp_path_factory.mktemp("banks") / "randomized"
    made.save(folder)
    return made, folder


@pytest.fixture(name="folder", scope="session")
def _folder(bank: Bank, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("banks") / "gantry_peg"
    bank.save(folder)
    return folder
