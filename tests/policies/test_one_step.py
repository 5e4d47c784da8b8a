"""One-step students: what they start from, what they return, and that they are saved whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.algos.chunk_critics import ChunkCriticConfig, ChunkCritics
from robot_rl.core.errors import CheckpointError
from robot_rl.core.policy import DemoBatch
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.best_of_n import BestOfN, candidate_noise
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, DiffusionPolicy, FlowPolicy
from robot_rl.policies.one_step import OneStepPolicy
from robot_rl.policies.taco import CoinFlipConfig, CoinFlips

META = PolicyMeta(
    task="t",
    robot="r",
    control_hz=20.0,
    state_names=("a", "b", "c"),
    action_names=("x", "y"),
    instruction="i",
    n_exec=2,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normaliser() -> Normaliser:
    rng = np.random.default_rng(0)
    state = rng.normal(2.0, 3.0, (50, 3)).astype(np.float32)
    return Normaliser.fit({"state": state}, rng.uniform(-0.5, 0.2, (50, 2)).astype(np.float32))


def flow(**options: Any) -> FlowPolicy:
    config = ChunkPolicyConfig(horizon=4, width=32, depth=2, time_dim=8, **options)
    return FlowPolicy(config, state_dim=3, action_dim=2, normaliser=normaliser(), generator=seeded()).eval()


OBS = {"state": torch.randn(6, 3, generator=seeded(3))}
Z = torch.randn(6, 4, 2, generator=seeded(4))


def test_the_student_of_a_flow_starts_as_its_one_euler_step() -> None:
    teacher = flow(steps=4)
    student = OneStepPolicy.student_of(teacher)
    # t = 1: x = z - velocity(z, 1), clamped where the chain ends.
    velocity = teacher.velocity(teacher.encode(OBS))(Z, 0)
    torch.testing.assert_close(student.decode(student.encode(OBS)["features"], Z), Z - velocity)
    chunk = student.sample(student.encode(OBS), z=Z).actions
    torch.testing.assert_close(chunk, teacher.from_chain(Z - velocity, teacher.encode(OBS)))
    assert chunk.amin() >= -0.5 - 1e-6
    assert chunk.amax() <= 0.2 + 1e-6
    before = teacher.net.chunk_in.weight.clone()
    with torch.no_grad():
        student.net.chunk_in.weight.add_(1.0)
    assert torch.equal(teacher.net.chunk_in.weight, before)  # weights of its own


def test_the_student_of_a_diffusion_policy_draws_its_own_weights() -> None:
    config = ChunkPolicyConfig(
        kind="diffusion", process="ddim", horizon=4, width=32, depth=2, time_dim=8, steps=5
    )
    teacher = DiffusionPolicy(config, state_dim=3, action_dim=2, normaliser=normaliser(), generator=seeded())
    student = OneStepPolicy.student_of(teacher, generator=seeded(5))
    assert student.config.process is None
    assert not torch.equal(student.net.chunk_in.weight, teacher.net.chunk_in.weight)
    assert torch.equal(student.encode(OBS)["features"], teacher.encode(OBS)["features"])
    aim = teacher.sample(teacher.encode(OBS), z=Z).actions
    torch.testing.assert_close(
        student.from_chain(student.to_chain(aim, student.encode(OBS)), student.encode(OBS)), aim
    )


def test_it_regresses_the_valid_steps() -> None:
    student = OneStepPolicy.student_of(flow())
    actions = torch.rand(6, 4, 2, generator=seeded(6)) * 0.2
    valid = torch.arange(4) < torch.tensor([4, 3, 2, 1, 1, 1])[:, None]
    z = torch.randn(6, 4, 2, generator=seeded(8))
    error = (
        student.decode(student.encode(OBS)["features"], z) - student.to_chain(actions, student.encode(OBS))
    ).square()
    expected = error.mean(dim=-1)[valid].mean()
    torch.testing.assert_close(student.bc_loss(DemoBatch(OBS, actions, valid), seeded(8)), expected)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    student = OneStepPolicy.student_of(flow())
    save_policy(tmp_path / "policy", student, meta=META)
    loaded, _ = load_policy(tmp_path / "policy", expect=META)
    assert isinstance(loaded, OneStepPolicy)
    assert torch.equal(
        loaded.sample(loaded.encode(OBS), z=Z).actions, student.sample(student.encode(OBS), z=Z).actions
    )
    with pytest.raises(ValueError, match="steps must be 1 for kind 'one_step', got 4"):
        ChunkPolicyConfig(kind="one_step", steps=4)


def test_the_best_by_a_critic_is_the_argmax_and_is_saved_whole(tmp_path: Path) -> None:
    base = flow()
    config = ChunkCriticConfig(num=2, width=16, prefix=True)
    critics = ChunkCritics(config, feature_dim=3, action_dim=2, steps=3, generator=seeded(1))
    policy = BestOfN(base, critics, 5)
    chosen = policy.sample(policy.encode(OBS), z=Z).actions
    repeated = {"state": OBS["state"].repeat_interleave(5, dim=0)}
    chunks = base.sample(base.encode(repeated), z=candidate_noise(Z, 5)).actions
    best = critics.score(base.encode(repeated)["features"], chunks).view(6, 5).argmax(dim=1)
    assert len(best.unique()) > 1
    assert torch.equal(chosen, chunks.view(6, 5, 4, 2)[torch.arange(6), best])
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, _ = load_policy(tmp_path / "policy", expect=META)
    assert torch.equal(loaded.sample(loaded.encode(OBS), z=Z).actions, chosen)
    spec = policy.spec()
    spec["scorer"]["steps"] = 9
    with pytest.raises(ValueError, match="here: steps must be 1 to the policy's horizon 4, got 9"):
        BestOfN.from_spec(spec, at="here")
    spec["scorer"]["kind"] = "dice"
    with pytest.raises(ValueError, match="no scorer named 'dice'"):
        BestOfN.from_spec(spec, at="here")


def test_a_counter_saved_before_there_were_other_scorers_is_read() -> None:
    counter = CoinFlips(CoinFlipConfig(width=8, depth=1), feature_dim=3, action_dim=2, horizon=4)
    spec = BestOfN(flow(), counter, 2).spec()
    del spec["scorer"]["kind"]
    assert isinstance(BestOfN.from_spec(spec, at="here").scorer, CoinFlips)
    spec["scorer"]["coins"] = 0
    with pytest.raises(CheckpointError, match="coins: got 0, allowed: 1 or more"):
        BestOfN.from_spec(spec, at="here")
