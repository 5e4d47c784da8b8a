"""`robot-rl finetune` from the command line: help, one line for each mistake, JSON, kill -9, LeRobot."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from robot_rl.cli.finetune import table
from robot_rl.cli.main import main
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.train.finetune import phases

WORDS = [
    "size=tiny",
    "horizon=4",
    "picture=[24,32]",
    "options.picture=[24,32]",
    "heldout=2",
    "batch=8",
    "stride=4",
    "curve_points=0",
    "checkpoint.every_s=0",
]


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))


@pytest.fixture
def g1_bottle() -> Path:
    """20 episodes of a humanoid, which lie beside the repository; too large to be in it."""
    for parent in Path(__file__).resolve().parents:
        folder = parent / "shared/data/g1_bottle"
        if folder.is_dir():
            return folder
    pytest.skip("the real dataset shared/data/g1_bottle is not beside this repository")


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--help"]) == 0
    text = capsys.readouterr().out
    assert "robot-rl finetune dataset=demos/pick_cube policy=smolvla size=tiny updates=50" in text
    for key in ("heldout", "accumulate", "precision", "lora.rank", "minutes", "baselines", "resume"):
        assert key in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "dataset: missing. Give it as `dataset=<text>`."),
        (["dataset=/no/such"], "dataset: no folder '/no/such'. Give a LeRobotDataset, or make one with"),
        (["dataset=.", "updtes=3"], "updtes: no such key. Did you mean 'updates'?"),
        (["dataset=.", "precision=fp8"], "precision: got 'fp8', allowed: one of 'fp32', 'bf16', 'fp16'."),
        (["resume=/no/such"], "resume: '/no/such' is no run folder, it has no config.yaml."),
        (["resume=x", "updates=3"], "resume: got other settings with it (updates=3), allowed: none."),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", *words, "--json"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert message in json.loads(said.out.splitlines()[-1])["error"]


def test_the_last_line_is_one_object(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("robot_rl.train.finetune.act.find_spec", lambda name: None)  # its import takes 10 s
    assert main(["finetune", f"dataset={dataset}", f"out={tmp_path}", "updates=2", *WORDS, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert {"heldout_error", "nearest_neighbour_error", "act_error", "minutes"} <= set(found)
    assert found["act_error"] is None
    assert said.out.splitlines()[-2] == found["verdict"]["text"]
    assert "beats the best baseline" in found["verdict"]["text"]
    assert "training on episodes 0-4 (5), held out: 5-6 (2)" in said.err
    assert "no ACT to compare with: the extra is not installed" in said.err
    rows = [cells(line) for line in said.out.splitlines() if line.startswith(("\u2502", "\u2503"))]
    assert rows[0] == ["predictor", "all", "95 % interval", "action 1", "action 4", "moving"]
    assert [row[0] for row in rows[1:]] == sorted(
        found["predictors"], key=lambda name: found["predictors"][name]["normalised"]
    )
    assert {"policy", "last action", "ridge", "nearest neighbour", "mean action"} <= {row[0] for row in rows}
    page = (Path(found["run"]) / "report.html").read_text()
    assert "Held-out error" in page
    assert "left shoulder" in page
    assert "Missing from this report" not in page


def cells(line: str) -> list[str]:
    """Returns what stands between the bars of a table's line."""
    return re.split(" *[\u2502\u2503] *", line)[1:-1]


def test_the_table_has_an_interval_moving_joints_and_both_ends_of_the_chunk(
    capsys: pytest.CaptureFixture[str],
) -> None:
    same: dict[str, Any] = {"still": 0.096, "by_step": [0.0174, 0.13, 0.2049]}
    predictors = {
        "nearest neighbour": {**same, "normalised": 0.203, "interval": None, "moving": None},
        "ridge": {**same, "normalised": 0.12249, "interval": [0.1196, 0.1241], "moving": 0.148},
    }
    Console(width=80).print(table(predictors))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "held-out errors, in standard deviations of the training actions"
    ridge, neighbour = (cells(line) for line in lines if line.startswith("\u2502"))
    assert ridge == ["ridge", "0.122", "0.120 to 0.124", "0.017", "0.205", "0.148"]
    assert neighbour == ["nearest neighbour", "0.203", "-", "0.017", "0.205", "-"]
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
def test_kill_9_and_resume_give_the_bytes_of_the_unbroken_run(dataset: Path, tmp_path: Path) -> None:
    program = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "ROBOT_RL_STATE": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    def command(out: str) -> list[str]:
        words = [f"dataset={dataset}", f"out={tmp_path / out}", "updates=60", "baselines=false", *WORDS]
        return [sys.executable, "-c", program, "finetune", *words, "checkpoint.every_steps=7"]

    subprocess.run(command("whole"), env=environment, capture_output=True, check=True)
    with subprocess.Popen(command("cut"), env=environment, stdout=-3, stderr=-3) as process:
        wait_for_updates(tmp_path / "cut", 30, process)
        process.send_signal(signal.SIGKILL)
    (cut,), (whole,) = (tmp_path / "cut").iterdir(), (tmp_path / "whole").iterdir()
    assert not (cut / "summary.json").exists()
    resume = [sys.executable, "-c", program, "finetune", f"resume={cut}"]
    said = subprocess.run(resume, env=environment, capture_output=True, check=True, text=True).stderr
    assert re.search(r"policy: goes on from updates \d+ of 60", said)
    weights = "policy/policy.safetensors"
    assert (cut / weights).read_bytes() == (whole / weights).read_bytes()
    errors = [json.loads((run / "summary.json").read_text())["heldout_error"] for run in (cut, whole)]
    assert errors[0] == errors[1]


