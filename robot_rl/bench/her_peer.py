"""The peer of `bench her`: Stable-Baselines3's SAC with hindsight experience replay on push_cube.

`python -m robot_rl.bench.her_peer <settings as JSON>` learns until it is stopped, and appends a row to the
curve at every evaluation.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import SAC, HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback

from robot_rl.core.seeding import quick_eval_seeds, train_seed
from robot_rl.data.episodes import Episodes
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.stepping import lockstep
from robot_rl.sched.opened import opened
from robot_rl.sim.single import SingleEnv
from robot_rl.sim.tasks.push_cube import GOAL_RADIUS_M
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.demos import collect_demonstrations
from robot_rl.train.recorded import DemosConfig

Array = NDArray[Any]

TASK = "push_cube"


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Settings of the program. The defaults are RL Zoo's for Fetch, except batch and width (2048, 512)."""

    seed: int
    curve: str
    """File of the rows."""
    every_env_steps: int = 2000
    episodes: int = 100
    """Of each evaluation."""
    batch: int = 256
    width: int = 256
    demos: int = 0
    """Demonstrations put into the replay at first."""
    noise_m: float = 0.0
    """Noise of their expert; see `DemosConfig`."""
    learning_rate: float = 1e-3
    gamma: float = 0.95
    tau: float = 0.05
    relabelled: int = 4
    """Transitions with another goal for each with its own."""
    learning_starts: int = 1000
    capacity: int = 500_000


class Goals:
    """Splits `state` into the parts of Fetch's observations, so that only `desired_goal` has the goal."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._rest = [i for i, name in enumerate(names) if not name.startswith("goal")]
        self._cube = [names.index(f"cube.pos.{axis}") for axis in range(2)]
        self._goal = [names.index(f"goal.pos.{axis}") for axis in range(2)]

    def split(self, obs: Obs) -> Obs:
        """Returns observation (..., F), achieved_goal and desired_goal (..., 2) in metres."""
        state = obs["state"]
        return {
            "observation": state[..., self._rest],
            "achieved_goal": state[..., self._cube],
            "desired_goal": state[..., self._goal],
        }


def reward_of(achieved_goal: Array, desired_goal: Array) -> Array:
    """Returns 0 where the cube (..., 2) is at the goal (..., 2), and -1 elsewhere."""
    far = np.linalg.norm(achieved_goal - desired_goal, axis=-1) >= GOAL_RADIUS_M
    return -far.astype(np.float32)


class PushGoals(gymnasium.Env[Obs, Array]):
    """push_cube in the form of Fetch's tasks: reward -1 away from the goal, 0 at it, no early end."""

    def __init__(self) -> None:
        self._env = SingleEnv(task=TASK, reward="sparse")
        self._goals, self._steps = Goals(self._env.batch.state_names), 0
        sizes = {key: value.shape for key, value in self._goals.split(self._env.reset(seed=0)[0]).items()}
        box = gymnasium.spaces.Box
        boxes: dict[str, gymnasium.Space[Any]] = {
            key: box(-np.inf, np.inf, shape, np.float32) for key, shape in sizes.items()
        }
        self.observation_space = cast("gymnasium.Space[Obs]", gymnasium.spaces.Dict(boxes))
        self.action_space = self._env.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        obs, infos = self._env.reset(seed=seed, options=options)
        self._steps = 0
        return self._goals.split(obs), infos

    def step(self, action: Array) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        obs = self._goals.split(self._env.step(action)[0])
        self._steps += 1
        reward = float(reward_of(obs["achieved_goal"], obs["desired_goal"]))
        return obs, reward, False, self._steps >= self._env.batch.horizon, {}

    def compute_reward(self, achieved_goal: Array, desired_goal: Array, info: Any) -> Array:
        """Returns `reward_of` the goals; hindsight replay calls this method for other goals."""
        return reward_of(achieved_goal, desired_goal)

    def close(self) -> None:
        self._env.close()


def success_of(env: VectorEnv, model: Any, seeds: NDArray[np.uint64]) -> float:
    """Returns the share of episodes, one for each seed and env, that the mean action solves."""
    goals, solved = Goals(env.state_names), np.zeros(env.num_envs, bool)

    def act(obs: Obs) -> Array:
        return model.predict(goals.split(obs), deterministic=True)[0]

    for moment in lockstep(env, seeds, lambda obs, infos: None, act):
        solved |= moment.live & moment.infos["success"]
    return float(solved.mean())


def add_demonstrations(replay: Any, episodes: Episodes) -> None:
    """Adds episodes to the peer's replay; their ends are time limits there."""
    goals = Goals(episodes.meta.state_names)
    after = np.concatenate([episodes.obs["state"][1:], episodes.obs["state"][:1]])
    ends = episodes.terminated | episodes.truncated
    after[ends] = episodes.final_obs["state"]
    obs, following = goals.split(episodes.obs), goals.split({"state": after})
    reward = reward_of(following["achieved_goal"], following["desired_goal"])
    for t in range(len(ends)):
        replay.add(
            {key: value[t : t + 1] for key, value in obs.items()},
            {key: value[t : t + 1] for key, value in following.items()},
            episodes.action[t : t + 1],
            reward[t : t + 1],
            ends[t : t + 1],
            [{"TimeLimit.truncated": True}] if ends[t] else [{}],
        )


class _Looks(BaseCallback):
    """Evaluates every `every_env_steps`, and writes the curve."""

    def __init__(self, cfg: PeerConfig, env: VectorEnv) -> None:
        super().__init__()
        self._cfg, self._env = cfg, env

    def _on_step(self) -> bool:
        if self.num_timesteps % self._cfg.every_env_steps == 0:
            success = success_of(self._env, self.model, quick_eval_seeds(self._cfg.seed, self._cfg.episodes))
            with Path(self._cfg.curve).open("a") as curve:
                curve.write(json.dumps({"step": self.num_timesteps, "eval/success": success}) + "\n")
        return True


def learn(cfg: PeerConfig, env_steps: int) -> None:
    """Learns for `env_steps` control steps, without those of demonstrations and evaluations."""
    torch.set_num_threads(1)
    model = SAC(
        "MultiInputPolicy",
        PushGoals(),
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": cfg.relabelled, "goal_selection_strategy": "future"},
        policy_kwargs={"net_arch": [cfg.width] * 3},
        batch_size=cfg.batch,
        buffer_size=cfg.capacity,
        learning_rate=cfg.learning_rate,
        learning_starts=cfg.learning_starts,
        gamma=cfg.gamma,
        tau=cfg.tau,
        seed=train_seed(cfg.seed, "her"),
        device="cpu",
    )
    config = EnvConfig(task=TASK, num_threads=1)
    with opened(simulation(config, cfg.episodes), holder="bench her, the peer") as env:
        if cfg.demos:
            wanted = DemosConfig(episodes=cfg.demos, noise_m=cfg.noise_m)
            add_demonstrations(model.replay_buffer, collect_demonstrations(env, wanted, cfg.seed))
        model.learn(env_steps, callback=_Looks(cfg, env))


if __name__ == "__main__":
    learn(PeerConfig(**json.loads(sys.argv[1])), env_steps=10**9)
