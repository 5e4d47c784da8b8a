"""Rollouts of the counting env: what was decided where, what it was worth, and exact resume."""

import copy
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import Chain, ChunkSample
from robot_rl.data.rollout import PPOBatch, Rollout
from robot_rl.rollout.chunks import RolloutSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.rollouts import RolloutExperience
from tests.plain import Plain
from tests.read_back import outside_of_simulation, reads_back

H, A = 4, 2


class Drifting(Plain, nn.Module):
    """Moves a little at random, and writes the step it saw into its chain."""

    horizon, action_dim = H, A

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(1))

    def sample(self, obs: dict[str, Tensor], *, generator: Generator, **how: Any) -> ChunkSample:
        assert how == {"mode": "explore", "record": True}
        state = obs["state"]
        x = 0.1 * torch.randn(len(state), 2, H, self.action_dim, generator=generator)
        index = torch.zeros(len(state), 1, dtype=torch.long)
        return ChunkSample(x[:, -1], Chain(x, index, state[:, :1] + self.version.detach(), "grid"))


def make_source(env: FakeEnv, *, decisions: int = 5, n_exec: int = 3) -> RolloutSource:
    return RolloutSource(env, Drifting(), decisions=decisions, n_exec=n_exec, gamma_step=0.5, seed=7)


def offered(version: float = 0.0) -> Publisher:
    handle = Publisher()
    handle.offer(0, lambda: {"version": torch.tensor([version])})
    return handle


def test_rewards_ends_and_final_observations_by_hand() -> None:
    # Chunks of 3 in episodes of 5: decisions at steps 0, 3 | 0, 3 | 0. The reward of step k is k.
    #   steps 1 2 3: 1 + 0.5 * 2 + 0.25 * 3 = 2.75, bootstrap 0.125;   steps 4 5: 4 + 2.5 = 6.5.
    # Env 0 is truncated there (bootstrap 0.25), env 1 terminates (0).
    env = FakeEnv(2, terminate_after=[None, 5], truncate_after=[5, None])
    rollout = make_source(env).collect(offered())
    step, episode = rollout.obs["state"][..., 0], rollout.obs["state"][..., 1]
    assert step.tolist() == [[0, 3, 0, 3, 0]] * 2
    assert episode.tolist() == [[0, 0, 1, 1, 2]] * 2
    assert rollout.steps.tolist() == [[3, 2, 3, 2, 3]] * 2
    assert rollout.ended.tolist() == [[False, True, False, True, False]] * 2
    assert rollout.reward.tolist() == [pytest.approx([2.75, 6.5, 2.75, 6.5, 2.75])] * 2
    assert rollout.bootstrap.tolist() == [[0.125, 0.25, 0.125, 0.25, 0.125], [0.125, 0, 0.125, 0, 0.125]]
    # What a chunk led to is of its own episode, also where the next one has begun.
    assert rollout.next_obs["state"][..., 0].tolist() == [[3, 5, 3, 5, 3]] * 2
    assert rollout.next_obs["state"][..., 1].tolist() == [[0, 0, 1, 1, 2]] * 2


def test_the_rows_of_the_chain_are_the_decisions() -> None:
    source = make_source(FakeEnv(3, truncate_after=[5, 4, 9]))
    # The second goes on where the first ended, in the same memory.
    rollouts = [copy.deepcopy(source.collect(offered())) for _ in range(2)]
    for rollout in rollouts:
        steps = rollout.obs["state"][..., 0].flatten()
        assert torch.equal(rollout.chain.log_prob[:, 0], steps)
        assert rollout.chain.x.shape == (15, 2, H, A)
        moved = rollout.next_obs["state"][..., 3:] - rollout.obs["state"][..., 3:]
        chunks = rollout.chain.x[:, -1].view(3, 5, H, A)
        ahead = torch.arange(H) < rollout.steps[..., None]
        assert torch.allclose(moved, 0.1 * (chunks * ahead[..., None]).sum(dim=2), atol=1e-6)


def test_figures_of_the_episodes() -> None:
    source = make_source(FakeEnv(2, terminate_after=[None, 5], truncate_after=[5, None]))
    source.collect(offered())
    # Two episodes of five steps ended in each env: return 1 + 2 + 3 + 4 + 5.
    figures = source.episodes.take()
    assert {name: figures[name] for name in ("episodes", "return", "length", "success")} == {
        "episodes": 4.0,
        "return": 15.0,
        "length": 5.0,
        "success": 0.5,
    }


