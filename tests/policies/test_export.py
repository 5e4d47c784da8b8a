"""Exported policies: equal to torch on 256 random inputs, executed like any policy, clear refusals."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.export import ExportedPolicy, export_policy
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("onnxruntime", "onnxscript"))),
    reason="needs the extra: pip install -e '.[export]'",
)  # looked for, not imported: both take seconds

STATE, ACTIONS, HORIZON = 6, 3, 8


def draw(rng: np.random.Generator, *, cameras: bool = False) -> dict[str, Tensor]:
    obs = {"state": torch.from_numpy(rng.normal(2.0, 3.0, (1, STATE)).astype(np.float32))}
    if cameras:
        obs["front.rgb"] = torch.from_numpy(rng.integers(0, 256, (1, 32, 32, 3), dtype=np.uint8))
    return obs


def flow(*, cameras: bool = False, steps: int = 4) -> FlowPolicy:
    rng = np.random.default_rng(0)
    data = {"state": rng.normal(2.0, 3.0, (50, STATE)).astype(np.float32)}
    normaliser = Normaliser.fit(data, rng.uniform(-0.4, 0.8, (50, ACTIONS)).astype(np.float32))
    seen = ("front",) if cameras else ()
    config = ChunkPolicyConfig(horizon=HORIZON, width=64, steps=steps, cameras=seen)
    generator = torch.Generator().manual_seed(0)
    return FlowPolicy(
        config, state_dim=STATE, action_dim=ACTIONS, normaliser=normaliser, generator=generator
    ).eval()


def residual() -> ResidualPolicy:
    generator = torch.Generator().manual_seed(1)
    policy = ResidualPolicy(flow(), ResidualHeadConfig(width=32), scale=0.5, generator=generator)
    torch.nn.init.normal_(dict(policy.head.named_parameters())["trunk.out.weight"], generator=generator)
    return policy.eval()


def exported(folder: Path, policy: Any, *, cameras: bool = False) -> ExportedPolicy:
    example = {name: value.numpy() for name, value in draw(np.random.default_rng(9), cameras=cameras).items()}
    export_policy(folder, policy, example)
    return ExportedPolicy(folder)


@pytest.mark.slow  # torch.onnx takes seconds to load, and to write a graph
@pytest.mark.parametrize("make", [flow, residual, lambda: flow(steps=1), lambda: flow(cameras=True)])
def test_parity_on_256_inputs(tmp_path: Path, make: Callable[[], Any]) -> None:
    policy = make()
    cameras = isinstance(policy, FlowPolicy) and bool(policy.config.cameras)
    runtime, rng = exported(tmp_path / "export", policy, cameras=cameras), np.random.default_rng(1)
    assert (runtime.horizon, runtime.action_dim) == (HORIZON, ACTIONS)
    worst, largest = 0.0, 0.0
    with torch.inference_mode():
        for _ in range(256):
            obs, z = (
                draw(rng, cameras=cameras),
                torch.from_numpy(rng.normal(size=(1, HORIZON, ACTIONS)).astype("f")),
            )
            ours, theirs = (
                runtime.sample(runtime.encode(obs), z=z).actions,
                policy.sample(policy.encode(obs), z=z).actions,
            )
            one, other = (
                runtime.refine(runtime.encode(obs), ours[:, 0]),
                policy.refine(policy.encode(obs), ours[:, 0]),
            )
            worst = max(worst, float((ours - theirs).abs().max()), float((one - other).abs().max()))
            largest = max(largest, float((one - ours[:, 0]).abs().max()))
    assert worst <= 1e-5
    assert (largest > 0.1) == isinstance(policy, ResidualPolicy)


@pytest.mark.slow
def test_an_executor_runs_it(tmp_path: Path) -> None:
    policy = residual()
    runtime, rng = exported(tmp_path / "export", policy), np.random.default_rng(2)
    ours, theirs = (ChunkExecutor(p, 1, n_exec=4, seed=3) for p in (runtime, policy))
    for _ in range(9):
        obs = {name: value.numpy() for name, value in draw(rng).items()}
        np.testing.assert_allclose(ours.act(obs).action, theirs.act(obs).action, atol=1e-5)


@pytest.mark.slow
def test_mean_takes_no_noise(tmp_path: Path) -> None:
    policy = flow()
    runtime, obs = exported(tmp_path / "export", policy), draw(np.random.default_rng(3))
    mean = policy.sample(policy.encode(obs), mode="mean").actions
    torch.testing.assert_close(
        runtime.sample(runtime.encode(obs), mode="mean").actions, mean, atol=1e-5, rtol=0
    )
    with pytest.raises(ConfigError, match="mode 'explore' needs the policy itself"):
        runtime.sample(runtime.encode(obs), mode="explore")
    with pytest.raises(ConfigError, match="the observation lacks state"):
        runtime.sample(runtime.encode({}))


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    policy = GaussianPolicy(GaussianPolicyConfig(horizon=2), state_dim=2, action_dim=2)
    with pytest.raises(ConfigError, match="got GaussianPolicy, allowed: a flow or diffusion policy"):
        export_policy(tmp_path / "export", policy, {"state": np.zeros((1, 2), np.float32)})
    with pytest.raises(
        CheckpointError, match=r"export.json: there is no such file. Run `export_policy` again"
    ):
        ExportedPolicy(tmp_path / "export")


def test_without_onnxruntime_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs onnxruntime: `pip install -e '.\[export\]'`"):
        ExportedPolicy(tmp_path)
