"""Whole fine-tuning runs on a made-up dataset: results, leaks, exact resume."""

import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from robot_rl.config import build
from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import CheckpointError, ConfigError, LeaseError
from robot_rl.core.files import without_checksum
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.linear import LinearPolicy
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.finetune import learn
from robot_rl.train.finetune import run as finetune
from robot_rl.train.finetune.baselines import past_of, predictor
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.learn import Finetuning, policy_errors
from robot_rl.train.finetune.policies import check_features
from robot_rl.train.finetune.run import FinetuneSummary
from robot_rl.train.finetune.settings import Recipe
from robot_rl.train.finetune.split import open_data
from robot_rl.train.hooks import show_progress
from robot_rl.train.session import RunSession
from tests.runs import SMALL_FINETUNING, killed_after

pytestmark = pytest.mark.usefixtures("whole_runs")


@pytest.fixture(autouse=True)
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_rl.train.finetune.act.find_spec", lambda name: None)  # its import takes 10 s


def small(dataset: Path, out: Path, **changes: Any) -> FinetuneConfig:
    return build(FinetuneConfig, {**SMALL_FINETUNING, "dataset": str(dataset), "out": str(out), **changes})


def again(config: FinetuneConfig, folder: Path) -> Finetuning:
    """Opens the dataset of a run once more, to measure."""
    return Finetuning(finetune.session_of(config, folder / "again"), config, *open_data(config))


def weights(folder: Path) -> bytes:
    return (folder / "policy/policy.safetensors").read_bytes()


