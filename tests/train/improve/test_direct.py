"""Methods without a base, `direct`, `sequence` and `qarl`: small runs, pretraining, resume, recipes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.transitions import ChunkBatch, StepBatch, TransitionBatch
from robot_rl.policies.actor import ActorPolicy
from robot_rl.policies.checkpoint import load_policy
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import direct
from robot_rl.train.improve.sequence import decisions
from robot_rl.train.phases import resume, run
from robot_rl.train.session import RunSession

pytestmark = pytest.mark.usefixtures("whole_runs")

ACTOR: dict[str, Any] = {
    "env_steps": 40,
    "batch": 8,
    "explore_steps": 10,
    "capacity": 1000,
    "algorithm": {"actor": {"width": 16}, "critic": {"width": 16}},
}
SMALL: dict[str, Any] = {
    "recipe": "small",
    "num_envs": 2,
    "n_exec": 4,
    "env": {"task": "reach", "horizon_s": 0.5, "num_threads": 1},
    "demos": {"episodes": 3},
    "policy": {"horizon": 8, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "bc": {"updates": 6, "batch": 8},
    "method": {"kind": "direct", **ACTOR, "pretrain_updates": 7},
    "evaluate": {"episodes": 4, "num_envs": 2, "every_env_steps": 20, "quick_episodes": 2},
    "checkpoint": {"every_s": 0.0, "every_steps": 2},
    "video": {"episodes": 0, "failures": 0},
}


def small(out: Path, **changes: Any) -> RunConfig:
    return build(RunConfig, {**SMALL, "out": str(out), **changes})


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_pretrains_warms_up_and_learns(tmp_path: Path) -> None:
    summary = run(small(tmp_path))
    rows = rows_of(Path(summary.run))
    assert [row["updates"] for row in rows if row["phase"] == "pretrain"] == list(range(1, 8))
    # One update for each of the 40 - 10 control steps after the warm-up.
    assert max(row["updates"] for row in rows if row["phase"] == "direct") == 30
    assert summary.env_steps == 40
    policy, _ = load_policy(Path(summary.run) / "policy" / "final")
    assert isinstance(policy, ActorPolicy)
    assert any(layer.abs().sum() > 0 for layer in policy.layers)


def other(kind: str, **algorithm: Any) -> dict[str, Any]:
    """Returns the settings of another method with that actor."""
    return {"kind": kind, **ACTOR, "algorithm": {**ACTOR["algorithm"], **algorithm}}


METHODS: dict[str, dict[str, Any]] = {
    "direct": SMALL["method"],
    "seldom": {**SMALL["method"], "publish_every": 7},
    "sequence": other("sequence", n_step=3, model_width=16),
    "decisions": other("sequence", n_step=3, model_width=16, credit="decisions"),
    "qarl": other("qarl", adversary={"width": 16, "curriculum": 20}),
}
SEEN: dict[str, Any] = {"cameras": ["front"], "image_size": [16, 16], "privileged": True}
SEEING: dict[str, Any] = {
    "method": SMALL["method"],
    "env": {**SMALL["env"], **SEEN, "state": ["joint", "tool"]},
    "policy": {**SMALL["policy"], "cameras": ["front"], "image_features": 8, "guess_weight": 0.5},
    "evaluate": {"episodes": 2, "num_envs": 2, "every_env_steps": 0, "quick_episodes": 2},
    "checkpoint": {"every_s": 0.0, "every_steps": 8},
}
"""A base that sees, and guesses where the goal is; `direct` on it."""
FROM_NOTHING: dict[str, Any] = {
    "stages": ["look", "online", "evaluate"],
    "demos": {"episodes": 1},
    "method": {"kind": "direct", **ACTOR, "demo_ratio": 0.0},
}
RUNS: dict[str, dict[str, Any]] = {name: {"method": method} for name, method in METHODS.items()} | {
    "cameras": {**SEEING, **FROM_NOTHING}
}


@pytest.mark.parametrize("name", list(RUNS))
def test_a_resumed_run_is_the_unbroken_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(small(tmp_path / "whole", **RUNS[name]))
    save, saved = RunSession.save, []

    def dies(self: RunSession, phase: str, loop: Any) -> None:
        save(self, phase, loop)
        saved.append(phase)
        if phase not in ("bc", "pretrain") and self.counters.env_steps >= 24:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunSession, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        run(small(tmp_path / "broken", **RUNS[name]))
    monkeypatch.setattr(RunSession, "save", save)
    (folder,) = (tmp_path / "broken").iterdir()
    broken = resume(folder)
    assert broken.final_digest == whole.final_digest
    assert broken.base_digest == whole.base_digest
    mine, theirs = (load_policy(Path(s.run) / "policy" / "final")[0] for s in (whole, broken))
    assert isinstance(mine, torch.nn.Module)
    assert isinstance(theirs, torch.nn.Module)
    for name, value in mine.state_dict().items():
        assert value.equal(theirs.state_dict()[name]), name


@pytest.mark.parametrize("base", ["clone", "noise"])
def test_an_actor_with_cameras_learns_its_encoder(base: str, tmp_path: Path) -> None:
    """It begins with the clone's; with noise for a base it is drawn, and sees what `policy` names."""
    config = small(tmp_path, **(SEEING if base == "clone" else {**SEEING, **FROM_NOTHING}))
    folder = Path(run(config).run)
    final: Any = load_policy(folder / "policy" / "final")[0]
    given: Any = load_policy(folder / "policy" / "base")[0]
    begun: Any = direct.make_policy(config, given)
    again: Any = direct.make_policy(config, given)
    assert final.config == begun.config
    assert (final.config.cameras, final.config.guess_weight) == (("front",), 0.5)
    for name, value in begun.encoder.named_parameters():
        assert value.equal(again.encoder.get_parameter(name)), name
        if base == "clone":
            assert value.equal(given.encoder.get_parameter(name)), name
        assert not value.equal(final.encoder.get_parameter(name)), name
    for name, value in given.normaliser.state_dict().items():
        assert value.equal(final.normaliser.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["sequence", "qarl"])