def test_a_diverged_simulation_is_counted_and_bootstraps() -> None:
    class Diverging(FakeEnv):
        def step_masked(self, actions: Any, active: Any) -> Any:
            *rest, infos = super().step_masked(actions, active)
            return *rest, infos | {"diverged": np.asarray(rest[3])}  # wherever it truncates

    source = make_source(Diverging(1, truncate_after=5))
    rollout = source.collect(offered())
    assert source.episodes.nan_resets == 2
    assert rollout.bootstrap[0].tolist() == [0.125, 0.25, 0.125, 0.25, 0.125]


def test_every_rollout_is_in_the_same_memory_unless_it_travels() -> None:
    def places(rollout: Rollout) -> list[int]:
        tensors = [rollout.obs["state"], rollout.next_obs["state"], rollout.chain.x, rollout.chain.log_prob]
        return [tensor.data_ptr() for tensor in (*tensors, rollout.reward, rollout.ended, rollout.steps)]

    source = make_source(FakeEnv(2, truncate_after=5))
    first = source.collect(offered())
    before = places(first)
    second = source.collect(offered())
    assert second is first
    assert places(second) == before
    assert second.obs["state"][0, :, 0].tolist() == [3, 0, 3, 0, 3]  # after the decisions at 0, 3, 0, 3, 0
    env = FakeEnv(2, truncate_after=5)
    away = RolloutSource(env, Drifting(), decisions=5, n_exec=3, gamma_step=0.5, seed=7, travels=True)
    first = away.collect(offered())
    kept = first.obs["state"].clone()
    assert places(away.collect(offered())) != places(first)
    assert first.obs["state"].equal(kept)


def test_of_earlier_decisions_no_observation_is_kept() -> None:
    alive: list[int] = []

    class Watched(FakeEnv):
        def step_chunk(self, actions: Any, n_exec: int, active: Any = None) -> Any:
            alive.append(sum(seen() is not None for seen in shown))
            done = super().step_chunk(actions, n_exec, active)
            final = [done.infos["final_obs"]] if "final_obs" in done.infos else []
            shown.extend(weakref.ref(part["state"]) for part in (done.obs, *final))
            return done

    shown: list[Any] = []
    make_source(Watched(2, truncate_after=5), decisions=8).collect(offered())
    assert len(shown) == 8 + 4  # every second chunk ends the episodes
    assert max(alive) <= 2  # of the newest chunk, and the final one


def test_tensors_of_an_env_make_the_same_rollout_and_one_copy_to_the_host() -> None:
    found: list[Any] = []
    for array in ("numpy", "torch"):
        env = SimVectorEnv(EnvConfig(task="reach", horizon_s=0.25, num_threads=1), 3, array=array)
        policy = Drifting()
        policy.action_dim = len(env.action_names)
        source = RolloutSource(env, policy, decisions=3, n_exec=3, gamma_step=0.5, seed=7)
        source.collect(offered())  # allocates
        publisher = Publisher(stays=True)
        with reads_back() as reads:
            publisher.offer(1, policy.state_dict)
            rollout = source.collect(publisher)
        found.append((rollout, source.episodes.take(), outside_of_simulation(reads)))
    (ours, log, _), (theirs, same, reads) = found
    # Episodes ended in two of the control steps: there a chunk looks whether any env goes on.
    assert [read.split(":")[0] for read in reads] == [
        *["_local_scalar_dense at robot_rl/hal/vector.py"] * 2,
        "numpy at robot_rl/rollout/sources.py",
    ]
    for name in ("obs", "next_obs"):
        mine, other = getattr(ours, name)["state"], getattr(theirs, name)["state"]
        torch.testing.assert_close(other, mine, atol=1e-5, rtol=1e-4)
    assert ours.ended.any()
    for name in ("ended", "steps", "bootstrap"):
        assert getattr(theirs, name).equal(getattr(ours, name)), name
    assert theirs.num_steps == ours.num_steps == int(ours.steps.sum())
    assert same == pytest.approx(log)
    assert log["episodes"] == 9


def test_the_newest_weights_act() -> None:
    source = make_source(FakeEnv(1))
    assert source.collect(offered(0.0)).chain.log_prob[0, 0] == 0.0
    handle = offered(0.0)
    handle.offer(1, lambda: {"version": torch.tensor([100.0])})
    assert (source.collect(handle).chain.log_prob >= 100.0).all()