def result(folder: Path) -> dict[str, Any]:
    """Returns everything a run came to, without what the clock says."""
    rows = read_metrics(folder / "metrics.jsonl")
    summary = without_checksum(json.loads((folder / "summary.json").read_text()))
    for name in ("run", "minutes", "policy_minutes", "timing", "command"):
        del summary[name]
    clock = ("wall_s", "heldout/minutes")
    return {
        "rows": [repr({key: value for key, value in row.items() if key not in clock}) for row in rows],
        "summary": summary,
        "weights": weights(folder),
    }


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FinetuneSummary]]:
    """Runs with leases of its own, without a page and without ACT, whose import takes ten seconds."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(out / "state"))
        patch.setattr(finetune, "write_report", lambda folder: folder / "report.html")
        patch.setattr("robot_rl.train.finetune.act.find_spec", lambda name: None)
        yield lambda dataset, **changes: finetune.run(small(dataset, out, **changes))


@pytest.fixture(scope="module")
def whole(dataset: Path, run_of: Callable[..., FinetuneSummary]) -> FinetuneSummary:
    """A run that nothing disturbed."""
    return run_of(dataset)


@pytest.fixture(scope="module")
def unbroken(whole: FinetuneSummary) -> dict[str, Any]:
    return result(Path(whole.run))


def test_a_run_says_what_it_came_to(whole: FinetuneSummary) -> None:
    assert whole.train_episodes == (0, 1, 2, 3, 4)
    assert whole.heldout_episodes == (5, 6)
    assert whole.chunks == 20  # two episodes of 20 steps, every second step
    assert whole.nearest_neighbour_error is not None
    assert whole.single_neighbour_error is not None
    assert whole.act_error is None
    assert "pip install -e '.[lerobot]'" in str(whole.act)
    rows = read_metrics(Path(whole.run) / "metrics.jsonl")
    assert whole.rows == len(rows)
    curve = [row["heldout/error"] for row in rows if "heldout/error" in row]
    assert len(curve) == 4  # neighbours, two looks, the result
    ridge = [row["heldout/ridge"] for row in rows if "heldout/ridge" in row]
    assert ridge == [whole.predictors["ridge"]["normalised"]]
    assert (curve[0], curve[-1]) == (whole.nearest_neighbour_error, whole.heldout_error)
    assert not (Path(whole.run) / "pictures").exists()


@pytest.mark.slow
def test_without_a_length_one_is_found_on_training_episodes(
    dataset: Path, run_of: Callable[..., FinetuneSummary]
) -> None:
    summary = run_of(dataset, updates=None, baselines=False)
    length = summary.length
    assert length is not None
    best, _ = min(length["curve"], key=lambda point: point[1])
    assert not set(length["validation"]) & set(summary.heldout_episodes)
    # All episodes are as long as each other: the passes of fewer become as many of all.
    inner = len(summary.train_episodes) - len(length["validation"])
    assert summary.updates == round(best * len(summary.train_episodes) / inner)


@pytest.mark.slow
def test_a_run_learns(dataset: Path, run_of: Callable[..., FinetuneSummary]) -> None:
    options = {
        **SMALL_FINETUNING["options"],
        "relative_actions": False,
        "state_noise": 0.0,
        "state_dropout": 0.0,
    }
    first, trained = (run_of(dataset, updates=n, options=options, baselines=False) for n in (1, 100))
    assert trained.heldout_error < 0.6 * first.heldout_error


def test_a_run_is_judged_by_the_best_baseline(whole: FinetuneSummary) -> None:
    names = {"mean action", "present joints", "last action", "ridge", "nearest neighbour", "single neighbour"}
    assert set(whole.predictors) == {"policy", *names}
    errors = {name: one["normalised"] for name, one in whole.predictors.items()}
    assert errors["policy"] == whole.heldout_error
    best = min(names, key=lambda name: errors[name])
    assert (whole.verdict["baseline"], whole.verdict["baseline_error"]) == (best, errors[best])
    assert not whole.verdict["beats"]  # after 6 updates
    assert whole.verdict["text"].startswith("nothing trained beats the best baseline: policy")
    for one in whole.predictors.values():
        assert len(one["by_step"]) == 4  # the horizon
        assert [row["episode"] for row in one["by_episode"]] == [5, 6]
        low, high = one["interval"]
        assert low <= one["normalised"] <= high


def test_the_cheap_baselines_are_always_there(dataset: Path, run_of: Callable[..., FinetuneSummary]) -> None:
    summary = run_of(dataset, updates=1, baselines=False)
    assert set(summary.predictors) == {"policy", "mean action", "present joints", "last action", "ridge"}
    assert summary.nearest_neighbour_error is None


def test_the_saved_policy_is_the_measured_one(whole: FinetuneSummary, tmp_path: Path) -> None:
    policy, meta = load_policy(Path(whole.run) / "policy")
    assert (meta.task, meta.robot, meta.n_exec) == ("follow", "arm", 4)
    config = finetune.load_config(Path(whole.run))
    errors = policy_errors(again(config, tmp_path), policy, whole.heldout_episodes)
    assert errors.normalised == whole.heldout_error


@pytest.mark.parametrize("name", ["ridge", "last action", "present joints", "mean action"])
def test_a_saved_baseline_is_the_measured_one(name: str, whole: FinetuneSummary, tmp_path: Path) -> None:
    policy, meta = load_policy(Path(whole.run) / f"baseline-{name.replace(' ', '-')}")
    assert (meta.task, meta.robot, meta.n_exec, policy.horizon) == ("follow", "arm", 4, 4)
    # Two joints and two actions, each with its changes over 1 and 4 steps.
    assert meta.state_names[::2] == (
        "left_shoulder",
        "left_shoulder.change_1",
        "left_shoulder.change_4",
        "left_shoulder.last_action",
        "left_shoulder.last_action.change_1",
        "left_shoulder.last_action.change_4",
    )
    config = finetune.load_config(Path(whole.run))
    work = again(config, tmp_path)
    predict = predictor(cast("LinearPolicy", policy), past_of(work.data))
    errors = work.measure(predict, whole.heldout_episodes, pictures=False)
    assert errors.normalised == whole.predictors[name]["normalised"]


def test_what_is_linear_needs_no_training(
    dataset: Path, run_of: Callable[..., FinetuneSummary], tmp_path: Path
) -> None:
    # The made-up arm is linear in its last two states: one update of the network is as good as none.
    options = {**SMALL_FINETUNING["options"], "linear": 1e-3}
    summary = run_of(dataset, updates=1, baselines=False, last_action=True, history=1, options=options)
    assert summary.heldout_error < 0.5 * summary.predictors["last action"]["normalised"]
    policy, meta = load_policy(Path(summary.run) / "policy")
    assert meta.state_names[-1] == "right_shoulder.last_action.change_1"
    config = finetune.load_config(Path(summary.run))
    assert policy_errors(again(config, tmp_path), policy, (5, 6)).normalised == summary.heldout_error


def test_nothing_is_learned_from_the_held_out_episodes(
    make_dataset: Callable[..., Path], whole: FinetuneSummary, run_of: Callable[..., FinetuneSummary]
) -> None:
    other = run_of(make_dataset([0, 1, 2, 3, 4, 100, 101]))  # the same but for the last two
    assert weights(Path(other.run)) == weights(Path(whole.run))
    assert other.nearest_neighbour == whole.nearest_neighbour
    assert other.heldout_error != whole.heldout_error


# Saves of the unbroken run: pictures, baselines, neighbour, 3 in the loop, policy, act settings, act.
@pytest.mark.parametrize("saves", [1, 4, 7])
def test_a_run_cut_short_ends_as_the_unbroken_one(
    saves: int, dataset: Path, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    with killed_after(saves):
        finetune.run(small(dataset, tmp_path))
    (folder,) = tmp_path.glob("*-finetune-small_vla-seed0")
    finetune.resume(folder)
    assert result(folder) == unbroken


def test_minutes_become_updates_once(dataset: Path, run_of: Callable[..., FinetuneSummary]) -> None:
    summary = run_of(dataset, updates=None, minutes=0.002, baselines=False)
    assert summary.updates >= 1
    assert summary.policy_minutes < 0.02  # 1.2 s of the processor, which may have had less
    assert f"updates={summary.updates}" in summary.command
    assert {"baselines=false", "horizon=4", "act.lrs=[0.001]"} <= set(shlex.split(summary.command))
    assert "minutes=" not in summary.command


def test_minutes_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that wait 5 ms each, and cost the processor next to nothing: 0.6 s hold 120 at most."""

    class Waits:
        def sample(self) -> None:
            time.sleep(0.005)

        def update(self, batch: None) -> None:
            pass

    run = SimpleNamespace(leader=SimpleNamespace(batches=Waits()))
    monkeypatch.setattr(learn, "assemble_job", lambda *_: (run, Waits()))
    session: Any = SimpleNamespace(config=SimpleNamespace(device="cpu"))
    nothing: Any = None
    assert learn.updates_in(session, nothing, nothing, minutes=0.01) <= 120
    by_processor = learn.updates_in(session, nothing, nothing, minutes=0.01, by=time.process_time)
    assert by_processor > 240