def test_cameras_are_for_direct_alone(kind: str, tmp_path: Path) -> None:
    config = small(tmp_path, **{**SEEING, "method": METHODS[kind]})
    with pytest.raises(
        ConfigError,
        match=rf"policy.cameras: got .*front.*none with method={kind}, which reads the state alone",
    ):
        run(config)


def test_a_guess_without_its_truth_is_refused(tmp_path: Path) -> None:
    run(small(tmp_path / "one", **SEEING, stages=["demos", "clone", "evaluate"]))
    (folder,) = (tmp_path / "one").iterdir()
    env = {**SEEING["env"], "privileged": False}
    config = small(tmp_path, **{**SEEING, "env": env}, bc={"policy": str(folder / "policy" / "base")})
    with pytest.raises(ConfigError, match=r"policy.guess_weight: got 0.5, .* without env.privileged=true"):
        run(config)


def test_a_base_with_another_encoder_is_refused(tmp_path: Path) -> None:
    """As a policy of another package may be: it sees, but not with an encoder of ours."""
    own = SimpleNamespace(cameras=("front",))
    base: Any = SimpleNamespace(kind="stranger", config=own, horizon=8)
    with pytest.raises(ConfigError, match=r"policy.cameras: got .*none with a base of kind stranger"):
        direct.make_policy(small(tmp_path), base)


@pytest.mark.parametrize("recipe", ["rlpd", "wsrl", "fast_td3", "fast_sac", "sequence", "qarl"])
def test_recipes_are_read(recipe: str) -> None:
    config = load(RunConfig, [f"recipe={recipe}"], config_name="train")
    assert config.method.kind == (recipe if recipe in ("sequence", "qarl") else "direct")
    assert config.recipe == recipe
    base = load(RunConfig, ["recipe=pick_cube"], config_name="train")
    if config.env.task == "pick_cube":  # the same demonstrations and base as the other methods have
        assert (config.demos, config.policy, config.bc, config.n_exec, config.env) == (
            base.demos,
            base.policy,
            base.bc,
            base.n_exec,
            base.env,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("method.pretrain_updates=-1", "method.pretrain_updates: got -1, allowed: 0 or more"),
        ("method.algorithm.critic.drawn=9", "critic.drawn: got 9, allowed: at most critic.num"),
        ("method.algorithm.critic.value=c50", "allowed: one of"),
    ],
)
def test_mistakes_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RunConfig, ["recipe=rlpd", change], config_name="train")


def test_a_decision_is_a_transition_of_all_its_actions() -> None:
    action = torch.arange(12.0).view(2, 3, 2)
    state, after, kind = {"state": torch.zeros(2, 4)}, {"state": torch.ones(2, 4)}, torch.zeros(2)
    valid, reward, bootstrap = torch.ones(2, 3), torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.5])
    chunks = ChunkBatch(state, action, valid, reward, bootstrap, after, kind)
    found = decisions(lambda sampler, rng: chunks)(None, np.random.default_rng(0))
    assert isinstance(found, TransitionBatch)
    assert found.action.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert (found.reward, found.bootstrap, found.next_obs) == (reward, bootstrap, after)


def test_a_decision_that_the_newest_step_cuts_short_is_none() -> None:
    """Ten steps of a lane whose episode goes on: chunks of three that begin at 8 or 9 are not whole."""
    replay = ReplayBuffer(40, 1, {"state": ((1,), np.float32)}, 1)
    for value in range(10):
        replay.add(counted(value))

    def draw(sampler: Any, rng: np.random.Generator) -> ChunkBatch:
        return sampler.sample_chunks(64, horizon=3, gamma_step=1.0, rng=rng)

    found = decisions(draw)(replay, np.random.default_rng(0))
    assert isinstance(found, TransitionBatch)
    begin = found.obs["state"]
    assert set(begin[:, 0].tolist()) == set(range(8))
    assert found.action.equal(begin + torch.tensor([0.0, 1.0, 2.0]))
    assert found.reward.equal(3 * begin[:, 0] + 3)
    fresh = ReplayBuffer(40, 1, {"state": ((1,), np.float32)}, 1)
    fresh.add(counted(0))
    with pytest.raises(DatasetError, match=r"cut all chunks short .* raise method\.explore_steps"):
        decisions(draw)(fresh, np.random.default_rng(0))


def counted(value: int) -> StepBatch:
    """Observation, action and reward are the value; the next observation is one more."""
    row = np.full((1, 1), value, np.float32)
    return StepBatch(
        obs={"state": row},
        base_action=row,
        action=row,
        reward=row[0],
        terminated=np.array([False]),
        truncated=np.array([False]),
        next_obs={"state": row + 1},
        next_base_action=row,
    )
