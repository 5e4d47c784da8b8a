"""Exact resume of RL on latents: cut short anywhere in its loop, it ends as the unbroken run, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.config import build
from robot_rl.core.files import without_checksum
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.latent import LatentSteer
from robot_rl.train import checkpoint, phases
from robot_rl.train.config import RunConfig
from tests.runs import Killed, rows_of

pytestmark = pytest.mark.usefixtures("whole_runs")

TINY: dict[str, Any] = {
    "recipe": "tiny",
    "num_envs": 3,
    "n_exec": 2,
    "metrics_rows": 10,
    "env": {"task": "reach", "horizon_s": 0.8, "num_threads": 1},
    "demos": {"episodes": 5, "bias_m": 0.02},
    "policy": {"horizon": 4, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "bc": {"updates": 5, "batch": 16},
    "method": {
        "kind": "latent",
        "env_steps": 180,
        "utd": 0.5,
        "batch": 16,
        "explore_steps": 60,
        "capacity": 1000,
        "actor": {"width": 16, "depth": 1},
        "algorithm": {"width": 16, "depth": 1, "actor_warmup": 10},
    },
    "evaluate": {"episodes": 6, "num_envs": 4, "every_env_steps": 60, "quick_episodes": 4},
    "checkpoint": {"every_s": 0.0, "every_steps": 9},
    "video": {"episodes": 0, "failures": 0},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "sac": {},
    "na": {"demo_ratio": 0.25, "algorithm": {**TINY["method"]["algorithm"], "variant": "na"}},
}


def tiny(out: Path, variant: str) -> RunConfig:
    values = {**TINY, "method": {**TINY["method"], **VARIANTS[variant]}}
    return replace(build(RunConfig, values), out=str(out))


def result(folder: Path) -> dict[str, Any]:
    """Returns everything a run came to, without what the clock says."""
    summary = without_checksum(json.loads((folder / "summary.json").read_text()))
    for name in ("train_minutes", "timing", "spent", "run", "command"):
        del summary[name]
    return {
        "rows": rows_of(folder),
        "summary": summary,
        "final": (folder / "policy/final/policy.safetensors").read_bytes(),
    }


@pytest.mark.parametrize("variant", ["sac", pytest.param("na", marks=pytest.mark.slow)])
def test_a_run_cut_short_ends_as_the_unbroken_one(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = Path(phases.run(tiny(tmp_path / "unbroken", variant)).run)
    policy, _ = load_policy(unbroken / "policy/final")
    assert isinstance(policy, LatentSteer)
    assert policy.steers
    write = checkpoint.write_state
    for killed_at, steers in ((27, False), (72, False), (120, True)):  # exploring, warm-up, steering

        def write_until_killed(
            state: Any, folder: Path, killed_at: int = killed_at, steers: bool = steers
        ) -> None:
            write(state, folder)  # the checkpoint's files are there, its name is not: the worst moment
            if state["phase"] == "latent" and state["loop"]["counters"]["env_steps"] >= killed_at:
                assert bool(state["loop"]["learners"][0]["publisher"]["weights"]["steers"]) == steers
                raise Killed

        monkeypatch.setattr(checkpoint, "write_state", write_until_killed)
        out = tmp_path / str(killed_at)
        with pytest.raises(Killed):
            phases.run(tiny(out, variant))
        monkeypatch.setattr(checkpoint, "write_state", write)
        (folder,) = out.glob("*-tiny-seed0")
        phases.resume(folder)
        assert result(folder) == result(unbroken)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_without_steps_the_base_is_the_result(variant: str, tmp_path: Path) -> None:
    config = tiny(tmp_path, variant)
    folder = Path(phases.run(replace(config, method=replace(config.method, env_steps=0))).run)
    base, final = (load_policy(folder / "policy" / name)[0] for name in ("base", "final"))
    obs = {"state": torch.zeros(2, base.feature_dim)}
    z = torch.ones(2, base.horizon, base.action_dim)
    assert torch.equal(
        base.sample(base.encode(obs), z=z).actions, final.sample(final.encode(obs), z=z).actions
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": {"kind": "latent", "demo_ratio": 0.5}},
            "method.demo_ratio: got 0.5, allowed: 0 with method.algorithm.variant",
        ),
        (
            {"human": {"input": "scripted"}, "num_envs": 1},
            "human.input: got 'scripted' with method=latent, allowed: none",
        ),
        (
            {"replay": {"reuse": ["/"]}},
            "replay.reuse: given with method.algorithm.variant=sac, allowed: none",
        ),
    ],
)
def test_experience_without_noise_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(RunConfig, {"method": {"kind": "latent"}, **change})
