"""`train`, `evaluate` and `collect` from the command line: help, mistakes, and the whole chain."""

import contextlib
import io
import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from robot_rl.cli import evaluate
from robot_rl.cli.command import resumed
from robot_rl.cli.main import main
from robot_rl.cli.train import _demonstrations as announced
from robot_rl.cli.train import _plan as plan_text
from robot_rl.config import build, dump, load, options
from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError, DeviceError
from robot_rl.core.files import read_json, write_json
from robot_rl.data.collecting import COLLECTED
from robot_rl.data.demos import load_episodes
from robot_rl.data.episode import SOURCES
from robot_rl.data.lerobot.checksums import record
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.device import DeviceSpec
from robot_rl.policies.checkpoint import save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.rollout.envs import make_env
from robot_rl.sched.inventory import cpu_spec
from robot_rl.sched.leases import LeaseStore
from robot_rl.sim.config import EnvConfig, ResetsConfig
from robot_rl.train.assemble import policy_meta
from robot_rl.train.config import RunConfig


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("train", "robot-rl train recipe=pick_cube seed=3"),
        ("evaluate", "which=base"),
        ("collect", "robot-rl collect task=pick_cube episodes=50 out=demos/pick_cube"),
    ],
)
def test_help_teaches_by_example(command: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert example in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "content", "message"),
    [
        (
            "evaluate run",
            "dataset: x",
            "a run of `robot-rl finetune`, not of `robot-rl train`; it was",
        ),
        ("train resume", "dataset: x", "go on with it by `robot-rl finetune resume="),
        ("finetune resume", "recipe: x", "go on with it by `robot-rl train resume="),
    ],
)
def test_a_run_of_another_kind(
    word: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(f"{content}\n")
    command, key = word.split()
    assert main([command, f"{key}={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_help_names_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*options("recipe"), *options("base")} <= set(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "recipe=pick_cub"], "no recipe named 'pick_cub'. Did you mean 'pick_cube'?"),
        (["train", "method.utf=2"], "method.utf: no such key. Did you mean 'method.utd'?"),
        (["train", "seed=many"], "seed: got 'many', allowed: a whole number."),
        (["train", "env.task=pick_cub"], "env.task: no task named 'pick_cub'. Did you mean 'pick_cube'?"),
        (["train", "resume=/no/such"], "resume: '/no/such' is no run folder, it has no config.yaml."),
        (
            ["train", "resume=runs/x", "seed=2"],
            "resume: got other settings with it (seed=2), allowed: none.",
        ),
        (["evaluate"], "run: give either run=runs/<folder>, to repeat its evaluation, or policy="),
        (["evaluate", "run=x", "policy=y"], "run: give either run=runs/<folder>"),
        (["evaluate", "run=x", "n_exec=4"], "n_exec: got 4, allowed: left out with run="),
        (["evaluate", "policy=x", "which=base"], "which: got 'base', allowed: left out with policy="),
        (["evaluate", "policy=/no/such"], "policy: '/no/such' holds no policy. Give the folder of"),
        (["evaluate", "run=/no/such"], "run: '/no/such' is no run folder"),
        (["evaluate", "run=x", "which=best"], "which: got 'best', allowed: one of 'final', 'base'."),
        (["evaluate", "run=x", "episodes=0"], "episodes: got 0, allowed: 1 to 10000"),
        (["evaluate", "run=x", "disturb=2"], "disturb: got 2.0, allowed: 0 to 1"),
        (["collect", "out=x"], "task: missing. Give it as `task=<text>`."),
        (["collect", "policy=/no/such", "out=x"], "policy: '/no/such' holds no policy. Give the folder of"),
        (["collect", "policy=x", "noise_m=0", "out=x"], "noise_m 0.0 with policy=x, allowed: neither."),
        (["collect", "task=reach", "out=x", "attempts=9"], "attempts: got 9, allowed: 100 or more"),
        (["collect", "task=reach", "out=x", "keep.fast=1"], "keep.fast: no such key. Did you mean"),
        (["collect", "task=reach", "out=/tmp"], "out: '/tmp' exists already. Choose another folder"),
        (["collect", "task=reach", "out="], "out: got '', allowed: a new folder"),
        (["train", "recipe=smoke", "out="], "out: got '', allowed: a folder"),
        (["reward", "train", "data=.", "out="], "out: got '', allowed: a new folder"),
        (
            ["collect", "task=reach", "out=x", "search.world=w"],
            "search.world: got 'w', allowed: with policy=",
        ),
        (["collect", "policy=x", "out=x", "search.candidates=4"], "allowed: nothing without search.world"),
        (["collect", "task=reach", "out=/x/y", "episodes=0"], "episodes: got 0, allowed: 1 or more"),
    ],
)
def test_mistakes_are_one_line_with_a_remedy(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""


def test_a_run_at_home_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resumed(["resume=~/L\xe4ufe (neu), a=b"]) == tmp_path / "L\xe4ufe (neu), a=b"


def test_given_demonstrations_are_announced_by_their_folder(tmp_path: Path) -> None:
    """Only the dataset knows how many they are: `demos.episodes` is of those that are collected."""
    given = build(RunConfig, {"demos": {"path": str(tmp_path), "episodes": 200}})
    assert announced(given) == f"demonstrations of {tmp_path}"
    assert announced(build(RunConfig, {"demos": {"episodes": 200}})) == "200 demonstrations"


def test_more_simulations_than_memory_holds_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """MuJoCo itself fails after 40 s and the demonstrations, deaf to Ctrl-C."""
    if not Path("/proc/sys/vm/max_map_count").is_file():
        pytest.skip("not Linux")
    for words in (["train"], ["collect", "task=reach", "out=x"]):
        assert main([*words, "num_envs=10000000"]) == 2
        assert "error: num_envs: got 10000000, allowed: at most " in capsys.readouterr().err


def test_a_person_without_a_terminal_is_told_before_anything_is_cloned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> int:
        raise DeviceError("keyboard: this process has no terminal.")

    monkeypatch.setattr("robot_rl.real.teleop.keyboard._own_terminal", none)
    out = tmp_path / "runs"
    assert main(["train", "recipe=online", "human.input=keyboard", f"out={out}"]) == 2
    assert "this process has no terminal" in capsys.readouterr().err
    assert not out.exists()


def test_an_arm_that_does_not_answer_is_told_before_anything_is_cloned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent:
        def __init__(self, *_: object, **__: object) -> None:
            raise DeviceError("the driver of station sim_arm ended (2): no arm (see /tmp/gone/driver.log)")

    monkeypatch.setattr("robot_rl.real.launch.StationProcesses", Absent)
    out = tmp_path / "runs"
    assert main(["train", "recipe=online", "station=sim_arm", f"out={out}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: station: the driver of station sim_arm ended (2): no arm (see /tmp/gone/driver.log). "
        "Nothing was begun."
    )
    assert not out.exists()


def test_a_machine_that_is_taken_says_by_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec: DeviceSpec = cpu_spec()
    store = LeaseStore()
    lease = store.acquire(spec, holder="another job")
    try:
        assert main(["train", "recipe=smoke", f"out={tmp_path}"]) == 2
    finally:
        store.release(lease)
    message = capsys.readouterr().err
    assert f"lease of cpu: wanted 1 slot, 0 of {spec.slots} slots are free" in message
    assert "Held by 'another job' (pid " in message
    assert list(tmp_path.glob("*-smoke-*")) == []  # a run that was refused leaves no folder


def test_a_policy_of_another_task_is_refused(
    tmp_path: Path, trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained["run"], tmp_path / "run"))
    path = folder / "config.yaml"
    config = path.read_text().replace("task: reach", "task: pick_cube")
    path.write_text(config)
    assert main(["evaluate", f"run={folder}"]) == 2
    assert "does not match the checksum in its first line (delete that line if" in capsys.readouterr().err
    path.write_text(config.partition("\n")[2])
    assert main(["evaluate", f"run={folder}"]) == 2
    assert "the policy was trained with task = 'reach', here it is 'pick_cube'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trains the smallest thing there is through the command line; returns the last line."""
    out = tmp_path_factory.mktemp("trained")
    words = {
        "recipe": "smoke",
        "out": str(out),
        "demos.episodes": 4,
        "bc.updates": 10,
        "method.env_steps": 0,
        "evaluate.episodes": 5,
        "evaluate.num_envs": 4,
        "env.horizon_s": 0.5,
        "video.episodes": 0,
        "video.failures": 0,
    }
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("ROBOT_RL_STATE", str(out / "state"))
        assert main(["train", *(f"{key}={value}" for key, value in words.items()), "--json"]) == 0
    return json.loads(printed.getvalue().splitlines()[-1])


def test_train_ends_with_one_object_and_evaluate_repeats_it(
    trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = trained
    for key in ("task", "base_success", "final_success", "episodes", "env_steps", "train_minutes", "run"):
        assert key in summary
    folder = Path(summary["run"])
    names = {"config.yaml", "metrics.jsonl", "checkpoints", "policy", "summary.json", "report.html"}
    assert names <= {path.name for path in folder.iterdir()}
    assert read_json(folder / "summary.json", CheckpointError, "") == summary
    assert main(["evaluate", f"run={folder}", "which=base", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["digest"] == summary["base_digest"]
    assert told["success"] == summary["base_success"]
    assert told["matches"] is True


@pytest.mark.slow
def test_demonstrations_are_read_as_it_is_typed(
    tmp_path: Path,
    trained: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of four episodes the first is left out by name, and the second for its damage."""
    demos = Path(shutil.copytree(Path(trained["run"]) / "demos", tmp_path / "demos"))
    path = next((demos / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    values = table["observation.state"].to_pylist()
    values[table["episode_index"].to_pylist().index(1)][0] = float("nan")
    field = table.schema.field("observation.state")
    at = table.schema.get_field_index(field.name)
    pq.write_table(table.set_column(at, field, pa.array(values, field.type)), path)
    record(demos)
    lasting = table["episode_index"].to_pylist()
    words = ["recipe=smoke", f"out={tmp_path / 'runs'}", f"demos.path={demos}", "bc.updates=2"]
    words += ["method.env_steps=0", "evaluate.episodes=1", "evaluate.num_envs=1", "env.horizon_s=0.5"]
    words += ["video.episodes=0", "video.failures=0"]
    assert main(["train", *words]) == 2
    assert "episode 1: " in capsys.readouterr().err
    assert main(["train", *words, "demos.read.episodes=1-3", "demos.read.on_damage=skip"]) == 0
    assert "left out: " in capsys.readouterr().err
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = next(row for row in rows if "demos/episodes" in row)
    assert (told["demos/episodes"], told["demos/env_steps"]) == (2, lasting.count(2) + lasting.count(3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["demos.read.episodes=0-1"],
            r"demos\.read: says how a dataset is read, and there is none\. Name it: ",
        ),
        (["replay.read.on_damage=skip"], r"replay\.read: .* Name it: replay\.reuse=<dataset>"),
        (
            ["demos.path=.", "demos.read.episodes=0-b"],
            r"demos\.read\.episodes: got 'b', allowed: a whole number",
        ),
        (
            ["demos.path=.", "demos.read.rename=actions"],
            r"demos\.read\.rename: got 'actions', allowed: <name",
        ),
        (
            ["demos.path=.", "demos.read.on_damage=drop"],
            r"demos\.read\.on_damage: got 'drop', allowed: one of",
        ),
    ],
)
def test_words_of_how_demonstrations_are_read(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, words, config_name="train")
    given = ["demos.read.episodes=0-1,3", "demos.read.cameras=front,wrist", "demos.read.rename=a:b,c:d"]
    read = load(RunConfig, ["demos.path=.", *given], config_name="train").demos.read
    assert read.options() == {
        "episodes": [0, 1, 3],
        "cameras": ["front", "wrist"],
        "rename": {"a": "b", "c": "d"},
    }


def test_an_evaluation_that_differs_from_training_fails(
    tmp_path: Path, trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained["run"], tmp_path / "run"))
    told = folder / "evaluation-final.json"
    written = read_json(told, CheckpointError, "")
    told.write_text(told.read_text().replace('"digest": "', '"digest": "0'))
    assert main(["evaluate", f"run={folder}"]) == 2
    assert "evaluation-final.json: damaged: it does not match its 'checksum'" in capsys.readouterr().err
    told.write_text(told.read_text()[:40])
    assert main(["evaluate", f"run={folder}"]) == 2
    assert "evaluation-final.json: damaged: " in capsys.readouterr().err
    write_json(told, written | {"digest": "0"}, is_checked=True)
    assert main(["evaluate", f"run={folder}"]) == 1
    assert "NOT those of training" in capsys.readouterr().out
    for other, why in (
        ("episodes=3", "training has evaluated other episodes"),
        ("disturb=0.5", "nothing pushed the robot in training's evaluation"),
        ("looks=held_out", "these were asked to look held_out"),
        ("camera_delay_s=0.02", "these were asked for cameras of another rate or delay"),
    ):
        assert main(["evaluate", f"run={folder}", other]) == 0
        assert f"not compared with those of training: {why}" in capsys.readouterr().out
    assert main(["evaluate", f"run={folder}", "variation=varied"]) == 2
    assert "env.variation: got 'varied', allowed: fixed, as 'reach' declares no" in capsys.readouterr().err
    assert main(["evaluate", f"run={folder}", "adversary=true"]) == 2
    assert "adversary: got True, allowed: false, but for runs with method=qarl" in capsys.readouterr().err


def test_a_policy_is_evaluated_in_scenes_that_training_does_not_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["demos.episodes=2", "bc.updates=2", "evaluate.episodes=4", "evaluate.num_envs=4"]
    small += ["env.horizon_s=0.3", "video.episodes=0", "video.failures=0", "stages=demos,clone,evaluate"]
    words = [
        "recipe=smoke",
        f"out={tmp_path}",
        "env.task=push_cube",
        "env.variation=varied",
        *small,
        "--json",
    ]
    assert main(["train", *words]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    found: dict[str, Any] = {}
    for variation in ("", "varied", "held_out"):
        asked = [f"variation={variation}"] if variation else []
        assert main(["evaluate", f"run={run}", *asked, "--json"]) == 0
        found[variation] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found[""]["matches"]  # as in the run
    assert found["varied"]["matches"] is None
    assert found["varied"]["digest"] == found[""]["digest"] != found["held_out"]["digest"]


def test_a_bank_of_training_does_not_stop_an_evaluation_in_other_scenes() -> None:
    env = EnvConfig(task="pick_cube", resets=ResetsConfig(bank="banks/x"))
    options = evaluate.EvaluateCommandConfig(run="runs/x", variation="held_out")
    asked = evaluate.env_asked_for(env, options)
    assert (asked.variation, asked.resets.bank) == ("held_out", None)
    of_bank = evaluate.EvaluateStarts(evaluate="grasped")
    with pytest.raises(
        ConfigError, match=r"env.resets.bank: got 'banks/x', allowed: none with env.variation"
    ):
        evaluate.env_asked_for(env, replace(options, resets=of_bank))


def test_a_vla_that_sees_no_object_pose_is_evaluated_as_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demos = f"{tmp_path}/demos"
    seen = ["state=[joint,finger,tool]", "cameras=[front]", "image_size=[16,24]"]
    assert main(["collect", "task=reach", "episodes=3", "num_envs=3", f"out={demos}", *seen]) == 0
    small = [
        "size=tiny",
        "horizon=3",
        "updates=2",
        "batch=4",
        "heldout=1",
        "baselines=false",
        "curve_points=0",
    ]
    sizes = ["picture=[16,24]", "options.picture=[16,24]", f"out={tmp_path}"]
    assert main(["finetune", f"dataset={demos}", *small, *sizes, "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]

    def evaluated(*words: str) -> dict[str, Any]:
        assert main(["evaluate", f"policy={tuned}", "episodes=2", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    found = evaluated()
    assert (found["task"], found["seed"], found["n_exec"], found["episodes"]) == ("reach", 0, 3, 2)
    assert found["matches"] is None  # nobody wrote down what it should be
    assert found["digest"] == evaluated()["digest"]
    assert found["digest"] != evaluated("seed=1")["digest"] != evaluated("n_exec=1")["digest"]
    assert main(["evaluate", f"policy={tuned}", "n_exec=4"]) == 2
    assert "n_exec: got 4, allowed: 1 to the policy's chunks of 3" in capsys.readouterr().err


def test_a_damaged_config_names_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(dump(build(RunConfig, {})).replace("seed: 0", "seed: none"))
    assert main(["train", f"resume={tmp_path}"]) == 2
    assert f"{tmp_path}/config.yaml: seed: got 'none', allowed: a whole number." in capsys.readouterr().err


def test_collect_writes_a_dataset_that_train_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "demos"
    words = ["collect", "task=reach", "episodes=3", "num_envs=2", "bias_m=0.01", f"out={out}", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["episodes"] == load_episodes(out).num_episodes == 3
    config = build(RunConfig, {"demos": {"path": str(out)}})
    assert config.demos.path == str(out)
    assert main(["collect", "task=reach", f"out={tmp_path}/x", "state=[jont]"]) == 2
    assert "state: got 'jont', with which no element of the state begins." in capsys.readouterr().err


def test_collect_takes_a_policy_and_tells_what_it_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with closing(make_env(EnvConfig(task="reach"), 2)) as env:
        made_for = policy_meta(RunConfig(env=EnvConfig(task="reach"), n_exec=2), env)
    state_dim, action_dim = len(made_for.state_names), len(made_for.action_names)
    policy = FlowPolicy(
        ChunkPolicyConfig(horizon=2, width=8, depth=1, steps=1),
        state_dim=state_dim,
        action_dim=action_dim,
        normaliser=Normaliser.fit(
            {"state": np.eye(9, state_dim, dtype=np.float32)}, np.eye(9, action_dim, dtype=np.float32)
        ),
        generator=torch.Generator().manual_seed(0),
    )
    save_policy(run / "policy" / "final", policy, meta=made_for)
    (run / "config.yaml").write_text("env: {task: reach, horizon_s: 0.5, num_threads: 1}\n")
    out = tmp_path / "improved"
    words = ["collect", f"policy={run}", "episodes=2", "num_envs=2", "keep.success=false", f"out={out}"]
    assert main([*words, "keep.fastest=0.5", "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out.splitlines()[-1])
    assert told == read_json(out / COLLECTED, DatasetError, "")
    assert told["started"]["episodes"] == 4
    assert told["refused"]["fastest"] == 2
    assert "refused 2 of 4: fastest 2" in said.err
    assert (load_episodes(out).episode_index == np.repeat([0, 1], 10)).all()  # the run's 0.5 s, at 20 Hz
    episode = Dataset(out).read(0)
    assert (episode.source == SOURCES.index("sim")).all()
    assert main([*words, "task=push_cube"]) == 2
    assert main(["replay", "verify", str(out)]) == 0


@pytest.mark.slow
def test_the_smoke_recipe_runs_the_whole_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipe=smoke", f"out={tmp_path}", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["env_steps"] == 6000
    assert main(["evaluate", f"run={summary['run']}"]) == 0
    assert "the same as in training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["recipe=pick_cube_pixels"], "15,000 control steps of DAgger on "),
        (["recipe=smoke"], "control steps of residual RL on "),
    ],
)
def test_a_run_says_by_which_method_it_improves(words: list[str], shown: str) -> None:
    assert shown in plan_text(load(RunConfig, words, config_name="train"))
