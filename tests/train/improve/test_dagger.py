"""DAgger: what is labelled and learned from, exact resume, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.config import build
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.registry import resolve
from robot_rl.data.demos import load_episodes
from robot_rl.data.normalize import Normaliser
from robot_rl.data.transitions import StepBatch
from robot_rl.policies.checkpoint import load_policy
from robot_rl.rollout.envs import make_env, make_expert
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.vector import EnvConfig
from robot_rl.train import checkpoint, phases
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import collect_episodes
from robot_rl.train.improve.dagger import LabelledSteps, make_source
from tests.runs import TINY, Killed, rows_of

STATE = ["joint", "finger", "tool.pos", "tool.xaxis"]


def tiny(out: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        **TINY,
        "n_exec": 1,
        "env": {**TINY["env"], "state": STATE, "privileged": True},
        "policy": {"kind": "gaussian", "width": 16, "depth": 1},
        "method": {"kind": "dagger", "env_steps": 90, "utd": 0.5, "batch": 16},
        **changes,
    }
    return replace(build(RunConfig, values), out=str(out))


@pytest.fixture(scope="module")
def two_episodes() -> Any:
    env = make_env(
        EnvConfig(task="reach", horizon_s=0.5, privileged=True, state=tuple(STATE)), 2, autoreset="disabled"
    )
    expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
    episodes = collect_episodes(env, expert, np.arange(2, dtype=np.uint64))
    env.close()
    return episodes


def labelled(episodes: Any, folder: Path, horizon: int = 3) -> LabelledSteps:
    return LabelledSteps(episodes, folder, capacity=40, horizon=horizon, batch=64, seed=0, device="cpu")


def step(episodes: Any, label: float) -> StepBatch:
    """Three envs at the first observation, where an expert would have given `label`."""
    obs = {key: np.repeat(value[:1], 3, axis=0) for key, value in episodes.obs.items()}
    action = np.zeros((3, episodes.action.shape[1]), np.float32)
    return StepBatch(
        obs=obs,
        action=action,
        base_action=action,
        reward=np.zeros(3),
        terminated=np.zeros(3, bool),
        truncated=np.zeros(3, bool),
        next_obs=obs,
        next_base_action=action,
        expert_action=np.full_like(action, label),
    )


def test_of_a_labelled_step_only_the_first_action_is_valid(two_episodes: Any, tmp_path: Path) -> None:
    steps = labelled(two_episodes, tmp_path)
    steps.add(step(two_episodes, 0.25))
    steps.add(step(two_episodes, 0.5))
    total, drawn = len(two_episodes.action) + 6, 0
    for _ in range(40):
        batch = steps.sample()
        is_label = (batch.actions[:, 0] == 0.25).all(dim=1) | (batch.actions[:, 0] == 0.5).all(dim=1)
        assert batch.actions.shape == (64, 3, two_episodes.action.shape[1])
        assert batch.valid[is_label].tolist() == [[True, False, False]] * int(is_label.sum())
        drawn += int(is_label.sum())
    # Six of all steps, each as likely: 40 x 64 draws of them give 40 * 64 * 6 / total, and 5 sigma of that.
    expected = 40 * 64 * 6 / total
    assert abs(drawn - expected) < 5 * np.sqrt(expected)


def test_a_checkpoint_says_how_many_labels_the_files_hold(two_episodes: Any, tmp_path: Path) -> None:
    steps = labelled(two_episodes, tmp_path)
    steps.add(step(two_episodes, 0.25))
    state = steps.state_dict()
    batch = steps.sample()
    steps.add(step(two_episodes, 0.5))  # after the checkpoint: forgotten on resume
    again = labelled(two_episodes, tmp_path)
    again.load_state_dict(state)
    assert torch.equal(again.sample().actions, batch.actions)
    again.add(step(two_episodes, 0.75))
    found = torch.cat([again.sample().actions[:, 0, 0] for _ in range(20)])
    assert not bool((found == 0.5).any())
    assert bool((found == 0.75).any())


def test_the_policy_acts_without_noise_and_the_expert_labels(two_episodes: Any, tmp_path: Path) -> None:
    config = tiny(tmp_path)
    policy = resolve("policy", "gaussian", at="test")(
        config.policy,
        state_dim=len(two_episodes.meta.state_names),
        action_dim=len(two_episodes.meta.action_names),
        normaliser=Normaliser.fit(two_episodes.obs, two_episodes.action),
        generator=torch.Generator().manual_seed(0),
    )
    env = make_env(config.env, config.num_envs)
    source = make_source(config, policy, env, "")
    publisher = Publisher()
    publisher.offer(0, policy.state_dict)
    wanted = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
    for _ in range(3):
        step = source.collect(publisher)
        seen = {key: torch.from_numpy(value) for key, value in step.obs.items()}
        mean = policy.sample(policy.encode(seen), mode="ode").actions[:, 0]
        np.testing.assert_allclose(step.action, mean.detach().numpy(), atol=1e-6)
        assert step.expert_action is not None
        assert not np.allclose(step.expert_action, step.action, atol=0.1)
        assert step.expert_action.shape == wanted.act().shape
    env.close()


@pytest.mark.usefixtures("whole_runs")
def test_a_run_cut_short_ends_as_the_unbroken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbroken = Path(phases.run(tiny(tmp_path / "unbroken")).run)
    base, final = (unbroken / f"policy/{name}/policy.safetensors" for name in ("base", "final"))
    assert base.read_bytes() != final.read_bytes()
    write = checkpoint.write_state

    def write_until_killed(state: Any, folder: Path) -> None:
        write(state, folder)
        if state["phase"] == "dagger" and state["loop"]["counters"]["env_steps"] >= 45:
            raise Killed

    monkeypatch.setattr(checkpoint, "write_state", write_until_killed)
    with pytest.raises(Killed):
        phases.run(tiny(tmp_path / "killed"))
    monkeypatch.setattr(checkpoint, "write_state", write)
    (killed,) = (tmp_path / "killed").glob("*-tiny-seed0")
    phases.resume(killed)
    assert rows_of(killed) == rows_of(unbroken)
    weights = [(folder / "policy/final/policy.safetensors").read_bytes() for folder in (unbroken, killed)]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("whole_runs")
def test_the_privileged_state_is_recorded_apart_and_no_policy_reads_it(tmp_path: Path) -> None:
    run = Path(phases.run(tiny(tmp_path, stages=["demos", "clone", "evaluate"])).run)
    episodes = load_episodes(run / "demos")
    assert PRIVILEGED in episodes.obs
    features = json.loads((run / "demos/meta/info.json").read_text())["features"]
    assert PRIVILEGED in features
    assert not [name for name in features if name.startswith("observation.") and "privileged" in name]
    policy, meta = load_policy(run / "policy/base")
    state = torch.zeros(2, len(meta.state_names))
    assert policy.sample(policy.encode({"state": state})).actions.shape == (2, 1, len(meta.action_names))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_exec": 2, "policy": {"kind": "gaussian", "horizon": 2}},
            "n_exec: got 2, allowed: 1 with method=dagger",
        ),
        (
            {"policy": {"kind": "gaussian", "guess_weight": 0.5}, "env": {"task": "reach"}},
            "policy.guess_weight: got 0.5, allowed: 0 without env.privileged=true",
        ),
        (
            {"demos": {"disturb": 0.3, "path": "recorded"}, "method": {"kind": "residual"}, "n_exec": 1},
            r"demos.disturb: got 0.3, allowed: 0 but with method=dagger, a method with a replay \(without "
            r"demos.path, or with method.demo_ratio=0\) or cloning alone",
        ),
        (
            {"demos": {"disturb": 0.3}, "method": {"kind": "ppo"}, "n_exec": 1},
            "demos.disturb: got 0.3, allowed: 0 but with method=dagger",
        ),
        (
            {"demos": {"disturb": 1.3}},
            "demos.disturb: got 1.3, allowed: 0 to 1",
        ),
    ],
)
def test_what_cannot_be_labelled_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(tmp_path, **changes)
