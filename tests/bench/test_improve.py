"""The table of methods: rows and curves by hand, what is finished stays, what was cut short goes on."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robot_rl.bench import improve, trials
from robot_rl.config import dump, load, options
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.train.config import RunConfig


def row(step: int, phase: str, wall_s: float, **metrics: float) -> str:
    return json.dumps({"step": step, "updates": 0, "phase": phase, "wall_s": wall_s, **metrics}) + "\n"


@functools.cache
def composed(*words: str) -> RunConfig:
    return load(RunConfig, list(words), config_name="train")


@pytest.fixture(autouse=True)
def composes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composes the same settings once: Hydra takes a tenth of a second, and a table asks again and again."""
    for module in (trials, improve):
        monkeypatch.setattr(module, "load", lambda schema, words, *, config_name: composed(*words))


def begin(folder: Path, *settings: str) -> None:
    """A run folder <out>/<task>/<method>/seed<k>/<name> with the configuration that the table gives it."""
    *_, task, method, seed, _ = folder.parts
    trial = improve.Trial(task, method, int(seed.removeprefix("seed")), folder.parents[3])
    folder.mkdir(parents=True)
    words = [*improve._FIXED, *trial.plan(), f"out={trial.folder}", *settings]
    (folder / "config.yaml").write_text(dump(composed(*words)))


def write_run(folder: Path, *, base: float, final: float, env_steps: int, minutes: float) -> None:
    """A finished run that was looked at twice, at a third and two thirds of its steps."""
    begin(folder)
    third = env_steps // 3
    (folder / "metrics.jsonl").write_text(
        row(0, "base", 30, **{"eval/success": base})
        + row(third, "residual", 60, **{"collect/return": 5.0})
        + row(third, "residual", 90, **{"eval/success": 0.25})
        + row(2 * third, "residual", 150, **{"eval/success": 0.75})
        + row(env_steps, "final", 180, **{"eval/success": final})
    )
    summary = {"base_success": base, "final_success": final, "env_steps": env_steps, "train_minutes": minutes}
    (folder / "summary.json").write_text(json.dumps(summary))