def test_a_saved_policy_goes_on(
    dataset: Path, whole: FinetuneSummary, run_of: Callable[..., FinetuneSummary]
) -> None:
    again = run_of(dataset, policy=whole.run, updates=1, lr=1e-9, baselines=False)
    assert again.heldout_error == pytest.approx(whole.heldout_error, rel=1e-3)
    assert again.policy == str(Path(whole.run) / "policy")


def test_a_saved_policy_of_other_joints(
    make_dataset: Callable[..., Path], whole: FinetuneSummary, run_of: Callable[..., FinetuneSummary]
) -> None:
    other = make_dataset([0, 1, 2, 3], ("left_shoulder", "left_elbow"))
    text = "with 2 state elements, the dataset has 2; they differ in: right_shoulder, left_elbow"
    with pytest.raises(CheckpointError, match=text):
        run_of(other, policy=whole.run, baselines=False)


def test_a_saved_policy_of_other_cameras(dataset: Path, whole: FinetuneSummary) -> None:
    policy, meta = load_policy(Path(whole.run) / "policy")
    facts = Dataset(dataset).facts()
    blind = replace(facts, features={"state": facts.features["state"]})
    with pytest.raises(CheckpointError, match="old sees front, the dataset's cameras are: none"):
        check_features("old", policy, meta, blind)


def test_a_policy_of_shorter_chunks(
    dataset: Path, whole: FinetuneSummary, run_of: Callable[..., FinetuneSummary]
) -> None:
    with pytest.raises(ConfigError, match="horizon: got 5, the policy predicts 4 control steps"):
        run_of(dataset, policy=whole.run, horizon=5, baselines=False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"policy": "smal_vla"}, ConfigError, r"no policy and no folder named .* Did you mean 'small_vla'"),
        ({"policy": "runs/nope"}, ConfigError, r"no such folder: 'runs/nope'\. Give a run folder"),
        ({"policy": "tests/nope"}, ConfigError, r"no such folder: 'tests/nope'"),
        ({"policy": "a/b/c"}, ConfigError, r"no such folder: 'a/b/c'\. .* <owner>/<name>"),
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
        finetune.run(small(dataset, tmp_path / "runs", **change))
    assert not (tmp_path / "runs").exists()  # said before anything was decoded


def test_a_run_that_is_refused_at_the_start_leaves_no_folder(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_: object) -> None:
        raise LeaseError("cpu is taken")

    monkeypatch.setattr("robot_rl.train.finetune.run.session_of", taken)
    with pytest.raises(LeaseError):
        finetune.run(small(dataset, tmp_path / "runs"))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_is_named_by_the_kind_of_its_policy(
    dataset: Path, whole: FinetuneSummary, run_of: Callable[..., FinetuneSummary]
) -> None:
    again = run_of(dataset, policy=str(Path(whole.run) / "policy"), updates=1, baselines=False)
    assert "-finetune-small_vla-seed0" in Path(again.run).name


def test_resuming_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run folder, it has no config\.yaml\. Give one that"):
        finetune.resume(tmp_path)


def test_settings_reach_the_algorithm(dataset: Path, tmp_path: Path) -> None:
    own = Recipe(lr=1e-5, weight_decay=0.5, grad_clip=10.0)
    given = small(dataset, tmp_path, accumulate=4, precision="bf16", lr=1e-3).learning(own, updates=50)
    assert (given.accumulate, given.precision, given.lr) == (4, "bf16", 1e-3)
    assert (given.weight_decay, given.grad_clip) == (0.5, 10.0)  # left to the policy's authors
    assert given.warmup_updates == 5  # 100 would be more than the run has


def test_a_look_at_the_held_out_error_leaves_the_rate_as_it_is(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update takes 1 s here, a look 100 s: the display says 1 update/s all the same."""
    clock, rates = ManualClock(), list[float]()
    monkeypatch.setattr("robot_rl.train.session.ProgressDisplay", lambda: ProgressDisplay(clock=clock))

    def looked(work: Finetuning, *words: Any) -> Any:
        clock.advance(100.0)
        return policy_errors(work, *words)

    def shown(session: RunSession, done: int) -> None:
        clock.advance(1.0)
        show_progress(session, done)
        assert session.progress is not None
        rates.append(session.progress._rate.per_s())

    monkeypatch.setattr(learn, "policy_errors", looked)
    monkeypatch.setattr(learn, "show_progress", shown)
    finetune.run(small(dataset, tmp_path / "runs", curve_points=6, baselines=False))
    assert rates == pytest.approx([1.0] * 6)
