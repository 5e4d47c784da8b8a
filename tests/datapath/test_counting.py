"""The whole data path, checked number by number: source -> replay -> n-step window -> learner.

The env counts and the policy says what it saw, so every number tells where it belongs:
env e, episode k, control step t. observation [e, k, t]; base action [t / 100, (50 k + e) / 10000];
the residual adds 1/4 to the first element; reward 100 k + t + 1. episode (e, k) has 3 + (7 e + 5 k) % 9
steps; where e + k is even it ends with success (terminated), else by the clock (truncated).
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Generator, Tensor, nn

from robot_rl.core.policy import ChunkSample, Encoded, Mode, Policy
from robot_rl.data.replay import ReplayBuffer, TransitionBatch
from robot_rl.hal.vector import Array, Obs, VectorEnv
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.sources import InlineSource
from robot_rl.rollout.weights import Publisher
from robot_rl.train.checkpoint import read_state, write_state
from robot_rl.train.experience import Draws, ReplayExperience
from robot_rl.train.loop import Hook, Learner, Pacer, Run, train
from robot_rl.train.schedule import Counters, Every, Ratio
from tests.plain import Plain

NUM_ENVS, N_STEP, GAMMA = 5, 3, 0.9
RESIDUAL = 0.25


def length(env: Array, episode: Array) -> Array:
    return 3 + (7 * env + 5 * episode) % 9


def base_action(env: Array, episode: Array, step: Array) -> Array:
    return np.stack([step / 100.0, (50 * episode + env) / 10_000.0], axis=-1).astype(np.float32)


def reward(episode: Array, step: Array) -> Array:
    return 100.0 * episode + step + 1.0


class CountingEnv(VectorEnv):
    """Refuses every action that was not made for exactly this env, episode and step."""

    task, robot, instruction, control_hz = "counting", "none", "count", 20.0
    state_names, action_names = ("env", "episode", "step"), ("step", "identity")
    caps = frozenset({"set_state"})

    def __init__(self, num_envs: int, first: int = 0) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        box = gymnasium.spaces.Box
        self.single_observation_space = gymnasium.spaces.Dict({"state": box(0, np.inf, (3,), np.float32)})
        self.single_action_space = box(-1, 1, (2,), np.float32)
        self._env = first + np.arange(num_envs)
        self._episode = np.zeros(num_envs, np.int64)
        self._step = np.zeros(num_envs, np.int64)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        self._episode[:], self._step[:] = 0, 0
        return self._obs(), {"success": np.zeros(self.num_envs, bool)}

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        expected = base_action(self._env, self._episode, self._step) + np.array([RESIDUAL, 0], np.float32)
        np.testing.assert_allclose(
            actions, expected, atol=1e-6, err_msg="an action of another step or episode"
        )
        earned = reward(self._episode, self._step)
        self._step += 1
        ended = self._step == length(self._env, self._episode)
        success = ended & ((self._env + self._episode) % 2 == 0)
        infos: dict[str, Any] = {
            "success": success,
            "commanded_action": np.asarray(actions, np.float32).copy(),
        }
        if ended.any():
            infos["final_obs"], infos["_final_obs"] = self._obs(), ended
            self._episode[ended] += 1
            self._step[ended] = 0
        return self._obs(), earned, success, ended & ~success, infos

    def episode_seeds(self) -> Array:
        return (self._env + 1000 * self._episode).astype(np.uint64)

    def state_dict(self) -> dict[str, Any]:
        return {"episode": self._episode.copy(), "step": self._step.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        self._episode, self._step = state["episode"].copy(), state["step"].copy()
        return self._obs()

    def _obs(self) -> Obs:
        return {"state": np.stack([self._env, self._episode, self._step], axis=1).astype(np.float32)}


class CountingPolicy(Plain, nn.Module):
    """Chunks that say at which env, episode and step each of their actions is to be executed."""

    horizon, action_dim = 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.updates = nn.Parameter(torch.zeros(1), requires_grad=False)

    def sample(
        self,
        obs: dict[str, Tensor],
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        env, episode, step = (obs["state"][:, i].numpy()[:, None] for i in range(3))
        ahead = np.arange(self.horizon)[None, :]
        chunk = base_action(env + 0 * ahead, episode + 0 * ahead, step + ahead)
        return ChunkSample(torch.from_numpy(chunk))

    def refine(self, encoded: Encoded, action: Tensor, **_: Any) -> Tensor:
        return action + torch.tensor([RESIDUAL, 0.0])


class CheckingAlgorithm:
    """Learns nothing; recomputes every window from the indices that its observation carries."""

    def __init__(self) -> None:
        self.updates = 0
        self.ends = {"terminated": 0, "truncated": 0, "inside": 0}

    def update(self, batch: TransitionBatch) -> Mapping[str, float]:
        obs, after = batch.obs["state"].numpy().astype(int), batch.next_obs["state"].numpy().astype(int)
        env, episode, step = obs.T
        last_step, ends_with_success = length(env, episode), (env + episode) % 2 == 0
        steps = after[:, 2] - step
        # The same env and episode on both sides: nothing leaks across a reset.
        np.testing.assert_array_equal(after[:, :2], obs[:, :2])
        # A window is n steps, fewer only at the end of the episode or at the newest step of its lane.
        assert (steps >= 1).all()
        assert (steps <= N_STEP).all()
        np.testing.assert_allclose(batch.base_action, base_action(env, episode, step), atol=1e-6)
        np.testing.assert_allclose(batch.action, batch.base_action + torch.tensor([RESIDUAL, 0.0]), atol=1e-6)
        np.testing.assert_allclose(batch.next_base_action, base_action(env, episode, after[:, 2]), atol=1e-6)
        # Reward: the sum of gamma^i (100 k + t + i + 1) over the m steps of the window.
        expected = sum(np.where(i < steps, GAMMA**i * reward(episode, step + i), 0.0) for i in range(N_STEP))
        np.testing.assert_allclose(batch.reward, expected, rtol=1e-5)
        # Bootstrap: gamma^m; 0 where the task ended; a time limit keeps the value of its final observation.
        terminated = (after[:, 2] == last_step) & ends_with_success
        np.testing.assert_allclose(batch.bootstrap, np.where(terminated, 0.0, GAMMA**steps), rtol=1e-6)
        self.updates += 1
        self.ends["terminated"] += int(terminated.sum())
        self.ends["truncated"] += int(((after[:, 2] == last_step) & ~ends_with_success).sum())
        self.ends["inside"] += int((after[:, 2] < last_step).sum())
        return {"reward": float(batch.reward.mean())}

    def policy_weights(self) -> dict[str, torch.Tensor]:
        return {"updates": torch.tensor([float(self.updates)])}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "ends": dict(self.ends)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates, self.ends = state["updates"], dict(state["ends"])


def build(
    env_steps: int, *, n_exec: int = 3, sources: int = 1, actors: int = 1
) -> tuple[Run, CheckingAlgorithm, CountingPolicy]:
    policy, algorithm = CountingPolicy(), CheckingAlgorithm()
    # Smaller than the run: it wraps.
    replay = ReplayBuffer(120 * actors, NUM_ENVS, {"state": ((3,), np.float32)}, 2, actors=actors)

    def source(number: int) -> InlineSource:
        executor = ChunkExecutor(cast(Policy, policy), NUM_ENVS, n_exec=n_exec)
        return InlineSource(CountingEnv(NUM_ENVS, NUM_ENVS * number), policy, executor, seed=0)

    handle = Publisher()

    def offer(counters: Counters) -> None:
        handle.offer(counters.updates, algorithm.policy_weights)

    offer(Counters())
    batches = Draws(
        lambda rng: replay.sample(32, n_step=N_STEP, gamma_step=GAMMA, rng=rng),
        seed=1,
    )
    run = Run(
        sources=[source(number) for number in range(sources)],
        experience=ReplayExperience(replay),
        learners=[Learner(algorithm, batches, Ratio(0.5, after_steps=20), handle)],
        pacer=Pacer(
            finished=lambda counters: counters.env_steps >= env_steps,
            hooks=[Hook("offer", Every(1), lambda counters: counters.updates, offer)],
        ),
        stage=lambda name: nullcontext(),
    )
    return run, algorithm, policy


@pytest.mark.parametrize("n_exec", [1, 3, 4])
def test_every_number_belongs_where_it_is(n_exec: int) -> None:
    run, algorithm, _ = build(600, n_exec=n_exec)
    train(run)
    assert run.counters.env_steps == 600
    assert algorithm.updates == (600 - 20) // 2  # half an update per step after the first 20
    assert min(algorithm.ends.values()) > 100  # the checks met all three ways a window can end


def test_two_sources_never_share_a_lane() -> None:
    """Envs 0 to 4 of one and 5 to 9 of the other: no window links them, in 1200 steps of ten lanes."""
    run, algorithm, _ = build(1200, sources=2, actors=2)
    train(run)
    assert min(algorithm.ends.values()) > 100
    state = run.state_dict()["experience"]["replay"]
    env = state["obs"]["state"][:, :, 0]
    assert (env == np.arange(10)[:, None]).all()


def test_a_second_source_on_used_lanes_is_refused() -> None:
    run, _, _ = build(600, sources=2)
    message = "got a step of actor 1, allowed 0 to 0: two sources never share a lane. Make the buffer with as"
    with pytest.raises(ValueError, match=message):
        train(run)


def test_the_acting_policy_gets_the_newest_weights() -> None:
    run, algorithm, policy = build(100)
    train(run)
    # 5 steps a turn at half an update a step: the last turn's 2 or 3 updates are not yet with the actor.
    assert algorithm.updates - 3 <= policy.updates.item() < algorithm.updates


def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    whole, expected, _ = build(600)
    train(whole)
    first, _, _ = build(310)
    train(first)
    write_state(first.state_dict(), tmp_path / "state")
    second, got, _ = build(600)
    second.load_state_dict(read_state(tmp_path / "state"))
    train(second)
    assert got.state_dict() == expected.state_dict()
    assert second.leader.meter.take() == whole.leader.meter.take()
    one, other = whole.state_dict(), second.state_dict()
    np.testing.assert_array_equal(one["experience"]["replay"]["head"], other["experience"]["replay"]["head"])
    for name, column in one["experience"]["replay"]["columns"].items():
        np.testing.assert_array_equal(column, other["experience"]["replay"]["columns"][name], err_msg=name)
