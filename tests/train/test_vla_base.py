"""Whole runs from a small VLA: what each method learns of it, and what is refused before anything is made."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.data.demos import save_episodes
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.policies.vla.small import SmallVLA
from robot_rl.rollout.envs import make_env
from robot_rl.sched.opened import opened
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.assemble import evaluator, policy_meta
from robot_rl.train.checkpoint import CheckpointStore
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import collect_demonstrations
from robot_rl.train.finetune import run as finetune
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.improve.method import method_of
from robot_rl.train.phases import Summary
from tests.runs import folder_of, killed_after, rows_of, undisturbed

pytestmark = pytest.mark.usefixtures("whole_runs")

TINY: dict[str, Any] = {
    "recipe": "tiny",
    "num_envs": 2,
    "n_exec": 3,
    "metrics_rows": 10,
    "env": {
        "task": "reach",
        "horizon_s": 0.7,
        "num_threads": 1,
        "cameras": ["front"],
        "image_size": [16, 24],
    },
    "demos": {"episodes": 2, "bias_m": 0.02},
    "evaluate": {"episodes": 2, "num_envs": 2, "every_env_steps": 0},
    "checkpoint": {"every_s": 0.0, "every_steps": 1},
    "video": {"episodes": 0, "failures": 0},
}
METHODS: dict[str, dict[str, Any]] = {
    "residual": {
        "env_steps": 40,
        "batch": 4,
        "explore_steps": 6,
        "capacity": 1000,
        "algorithm": {"num_critics": 2, "width": 8, "depth": 1, "critic_warmup": 2},
    },
    "latent": {
        "env_steps": 40,
        "batch": 4,
        "explore_steps": 6,
        "capacity": 1000,
        "actor": {"width": 8, "depth": 1},
        "algorithm": {"width": 8, "depth": 1},
    },
    "ppo": {
        "env_steps": 80,
        "decisions": 5,
        "algorithm": {"batch": 8, "epochs": 1, "width": 8, "depth": 1, "actor_lr": 1e-3},
    },
    "grpo": {
        "env_steps": 60,
        "group": 2,
        "reward": "process",
        "keep": [0.0, 1.0],
        "algorithm": {"batch": 8, "epochs": 1, "width": 8, "depth": 1, "actor_lr": 1e-3},
    },
}
FINETUNE: dict[str, Any] = {
    "size": "tiny",
    "horizon": 4,
    "picture": [16, 24],
    "options": {"steps": 2},
    "heldout": 1,
    "updates": 2,
    "batch": 4,
    "stride": 4,
    "curve_points": 1,
    "baselines": False,
}
VLA = SmallVLAConfig(
    horizon=4,
    cameras=("front",),
    picture=(16, 24),
    width=8,
    depth=1,
    heads=1,
    context_depth=1,
    channels=2,
    text_tokens=1,
    instruction="reach the ball",
    steps=2,
)


@pytest.fixture(scope="module")
def vla(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves an untrained VLA for the run's task and robot, as `robot-rl finetune` leaves a trained one."""
    config = build(RunConfig, TINY)
    env = make_env(replace(config.env, cameras=()), 1, autoreset="disabled")
    meta = policy_meta(config, env)
    env.close()

    def save(**options: Any) -> Path:
        policy = SmallVLA(
            replace(VLA, **options),
            state_dim=len(meta.state_names),
            action_dim=len(meta.action_names),
            generator=torch.Generator().manual_seed(0),
        )
        torch.nn.init.normal_(policy.expert.out.weight, std=0.1, generator=torch.Generator().manual_seed(1))
        folder = tmp_path_factory.mktemp("vla") / "policy"
        save_policy(folder, policy, meta=replace(meta, n_exec=VLA.horizon))
        return folder

    return save


@pytest.fixture(scope="module")
def base(vla: Callable[..., Path]) -> Path:
    return vla()


@pytest.fixture(scope="module")
def unbroken(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Summary]:
    """Trains that VLA with a method, once; returns what the run came to."""

    @functools.cache
    def train(method: str) -> Summary:
        out = tmp_path_factory.mktemp("unbroken")
        with undisturbed(out / "state"):
            return phases.run(tiny(out, base, method))

    return train


def tiny(out: Path, base: Path, method: str, **changes: Any) -> RunConfig:
    # The section `policy` is of what would be cloned: the VLA says itself what it is.
    words = {**TINY, "policy": {"horizon": 2}, "bc": {"policy": str(base)}}
    section = {"kind": method, **METHODS.get(method, {}), **changes.pop("settings", {})}
    return replace(build(RunConfig, {**words, "method": section, **changes}), out=str(out))


def weights(folder: Path, which: str) -> dict[str, torch.Tensor]:
    policy: Any = load_policy(folder / "policy" / which)[0]
    return policy.state_dict()


@pytest.mark.parametrize(("method", "learns"), [("residual", {"head"}), ("latent", {"actor", "steers"})])
def test_around_a_frozen_vla_the_head_alone_learns(
    method: str, learns: set[str], tmp_path: Path, base: Path, unbroken: Callable[[str], Summary]
) -> None:
    summary = unbroken(method)
    folder = Path(summary.run)
    assert summary.env_steps == 40
    final, frozen = weights(folder, "final"), load_policy(folder / "policy" / "base")[0]
    config = tiny(tmp_path, base, method)
    before = method_of(config).make_policy(config, frozen).state_dict()
    changed = {name.split(".")[0] for name in final if not torch.equal(final[name], before[name])}
    assert changed == learns
    meta = load_policy(folder / "policy" / "base")[1]
    assert meta.n_exec == 3  # the run's, not the 4 of the VLA's folder


