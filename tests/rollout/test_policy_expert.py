"""A saved policy that reads the state, as the expert of envs that show less of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.config import build
from robot_rl.core.errors import CheckpointError
from robot_rl.core.registry import resolve
from robot_rl.data.demos import load_episodes
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import PolicyMeta, save_policy
from robot_rl.policies.config import PolicyConfig
from robot_rl.rollout.envs import make_env, make_expert
from robot_rl.sim.vector import EnvConfig
from robot_rl.train import phases
from robot_rl.train.before import check_before_learner
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import first_seed
from tests.runs import TINY

REACH = EnvConfig(task="reach", num_threads=1)


@pytest.fixture(scope="module")
def sees_all() -> Iterator[VectorEnv]:
    """Two simulations that show the whole state."""
    env = make_env(REACH, 2, autoreset="disabled")
    yield env
    env.close()


def saved(folder: Path, env: VectorEnv, kind: str = "flow", **changes: Any) -> tuple[Path, Any]:
    """A policy of the env with drawn weights, and itself."""
    cameras = changes.pop("cameras", ())
    sizes = {"state_dim": len(env.state_names), "action_dim": len(env.action_names)}
    obs: dict[str, Any] = {"state": np.random.default_rng(0).normal(size=(4, sizes["state_dim"]))}
    obs |= {f"{camera}.rgb": np.zeros((4, 8, 8, 3), np.uint8) for camera in cameras}
    config = PolicyConfig.of_kind(kind, "test")(horizon=4, width=16, depth=1, cameras=cameras)
    policy = resolve("policy", kind, at="test")(
        config,
        **sizes,
        normaliser=Normaliser.fit(obs, np.zeros((4, sizes["action_dim"]), np.float32)),
        generator=torch.Generator().manual_seed(3),
    )
    meta = PolicyMeta(
        task=env.task, robot=env.robot, control_hz=env.control_hz, state_names=env.state_names,
        action_names=env.action_names, instruction=env.instruction, n_exec=4,
    )  # fmt: skip
    save_policy(folder, policy, meta=replace(meta, **changes))
    return folder, policy.eval()


@pytest.mark.parametrize("kind", ["gaussian", "flow"])
def test_it_reads_what_its_env_does_not_show(kind: str, sees_all: VectorEnv, tmp_path: Path) -> None:
    folder, policy = saved(tmp_path / "teacher", sees_all, kind)
    seen, _ = sees_all.reset(seed=7)
    env = make_env(replace(REACH, state=("joint",), expert=str(folder)), 2, autoreset="disabled")
    obs, _ = env.reset(seed=7)
    assert obs["state"].shape[1] < seen["state"].shape[1]
    expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=5)
    action = expert.act()
    np.testing.assert_array_equal(expert.act(), action)  # the noise of a flow is the episode's
    if kind == "gaussian":
        wanted = policy.sample(policy.encode({"state": torch.from_numpy(seen["state"])}), mode="ode")
        np.testing.assert_allclose(action, wanted.actions[:, 0].detach().clamp(-1, 1), atol=1e-6)
    env.step(action)
    assert not np.array_equal(expert.act(), action)
    env.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "push_cube"}, "task = 'push_cube', here it is 'reach'"),
        ({"control_hz": 10.0}, "control_hz = 10.0, here it is 20.0"),
        (
            {"cameras": ("front",)},
            "allowed: a policy that reads the state alone. observation: no 'front.rgb'.",
        ),
    ],
)
def test_a_teacher_of_something_else_is_refused(
    changes: dict[str, Any], words: str, sees_all: VectorEnv, tmp_path: Path
) -> None:
    folder, _ = saved(tmp_path / "teacher", sees_all, "gaussian", **changes)
    env = make_env(replace(REACH, expert=str(folder)), 2, autoreset="disabled")
    with pytest.raises(CheckpointError, match=r"env\.expert: .*teacher") as caught:
        make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
    assert words in str(caught.value)
    env.close()


def test_an_element_that_the_env_does_not_have_is_named(sees_all: VectorEnv, tmp_path: Path) -> None:
    names = (*sees_all.state_names[:-1], "drawer.pos")
    folder, _ = saved(tmp_path / "teacher", sees_all, "gaussian", state_names=names)
    env = make_env(replace(REACH, expert=str(folder)), 2, autoreset="disabled")
    with pytest.raises(CheckpointError, match=r"drawer\.pos, here it is"):
        make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
    env.close()


@pytest.mark.usefixtures("whole_runs")
def test_a_run_clones_and_asks_the_policy_of_another(sees_all: VectorEnv, tmp_path: Path) -> None:
    teacher, _ = saved(tmp_path / "teacher", sees_all, "gaussian")
    values = {
        **TINY,
        "n_exec": 1,
        "env": {**TINY["env"], "state": ["joint"], "expert": str(teacher)},
        "policy": {"kind": "gaussian", "width": 16, "depth": 1},
        "method": {"kind": "dagger", "env_steps": 30, "utd": 0.5, "batch": 16},
    }
    config = replace(build(RunConfig, values), out=str(tmp_path / "runs"))
    run = Path(phases.run(config).run)
    env = make_env(config.env, 1, autoreset="disabled")
    env.reset(seed=first_seed(config.seed))
    wanted = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0).act()
    np.testing.assert_allclose(load_episodes(run / "demos").action[:1], wanted, atol=1e-6)
    labels = np.load(run / "labels" / "expert_action.npy")
    assert labels[:30].any(axis=1).all()
    env.close()


def test_a_teacher_that_is_not_there_is_named_before_anything_begins() -> None:
    values = {
        **TINY,
        "n_exec": 1,
        "env": {**TINY["env"], "expert": "runs/none"},
        "method": {"kind": "dagger"},
    }
    with pytest.raises(CheckpointError, match=r"env\.expert: 'runs/none' holds no policy"):
        check_before_learner(build(RunConfig, values))
