"""Whole runs of RL-100: every phase in its order, the gate in the simulator, exact resume anywhere."""

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from robot_rl.algos.distil import Distillation
from robot_rl.algos.offline_ppo import OfflinePPO
from robot_rl.config import build, load
from robot_rl.core.errors import CheckpointError
from robot_rl.core.files import write_json
from robot_rl.core.seeding import EVAL_SEED_START
from robot_rl.policies.checkpoint import load_policy
from robot_rl.rollout.envs import make_env
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.before import check_before_learner
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import rl100
from robot_rl.train.improve.config import RL100Settings
from robot_rl.train.improve.method import settings_of
from tests.runs import TINY, folder_of
from tests.worlds.conftest import META

pytestmark = pytest.mark.usefixtures("whole_runs")

RUN: dict[str, Any] = {
    **TINY,
    "method": {
        "kind": "rl100",
        "env_steps": 120,
        "decisions": 5,
        "exploration": {"process": "flow_sde", "stochastic_steps": "all"},
        "algorithm": {"reduction": "per_step", "batch": 8, "epochs": 2, "width": 16, "depth": 1},
        "offline": {
            "critic_updates": 4,
            "updates": 6,
            "batch": 8,
            "iql": {"critics": {"width": 16, "depth": 1}},
            "gate": {"every": 3, "scorer": "critics", "states": 8},
        },
        "distil": {"updates": 6, "batch": 8},
    },
    "evaluate": {**TINY["evaluate"], "every_env_steps": 0},
}


def tiny(out: Path, **section: Any) -> RunConfig:
    return replace(build(RunConfig, {**RUN, "method": {**RUN["method"], **section}}), out=str(out))


def test_every_phase_hands_its_policy_to_the_next(tmp_path: Path) -> None:
    summary = phases.run(tiny(tmp_path))
    folder = Path(summary.run)
    rows = read_metrics(folder / "metrics.jsonl")
    names = list(dict.fromkeys(row["phase"] for row in rows))
    assert names == ["demos", "bc", "base", "rl100 offline", "rl100", "distil", "final"]
    offline = [row for row in rows if row["phase"] == "rl100 offline"]
    assert max(row["updates"] for row in offline) == 10
    judged = [row["updates"] for row in offline if "rl100 offline/gate_score" in row]
    assert judged == [7, 10]  # four of the critics, then two candidates of three
    assert {row["step"] for row in offline} == {0}
    assert 120 <= summary.env_steps < 180
    assert max(row["updates"] for row in rows if row["phase"] == "distil") == 6
    kinds = {which: load_policy(folder / "policy" / which)[0].kind for which in ("base", "improved", "final")}
    assert kinds == {"base": "flow", "improved": "flow", "final": "one_step"}


def test_a_gate_in_the_simulator_pays_for_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Any] = []
    evaluate = rl100.evaluate_in

    def watched(*args: Any, **options: Any) -> Any:
        played.append(evaluate(*args, **options))
        return played[-1]

    monkeypatch.setattr(rl100, "evaluate_in", watched)
    offline = {**RUN["method"]["offline"], "gate": {"every": 3, "scorer": "simulator", "episodes": 2}}
    summary = phases.run(tiny(tmp_path, offline=offline, env_steps=0, distil={"updates": 0}))
    assert len(played) == 3  # the base, and two candidates
    assert summary.env_steps == sum(int(found.steps.sum()) for found in played) > 0
    assert max(found.seeds.max() for found in played) < EVAL_SEED_START
    assert not (Path(summary.run) / "policy/improved").exists()


@pytest.mark.parametrize(
    ("learner", "fails_at"), [(OfflinePPO, 3), (OfflinePPO, 9), (Distillation, 1), (Distillation, 4)]
)
def test_a_run_cut_short_in_any_phase_ends_the_same(
    learner: Any, fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = phases.run(tiny(tmp_path / "whole"))
    update, left = learner.update, [fails_at]

    def fails(self: Any, batch: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return update(self, batch)

    monkeypatch.setattr(learner, "update", fails)
    with pytest.raises(KeyboardInterrupt):
        phases.run(tiny(tmp_path / "cut"))
    resumed = phases.resume(folder_of(tmp_path / "cut"))
    assert resumed.final_digest == whole.final_digest
    rows = [read_metrics(folder_of(tmp_path / name) / "metrics.jsonl") for name in ("whole", "cut")]
    learned = [[(r["phase"], r["step"], r.get("updates")) for r in found] for found in rows]
    assert learned[0] == learned[1]


def test_rate_and_range_of_the_offline_steps_are_their_own(tmp_path: Path) -> None:
    online = {"reduction": "per_step", "lam": 0.7, "clip": 0.3, "clip_high": 0.4, "actor_lr": 1e-2}
    offline = {"clip": 0.1, "actor_lr": 1e-3, "target_kl": 0.05}
    config = tiny(tmp_path, algorithm=online, offline=offline)
    rates = rl100.offline_rates(settings_of(config, RL100Settings))
    assert (rates.clip, rates.clip_high, rates.actor_lr, rates.target_kl) == (0.1, None, 1e-3, 0.05)
    assert rates.lam == 0.7


def test_without_updates_the_base_is_left(tmp_path: Path) -> None:
    offline = {**RUN["method"]["offline"], "updates": 0}
    summary = phases.run(tiny(tmp_path, offline=offline, env_steps=0, distil={"updates": 0}))
    assert summary.final_digest == summary.base_digest


def test_the_recipe_shares_the_base_of_pick_cube() -> None:
    config, usual = (
        load(RunConfig, [f"recipe={name}"], config_name="train") for name in ("rl100", "pick_cube")
    )
    assert config.method.kind == "rl100"
    for name in ("demos", "bc", "n_exec", "env", "policy"):
        assert getattr(config, name) == getattr(usual, name)


def test_a_gate_in_a_model_of_something_else_is_refused_before_any_work(tmp_path: Path) -> None:
    write_json(tmp_path / "world.json", {"meta": asdict(META)}, is_checked=True)
    gate = {"scorer": "world", "world": str(tmp_path)}
    config = tiny(tmp_path, offline={**RUN["method"]["offline"], "gate": gate})
    words = r"method\.offline\.gate\.world: the world model is of something else: .* 'point', not 'panda'"
    with pytest.raises(CheckpointError, match=words):
        check_before_learner(config)
    with closing(make_env(config.env, 1)) as real:
        session: Any = SimpleNamespace(config=config)
        start: Any = SimpleNamespace(eval_envs={"": real})
        with pytest.raises(CheckpointError, match=words):
            rl100.episode_score(session, start, nn.Module(), settings_of(config, RL100Settings).offline.gate)
