"""Methods learn inside of a model, unchanged: a point that a model of others moves, judged where it is real.

Learned from nothing but imagined steps, each must solve far more of the real episodes than its base. Of the
200 real ones (run seed 0) the clones solve 36 %, the small VLA 18 %; an untrained latent actor, whose noise
is near zero, 29 %.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.config import build, plain
from robot_rl.data.replay import ReplayBuffer
from robot_rl.rollout.envs import make_env
from robot_rl.sim.config import EnvConfig
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.worlds.audit import measured
from robot_rl.worlds.bill import bills_of
from robot_rl.worlds.build import RealEnv, read_history
from robot_rl.worlds.config import ServedConfig, TrustConfig
from robot_rl.worlds.history import TRAIN
from robot_rl.worlds.outcome import ClassifierOutcome
from robot_rl.worlds.served import Served
from tests.runs import folder_of, undisturbed, weights
from tests.worlds import foreign_models, points

REAL = EnvConfig(
    kind="gym",
    id=f"{points.__name__}:point",
    settings={"max_episode_steps": points.STEPS},
    expert=f"{points.__name__}:stops_short",
)
TRUSTING = TrustConfig(coverage_within=1.0, min_rank=-1.0, max_false_success=1.0)
RUN: dict[str, Any] = {
    "recipe": "tiny",
    "num_envs": 32,
    "n_exec": 4,
    "bc": {"updates": 300, "batch": 64, "algorithm": {"lr": 2e-3}},
    "evaluate": {"episodes": 200, "num_envs": 50, "every_env_steps": 0},
    "video": {"episodes": 0, "failures": 0},
}
BASES: dict[str, dict[str, Any]] = {
    "flow": {"horizon": 4, "width": 64, "depth": 2, "time_dim": 8, "steps": 4},
    "small_vla": {
        **{"kind": "small_vla", "horizon": 4, "width": 32, "depth": 1, "heads": 2, "steps": 2},
        **{"context_depth": 1, "text_tokens": 1, "instruction": "go to the goal"},
        **{"state_noise": 0.0, "state_dropout": 0.0, "dropout": 0.0},
    },
}
CHAIN: dict[str, Any] = {
    "exploration": {"process": "flow_sde", "eta": 1.0},
    "algorithm": {"batch": 64, "epochs": 4, "width": 32, "depth": 2, "actor_lr": 2e-4},
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("flow", {"kind": "grpo", "env_steps": 16_000, **CHAIN}),
    "SRPO": (
        "flow",
        {"kind": "grpo", "env_steps": 16_000, "reward": "progress", "keep": [0.0, 0.9], **CHAIN},
    ),
    "PPO": (
        "small_vla",
        {
            **{"kind": "ppo", "env_steps": 8000, "decisions": 4, **CHAIN},
            "algorithm": {**CHAIN["algorithm"], "actor_lr": 3e-4, "gamma_step": 0.95, "critic_lr": 3e-3},
        },
    ),
    "DSRL": (
        "flow",
        {
            **{"kind": "latent", "env_steps": 3000, "utd": 0.5, "batch": 64, "explore_steps": 500},
            **{"capacity": 10_000, "actor": {"width": 64, "depth": 2}},
            "algorithm": {
                **{"width": 64, "depth": 2, "gamma_step": 0.95, "tau": 0.02, "initial_temperature": 0.01},
                **{"actor_lr": 1e-3, "critic_lr": 1e-3},
            },
        },
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the run folders of clones of an expert that often misses."""
    found = dict[str, Path]()
    for kind, policy in BASES.items():
        out = tmp_path_factory.mktemp(kind)
        config = {
            **RUN,
            **{"env": plain(REAL), "demos": {"episodes": 100}, "policy": policy, "out": str(out)},
            "stages": ["demos", "clone", "evaluate"],
        }
        with undisturbed(out / "state"):
            phases.run(build(RunConfig, config))
        found[kind] = folder_of(out)
    return found


@pytest.fixture(scope="module")
def world(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a model that nothing was learned for but what success looks like."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copy(foreign_models.__file__, folder)
    real = RealEnv.of(REAL, make_env(REAL, 1))
    history = read_history((str(bases["flow"] / "demos"),), real.meta, print)
    names = {name: getattr(real.meta, name) for name in ("state_names", "action_names")}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # its first weights are torch's own
        judge = ClassifierOutcome(len(real.meta.state_names))
    judge.fit(history, updates=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("robot_rl.worlds.calibration.MIN_WINDOWS", 20)
        model = Served(ServedConfig(id="foreign_models:point", settings=names), real.meta)
        model.fit_scales(history, history.split(TRAIN))
        how: dict[str, Any] = {"limits": TRUSTING, "version": 1}
        made, _ = measured(model, judge, history, env=REAL, horizon=real.horizon, **how)
        model.close()
    made.save(folder)
    return folder


def imagined_in(world: Path) -> int:
    """Returns what the model's own bill says of the runs here, which all have one name."""
    return bills_of(world)[0].imagined.get("train tiny seed 0", 0)


@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("name", METHODS)
def test_a_method_learns_in_a_model_and_is_better_where_it_is_real(
    name: str, bases: dict[str, Path], world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)  # its process finds the module there
    kind, method = METHODS[name]
    replays, begins = list[ReplayBuffer](), ReplayBuffer.__init__

    def seen(replay: ReplayBuffer, *args: Any, **how: Any) -> None:
        begins(replay, *args, **how)
        replays.append(replay)
        assert how["imagined"]

    monkeypatch.setattr(ReplayBuffer, "__init__", seen)
    config = {
        **RUN,
        "env": {"kind": "world", "id": str(world), "task": REAL.id},
        "demos": {"path": str(bases["flow"] / "demos")},
        "bc": {"policy": str(bases[kind] / "policy" / "base")},
        "method": method,
        "out": str(tmp_path),
    }
    before = imagined_in(world)
    summary = phases.run(build(RunConfig, config))
    folder = folder_of(tmp_path)
    assert summary.base_success is not None
    assert summary.final_success > summary.base_success + 0.25
    # Imagined steps are billed as such, and what was real are the demonstrations alone.
    billed = summary.control_steps
    assert set(billed) == {"demo", "world"}
    assert method["env_steps"] <= billed["world"] < 1.1 * method["env_steps"]
    assert imagined_in(world) - before == billed["world"]
    assert weights(folder, "final") != weights(folder, "base")
    # Nothing that could pass for experience is left, and a replay takes them as imagined ones alone.
    assert not (folder / "experience").exists()
    assert len(replays) == (name == "DSRL")