def test_what_finetune_leaves_is_a_base(tmp_path: Path) -> None:
    config, demos = build(RunConfig, {**TINY, "demos": {"episodes": 4}}), tmp_path / "demos"
    with opened(evaluator(config), holder="test") as env:
        save_episodes(demos, collect_demonstrations(env, config.demos, 0))
    tuned = finetune.run(build(FinetuneConfig, {**FINETUNE, "dataset": str(demos), "out": str(tmp_path)}))
    given = {"demos": {"path": str(demos)}}
    folder = Path(phases.run(tiny(tmp_path / "runs", Path(tuned.run) / "policy", "residual", **given)).run)
    first: Any = load_policy(Path(tuned.run) / "policy")[0]
    taken = weights(folder, "base")
    assert all(torch.equal(taken[name], value) for name, value in first.state_dict().items())


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_ppo_trains_the_vla_through_its_chain(method: str, unbroken: Callable[[str], Summary]) -> None:
    folder = Path(unbroken(method).run)
    base, final = weights(folder, "base"), weights(folder, "final")
    changed = {name.split(".")[0] for name in final if not torch.equal(final[name], base[name])}
    assert {"image_encoders", "text_encoder", "state_in", "blocks", "expert"} <= changed
    assert "normaliser" not in changed
    policy: Any = load_policy(folder / "policy" / "final")[0]
    assert (policy.kind, policy.config.process, policy.config.scored) == ("small_vla", "flow_sde", 3)
    assert replace(policy.config, process="flow_ode", scored=None) == VLA
    first = next(row for row in read_metrics(folder / "metrics.jsonl") if f"{method}/kl" in row)
    assert first[f"{method}/kl"] < 0.1


def test_ppo_of_a_vla_cut_short_ends_as_the_unbroken_run(
    tmp_path: Path, base: Path, unbroken: Callable[[str], Summary]
) -> None:
    with killed_after(1):
        phases.run(tiny(tmp_path / "cut", base, "ppo"))
    (folder,) = (tmp_path / "cut").glob("*-tiny-seed0")
    assert phases.resume(folder).final_digest == unbroken("ppo").final_digest


@pytest.mark.parametrize("method", ["residual", "latent"])
def test_a_run_that_sees_cut_short_goes_on_from_the_encodings_that_it_kept(
    method: str, tmp_path: Path, base: Path, unbroken: Callable[[str], Summary]
) -> None:
    whole = Path(unbroken(method).run)
    with killed_after(19):  # the first episodes have ended
        phases.run(tiny(tmp_path / "cut", base, method))
    folder = folder_of(tmp_path / "cut")
    state = CheckpointStore(folder / "checkpoints").load()
    assert state is not None
    kept = state["loop"]["experience"]["replay"]
    shown = set(kept["replay"]["obs"])  # a few numbers a step, in the place of pictures
    assert shown == {"features"} if method == "residual" else "features" in shown
    assert not [key for key in shown if key.endswith(".rgb")]
    phases.resume(folder)
    assert rows_of(folder) == rows_of(whole)
    for path in ("policy/final/policy.safetensors", "evaluation-final.json"):
        assert (folder / path).read_bytes() == (whole / path).read_bytes()


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("direct", {}, r"got .small_vla., allowed: flow, .* noise with method=direct. Use method=residual"),
        ("chunked", {}, r"got 'small_vla', allowed: flow with method=chunked"),
        ("residual", {"n_exec": 5}, r"n_exec: got 5, allowed: 1 to the base's 4"),
        (
            "residual",
            {"env": {**TINY["env"], "cameras": []}},
            r"reads cameras front at \(16, 24\), the run shows none .*env\.cameras=\[front\]",
        ),
        (
            "residual",
            {"env": {**TINY["env"], "image_size": [24, 24]}},
            r"the run shows front at \(24, 24\)\. Say .* env\.image_size=\[16,24\]",
        ),
        (
            "ppo",
            {"settings": {"exploration": {"process": "flow_noise"}}},
            r"method\.exploration: small_vla process: got 'flow_noise', allowed: flow_ode, flow_sde",
        ),
        (
            "ppo",
            {"settings": {"distil": {"updates": 5}}},
            r"method\.distil\.updates: got 5, allowed: 0 with a small_vla",
        ),
    ],
)
def test_what_cannot_work_is_said_before_a_folder_is_made(
    method: str, changes: dict[str, Any], message: str, tmp_path: Path, vla: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        phases.run(tiny(tmp_path / "out", vla(), method, **changes))
    assert not (tmp_path / "out").exists()


def test_decisions_of_a_fixed_length_refuse_a_base_that_ends_its_chunks(
    tmp_path: Path, vla: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=r"horizons: got \(2, 4\), allowed: \(\) with method=latent"):
        phases.run(tiny(tmp_path, vla(horizons=(2, 4)), "latent"))


def test_demonstrations_without_the_pictures_are_refused(tmp_path: Path, vla: Callable[..., Path]) -> None:
    blind = {"demos": {"episodes": 2}, "method": {"env_steps": 0}, "bc": {"updates": 1, "batch": 4}}
    env = {**TINY["env"], "cameras": []}
    words = {**TINY, **blind, "env": env, "policy": {"horizon": 4, "width": 8, "depth": 1, "steps": 2}}
    made = phases.run(replace(build(RunConfig, words), out=str(tmp_path / "blind")))
    given = {"demos": {"path": f"{made.run}/demos"}}
    with pytest.raises(ConfigError, match=r"has front\.rgb nowhere, the run shows \(16, 24, 3\)"):
        phases.run(tiny(tmp_path / "seeing", vla(), "residual", **given))
