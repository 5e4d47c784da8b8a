"""A picture is encoded once in a control step, whoever reads it, and once for each network of an update."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.algos.chain_ppo import ChainPPO, ChainPPOConfig
from robot_rl.algos.chunk_critics import ChunkCritics
from robot_rl.algos.chunk_q import ChunkQ
from robot_rl.algos.config.off_policy import (
    ActorConfig,
    ActorCriticConfig,
    ChunkCriticConfig,
    ChunkQConfig,
    CriticConfig,
    LatentConfig,
    ResidualConfig,
)
from robot_rl.algos.latent import LatentSAC
from robot_rl.algos.residual import ResidualTD
from robot_rl.core.policy import Chain, Policy
from robot_rl.data.rollout import Rollout
from robot_rl.data.transitions import ChunkBatch, Prefixes, TransitionBatch
from robot_rl.policies.actor import ActorPolicy, ActorPolicyConfig
from robot_rl.policies.best_of_n import BestOfN
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.policies.latent import LatentActorConfig, LatentSteer
from robot_rl.policies.networks import ImageEncoder
from robot_rl.policies.one_step import OneStepPolicy
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from tests.kinds import seeded

B, H, A = 6, 4, 2
SIZES: dict[str, Any] = {"state_dim": 3, "action_dim": A}


def flow() -> FlowPolicy:
    sizes: dict[str, Any] = {"horizon": H, "width": 16, "depth": 1, "time_dim": 4, "steps": 2}
    config = ChunkPolicyConfig(**sizes, process="flow_sde", cameras=("front",), image_features=8)
    return FlowPolicy(config, **SIZES, generator=seeded()).eval()


def gaussian() -> GaussianPolicy:
    config = GaussianPolicyConfig(horizon=H, width=16, depth=1, cameras=("front",), image_features=8)
    return GaussianPolicy(config, **SIZES, generator=seeded()).eval()


def residual() -> ResidualPolicy:
    return ResidualPolicy(flow(), ResidualHeadConfig(width=16), generator=seeded())


def latent() -> LatentSteer:
    policy = LatentSteer(flow(), LatentActorConfig(width=16), generator=seeded())
    policy.steers.fill_(True)
    return policy


def critics(base: FlowPolicy) -> ChunkCritics:
    config = ChunkCriticConfig(width=16, depth=1)
    return ChunkCritics(config, feature_dim=base.feature_dim, action_dim=A, steps=2, generator=seeded())


def best_of_n() -> BestOfN:
    base = flow()
    return BestOfN(base, critics(base), 5)


def actor() -> ActorPolicy:
    config = ActorPolicyConfig(horizon=H, decides=3, width=16, cameras=("front",), image_features=8)
    return ActorPolicy(config, **SIZES, generator=seeded()).eval()


POLICIES: dict[str, Callable[[], Any]] = {
    "actor": actor,
    "flow": flow,
    "gaussian": gaussian,
    "latent": latent,
    "best_of_n": best_of_n,
    "one_step": lambda: OneStepPolicy.student_of(flow()).eval(),
    "real_time": lambda: RealTimeChunks(flow()),
    "residual": residual,
    "residual, real_time": lambda: RealTimeChunks(residual()),
}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each run of an image encoder saw."""
    seen, forward = list[int](), ImageEncoder.forward

    def counted(self: ImageEncoder, image: Tensor) -> Tensor:
        seen.append(len(image))
        return forward(self, image)

    monkeypatch.setattr(ImageEncoder, "forward", counted)
    return seen


def observed(seed: int, rows: int = B) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    pictures = rng.integers(0, 256, (rows, 16, 16, 3), np.uint8)
    return {"state": rng.normal(size=(rows, 3)).astype(np.float32), "front.rgb": pictures}


def tensors(seed: int, rows: int = B) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in observed(seed, rows).items()}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("mode", ["ode", "explore"])
def test_a_control_step_encodes_once(name: str, mode: Any, looks: list[int]) -> None:
    policy: Policy = POLICIES[name]()
    executor, found = ChunkExecutor(policy, B, n_exec=3, mode=mode), list[list[int]]()
    for step in range(5):
        if step == 2:
            executor.reset(np.arange(B) < 2)
        looks.clear()
        executor.act(observed(step))
        found.append(list(looks))
    # All rows plan at step 0, those that were reset at step 2 and the others at step 3.
    assert found == ([[B]] * 5 if policy.refines else [[B], [], [2], [B - 2], []])
    looks.clear()
    executor.base_action(observed(5), np.arange(B) < 2)
    assert looks == [2]


