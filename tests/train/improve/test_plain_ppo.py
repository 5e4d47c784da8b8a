"""Runs of `plain_ppo`: from nothing, resumed, repeated, evaluated again; mistakes; recipes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.cli.main import main
from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train.config import RunConfig
from robot_rl.train.phases import resume, run
from tests.runs import folder_of, killed_after

pytestmark = pytest.mark.usefixtures("whole_runs")

SMALL: dict[str, Any] = {
    "recipe": "small",
    "stages": ("look", "evaluate", "online", "evaluate"),
    "num_envs": 2,
    "n_exec": 1,
    "env": {"task": "reach", "horizon_s": 0.25, "num_threads": 1},
    "demos": {"episodes": 3},
    "policy": {"kind": "gaussian", "width": 16, "depth": 1},
    "method": {
        "kind": "plain_ppo",
        "env_steps": 48,
        "steps": 4,
        "algorithm": {"width": 16, "depth": 1, "minibatches": 2, "epochs": 2},
    },
    "evaluate": {"episodes": 4, "num_envs": 2, "every_env_steps": 24, "quick_episodes": 2},
    "checkpoint": {"every_s": 0.0, "every_steps": 8},
    "video": {"episodes": 0, "failures": 0},
}
GYM: dict[str, Any] = {"kind": "gym", "id": "Pendulum-v1", "settings": {"max_episode_steps": 6}}
HIDDEN: dict[str, Any] = {
    "env": {**SMALL["env"], "state": ["joint", "tool"], "privileged": True},
    "method": {**SMALL["method"], "algorithm": {**SMALL["method"]["algorithm"], "privileged": True}},
}


def small(out: Path, **changes: Any) -> RunConfig:
    return build(RunConfig, {**SMALL, "out": str(out), **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    policy: Any = load_policy(folder / "policy" / "final")[0]
    assert isinstance(policy, GaussianPolicy)
    return policy.state_dict()


def same(mine: Path, theirs: Path) -> bool:
    found, other = weights(mine), weights(theirs)
    return found.keys() == other.keys() and all(value.equal(other[name]) for name, value in found.items())


def test_a_run_from_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(small(tmp_path))
    folder = folder_of(tmp_path)
    assert summary.env_steps == 48
    assert summary.control_steps == {"sim": 48 + summary.demo_env_steps}
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "plain_ppo/kl" in row]
    assert rows[-1]["updates"] == 6  # 48 steps of 2 envs, 4 at a time
    assert {"plain_ppo/lr", "plain_ppo/value_loss", "collect/episodes"} <= rows[-1].keys()
    begun, final = load_policy(folder / "policy/base")[0], weights(folder)
    scale: Any = begun
    # The scale has gone on from that of the noise.
    mean = "encoder.normaliser.mean_state"
    assert not final[mean].equal(scale.normaliser.mean_state)
    assert main(["evaluate", f"run={folder}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["digest"] == summary.final_digest


@pytest.mark.parametrize("name", ["reach", "gym", "privileged"])
def test_a_resumed_run_is_the_unbroken_one(name: str, tmp_path: Path) -> None:
    change = {"reach": {}, "gym": {"env": GYM}, "privileged": HIDDEN}[name]
    whole = run(small(tmp_path / "whole", **change))
    with killed_after(8):
        run(small(tmp_path / "cut", **change))
    resumed = resume(folder_of(tmp_path / "cut"))
    assert resumed.final_digest == whole.final_digest
    assert same(Path(whole.run), Path(resumed.run))


ROBOTS: dict[str, Any] = {
    "env": {**SMALL["env"], "robots": ["reach:panda", "reach:gantry", "mobile_reach:mobile_panda"]},
    "sources": {
        "panda": {"robot": "panda", "num_envs": 2, "env_steps": 48},
        "gantry": {"robot": "gantry", "num_envs": 3, "env_steps": 24},
        "mobile": {"robot": "mobile_panda", "task": "mobile_reach", "num_envs": 2, "env_steps": 32},
    },
}


def several(out: Path) -> RunConfig:
    """Returns a run of three bodies with joints and actions of their own, of which one ends first."""
    words = {key: value for key, value in SMALL.items() if key != "num_envs"}
    method = {key: value for key, value in SMALL["method"].items() if key != "env_steps"}
    return build(RunConfig, {**words, **ROBOTS, "method": method, "out": str(out)})


def test_bodies_that_differ_learn_one_policy_and_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    whole = run(several(tmp_path / "whole"))
    folder = folder_of(tmp_path / "whole")
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "plain_ppo/kl" in row]
    # A turn brings 8, 12 and 8 steps and one update: gantry ends after 2, mobile after 4, Panda after 6.
    assert rows[-1]["updates"] == 6
    steps = {name: one["env_steps"] for name, one in whole.sources.items()}
    assert steps == {"panda": 48, "gantry": 24, "mobile": 32}
    with killed_after(8):
        run(several(tmp_path / "cut"))
    resumed = resume(folder_of(tmp_path / "cut"))
    assert resumed.final_digest == whole.final_digest
    assert same(Path(whole.run), Path(resumed.run))


def test_the_same_seed_twice_is_the_same_policy_and_another_is_not(tmp_path: Path) -> None:
    one, two, other = (
        Path(run(small(tmp_path / name, seed=seed)).run) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert same(one, two)
    assert not same(one, other)


def test_the_value_alone_reads_what_is_hidden(tmp_path: Path) -> None:
    folder = Path(run(small(tmp_path, **HIDDEN)).run)
    policy: Any = load_policy(folder / "policy" / "final")[0]
    assert PRIVILEGED in policy.normaliser.feature_dims
    state = {"state": torch.zeros(1, policy.state_dim)}
    assert policy.sample(policy.encode(state)).actions.shape == (1, 1, policy.action_dim)


def test_nothing_is_hidden_from_a_policy_that_sees_all(tmp_path: Path) -> None:
    env = {**SMALL["env"], "privileged": True}
    with pytest.raises(ConfigError, match="false where the policy sees the whole state"):
        run(small(tmp_path, **{**HIDDEN, "env": env}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.kind=flow", "policy.kind: got 'flow', allowed: gaussian with method=plain_ppo"),
        ("policy.horizon=2", "policy.horizon: got 2, allowed: 1 with method=plain_ppo"),
        ("n_exec=2", "n_exec: got 2, allowed: 1 with method=plain_ppo"),
        ("policy.cameras=front", "policy.cameras: got .*front.*, allowed: none with method=plain_ppo"),
        ("transport=process", "transport: got 'process', allowed: inline with method=plain_ppo"),
        ("real_time=true num_envs=1", "no `look` with an arm"),
        ("stages=demos,clone,online,evaluate", "gaussian.*noise with method=plain_ppo"),
        ("num_envs=1 method.steps=1", "method.steps: got 1, allowed: 2 or more with num_envs=1"),
        (
            "num_envs=1 method.steps=3",
            "minibatches: got 4, allowed: at most 3, .*method.steps=3",
        ),
        ("method.steps=0", "method.steps: got 0, allowed: 1 or more"),
        ("method.algorithm.clip=1", "method.algorithm.clip: got 1.0, allowed: above 0, below 1"),
        ("method.algorithm.lr_range=[1,0.1]", "lr_range: got .*, allowed: two numbers above 0"),
    ],
)
def test_mistakes_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, ["recipe=plain_ppo", *change.split()], config_name="train")


FLOW: dict[str, Any] = {
    "policy": {"kind": "flow", "horizon": 2, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "n_exec": 2,
    "method": {
        "kind": "ppo",
        "env_steps": 48,
        "decisions": 4,
        "exploration": {"process": "flow_noise"},
        "algorithm": {"reduction": "joint", "epochs": 2, "batch": 4, "critic_warmup": 0, "width": 16},
    },
}


def test_a_flow_learns_from_nothing_and_resumes(tmp_path: Path) -> None:
    whole = run(small(tmp_path / "whole", **FLOW))
    with killed_after(4):  # two of its four updates are saved
        run(small(tmp_path / "cut", **FLOW))
    resumed = resume(folder_of(tmp_path / "cut"))
    assert resumed.final_digest == whole.final_digest
    base, final = (load_policy(Path(whole.run) / "policy" / name)[0] for name in ("base", "final"))
    assert (base.kind, final.kind) == ("noise", "flow")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.kind=gaussian", "policy.kind: got 'gaussian', allowed: flow, diffusion"),
        ("n_exec=2", "n_exec: got 2, allowed: 1 to policy.horizon, which is 1"),
        ("method.exploration.process=flow_ode", "which does not explore"),
    ],
)
def test_a_flow_that_cannot_explore_is_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, ["recipe=flow_ppo", change], config_name="train")
