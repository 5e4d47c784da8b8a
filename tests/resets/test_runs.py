"""Runs that begin in a bank: what they see of the rows that are held out for evaluation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from robot_rl.cli.main import main
from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.data.demos import load_episodes
from robot_rl.data.episode import RESET_ROW
from robot_rl.data.store.reader import StoreReader
from robot_rl.sched.opened import opened
from robot_rl.sim.bank_files import Bank
from robot_rl.sim.config import EnvConfig, ResetsConfig
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.train.before import check_before_learner, check_start_classes
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import first_seed
from robot_rl.train.improve.imagined import RealSource
from robot_rl.train.phases import resume, run
from robot_rl.worlds.saved import imitated
from tests.runs import SMALL, TINY, folder_of, killed_after

NOISE: dict[str, Any] = {
    "stages": ("look", "online", "evaluate"),
    "n_exec": 1,
    "policy": {"kind": "gaussian", "width": 16, "depth": 1},
    "method": {"kind": "plain_ppo", "env_steps": 16, "steps": 4},
}


def recording(bank: Path, out: Path, **changes: Any) -> RunConfig:
    """A residual of 40 control steps in 2 envs, which begin in the bank; evaluations do not."""
    resets = {"bank": str(bank), "mix": {"own": 1.0, "grasped": 1.0, "near_goal": 1.0}}
    env = {"task": "gantry_peg", "horizon_s": 0.25, "num_threads": 1, "resets": resets}
    return build(RunConfig, {**SMALL, "env": env, "out": str(out), **changes})


def rows_of(store: Path) -> list[list[int]]:
    """Returns class and row of each recorded episode."""
    reader = StoreReader(store)
    return [reader.read(number).obs[RESET_ROW][0].tolist() for number in range(len(reader))]


@pytest.mark.usefixtures("whole_runs")
def test_a_run_records_in_which_rows_of_its_bank_the_episodes_began(
    bank: Bank, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = Path(run(recording(folder, tmp_path / "unbroken")).run) / "experience"
    with killed_after(14):
        run(recording(folder, tmp_path / "killed"))
    killed = folder_of(tmp_path / "killed")
    resume(killed)
    assert rows_of(killed / "experience") == rows_of(unbroken)
    reader = StoreReader(unbroken)
    starts = reader.layout.starts
    assert starts is not None
    assert starts.bank is not None
    assert starts.bank["digest"] == bank.digest
    env = SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1), 1, autoreset="disabled")
    counts = dict.fromkeys(starts.classes, 0)
    for number in range(len(reader)):
        obs = reader.read(number).obs
        name, row = starts.of(obs[RESET_ROW])
        counts[name] += 1
        if row >= 0:
            begun = env.set_state(bank.sets[name].states[[row]])["state"][0]
            np.testing.assert_array_equal(obs["state"][0], begun)
    capsys.readouterr()
    assert main(["replay", "info", str(unbroken), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])["starts"]
    assert {each["name"]: each["episodes"] for each in shown} == {
        name: count for name, count in counts.items() if count
    }
    assert counts["grasped"] + counts["near_goal"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
def test_simulations_record_their_rows_and_an_arm_has_none(folder: Path, tmp_path: Path) -> None:
    """Evaluations begin in the bank, too: a recording follows what acts."""
    method = {key: value for key, value in SMALL["method"].items() if key != "env_steps"}
    sources = {"simulations": {"num_envs": 2, "env_steps": 40}, "arm": {"real_time": True, "env_steps": 8}}
    config = recording(folder, tmp_path, sources=sources, num_envs=16, method=method)
    resets = replace(config.env.resets, evaluate="near_goal")
    made = run(replace(config, env=replace(config.env, resets=resets)))
    stores = {name: Path(made.run) / "experience" / name for name in sources}
    assert {kind for kind, _ in rows_of(stores["simulations"])} <= {0, 3, 4}
    arm = StoreReader(stores["arm"])
    assert arm.layout.starts is None
    assert RESET_ROW not in arm.features
    assert arm.lengths().sum() == 8


@pytest.mark.usefixtures("whole_runs")
def test_a_run_of_a_version_that_recorded_no_rows_goes_on_without_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("robot_rl.train.phases.starts_of", lambda *_: None)
        with killed_after(14):
            run(recording(folder, tmp_path))
    found = resume(folder_of(tmp_path))
    reader = StoreReader(Path(found.run) / "experience")
    assert reader.lengths().sum() == 40
    assert RESET_ROW not in reader.features


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


@pytest.mark.parametrize(
    ("mix", "given", "words"),
    [
        (
            {},
            {"grasp": 1.0, "near_goal": 1.0},
            "'grasp', allowed: reaching, near_object, grasped, near_goal,",
        ),
        ({}, {"own": 1.0}, "'own', allowed: reaching, near_object, grasped, near_goal, which real"),
        ({"grasped": 1.0, "own": 0.0}, {"own": 1.0, "near_goal": 2.0}, "'own, near_goal', allowed: grasped,"),
        ({"own": 1.0, "reaching": 2.0}, {"own": 1.0, "grasped": 2.0}, "'grasped', allowed: own, reaching,"),
    ],
)
def test_imagination_begins_in_no_class_that_real_episodes_do_not_draw(
    mix: dict[str, float], given: dict[str, float], words: str, folder: Path, tmp_path: Path
) -> None:
    method = {"kind": "imagined", "starts": {"classes": given}}
    env = {"task": "gantry_peg", "resets": {"bank": str(folder), "mix": mix}}
    config = build(RunConfig, {**TINY, "env": env, "method": method, "out": str(tmp_path)})
    for check in (check_before_learner, run):
        with pytest.raises(ConfigError, match=rf"method\.starts\.classes: got {words}"):
            check(config)
    without = replace(config, env=replace(config.env, resets=ResetsConfig()))
    with pytest.raises(ConfigError, match=r"allowed: none without env\.resets\.bank, or with station="):
        run(without)
    assert not list(tmp_path.iterdir())


def test_imagination_begins_in_classes_that_real_episodes_draw(folder: Path) -> None:
    classes = {"own": 1.0, "grasped": 2.0, "near_goal": 0.0}
    method = {"kind": "imagined", "starts": {"classes": classes}}
    resets = {"bank": str(folder), "mix": {"own": 1.0, "grasped": 1.0}}
    env = {"task": "gantry_peg", "resets": resets}
    config = build(RunConfig, {**TINY, "env": env, "method": method})
    check_start_classes(config)
    with pytest.raises(ConfigError, match=r"got 'own, grasped', allowed: none .* with station="):
        check_start_classes(replace(config, station="sim_arm"))
    typed = replace(config.env.resets, mix={"graspt": 1.0})
    with pytest.raises(ConfigError, match=r"env.resets.mix: no class 'graspt'. Did you mean 'grasped'"):
        check_start_classes(replace(config, env=replace(config.env, resets=typed)))


def test_training_in_held_out_rows_is_refused(folder: Path) -> None:
    env = {"task": "gantry_peg", "resets": {"bank": str(folder), "rows": "held_out"}}
    with pytest.raises(ConfigError, match=r"env.resets.rows: got 'held_out', allowed: train"):
        check_before_learner(build(RunConfig, {**TINY, "env": env}))
