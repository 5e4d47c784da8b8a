"""Rollouts of single control steps: what is where, one memory, both kinds of array, exact resume."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.data.normalize import Normaliser
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.rollout.steps import StepRolloutSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.testing.devices import STEP_M, FakeEnv
from tests.kinds import seeded
from tests.read_back import outside_of_simulation, reads_back


def make_source(
    env: Any, *, steps: int = 4, device: str = "cpu", correlation: float = 0.0
) -> StepRolloutSource:
    state_dim, action_dim = len(env.state_names), len(env.action_names)
    policy = GaussianPolicy(
        GaussianPolicyConfig(width=8, depth=1, initial_std=0.5),
        state_dim=state_dim,
        action_dim=action_dim,
        normaliser=Normaliser({"state": state_dim}, action_dim),
        generator=seeded(),
    ).to(device)
    return StepRolloutSource(env, policy, steps=steps, seed=7, device=device, correlation=correlation)


def offered(source: StepRolloutSource) -> Publisher:
    publisher = Publisher()
    publisher.offer(0, source._policy.state_dict)
    return publisher


def test_steps_ends_and_final_observations_by_hand() -> None:
    # Env 0 is truncated after 3 steps, env 1 terminates after 2; the reward of step k is k.
    env = FakeEnv(2, terminate_after=[None, 2], truncate_after=[3, None])
    source = make_source(env)
    rollout = source.collect(offered(source))
    step, episode = rollout.obs["state"][..., 0], rollout.obs["state"][..., 1]
    assert step.tolist() == [[0, 0], [1, 1], [2, 0], [0, 1], [1, 0]]
    assert episode.tolist() == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 2]]
    assert rollout.reward.tolist() == [[1, 1], [2, 2], [3, 1], [1, 2]]
    assert rollout.truncated.nonzero().tolist() == [[2, 0]]
    assert rollout.terminated.nonzero().tolist() == [[1, 1], [3, 1]]
    assert rollout.num_final == 1
    assert rollout.final_row[:1].tolist() == [2 * 2 + 0]
    assert rollout.final_obs["state"][0, :2].tolist() == [3, 0]  # of its own episode
    assert (rollout.cost, rollout.policy_version) == (8, 0)
    moved = rollout.obs["state"][1, :, 3:] - rollout.obs["state"][0, :, 3:]
    torch.testing.assert_close(moved, STEP_M * rollout.drawn[0].clamp(-1.0, 1.0), atol=1e-6, rtol=0)
    log = source.episodes.take()
    assert (log["episodes"], log["return"], log["length"], log["success"]) == (
        3,
        pytest.approx((6 + 3 + 3) / 3),
        pytest.approx(7 / 3),
        pytest.approx(2 / 3),
    )


def test_what_was_drawn_is_mean_and_noise_of_the_policy() -> None:
    source = make_source(FakeEnv(3), steps=200)
    rollout = source.collect(offered(source))
    policy = source._policy
    with torch.no_grad():
        mean, std = policy.moments(policy.encode({"state": rollout.obs["state"][7]}))
    torch.testing.assert_close(rollout.mean[7], mean[:, 0])
    assert rollout.std.equal(std)
    noise = (rollout.drawn - rollout.mean) / rollout.std
    assert abs(float(noise.mean())) < 0.1  # 1,200 draws: 0.03 is one standard error
    assert float(noise.std()) == pytest.approx(1.0, abs=0.07)


def test_every_rollout_is_in_the_same_memory_and_goes_on() -> None:
    env = FakeEnv(2, truncate_after=3)
    source = make_source(env)
    first = source.collect(offered(source))
    last, places = first.obs["state"][-1].clone(), [first.drawn.data_ptr(), first.obs["state"].data_ptr()]
    second = source.collect(offered(source))
    assert second is first
    assert [second.drawn.data_ptr(), second.obs["state"].data_ptr()] == places
    assert second.obs["state"][0].equal(last)
    assert second.final_row[: second.num_final].tolist() == [2, 3]  # step 6 of all, at t = 1


def test_it_goes_on_where_it_was_saved() -> None:
    source = make_source(FakeEnv(2, truncate_after=3))
    publisher = offered(source)
    source.collect(publisher)
    state = copy.deepcopy(source.state_dict())
    whole = copy.deepcopy(source.collect(publisher))
    again = make_source(FakeEnv(2, truncate_after=3))
    again.load_state_dict(state)
    resumed = again.collect(publisher)
    for name in ("drawn", "mean", "reward", "terminated", "truncated"):
        assert getattr(resumed, name).equal(getattr(whole, name)), name
    assert resumed.obs["state"].equal(whole.obs["state"])
    assert resumed.num_final == whole.num_final
    assert again.episodes.take() == source.episodes.take()


def test_tensors_of_an_env_make_the_same_rollout() -> None:
    found: list[Any] = []
    for array in ("numpy", "torch"):
        config = EnvConfig(task="reach", horizon_s=0.15, num_threads=1)
        source = make_source(SimVectorEnv(config, 3, array=array), steps=4)
        publisher = Publisher(stays=True)
        with reads_back() as reads:
            publisher.offer(0, source._policy.state_dict)
            rollout = source.collect(publisher)
        found.append((rollout, source.episodes.take(), outside_of_simulation(reads)))
    (ours, log, _), (theirs, same, reads) = found
    # After the last step, one copy of what is counted.
    assert [read.split(":")[0] for read in reads] == ["numpy at robot_rl/rollout/sources.py"]
    # Products of matrices round differently in the last bits.
    torch.testing.assert_close(theirs.obs["state"], ours.obs["state"], atol=1e-5, rtol=1e-4)
    assert ours.truncated.equal(theirs.truncated)
    assert ours.truncated[2].all()
    assert theirs.final_row[: theirs.num_final].equal(ours.final_row[: ours.num_final])
    torch.testing.assert_close(theirs.final_obs["state"], ours.final_obs["state"], atol=1e-5, rtol=1e-4)
    assert same == pytest.approx(log)
    assert log["episodes"] == 3


def test_a_feature_that_nobody_reads_takes_no_memory() -> None:
    class More(FakeEnv):
        def _observe(self) -> Any:
            return {**super()._observe(), "front.rgb": np.zeros((self.num_envs, 4, 4, 3), np.uint8)}

    source = make_source(More(2))
    assert set(source.collect(offered(source)).obs) == {"state"}


def noise_of(source: StepRolloutSource, rollouts: int) -> list[torch.Tensor]:
    published = offered(source)
    found = (source.collect(published) for _ in range(rollouts))
    return [((one.drawn - one.mean) / one.std).clone() for one in found]


def test_correlated_noise_has_the_same_size_and_lasts_over_rollouts() -> None:
    noise = noise_of(make_source(FakeEnv(64, truncate_after=5), steps=16, correlation=0.9), 20)
    seen = torch.cat(noise)
    assert float(seen.std()) == pytest.approx(1.0, abs=0.05)
    assert float((seen[1:] * seen[:-1]).mean()) == pytest.approx(0.9, abs=0.06)
    borders = torch.stack([(later[0] * before[-1]).mean() for before, later in itertools.pairwise(noise)])
    assert float(borders.mean()) == pytest.approx(0.9, abs=0.15)
    white = torch.cat(noise_of(make_source(FakeEnv(64, truncate_after=5), steps=16), 20))
    assert float((white[1:] * white[:-1]).mean()) == pytest.approx(0.0, abs=0.05)


def test_correlated_noise_goes_on_after_a_resume() -> None:
    source = make_source(FakeEnv(2, truncate_after=5), correlation=0.9)
    published = offered(source)
    source.collect(published)
    again = make_source(FakeEnv(2, truncate_after=5), correlation=0.9)
    again.load_state_dict(copy.deepcopy(source.state_dict()))
    assert torch.equal(source.collect(published).drawn, again.collect(published).drawn)