def test_an_actor_critic_encodes_each_observation_once(looks: list[int]) -> None:
    policy = actor()
    cfg = ActorCriticConfig(actor=ActorConfig(width=16), critic=CriticConfig(width=16))
    learner = ActorCritic(policy.feature_dim, A, cfg, 0, encode=policy.encode, seeing=policy)
    learner.update(transitions())  # of critics, actor, temperature and encoder
    assert looks == [B, B]


def transitions() -> TransitionBatch:
    zeros = torch.zeros(B, A)
    ones = torch.ones(B)
    return TransitionBatch(tensors(0), zeros, zeros, ones, ones, tensors(1), zeros, ones.to(torch.uint8))


def chunks(lengths: int) -> ChunkBatch:
    ones, many = torch.ones(B), tensors(2, B * lengths)
    next_obs = {name: value.unflatten(0, (B, lengths)) for name, value in many.items()}
    prefix = Prefixes(torch.ones(B, lengths), torch.ones(B, lengths), torch.ones(B, lengths) > 0, next_obs)
    return ChunkBatch(
        tensors(0),
        torch.zeros(B, H, A),
        torch.ones(B, H) > 0,
        ones,
        ones,
        tensors(1),
        ones.to(torch.uint8),
        latent=torch.zeros(B, H * A),
        prefix=prefix,
    )


def test_a_residuals_update_encodes_the_present_and_the_next(looks: list[int]) -> None:
    learner = ResidualTD(residual(), ResidualConfig(width=16, critic_warmup=0, actor_every=1), 0)
    learner.update(transitions())
    assert looks == [B, B]


@pytest.mark.parametrize("variant", ["sac", "na"])
def test_a_steering_update_encodes_the_present_and_the_next(variant: Any, looks: list[int]) -> None:
    learner = LatentSAC(latent(), LatentConfig(width=16, variant=variant, actor_warmup=0), 0, n_exec=2)
    batch = chunks(1)
    if variant == "na":
        batch.action = batch.action[:, :2]
    learner.update(batch)
    assert looks == [B, B]


@pytest.mark.parametrize(("actor", "networks"), [("best_of_n", [B]), ("fql", [B, B, B])])
def test_a_chunk_update_encodes_once_for_each_network(
    actor: Any, networks: list[int], looks: list[int]
) -> None:
    """The flow reads present and next, its learner the present; a student of its own weights both again."""
    base = flow()
    judge = critics(base)
    lengths = len(judge.lengths)
    student = OneStepPolicy.student_of(base) if actor == "fql" else None
    learner = ChunkQ(base, judge, ChunkQConfig(actor=actor, candidates=5), 0, student=student)
    learner.update(chunks(lengths))
    assert sorted(looks) == sorted([B, B * lengths, *networks])


@pytest.mark.parametrize(("regulariser", "more"), [("none", []), ("w2", [B])])
def test_an_update_of_ppo_encodes_once(regulariser: Any, more: list[int], looks: list[int]) -> None:
    """And once more where the policy that it began as, of other weights, is asked."""
    policy = flow()
    learner = ChainPPO(policy, ChainPPOConfig(regulariser=regulariser, width=16), 0)
    obs = tensors(0)
    with torch.no_grad():
        chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    looks.clear()
    learner.update_policy(obs, chain, torch.arange(B) * 1.0)
    assert looks == [B, *more]


def test_the_value_of_ppo_encodes_what_was_decided_at_and_the_ends(looks: list[int]) -> None:
    """Two decisions of B envs, and the first chunk of two envs ended an episode: 2 B + 2 + B pictures."""
    policy = flow()
    learner = ChainPPO(policy, ChainPPOConfig(width=16), 0)
    obs, after = tensors(0, 2 * B), tensors(1, 2 * B)
    obs, after = ({name: value.unflatten(0, (B, 2)) for name, value in of.items()} for of in (obs, after))
    ended = torch.zeros(B, 2) > 0
    ended[:2, 0] = True
    for name, value in after.items():
        value[2:, 0] = obs[name][2:, 1]
    chain = Chain(torch.zeros(2 * B, 1, 1, 1), torch.zeros(2 * B, 1).long(), torch.zeros(2 * B, 1), None)
    rollout = Rollout(obs, chain, torch.ones(B, 2), torch.ones(B, 2), after, ended, torch.ones(B, 2).long())
    learner.prepare(rollout)
    assert looks == [2 * B, 2 + B]
    with torch.no_grad():
        features, each = (
            policy.encode({name: value.flatten(0, 1) for name, value in of.items()})["features"]
            for of in (obs, after)
        )
        torch.testing.assert_close(learner._read_next(rollout, features), each)


def test_the_likelihood_teaches_the_encoder() -> None:
    policy, obs = flow(), tensors(0)
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    policy.log_prob(policy.encode(obs), chain)[0].sum().backward()
    weights = next(policy.encoder.images.parameters())
    assert weights.grad is not None
    assert weights.grad.abs().max() > 0
