"""Whole runs from a policy that LeRobot saved: who learns, what stays, and what LeRobot reads again."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.algos.chain_ppo import ChainPPO
from robot_rl.cli import evaluate
from robot_rl.config import build
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.policy import Encoded
from robot_rl.data.demos import save_episodes
from robot_rl.data.episode import observed
from robot_rl.data.episodes import episodes_meta
from robot_rl.data.facts import DatasetFacts
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.given import GivenPolicy
from robot_rl.policies.vla import tiny
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.policies.vla.lerobot_files import extra, quiet
from robot_rl.rollout.envs import make_env
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.collect import open_policy
from robot_rl.train.config import RunConfig
from robot_rl.train.given import find_given, given_policy
from robot_rl.train.improve import ppo
from robot_rl.train.improve.config import ChainSettings
from robot_rl.train.improve.method import settings_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_hub", "whole_runs")]

ENV: dict[str, Any] = {"task": "reach", "horizon_s": 0.7, "num_threads": 1}
SEEN = {**ENV, "cameras": ["front"], "image_size": [48, 48]}
APART = {**ENV, "environment_state": ["goal"]}
TINY: dict[str, Any] = {
    "recipe": "tiny",
    "num_envs": 2,
    "n_exec": 3,
    "metrics_rows": 10,
    "demos": {"episodes": 2, "bias_m": 0.02},
    "evaluate": {"episodes": 2, "num_envs": 2, "every_env_steps": 0},
    "checkpoint": {"every_s": 0.0, "every_steps": 1000},
    "video": {"episodes": 0, "failures": 0},
}
METHODS: dict[str, dict[str, Any]] = {
    "residual": {
        "env_steps": 24,
        "batch": 4,
        "explore_steps": 6,
        "capacity": 1000,
        "algorithm": {"num_critics": 2, "width": 8, "depth": 1, "critic_warmup": 2},
    },
    "latent": {
        "env_steps": 24,
        "batch": 4,
        "explore_steps": 6,
        "capacity": 1000,
        "actor": {"width": 8, "depth": 1},
        "algorithm": {"width": 8, "depth": 1},
    },
    "ppo": {
        "env_steps": 24,
        "decisions": 4,
        "algorithm": {"batch": 8, "epochs": 1, "width": 8, "depth": 1, "actor_lr": 1e-3, "critic_warmup": 0},
    },
    "grpo": {
        "env_steps": 24,
        "group": 2,
        "reward": "process",
        "keep": [0.0, 1.0],
        "algorithm": {"batch": 8, "epochs": 1, "width": 8, "depth": 1, "actor_lr": 1e-3, "critic_warmup": 0},
    },
}


BY_DDPM = {
    "exploration": {"process": "ddpm"},
    "algorithm": {**METHODS["ppo"]["algorithm"], "reduction": "per_step"},
}
"""Of `ppo`, for a diffusion."""


def facts_of(env_config: dict[str, Any]) -> DatasetFacts:
    """Facts of a dataset of that env."""
    with closing(make_env(build(RunConfig, {"env": env_config}).env, 1, autoreset="disabled")) as env:
        meta, features = episodes_meta(env), observed(env)

    def table(size: int) -> dict[str, Any]:
        names = {"min": -1.0, "max": 1.0, "mean": 0.1, "std": 0.5, "q01": -0.9, "q99": 0.9}
        return {name: torch.full((size,), value).numpy() for name, value in names.items()}

    stats = {"state": table(len(meta.state_names)), "action": table(len(meta.action_names))}
    return DatasetFacts(meta=meta, features=features, stats=stats, instructions=(meta.instruction,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, no_hub: None) -> Callable[[str], Path]:
    """Folders of tiny policies that see; SmolVLA and Diffusion by DDIM."""

    def save(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        options = tiny.options(kind, folder / "vlm")
        short = {"horizon": 8} if kind == "diffusion" else {"chunk_size": 4, "n_action_steps": 4}
        small = {"down_dims": [8, 16]} if kind == "diffusion" else {}
        options["config"] |= {**short, **small, **({"n_action_steps": 4} if small else {})}
        generator = torch.Generator().manual_seed(0)
        with quiet():
            LeRobotPolicy.create(facts_of(SEEN), options, generator=generator).save(folder / "policy")
        return folder / "policy"

    return save


@pytest.fixture(scope="module")
def blind_act(tmp_path_factory: pytest.TempPathFactory, no_hub: None) -> Path:
    """What LeRobot's own classes write of an ACT that reads state and environment_state, and no picture."""
    facts = facts_of(APART)
    size, apart = len(facts.meta.state_names), facts.features["environment_state"].shape[0]
    types, configs = extra("lerobot.configs"), extra("lerobot.policies.act.configuration_act")
    feature, kinds = types.PolicyFeature, types.FeatureType
    config = configs.ACTConfig(
        input_features={
            "observation.state": feature(type=kinds.STATE, shape=(size,)),
            "observation.environment_state": feature(type=kinds.ENV, shape=(apart,)),
        },
        output_features={"action": feature(type=kinds.ACTION, shape=(len(facts.meta.action_names),))},
        chunk_size=4,
        n_action_steps=3,
        dim_model=16,
        n_heads=2,
        dim_feedforward=16,
        n_encoder_layers=1,
        use_vae=False,
        device="cpu",
        push_to_hub=False,
    )
    folder = tmp_path_factory.mktemp("act") / "checkpoints" / "last" / "pretrained_model"
    factory = extra("lerobot.policies.factory")
    stats = {"observation.state": facts.stats["state"], "action": facts.stats["action"]}
    with quiet():
        torch.manual_seed(0)
        factory.get_policy_class("act")(config).save_pretrained(folder)
        for pipeline in factory.make_pre_post_processors(config, dataset_stats=stats):
            pipeline.save_pretrained(folder)
    return folder