Commands = list[dict[str, Any]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Stands in for the processes; a run of seed k succeeds in 60 + 10 k percent at the end."""
    commands: Commands = []

    def train(command: list[str], **_: Any) -> SimpleNamespace:
        words = dict(word.split("=", 1) for word in command[command.index("train") + 1 :])
        commands.append(words)
        folder = Path(words["resume"] if "resume" in words else f"{words['out']}/1-run")
        (seed,) = folder.parent.name.removeprefix("seed")
        how: dict[str, Any] = {"base": 0.5, "env_steps": 300, "minutes": 4.0}
        if "resume" in words:
            (folder / "config.yaml").unlink()
            folder.rmdir()
        write_run(folder, final=0.6 + 0.1 * int(seed), **how)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trials.subprocess, "run", train)
    return commands


def run(out: Path, **options: Any) -> dict[str, Any]:
    return improve.run(
        tasks=("pick_cube",), methods=("residual",), out=str(out), figure="", jobs=1, **options
    )


def test_rows_and_curves_by_hand(tmp_path: Path, started: Commands) -> None:
    write_run(tmp_path / "pick_cube/residual/seed0/a", base=0.4, final=0.9, env_steps=3000, minutes=6.0)
    write_run(tmp_path / "pick_cube/residual/seed1/b", base=0.6, final=1.0, env_steps=6000, minutes=9.0)
    result = run(tmp_path, seeds=(0, 1), equal_steps=2500, equal_minutes=1.5)
    assert started == []
    # Means of the two seeds: (0.4 + 0.6) / 2, (0.9 + 1) / 2, (3000 + 6000) / 2. Both were cloned after 30 s
    # and learned for 120 s. After 2500 steps both had been looked at last at 2000, the second time
    # and the first; after 1.5 minutes both once.
    assert result["rows"] == [
        {
            "method": "residual",
            "task": "pick_cube",
            "base": pytest.approx(0.5),
            "success": pytest.approx(0.95),
            "spread": "90.0% to 100.0%",
            "env_steps": 4500,
            "minutes": 2.0,
            "at_steps": pytest.approx((0.75 + 0.25) / 2),
            "at_minutes": 0.25,
            "seed": "0 1",
        }
    ]
    # Neither the held-out evaluations nor rows without one belong to the curve.
    kept = json.loads((tmp_path / "improve.json").read_text())
    assert kept["runs"][1].pop("curve") == [
        {"env_steps": 2000, "minutes": 1.0, "success": 0.25},
        {"env_steps": 4000, "minutes": 2.0, "success": 0.75},
    ]
    assert kept["rows"] == result["rows"]
    assert kept["runs"][1] == result["runs"][1]
    assert [result["runs"][1][name] for name in ("seed", "base", "success")] == [1, 0.6, 1.0]


def test_what_is_finished_is_not_done_again(tmp_path: Path, started: Commands) -> None:
    assert run(tmp_path, seeds=(1,), settings=("video.episodes=0",))["rows"][0]["success"] == 0.7
    cloned, words = started
    assert (cloned["method.env_steps"], cloned["seed"]) == ("0", "1")
    assert (words["recipe"], words["base"], words["seed"]) == ("residual", "pick_cube", "1")
    assert (words["torch_threads"], words["video.episodes"]) == ("1", "0")
    base = tmp_path / "pick_cube/base/seed1/1-run"
    assert (words["demos.path"], words["bc.policy"]) == (f"{base}/demos", f"{base}/policy/base")
    result = run(tmp_path, seeds=(1, 2))
    assert [words["seed"] for words in started] == ["1", "1", "2", "2"]
    assert [one["success"] for one in result["runs"]] == [0.7, 0.8]


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path, started: Commands) -> None:
    folder = tmp_path / "pick_cube/residual/seed3/begun"
    begin(folder)
    assert run(tmp_path, seeds=(3,))["rows"][0]["success"] == pytest.approx(0.9)
    assert [words.get("resume") for words in started] == [None, str(folder)]


@pytest.mark.parametrize("setting", ["seed=7", "method.utd=0.125"])
def test_a_run_of_another_plan_is_not_taken_for_ours(tmp_path: Path, started: Commands, setting: str) -> None:
    folder = tmp_path / "pick_cube/residual/seed3/begun"
    begin(folder, setting)
    name, value = setting.split("=")
    with pytest.raises(ConfigError, match=rf"{folder} was begun with {name}={value}, got .* out="):
        run(tmp_path, seeds=(3,))
    assert started == []


def test_another_kind_of_policy_clones_its_own_base(tmp_path: Path, started: Commands) -> None:
    improve.run(tasks=("pick_cube",), methods=("dppo",), seeds=(4,), out=str(tmp_path), figure="", jobs=1)
    assert started[1]["demos.path"] == f"{tmp_path}/pick_cube/base/seed4/1-run/demos"
    assert "bc.policy" not in started[1]


def test_methods_stand_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    for method in ("latent", "residual"):
        for seed in (0, 1):
            folder = tmp_path / "pick_cube" / method / f"seed{seed}/a"
            write_run(folder, base=0.5, final=0.9, env_steps=300, minutes=1.0)
    figure = tmp_path / "curves.png"
    rows = improve.run(
        tasks=("pick_cube",),
        methods=("residual", "latent"),
        seeds=(0, 1),
        out=str(tmp_path),
        figure=str(figure),
        jobs=1,
    )["rows"]
    assert [(row["method"], row["seed"]) for row in rows] == [("residual", "0 1"), ("latent", "0 1")]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.subprocess, "run", lambda command, **how: SimpleNamespace(returncode=1))
    with pytest.raises(DeviceError, match=r"base on pick_cube, seed 0: see .*seed0/train\.log"):
        run(tmp_path, seeds=(0,))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'residul'\. Did you mean 'residual'\?"):
        improve.run(methods=("residul",))
    with pytest.raises(ConfigError, match=r"no base 'pick_cub'\. Did you mean 'pick_cube'\?"):
        improve.run(tasks=("pick_cub",))


def test_the_table_is_of_recipes_on_one_base() -> None:
    assert set(improve.METHODS) <= set(options("recipe"))
    assert set(improve.TASKS) <= set(options("base"))
    runs = [composed(f"recipe={name}", f"base={task}") for task in improve.TASKS for name in improve.METHODS]
    for config in runs:
        first = next(one for one in runs if one.env.task == config.env.task)
        assert (config.env, config.demos, config.bc, config.n_exec) == (
            first.env,
            first.demos,
            first.bc,
            first.n_exec,
        )
        assert config.policy == first.policy or config.recipe == "dppo"
