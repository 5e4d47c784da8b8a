"""Benchmarks of acting: what needs no learning stands beside the clones, on the same episodes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.bench import cloned, trials
from robot_rl.cli.main import main
from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import train_seed
from robot_rl.data.demos import ChunkSampler
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.demos import collect_demonstrations
from robot_rl.train.recorded import DemosConfig


def in_this_process(command: list[str], **_: Any) -> SimpleNamespace:
    return SimpleNamespace(returncode=main(command[command.index("train") :]))


@pytest.fixture(autouse=True)
def trains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the runs of a benchmark done in this process."""
    monkeypatch.setattr(
        trials, "subprocess", SimpleNamespace(run=in_this_process, TimeoutExpired=TimeoutError)
    )


def test_a_clone_is_what_the_formulas_of_cloning_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"demos": 3, "noise_m": 0.01, "updates": 4, "horizon": 5, "out": str(tmp_path)}
    found = cloned._clone("reach", 7, **how)
    # The same by hand: demonstrations of the same seeds, a batch of 256 windows for each update.
    with opened(simulation(EnvConfig(task="reach"), 3), holder="a test") as env:
        episodes = collect_demonstrations(env, DemosConfig(episodes=3, noise_m=0.01), 7)
    policy = FlowPolicy(
        ChunkPolicyConfig(horizon=5, width=256),
        state_dim=len(episodes.meta.state_names),
        action_dim=len(episodes.meta.action_names),
        normaliser=Normaliser.fit(episodes.obs, episodes.action),
        generator=torch.Generator().manual_seed(train_seed(7, "policy")),
    )
    learner = BehaviourCloning(policy, BCConfig(), train_seed(7, "bc"), total_updates=4)
    rng = np.random.default_rng(train_seed(7, "bc batches"))
    for _ in range(4):
        learner.update(ChunkSampler(episodes, 5).sample(256, rng))
    policy.load_state_dict(learner.policy_weights())
    weights = found.policy.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in policy.state_dict().items())
    np.testing.assert_array_equal(found.episodes.action, episodes.action)
    monkeypatch.setattr(trials, "subprocess", None)  # what is done is taken
    again = cloned._clone("reach", 7, **how).policy.state_dict()
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    how["updates"] = 5
    with pytest.raises(ConfigError, match=r"was begun with bc\.updates=4, got 5"):
        cloned._clone("reach", 7, **how)


def test_noise_standing_still_and_the_expert_play_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def solved(env: VectorEnv, name: str, seed: int, episodes: int) -> NDArray[np.bool_]:
        seen.append((env.task, name, seed, episodes))
        return np.arange(episodes) < {"random": 0, "hold": seed, "expert": episodes}[name]

    monkeypatch.setattr(cloned, "solved", solved)
    clones: list[int] = []
    result = cloned.play_clones(
        lambda env, clone, held_out: clones.append(clone.seed),
        task="reach",
        seeds=(0, 1),
        episodes=2,
        horizon=4,
        updates=1,
        demos=2,
        noise_m=0.0,
        out=str(tmp_path),
    )
    assert clones == result["seeds"] == [0, 1]
    noise, still, expert = result["trivial"]
    assert (noise["policy"], noise["success"]) == ("random", 0.0)
    # None of 2 with seed 0, one of 2 with seed 1; Wilson, 1 of 4.
    assert (still["policy"], still["success"], still["low"], still["high"]) == ("hold", 0.25, 0.0, 0.5)
    assert (still["ci_low"], still["ci_high"]) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert (expert["policy"], expert["success"]) == ("expert", 1.0)
    assert seen == [("reach", name, seed, 2) for name in ("random", "hold", "expert") for seed in (0, 1)]
