"""What a DAgger run records: the expert's labels for a clone, what was executed for a replay."""

import json
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.cli.main import main
from robot_rl.core.errors import DatasetError
from robot_rl.core.names import EXECUTED_ACTION, PRIVILEGED
from robot_rl.data.demos import load_episodes
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.pool import EpisodePool
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.seal import seal
from robot_rl.policies.checkpoint import load_policy
from robot_rl.rollout.envs import make_env, make_expert
from robot_rl.train import phases
from robot_rl.train.finetune.past import Past
from robot_rl.train.improve import dagger
from robot_rl.train.improve.method import method_of
from robot_rl.train.recorded import DemosConfig, ReplayConfig
from robot_rl.train.relabel import labels_of, lanes_of, open_recording
from tests.runs import TINY, folder_of, killed_after, undisturbed, weights
from tests.train.improve.test_dagger import STATE, tiny

LABEL_GAIN, STEP_M = 1.5, 0.05
"""Of the expert of `reach`: it asks for 1.5 times the way to the goal, in units of the largest step."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The folder of a run of 90 steps in 3 envs, whose episodes have at most 14 steps."""
    out = tmp_path_factory.mktemp("labelled")
    with undisturbed(out / "state"):
        yield Path(phases.run(tiny(out)).run)


def recorded(run: Path) -> list[Episode]:
    source = StoreReader(run / "experience")
    return [source.read(number) for number in range(len(source))]


def test_all_steps_are_recorded_and_the_budget_ends_the_last_episodes(finished: Path) -> None:
    # 30 steps an env are episodes of 14, 14 and 2 steps, of which the last are cut by the end of the run.
    episodes = recorded(finished)
    assert [len(episode) for episode in episodes] == [14] * 6 + [2] * 3
    assert all(episode.truncated[-1] and episode.final_obs for episode in episodes)
    assert not any(episode.truncated[:-1].any() for episode in episodes)


def test_the_recorded_action_is_what_the_expert_does_in_that_state(finished: Path) -> None:
    for episode in recorded(finished):
        tool, goal = episode.obs["state"][:, 9:12], episode.obs[PRIVILEGED][:, 3:6]
        wanted = np.clip(LABEL_GAIN * (goal - tool) / STEP_M, -1.0, 1.0)
        np.testing.assert_allclose(episode.action[:, :3], wanted, atol=1e-4)
        assert (episode.action[:, 3] == 1.0).all()  # an open gripper


def test_what_the_policy_did_is_kept_apart(finished: Path) -> None:
    base, _ = load_policy(finished / "policy/base")  # acts in the first step of each env
    for episode in recorded(finished)[:3]:
        seen = {"state": torch.from_numpy(episode.obs["state"][:1])}
        acted = base.sample(base.encode(seen), mode="ode").actions[:, 0].detach().numpy()
        np.testing.assert_allclose(episode.obs[EXECUTED_ACTION][:1], acted.clip(-1, 1), atol=1e-6)
        assert np.array_equal(episode.as_executed().action, episode.obs[EXECUTED_ACTION])
        assert not np.allclose(episode.action, episode.obs[EXECUTED_ACTION], atol=0.1)


@pytest.mark.usefixtures("whole_runs")
def test_sealed_it_is_a_dataset_of_labels_that_a_run_clones(finished: Path, tmp_path: Path) -> None:
    labels = np.concatenate([episode.action for episode in recorded(finished)])
    executed = np.concatenate([episode.obs[EXECUTED_ACTION] for episode in recorded(finished)])
    dataset = shutil.copytree(finished / "experience", tmp_path / "experience")
    seal(dataset)
    found = load_episodes(dataset)
    assert np.array_equal(found.action, labels)
    assert set(found.obs) == {"state", PRIVILEGED}  # no policy reads what was executed
    assert np.array_equal(load_episodes(dataset, as_executed=True).action, executed)
    read = Dataset(dataset)
    assert [name for name in read.info["features"] if name.startswith("observation.")] == [
        "observation.state"
    ]
    past = Past(read, lags=()).at(np.arange(14)).last_action  # of a policy that sees its last action
    np.testing.assert_array_equal(past[1:], executed[:13])
    config = replace(
        tiny(tmp_path / "clone", stages=["demos", "clone", "evaluate"]), demos=DemosConfig(path=str(dataset))
    )
    summary = phases.run(config)
    assert summary.demo_env_steps == 90
    assert (Path(summary.run) / "policy/base/policy.safetensors").is_file()