def config_of(out: Path, base: Path, method: str, env: dict[str, Any], **changes: Any) -> RunConfig:
    section = {"kind": method, **METHODS[method], **changes.pop("settings", {})}
    words = {**TINY, "env": env, "bc": {"policy": str(base)}, "method": section, **changes}
    return replace(build(RunConfig, words), out=str(out))


def states(folder: Path, which: str) -> dict[str, torch.Tensor]:
    policy: Any = load_policy(folder / "policy" / which)[0]
    return policy.state_dict()


def observation(env_config: dict[str, Any], rows: int = 5) -> dict[str, torch.Tensor]:
    with closing(make_env(build(RunConfig, {"env": env_config}).env, rows, autoreset="disabled")) as env:
        return {key: torch.from_numpy(value) for key, value in env.reset(seed=3)[0].items()}


def test_it_acts_as_lerobot_does_and_shows_the_state(blind_act: Path, tmp_path: Path) -> None:
    base = LeRobotPolicy.from_pretrained(blind_act)
    policy = GivenPolicy(base, base.state_scale())
    obs = observation(APART)
    encoded = policy.encode(obs)
    torch.testing.assert_close(encoded["features"], (obs["state"] - 0.1) / 0.5)
    factory, config = extra("lerobot.policies.factory"), extra("lerobot.configs").PreTrainedConfig
    with quiet():
        theirs = config.from_pretrained(blind_act)
        model = factory.get_policy_class("act").from_pretrained(blind_act, config=theirs)
        pre, post = factory.make_pre_post_processors(theirs, pretrained_path=str(blind_act))
    batch = {f"observation.{key}": obs[key] for key in ("state", "environment_state")}
    expected = post(model.predict_action_chunk(pre(batch))).clamp(-1.0, 1.0)
    z = torch.randn(5, 4, expected.shape[-1])
    torch.testing.assert_close(policy.sample(encoded, z=z).actions, expected)
    facts = facts_of(APART)
    save_policy(tmp_path / "p", policy, meta=PolicyMeta(**vars(facts.meta), n_exec=3))
    again: Any = load_policy(tmp_path / "p")[0]
    torch.testing.assert_close(again.encode(obs)["features"], encoded["features"])
    assert torch.equal(again.sample(again.encode(obs)).actions, policy.sample(encoded).actions)
    with pytest.raises(ValueError, match=r"lerobot: the observation lacks environment_state; it has state"):
        policy.encode({"state": obs["state"]})


def test_a_residual_on_an_act_without_cameras(blind_act: Path, tmp_path: Path) -> None:
    """The head alone learns; a replayed step does not run the base."""
    output = blind_act.parents[2]
    summary = phases.run(config_of(tmp_path, output, "residual", APART))
    folder = Path(summary.run)
    base, final = states(folder, "base"), states(folder, "final")
    frozen = {name.removeprefix("base."): value for name, value in final.items() if name.startswith("base.")}
    assert frozen.keys() == base.keys()
    assert all(torch.equal(frozen[name], value) for name, value in base.items())
    assert any(value.abs().sum() > 0 for name, value in final.items() if name.startswith("head."))
    assert summary.base_digest != summary.final_digest
    policy: Any = load_policy(folder / "policy" / "final")[0]
    encoded = policy.encode(observation(APART))
    policy.base.base.encode = lambda obs: pytest.fail("the base was run")
    policy.refine(Encoded(encoded), torch.zeros(5, policy.action_dim))


