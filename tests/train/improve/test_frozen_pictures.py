"""RL on a frozen base that sees: each picture is encoded once for the replay, and a run resumes exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.replay import ReplayBuffer
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.networks import ObservationEncoder
from robot_rl.train.config import RunConfig
from robot_rl.train.phases import resume, run
from robot_rl.train.session import RunSession

pytestmark = pytest.mark.usefixtures("whole_runs")

STEPS = 40
COMMON: dict[str, Any] = {"env_steps": STEPS, "batch": 8, "explore_steps": 10, "capacity": 1000}
RESIDUAL: dict[str, Any] = {"width": 16, "critic_warmup": 2, "privileged": True}
METHODS: dict[str, dict[str, Any]] = {
    "residual": {**COMMON, "head": {"width": 16}, "algorithm": RESIDUAL},
    "latent": {**COMMON, "algorithm": {"width": 16, "privileged": True}},
}
LATE: dict[str, dict[str, Any]] = {
    "residual": {"camera_hz": [12.5], "camera_delay_s": [0.045]},  # pictures are in flight when a run dies
    "latent": {},
}


def seeing(out: Path, kind: str, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "recipe": "small",
        "num_envs": 2,
        "n_exec": 4,
        "env": {
            "task": "reach",
            "horizon_s": 0.5,
            "num_threads": 1,
            "cameras": ["front"],
            "image_size": [16, 16],
            "state": ["joint", "tool"],
            "privileged": True,
            **LATE[kind],
        },
        "demos": {"episodes": 3},
        "policy": {
            "horizon": 8,
            "width": 16,
            "depth": 1,
            "time_dim": 8,
            "steps": 2,
            "cameras": ["front"],
            "image_features": 8,
        },
        "bc": {"updates": 6, "batch": 8},
        "method": {"kind": kind, **METHODS[kind]},
        "evaluate": {"episodes": 2, "num_envs": 2, "every_env_steps": 0, "quick_episodes": 2},
        "checkpoint": {"every_s": 0.0, "every_steps": 8},
        "video": {"episodes": 0, "failures": 0},
        "out": str(out),
    }
    return build(RunConfig, {**settings, **changes})


@pytest.mark.parametrize("kind", list(METHODS))
def test_the_replay_holds_features_and_updates_encode_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[Any] = []
    rows: list[int] = []
    make, encode = ReplayBuffer.__init__, ObservationEncoder.forward

    def made(self: ReplayBuffer, *args: Any, **how: Any) -> None:
        make(self, *args, **how)
        buffers.append(self)

    def encoded(self: ObservationEncoder, obs: Any) -> torch.Tensor:
        rows.append(len(obs["state"]))
        return encode(self, obs)

    monkeypatch.setattr(ReplayBuffer, "__init__", made)
    monkeypatch.setattr(ObservationEncoder, "forward", encoded)
    run(seeing(tmp_path, kind, method={"kind": kind, **METHODS[kind], "batch": 64}))
    assert buffers
    for buffer in buffers:
        assert set(buffer._obs) == {"features", PRIVILEGED}
        assert len(buffer)
    assert max(rows) < 64  # the cloning's batches have 8 rows, episodes 10 steps


@pytest.mark.parametrize("kind", list(METHODS))
def test_a_resumed_run_is_the_unbroken_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(seeing(tmp_path / "whole", kind))
    save = RunSession.save

    def dies(self: RunSession, phase: str, loop: Any) -> None:
        save(self, phase, loop)
        if phase == kind and self.counters.env_steps >= 24:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunSession, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        run(seeing(tmp_path / "broken", kind))
    monkeypatch.setattr(RunSession, "save", save)
    (folder,) = (tmp_path / "broken").iterdir()
    broken = resume(folder)
    assert broken.final_digest == whole.final_digest
    mine, theirs = (load_policy(Path(each.run) / "policy" / "final")[0] for each in (whole, broken))
    assert isinstance(mine, torch.nn.Module)
    assert isinstance(theirs, torch.nn.Module)
    for name, value in mine.state_dict().items():
        assert value.equal(theirs.state_dict()[name]), name


def test_critics_read_the_privileged_state_where_there_is_one(tmp_path: Path) -> None:
    env = {"task": "reach", "horizon_s": 0.5, "num_threads": 1}
    with pytest.raises(ConfigError, match=r"algorithm.privileged: got True, .* without env.privileged=true"):
        seeing(tmp_path, "residual", env=env, policy={})
    config = seeing(tmp_path, "residual", env={**env, "privileged": True}, policy={"width": 16})
    with pytest.raises(ConfigError, match=r"allowed: false where the policy sees the whole state"):
        run(config)


def test_cloning_begins_with_the_image_encoders_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ["demos", "clone", "evaluate"]
    first = Path(run(seeing(tmp_path / "one", "residual", stages=stages)).run)
    weights = first / "policy" / "base" / "policy.safetensors"
    given: dict[str, Any] = {"updates": 0, "encoder": str(weights)}
    again = Path(run(seeing(tmp_path / "two", "residual", stages=stages, bc=given)).run)
    one, other = (load_policy(folder / "policy" / "base")[0] for folder in (first, again))
    assert isinstance(one, torch.nn.Module)
    assert isinstance(other, torch.nn.Module)
    mine, theirs = one.state_dict(), other.state_dict()
    images = [name for name in mine if name.startswith("encoder.images.")]
    assert images
    for name in images:
        assert mine[name].equal(theirs[name]), name
    assert "SHA-256 " in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"bc.encoder: no file '/no/such'. Name the policy.safetensors"):
        seeing(tmp_path, "residual", bc={"encoder": "/no/such"})
    blind = {"policy": {"width": 16}, "env": {"task": "reach"}}
    with pytest.raises(ConfigError, match=r"bc.encoder: got .*, allowed: none without policy.cameras"):
        seeing(tmp_path, "residual", **blind, bc={"encoder": str(weights)})