def test_a_replay_of_earlier_runs_draws_what_was_executed(finished: Path) -> None:
    source = StoreReader(finished / "experience")
    batch = EpisodePool([source], capacity=200, keys=("state",)).sample(
        64, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0)
    )
    every = [source.read(number) for number in range(len(source))]
    state = np.concatenate([episode.obs["state"] for episode in every])
    executed = np.concatenate([episode.obs[EXECUTED_ACTION] for episode in every])
    rows = [int(np.abs(state - row).sum(axis=1).argmin()) for row in batch.obs["state"].numpy()]
    np.testing.assert_array_equal(batch.action.numpy(), executed[rows])


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("saves", [12, 25])
def test_a_run_that_is_killed_records_each_label_once(finished: Path, tmp_path: Path, saves: int) -> None:
    with killed_after(saves):
        phases.run(tiny(tmp_path))
    killed = folder_of(tmp_path)
    phases.resume(killed)
    for got, wanted in zip(recorded(killed), recorded(finished), strict=True):
        for name in ("action", "truncated", "stamp_ns", "policy_version"):
            assert np.array_equal(getattr(got, name), getattr(wanted, name)), name
        for key, values in wanted.obs.items():
            assert np.array_equal(got.obs[key], values), key


@pytest.mark.usefixtures("whole_runs")
def test_without_a_record_there_is_none(tmp_path: Path) -> None:
    config: Any = replace(tiny(tmp_path), replay=ReplayConfig(record=False))
    run = Path(phases.run(config).run)
    assert not (run / "experience").exists()