@pytest.mark.parametrize(("kind", "method"), [("diffusion", "latent"), ("smolvla", "residual")])
def test_a_frozen_base_that_sees(
    kind: str, method: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(phases.run(config_of(tmp_path, saved(kind), method, SEEN)).run)
    base, final = states(folder, "base"), states(folder, "final")
    assert all(torch.equal(final[f"base.{name}"], value) for name, value in base.items())
    learned = {"residual": "head.", "latent": "actor."}[method]
    assert any(name.startswith(learned) for name in final)


@pytest.mark.parametrize(
    ("kind", "method", "learns"),
    [
        ("smolvla", "ppo", {"action_out_proj", "vlm_with_expert"}),
        ("smolvla", "grpo", {"action_out_proj", "vlm_with_expert"}),
        ("diffusion", "ppo", {"unet", "rgb_encoder"}),
    ],
)
def test_a_base_learns_through_its_chain_and_lerobot_reads_it(
    kind: str, method: str, learns: set[str], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    changes = {"settings": BY_DDPM} if kind == "diffusion" else {}
    folder = Path(phases.run(config_of(tmp_path, saved(kind), method, SEEN, **changes)).run)
    base, final = states(folder, "base"), states(folder, "final")
    changed = {name.split(".")[2] for name in final if not torch.equal(final[name], base[name])}
    assert learns <= changed
    first = next(row for row in read_metrics(folder / "metrics.jsonl") if f"{method}/kl" in row)
    assert first[f"{method}/kl"] < 0.1
    policy: Any = load_policy(folder / "policy" / "final")[0]
    explores = policy.explorable.process, policy.explorable.scored
    assert explores == (("ddpm", 3) if kind == "diffusion" else ("flow_sde", 3))
    theirs = folder / "policy" / "lerobot"
    with quiet():
        config = extra("lerobot.configs").PreTrainedConfig.from_pretrained(theirs)
        found = extra("lerobot.policies.factory").get_policy_class(config.type)
        model = found.from_pretrained(theirs, config=config, strict=True)
    weights = model.state_dict()
    assert all(torch.equal(weights[name.removeprefix("policy.")], final[name]) for name in final)


@pytest.mark.parametrize("kind", ["smolvla", "diffusion"])
def test_the_first_minibatch_has_ratio_one(kind: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    changes = {"settings": BY_DDPM} if kind == "diffusion" else {}
    config = config_of(tmp_path, saved(kind), "ppo", SEEN, **changes)
    given = find_given(config)
    assert given is not None
    policy = ppo.make_policy(config, given_policy(config, given, "reach"))
    obs = observation(SEEN)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = policy.sample(policy.encode(obs), mode="explore", record=True, generator=generator)
    learner = ChainPPO(policy, settings_of(config, ChainSettings).algorithm, seed=0)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    metrics = learner.update_policy(obs, found.chain, torch.linspace(-1.0, 1.0, 5))
    assert float(metrics["kl"]) < 1e-9  # mean of ratio - 1 - log ratio: 0 where each ratio is 1
    assert float(metrics["clipped"]) == 0.0
    after = policy.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)
    again, _ = policy.log_prob(policy.encode(obs), found.chain)
    moved = ((again - found.chain.log_prob).detach() * torch.linspace(-1.0, 1.0, 5)[:, None]).sum()
    assert float(moved) > 0  # what was good became more likely


def test_adapters_learn_in_the_place_of_all_weights(saved: Callable[[str], Path], tmp_path: Path) -> None:
    given = saved("smolvla")
    by_lora = {"bc": {"policy": str(given), "lora": {"rank": 2}}}
    folder = Path(phases.run(config_of(tmp_path, given, "ppo", SEEN, **by_lora)).run)
    base, final = states(folder, "base"), states(folder, "final")
    changed = {name for name in final if not torch.equal(final[name], base[name])}
    assert any("lora_A" in name for name in final)
    assert changed
    assert all("lora_" in name or "_proj" in name or "time_mlp" in name for name in changed)
    assert not any("vlm.model" in name for name in changed)
    merged = LeRobotPolicy.from_pretrained(folder / "policy" / "lerobot")
    assert not any("lora" in name for name in merged.state_dict())
    with pytest.raises(ConfigError, match=r"bc\.lora\.rank: got 2, allowed: 0 but with method=ppo or grpo"):
        phases.run(config_of(tmp_path / "residual", given, "residual", SEEN, **by_lora))


def test_evaluate_finds_the_env_by_the_dataset(blind_act: Path, tmp_path: Path) -> None:
    run = build(RunConfig, {**TINY, "env": APART, "stages": ["demos", "clone", "evaluate"]})
    run = replace(run, bc=replace(run.bc, policy=str(blind_act)), out=str(tmp_path))
    summary = phases.run(run)
    demos = Path(summary.run) / "demos"
    assert (demos / "meta" / "robot_rl.json").is_file()
    policy, meta, env = open_policy(str(blind_act), str(demos))
    assert (meta.task, meta.n_exec, env.state) == ("reach", 3, meta.state_names)
    assert isinstance(policy, GivenPolicy)
    other = tmp_path / "other"
    _rewritten(demos, other)
    with pytest.raises(CheckpointError, match=r"another embodiment: observation\.state has \d+ elements"):
        open_policy(str(blind_act), str(other))
    assert evaluate.config([f"policy={blind_act}"]).policy == str(blind_act)


def _rewritten(demos: Path, to: Path) -> None:
    """Writes the demonstrations without the goal."""
    from robot_rl.data.demos import load_episodes

    save_episodes(to, load_episodes(demos).with_state(("joint",), at="state"))