@pytest.mark.parametrize("before", [0, 1, 2])
def test_resume_is_exact(before: int) -> None:
    def collected(source: RolloutSource, count: int) -> list[Rollout]:
        return [copy.deepcopy(source.collect(offered())) for _ in range(count)]

    source = make_source(FakeEnv(3, truncate_after=[5, 4, 9]))
    collected(source, before)
    state = copy.deepcopy(source.state_dict())
    resumed = make_source(FakeEnv(3, truncate_after=[5, 4, 9]))
    resumed.load_state_dict(state)
    for one, other in zip(collected(source, 2), collected(resumed, 2), strict=True):
        for name in ("reward", "bootstrap", "ended", "steps"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert torch.equal(one.obs["state"], other.obs["state"])
        assert torch.equal(one.chain.x, other.chain.x)
    assert source.episodes.take() == resumed.episodes.take()


class Numbering:
    """Prepares a rollout by numbering its decisions."""

    def __init__(self) -> None:
        self.prepared = list[bool]()
        """Of each rollout, whether it was stale."""
        self.begun = list[bool]()

    def prepare(self, rollout: Rollout, *, is_stale: bool = False) -> PPOBatch:
        self.prepared.append(is_stale)
        self.begun.append(rollout.begins)
        obs = {key: value.flatten(0, 1) for key, value in rollout.obs.items()}
        number = torch.arange(rollout.reward.numel(), dtype=torch.float32)
        return PPOBatch(obs, rollout.chain, obs["state"], number, number, number, number.view(-1, 1))


def test_an_epoch_takes_every_decision_once_and_advantages_are_computed_once() -> None:
    learner = Numbering()
    experience = RolloutExperience(learner, batch=4, epochs=2, seed=0)
    rollout = make_source(FakeEnv(3, truncate_after=[5, 4, 9])).collect(offered())
    experience.add(rollout)
    assert rollout.cost == int(rollout.steps.sum())  # control steps, not chunks
    assert experience.owed() == 2 * 4
    orders = []
    for _ in range(2):
        batches = [experience.sample() for _ in range(4)]
        assert sorted(len(batch) for batch in batches) == [3, 4, 4, 4]
        orders.append(torch.cat([batch.advantage for batch in batches]).tolist())
        for batch in batches:
            assert torch.equal(batch.chain.log_prob[:, 0], batch.obs["state"][:, 0])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(15))
    assert orders[0] != orders[1]
    assert learner.prepared == [False]
    assert experience.metrics() == {}  # nothing was stale


def test_what_several_sources_bring_in_a_turn_is_one_batch() -> None:
    experience = RolloutExperience(Numbering(), batch=10, epochs=2, seed=0)
    assert experience.owed() == 0
    for _ in range(2):
        experience.add(make_source(FakeEnv(3, truncate_after=[5, 4, 9])).collect(offered()))
    assert experience.owed() == 2 * 3  # 30 decisions
    batches = [experience.sample() for _ in range(3)]
    assert sorted(torch.cat([batch.advantage for batch in batches]).tolist()) == sorted([*range(15)] * 2)
    for batch in batches:
        assert torch.equal(batch.chain.log_prob[:, 0], batch.obs["state"][:, 0])
        assert torch.equal(batch.weight[:, 0], batch.advantage)
    assert experience.owed() == 0


def test_rollouts_of_older_weights_are_weighed_or_dropped_and_counted() -> None:
    learner, updates = Numbering(), [0]
    experience = RolloutExperience(
        learner, batch=15, epochs=1, seed=0, updates=lambda: updates[0], max_staleness=4
    )
    rollout = make_source(FakeEnv(3, truncate_after=[5, 4, 9])).collect(offered())
    owed = list[int]()
    for updates[0] in (0, 4, 5):
        experience.add(rollout)
        owed.append(experience.owed())
    assert owed == [1, 1, 0]
    assert learner.prepared == [False, True]
    resumed = RolloutExperience(learner, batch=15, epochs=1, seed=0)
    resumed.load_state_dict(copy.deepcopy(experience.state_dict()))
    for one in (experience, resumed):
        assert one.metrics() == {
            "collect/staleness": 3.0,
            "collect/stale_steps": 2.0 * rollout.cost,
            "collect/stale_steps_dropped": float(rollout.cost),
        }
        assert one.metrics() == {}


def test_what_comes_after_a_dropped_rollout_does_not_go_on_from_before() -> None:
    learner, updates = Numbering(), [9]
    how: dict[str, Any] = {
        "batch": 15,
        "epochs": 1,
        "seed": 0,
        "updates": lambda: updates[0],
        "max_staleness": 4,
    }
    experience, resumed = RolloutExperience(learner, **how), RolloutExperience(learner, **how)
    rollout = make_source(FakeEnv(3, truncate_after=[5, 4, 9])).collect(offered())
    experience.add(rollout)
    resumed.load_state_dict(copy.deepcopy(experience.state_dict()))
    updates[0] = 0
    for one in (experience, resumed):
        for _ in range(2):
            one.add(rollout)
    assert learner.begun == [True, False] * 2


def test_nothing_to_sample_before_the_first_rollout() -> None:
    with pytest.raises(RuntimeError, match="nothing was collected since the run began or was resumed"):
        RolloutExperience(Numbering(), batch=1, epochs=1, seed=0).sample()