def wait_for_updates(out: Path, updates: int, process: "subprocess.Popen[bytes]") -> None:
    """Waits until metrics.jsonl has a row of the policy at so many updates."""
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        for path in out.glob("*/metrics.jsonl"):
            if path.read_text().count('"phase": "policy"') >= updates:
                return
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    raise AssertionError(f"no {updates} updates in time")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["act", "smolvla"])
def test_what_is_trained_for_lerobot_is_loaded_by_lerobot(
    policy: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LeRobot's own classes give the chunk that ours does, from the folder that the run left."""
    pytest.importorskip("lerobot", reason="the extra `lerobot` is not installed")
    words = [word for word in WORDS if not word.startswith("options")]
    given = [f"policy={policy}", f"dataset={dataset}", f"out={tmp_path}", "updates=3", "baselines=false"]
    assert main(["finetune", *given, *words, "--json"]) == 0
    folder = Path(json.loads(capsys.readouterr().out.splitlines()[-1])["run"]) / "policy"
    observed = Dataset(dataset).read(6).obs
    obs = {
        "state": torch.from_numpy(np.array(observed["state"][:1])),
        "front.rgb": torch.from_numpy(np.array(observed["front.rgb"][np.array([0])])),
    }
    from robot_rl.core.registry import resolve

    kind = "lerobot_flow" if policy == "smolvla" else "lerobot"
    torch.manual_seed(0)
    with torch.no_grad():
        tuned = resolve("policy", kind).from_pretrained(folder)
        ours = tuned.sample(tuned.encode(obs), mode="mean").actions
    np.testing.assert_allclose(_lerobots_chunk(folder, policy, obs), ours.numpy(), atol=2e-4)


def _lerobots_chunk(folder: Path, policy: str, obs: dict[str, torch.Tensor]) -> Any:
    """Returns the chunk of LeRobot's own policy and pipelines, from zero noise."""
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    from robot_rl.policies.vla.lerobot_files import quiet

    with quiet():
        model: Any = get_policy_class(policy).from_pretrained(str(folder), strict=True).eval()
        pre, post = make_pre_post_processors(model.config, pretrained_path=str(folder))
    batch = pre(
        {
            "observation.state": obs["state"],
            "observation.images.front": obs["front.rgb"].permute(0, 3, 1, 2).float() / 255,
            "task": ["follow the square"],
        }
    )
    noise = {}
    if policy == "smolvla":
        noise = {"noise": torch.zeros(1, model.config.chunk_size, model.config.max_action_dim)}
    with torch.no_grad():
        return post(model.predict_action_chunk(batch, **noise)).numpy()


@pytest.mark.slow
def test_it_runs_on_real_data_beside_both_baselines(
    g1_bottle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few updates: this says that everything works on a humanoid's episodes, not that it is good."""
    pytest.importorskip("lerobot", reason="the extra `lerobot` is not installed")
    words = ["size=tiny", "updates=10", "batch=8", "picture=[24,32]", "options.picture=[24,32]"]
    given = [f"dataset={g1_bottle}", f"out={tmp_path}", "heldout=4", "curve_points=0", "act.lrs=[1e-4]"]
    assert main(["finetune", *given, *words, "act.batches=[8]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["heldout_episodes"] == [16, 17, 18, 19]
    assert 0.15 < found["nearest_neighbour_error"] < 0.25  # 0.203 with pictures of 96 x 128
    assert found["act_error"] > found["nearest_neighbour_error"]  # after less than a second of training
    assert found["act_minutes"] >= found["policy_minutes"]
    assert {"policy", "nearest neighbour", "ACT", "ridge", "last action"} <= set(found["groups"])
    # Worked out without this program: 0.159 for repeating the last action, 0.333 for staying.
    assert found["predictors"]["last action"]["normalised"] == pytest.approx(0.159, abs=0.001)
    assert found["predictors"]["present joints"]["normalised"] == pytest.approx(0.333, abs=0.001)
    assert found["predictors"]["ridge"]["normalised"] < 0.13


def test_an_interrupted_run_is_told_how_to_go_on(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(phases.PHASES, "neighbour", interrupted)
    assert main(["finetune", f"dataset={dataset}", f"out={tmp_path / 'runs'}", "updates=1", *WORDS]) == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"Continue with: robot-rl finetune resume={folder}" in capsys.readouterr().err
