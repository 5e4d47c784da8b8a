"""Decision-time search: what is imagined to succeed is executed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.policy import ChunkSample, Encoded
from robot_rl.policies.best_of_n import candidate_noise
from robot_rl.train.search import SearchPolicy, looking_ahead
from robot_rl.worlds.config import SearchConfig
from robot_rl.worlds.env import ImaginedConfig, WorldEnv
from robot_rl.worlds.saved import World

# Fixtures of the point that moves where it is pushed.
from tests.worlds.conftest import META, RADIUS, SPEED, history, made_once, world

__all__ = ["history", "made_once", "world"]
ROWS, NUM = 6, 24


class Wandering(nn.Module):
    """Moves where its noise points, all chunk long, whatever it sees."""

    horizon, action_dim, feature_dim, refines = 4, 2, 4, False

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        return cast("Encoded", {"features": obs["state"]})

    def sample(self, encoded: Encoded, *, z: Tensor, **_: Any) -> ChunkSample:
        return ChunkSample(actions=torch.tanh(2 * z[:, :1]).expand(-1, 4, -1))


def searching(world: World, *, strides: int = 1) -> SearchPolicy:
    env = WorldEnv(world, ROWS * NUM, autoreset="disabled", settings=ImaginedConfig(member=0, gate=False))
    config = SearchConfig(world="here", candidates=NUM, strides=strides)
    return SearchPolicy(Wandering(), env, config, n_exec=4)


def _states() -> Tensor:
    """Points at the origin, whose goals lie 0.3 away in six directions; a chunk moves up to 0.2."""
    angle = torch.arange(ROWS) * (2 * torch.pi / ROWS)
    goal = 0.3 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return torch.cat([torch.zeros(ROWS, 2), goal], dim=1)


def test_the_candidate_that_reaches_the_goal_is_chosen(world: World) -> None:
    policy, states = searching(world), _states()
    z = torch.randn((ROWS, 4, 2), generator=torch.Generator().manual_seed(0))
    encoded = policy.encode({"state": states})
    chosen = policy.sample(encoded, z=z).actions
    plain = Wandering().sample(cast("Encoded", {}), z=z).actions

    def away(chunks: Tensor) -> Tensor:
        """By hand: the point moves SPEED a step."""
        return (states[:, 2:] - SPEED * chunks.sum(dim=1)).norm(dim=1)

    each = candidate_noise(z, NUM).unflatten(0, (ROWS, NUM)).unbind(dim=1)
    distances = torch.stack([away(Wandering().sample(encoded, z=noise).actions) for noise in each])
    can = distances.min(dim=0).values < RADIUS - 0.05  # what judges was learned: about RADIUS
    assert can.sum() >= 4, can
    assert away(plain)[can].max() > RADIUS + 0.1
    assert away(chosen)[can].max() < RADIUS + 0.05
    assert (policy.sample(encoded, z=z).actions == chosen).all()
    some = cast("Encoded", {name: value[:2] for name, value in encoded.items()})
    assert (policy.sample(some, z=z[:2]).actions == chosen[:2]).all()  # rows do not know of each other


def test_without_success_ahead_the_policy_acts_as_it_would(world: World) -> None:
    policy, states = searching(world), _states()
    states[:, 2:] *= 100.0  # nobody gets there
    z = torch.randn((ROWS, 4, 2), generator=torch.Generator().manual_seed(0))
    chosen = policy.sample(policy.encode({"state": states}), z=z).actions
    assert np.array_equal(chosen, Wandering().sample(cast("Encoded", {}), z=z).actions)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"task": "push"}, "with task 'point', not 'push'"),
        ({"robot": "cart"}, "with robot 'point', not 'cart'"),
        ({"state_names": ("x", "y", "vx", "vy")}, "it has goal.0, goal.1 and lacks vx, vy"),
        ({"control_hz": 10.0}, "at 20 Hz, not 10 Hz"),
    ],
)
def test_a_model_of_something_else_is_not_searched_in(
    world: World, tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    world.save(tmp_path)
    real: Any = SimpleNamespace(**{**vars(META), **other}, num_envs=1)
    config = SearchConfig(world=str(tmp_path))
    ahead = looking_ahead(Wandering(), config, real=real, n_exec=4, holder="test", wait_s=0.0)
    with pytest.raises(
        CheckpointError, match=rf"search\.world: the world model is of something else.*{words}"
    ):
        ahead.__enter__()


def test_a_search_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"search\.candidates: got 1, allowed: 2 or more"):
        SearchConfig(candidates=1)
