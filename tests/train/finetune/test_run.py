"""Whole fine-tuning runs on a made-up dataset: results, leaks, exact resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.config import build
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.data.lerobot.pictures import PictureCache
from robot_rl.policies.checkpoint import load_policy
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import checkpoint
from robot_rl.train.finetune import run as finetune
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.data import DemoData

SMALL: dict[str, Any] = {
    "size": "tiny",
    "horizon": 4,
    "picture": [24, 32],
    "heldout": 2,
    "updates": 6,
    "batch": 8,
    "stride": 2,
    "curve_points": 3,
    "metrics_rows": 6,
    "options": {"picture": [24, 32]},
    "act": {"lrs": [1e-3], "batches": [4]},
    "checkpoint": {"every_s": 0.0, "every_steps": 2},
}


class Killed(BaseException):
    """What a run gets here instead of SIGKILL; nothing catches it."""


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(finetune, "write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("robot_rl.train.finetune.act.find_spec", lambda name: None)  # its import takes 10 s


def small(dataset: Path, out: Path, **changes: Any) -> FinetuneConfig:
    return build(FinetuneConfig, {**SMALL, "dataset": str(dataset), "out": str(out), **changes})


def weights(folder: Path) -> bytes:
    return (folder / "policy/policy.safetensors").read_bytes()


def result(folder: Path) -> dict[str, Any]:
    """Returns everything a run came to, without what the clock says."""
    rows = read_metrics(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    for name in ("run", "minutes", "policy_minutes", "timing"):
        del summary[name]
    clock = ("wall_s", "heldout/minutes")
    return {
        "rows": [repr({key: value for key, value in row.items() if key not in clock}) for row in rows],
        "summary": summary,
        "weights": weights(folder),
    }


def test_a_run_learns_and_says_what_it_came_to(dataset: Path, tmp_path: Path) -> None:
    options = {**SMALL["options"], "relative_actions": False, "state_noise": 0.0, "state_dropout": 0.0}
    summary = finetune.run(small(dataset, tmp_path, updates=45, options=options))
    assert summary.train_episodes == (0, 1, 2, 3, 4)
    assert summary.heldout_episodes == (5, 6)
    assert summary.chunks == 20  # two episodes of 20 steps, every second step
    assert summary.nearest_neighbour_error is not None
    assert summary.act_error is None
    assert "pip install 'robot-rl[lerobot]'" in str(summary.act)
    rows = read_metrics(Path(summary.run) / "metrics.jsonl")
    curve = [row["heldout/error"] for row in rows if "heldout/error" in row]
    assert len(curve) == 4  # neighbours, two looks, the result
    assert curve[-1] == summary.heldout_error < 0.8 * curve[1]


def test_the_saved_policy_is_the_measured_one(dataset: Path, tmp_path: Path) -> None:
    config = small(dataset, tmp_path)
    summary = finetune.run(config)
    policy, meta = load_policy(Path(summary.run) / "policy")
    assert (meta.task, meta.robot, meta.n_exec) == ("follow", "arm", 4)
    with finetune.FinetuneSession(finetune.load_config(Path(summary.run)), tmp_path / "again") as session:
        errors = finetune.policy_errors(session, policy, summary.heldout_episodes)
    assert errors.normalised == summary.heldout_error


def test_nothing_is_learned_from_the_held_out_episodes(
    make_dataset: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    other = make_dataset([0, 1, 2, 3, 4, 100, 101])  # the same but for the last two
    runs = [finetune.run(small(folder, tmp_path)) for folder in (dataset, other)]
    assert weights(Path(runs[0].run)) == weights(Path(runs[1].run))
    assert runs[0].nearest_neighbour == runs[1].nearest_neighbour
    assert runs[0].heldout_error != runs[1].heldout_error


@pytest.fixture(scope="module")
def unbroken(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(out / "state"))
        patch.setattr(finetune, "write_report", lambda folder: folder / "report.html")
        patch.setattr("robot_rl.train.finetune.act.find_spec", lambda name: None)
        return result(Path(finetune.run(small(dataset, out)).run))


# Saves of the unbroken run: pictures, neighbour, 3 in the loop, policy, act settings, act.
@pytest.mark.parametrize("saves", [1, 3, 4, 6])
def test_a_run_cut_short_ends_as_the_unbroken_one(
    saves: int, dataset: Path, tmp_path: Path, unbroken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = checkpoint.write_state, [saves]

    def write_until_killed(state: Any, folder: Path) -> None:
        write(state, folder)  # the checkpoint's files are there, its name is not: the worst moment
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    monkeypatch.setattr(checkpoint, "write_state", write_until_killed)
    with pytest.raises(Killed):
        finetune.run(small(dataset, tmp_path))
    monkeypatch.setattr(checkpoint, "write_state", write)
    (folder,) = tmp_path.glob("*-finetune-small_vla-seed0")
    finetune.resume(folder)
    assert result(folder) == unbroken


def test_minutes_become_updates_once(dataset: Path, tmp_path: Path) -> None:
    summary = finetune.run(small(dataset, tmp_path, updates=None, minutes=0.005, baselines=False))
    assert summary.updates > 1
    assert 0.001 < summary.policy_minutes < 0.05
    assert f"updates={summary.updates}" in summary.command


def test_a_saved_policy_goes_on(dataset: Path, tmp_path: Path) -> None:
    first = finetune.run(small(dataset, tmp_path, updates=10, baselines=False))
    again = small(dataset, tmp_path, policy=first.run, updates=1, lr=1e-9, baselines=False)
    second = finetune.run(again)
    assert second.heldout_error == pytest.approx(first.heldout_error, rel=1e-3)
    assert second.policy == str(Path(first.run) / "policy")


def test_a_saved_policy_of_other_joints_or_cameras(
    make_dataset: Callable[..., Path], dataset: Path, tmp_path: Path
) -> None:
    first = finetune.run(small(dataset, tmp_path, updates=1, baselines=False))
    other = make_dataset([0, 1, 2, 3], ("left_shoulder", "left_elbow"))
    text = "with 2 state elements, the dataset has 2; they differ in: right_shoulder, left_elbow"
    with pytest.raises(CheckpointError, match=text):
        finetune.run(small(other, tmp_path, policy=first.run))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"policy": "smal_vla"}, ConfigError, r"no policy and no folder named .* Did you mean 'small_vla'"),
        ({"policy": "."}, CheckpointError, r"neither policy\.json \(ours\) nor config\.json \(LeRobot's\)"),
        ({"options": {"deep": 3}}, ConfigError, r"small_vla: no option 'deep'\. Did you mean 'depth'"),
        ({"lora": {"rank": 4}}, ConfigError, r"lora\.rank: got 4 with policy=small_vla, allowed: 0"),
    ],
)
def test_policies_that_cannot_be(
    dataset: Path, tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    change = {key: str(tmp_path / "empty") if value == "." else value for key, value in change.items()}
    with pytest.raises(error, match=message):
        finetune.run(small(dataset, tmp_path, **change))


def test_a_policy_of_shorter_chunks(dataset: Path, tmp_path: Path) -> None:
    first = finetune.run(small(dataset, tmp_path, updates=1, baselines=False))
    with pytest.raises(ConfigError, match="horizon: got 5, the policy predicts 4 control steps"):
        finetune.run(small(dataset, tmp_path, policy=first.run, horizon=5))


def test_resuming_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run folder, it has no config\.yaml\. Give one that"):
        finetune.resume(tmp_path)


def test_batches_reach_the_learner_in_pieces(dataset: Path, tmp_path: Path) -> None:
    summaries = [
        finetune.run(small(dataset, tmp_path, accumulate=n, baselines=False, updates=3)) for n in (1, 4)
    ]
    assert weights(Path(summaries[0].run)) != weights(Path(summaries[1].run))  # their noise differs
    assert torch.isfinite(torch.tensor([s.heldout_error for s in summaries])).all()


def test_pictures_are_decoded_once_and_go_with_the_run(dataset: Path, tmp_path: Path) -> None:
    summary = finetune.run(small(dataset, tmp_path, updates=1, baselines=False))
    assert not (Path(summary.run) / "pictures").exists()
    kept = tmp_path / "kept"
    finetune.run(small(dataset, tmp_path, updates=1, baselines=False, cache=str(kept)))
    assert list(kept.iterdir())


def test_experience_is_read_only(dataset: Path) -> None:
    data, split = finetune.open_data(small(dataset, Path()))
    chunks = DemoData(data, split, picture=None, device="cpu", cache=PictureCache())
    with pytest.raises(RuntimeError, match="a dataset is read only"):
        chunks.experience(split.train, horizon=4, batch=2, seed=0).add(object())
