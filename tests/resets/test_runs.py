"""Runs that begin in a bank: what they see of the rows that are held out for evaluation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.data.demos import load_episodes
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.train.before import check_before_learner
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import first_seed
from robot_rl.train.improve.imagined import RealSource
from robot_rl.train.phases import run
from robot_rl.worlds.saved import imitated
from tests.runs import TINY, folder_of

NOISE: dict[str, Any] = {
    "stages": ("look", "online", "evaluate"),
    "n_exec": 1,
    "policy": {"kind": "gaussian", "width": 16, "depth": 1},
    "method": {"kind": "plain_ppo", "env_steps": 16, "steps": 4},
}


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize(
    ("played", "changes"), [("demos", {"stages": ("demos", "clone", "evaluate")}), ("look", NOISE)]
)
def test_what_is_played_before_a_run_learns_is_not_held_out(
    played: str, changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Demonstrations begin as the task says, also where evaluations begin in a class of the bank."""
    env: dict[str, Any] = {"task": "gantry_peg", "horizon_s": 0.25, "num_threads": 1}
    resets = {"bank": str(folder), "evaluate": "near_goal"}
    config = {
        **TINY,
        **changes,
        "demos": {"episodes": 3},
        "env": {**env, "resets": resets},
        "out": str(tmp_path),
    }
    run(build(RunConfig, config))
    episodes = load_episodes(folder_of(tmp_path) / played)
    begun = SimVectorEnv(EnvConfig(**env), 3).reset(seed=first_seed(0))[0]["state"]
    np.testing.assert_array_equal(episodes.obs["state"][episodes.bounds()[0]], begun)


@pytest.mark.parametrize("evaluate", ["own", "near_goal"])
def test_real_episodes_of_an_imagined_run_begin_in_the_bank_and_its_probes_as_evaluations_do(
    folder: Path, evaluate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    resets = {"bank": str(folder), "mix": {"grasped": 1.0}, "evaluate": evaluate}
    env: dict[str, Any] = {"task": "gantry_peg", "horizon_s": 0.25, "num_threads": 1, "resets": resets}
    config = build(RunConfig, {**TINY, "env": env, "method": {"kind": "imagined"}})
    conductor: Any = SimpleNamespace(
        session=SimpleNamespace(config=config), real=SimpleNamespace(env=imitated(config.env.evaluated()))
    )
    source = RealSource(conductor, nn.Linear(1, 1), 4)
    begun = dict[bool, set[str]]()
    for is_probe in (False, True):
        with opened(source._device(6, is_probe=is_probe), holder="test") as found:
            assert found.num_envs == 4
            infos = found.reset(seed=0)[1]
            begun[is_probe] = {found.reset_classes[kind] for kind in infos.get("reset_class", ())}
    assert begun == {False: {"grasped"}, True: {evaluate} - {"own"}}


def test_training_in_held_out_rows_is_refused(folder: Path) -> None:
    env = {"task": "gantry_peg", "resets": {"bank": str(folder), "rows": "held_out"}}
    with pytest.raises(ConfigError, match=r"env.resets.rows: got 'held_out', allowed: train"):
        check_before_learner(build(RunConfig, {**TINY, "env": env}))