@pytest.mark.usefixtures("whole_runs")
def test_a_run_of_a_version_without_a_record_goes_on_without_one(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it recorded now would begin midway, and no seed leads there."""
    with monkeypatch.context() as patch:
        patch.setattr(dagger, "LabelRecord", lambda *_: None)
        patch.setattr(phases, "method_of", lambda config: replace(method_of(config), records=False))
        with killed_after(25):
            phases.run(tiny(tmp_path))
    run = folder_of(tmp_path)
    capsys.readouterr()
    with killed_after(2):  # a second life after that is no other
        phases.resume(run)
    phases.resume(run)
    assert not (run / "experience").exists()
    assert capsys.readouterr().err.count("resumed without a record of its first steps") == 2
    assert weights(run, "final") == weights(finished, "final")


@pytest.mark.usefixtures("whole_runs")
def test_pictures_are_kept_with_loss_since_the_labels_have_the_exact_ones(tmp_path: Path) -> None:
    env = {**TINY["env"], "state": STATE, "privileged": True, "cameras": ["front"], "image_size": [16, 16]}
    run = Path(phases.run(tiny(tmp_path, env=env, method={"kind": "dagger", "env_steps": 9, "batch": 4})).run)
    exact = np.load(run / "labels" / "front.rgb.npy")
    assert exact[:9].any(axis=(1, 2, 3)).all()
    journal = b"".join(path.read_bytes() for path in (run / "experience/journal").glob("*.log"))
    assert b"\xff\xd8\xff" in journal  # the first bytes of a JPEG
    assert b"\x89PNG" not in journal
    (shown, *_) = recorded(run)
    assert shown.obs["front.rgb"][:].shape == (3, 16, 16, 3)


@pytest.mark.usefixtures("whole_runs")
def test_a_flow_comes_nearer_to_the_labels_where_it_went(tmp_path: Path) -> None:
    flow = {"kind": "flow", "horizon": 2, "width": 32, "depth": 1, "time_dim": 8, "steps": 2}
    learning = {"kind": "dagger", "env_steps": 90, "utd": 4.0, "batch": 32}
    shown = {**TINY["env"]}  # all of the state, the goal too: so the labels can be learned
    run = Path(phases.run(tiny(tmp_path, env=shown, policy=flow, method=learning)).run)
    episodes = recorded(run)
    assert sum(len(episode) for episode in episodes) == 90
    seen = {"state": torch.from_numpy(np.concatenate([episode.obs["state"] for episode in episodes]))}
    label = np.concatenate([episode.action for episode in episodes])

    def error(which: str) -> float:
        policy, _ = load_policy(run / "policy" / which)
        generator = torch.Generator().manual_seed(0)
        actions = policy.sample(policy.encode(seen), mode="ode", generator=generator).actions[:, 0]
        return float(np.abs(actions.detach().numpy() - label).mean())

    assert error("final") < 0.5 * error("base")


def test_a_free_env_begins_the_next_episode() -> None:
    # Two envs. Env 0: 4 steps, then (at 4) episode 3. Env 1: 2 steps, (at 2) episode 2, (at 5) episode 4.
    assert lanes_of([0, 1, 2, 3, 4], np.array([4, 2, 3, 5, 1]), 2) == [[0, 3], [1, 2, 4]]
    assert lanes_of([3, 1, 2, 0], np.array([1, 2, 1, 2]), 2) == [[3, 2], [1, 0]]  # read in another order
    assert lanes_of([0], np.array([7]), 3) == [[0], [], []]


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("is_sealed", [False, True])
def test_labelled_offline_a_run_has_the_labels_that_it_learned_from(
    finished: Path, tmp_path: Path, is_sealed: bool
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    if is_sealed:
        seal(run / "experience")
    out = tmp_path / "labelled"
    assert main(["collect", f"label={run / 'experience'}", f"out={out}"]) == 0
    wanted = recorded(run)
    found = Dataset(out)
    for got, episode in zip([found.read(i) for i in range(len(found))], wanted, strict=True):
        assert np.array_equal(got.action, episode.action)
        assert np.array_equal(got.obs[EXECUTED_ACTION], episode.obs[EXECUTED_ACTION])


@pytest.mark.usefixtures("whole_runs")
def test_episodes_of_a_student_are_labelled(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student, out = tmp_path / "student", tmp_path / "labelled"
    words = ["keep.success=false", "episodes=5", "num_envs=2", "state=joint,finger,tool.pos"]
    assert main(["collect", f"policy={finished}", *words, f"out={student}"]) == 0
    acted = load_episodes(student)
    assert main(["collect", f"label={student}", "num_envs=3", f"out={out}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    steps = len(acted.action)
    assert (told["episodes"], told["env_steps"], told["cut_short"]) == (5, steps, 0)
    found = load_episodes(out)
    assert np.array_equal(load_episodes(out, as_executed=True).action, acted.action)
    assert np.array_equal(found.obs["state"], acted.obs["state"])
    tool, goal = found.obs["state"][:, 9:12], found.obs[PRIVILEGED][:, 3:6]
    wanted = np.clip(LABEL_GAIN * (goal - tool) / STEP_M, -1.0, 1.0)
    np.testing.assert_allclose(found.action[:, :3], wanted, atol=1e-4)
    config = replace(tiny(tmp_path / "clone"), demos=DemosConfig(path=str(out)))
    with pytest.raises(DatasetError, match="the dataset does not fit this run"):
        phases.run(config)  # another state: the labels are of the student's own observation


@pytest.mark.usefixtures("whole_runs")
def test_a_policy_labels_in_the_place_of_the_expert(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "labelled"
    assert main(["collect", f"label={finished / 'experience'}", f"policy={finished}", f"out={out}"]) == 0
    teacher, _ = load_policy(finished / "policy/final")
    found = load_episodes(out)
    seen = {"state": torch.from_numpy(found.obs["state"])}
    wanted = teacher.sample(teacher.encode(seen), mode="ode").actions[:, 0].detach().numpy()
    np.testing.assert_allclose(found.action, wanted.clip(-1, 1), atol=1e-5)


@pytest.mark.usefixtures("whole_runs")
def test_a_recording_that_cannot_be_played_again_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = open_recording(finished / "experience", num_envs=1)
    env = make_env(recording.env, 3, autoreset="disabled")
    expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
    other = replace(recording, seeds=[[7, None, None], *recording.seeds[1:]])
    with pytest.raises(DatasetError, match=r"episode 0, step 0: played again, .* differs by .* do not lead"):
        labels_of(other, env, expert)
    swapped = replace(recording, lanes=[[0, 4, 6], [1, 3, 7], recording.lanes[2]])
    with pytest.raises(DatasetError, match="episode 4, step 0: played again, "):
        labels_of(swapped, env, expert)
    env.close()
    assert main(["collect", f"label={finished / 'demos'}", f"out={tmp_path / 'a'}"]) == 2
    assert "it has 4 episodes, and says the seeds of 0; allowed: the experience/ of a run" in _said(capsys)
    assert main(["collect", "label=nowhere", f"out={tmp_path / 'a'}"]) == 2
    assert "nowhere" in _said(capsys)
    words = ["collect", f"label={finished / 'experience'}", f"out={tmp_path / 'a'}"]
    assert main([*words, "task=reach"]) == 2
    assert "task: got 'reach', allowed: left out with label=" in _said(capsys)
    assert not (tmp_path / "a").exists()


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err
