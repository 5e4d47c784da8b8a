"""A source of single control steps for learners that score their own actions: rollouts of a Gaussian policy.

N envs, T control steps, A action dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from robot_rl.core.policy import Encoded
from robot_rl.data.rollout import StepRollout
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.rollout.sources import LOGGED, EpisodeLog, Here
from robot_rl.rollout.stepping import actions_for
from robot_rl.rollout.weights import Published, Subscriber

Array = NDArray[Any]


class StepRolloutSource(Here):
    """Collects T control steps of every env at a time; episodes continue from one rollout to the next.

    A rollout is memory that the next one overwrites, so the learner has to be done with it: the source acts
    in the learner's process.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: GaussianPolicy,
        *,
        steps: int,
        seed: int,
        device: str = "cpu",
        correlation: float = 0.0,
    ) -> None:
        """Begins with new episodes.

        Args:
            env: where; with autoreset SAME_STEP.
            policy: the acting copy, whose chunks are one action long.
            steps: T.
            seed: of the episodes and of the exploration.
            device: where the policy's parameters are, and the memory.
            correlation: of the noise of a control step with that of the step before, in [0, 1).
        """
        assert policy.horizon == 1, "a decision at every control step"
        self._env, self._policy, self._steps = env, policy, steps
        self._seed, self._device = seed, device
        self._generator = Generator(device).manual_seed(seed)
        self._weights = Subscriber(policy)
        self._memory: StepRollout | None = None
        self._correlation = correlation
        self._noise: Tensor | None = None
        """(N, A): the noise of the last step, where noise is correlated."""
        self.episodes = EpisodeLog(env.num_envs, env.reset_classes)

    def close(self) -> None:
        """Closes the env."""
        self._env.close()

    @torch.no_grad()
    def collect(self, published: Published) -> StepRollout:
        """Returns T control steps of every env, all with the newest weights."""
        if self._memory is None:
            obs, _ = self._env.reset(seed=self._seed)
            self._memory = memory = self._allocated(obs)
        else:
            memory = self._memory
            memory.begin()
        memory.policy_version = self._weights.refresh(published)
        memory.drawn.normal_(generator=self._generator)
        if self._correlation:
            self._correlate(memory.drawn)
        logged = [self._step(memory, t) for t in range(self._steps)]
        self.episodes.add_turns(logged)
        return memory

    def _correlate(self, noise: Tensor) -> None:
        """Makes white noise (T, N, A) a first-order autoregression of the same variance, in place."""
        rho = self._correlation
        fresh = (1.0 - rho**2) ** 0.5
        if self._noise is not None:
            noise[0].mul_(fresh).add_(self._noise, alpha=rho)
        for t in range(1, len(noise)):
            noise[t].mul_(fresh).add_(noise[t - 1], alpha=rho)
        self._noise = noise[-1].clone()

    def _allocated(self, obs: Obs) -> StepRollout:
        known = self._policy.normaliser.feature_dims
        shown = {name: value for name, value in obs.items() if name in known}
        return StepRollout.allocate(shown, self._steps, self._policy.action_dim, self._device)

    def _step(self, memory: StepRollout, t: int) -> dict[str, Array]:
        """Takes step `t`, and returns what is to be logged of it."""
        shown = {name: value[t] for name, value in memory.obs.items()}
        mean, std = self._policy.moments(Encoded(self._policy.encode(shown)))
        memory.mean[t].copy_(mean[:, 0])
        memory.std.copy_(std)
        drawn = torch.addcmul(memory.mean[t], memory.drawn[t], std, out=memory.drawn[t])
        action = self._policy.executed(drawn)
        obs, reward, terminated, truncated, infos = self._env.step(actions_for(self._env, action))
        memory.put(t, obs, reward, terminated, truncated)
        if "final_obs" in infos:
            memory.put_final(t, infos["final_obs"], truncated)
        logged = {name: infos[name] for name in LOGGED if name in infos}
        return {"reward": reward, "ended": terminated | truncated, **logged}

    def state_dict(self) -> dict[str, Any]:
        """Returns acting weights, the generator, the figures of the episodes, the env and the observation."""
        memory = self._memory
        obs = None if memory is None else {name: value[-1].clone() for name, value in memory.obs.items()}
        return {
            **self._weights.state_dict(),
            "generator": self._generator.get_state(),
            "episodes": self.episodes.state_dict(),
            "env": self._env.state_dict(),
            "obs": obs,
            "noise": self._noise,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state)
        self._generator.set_state(state["generator"])
        self.episodes.load_state_dict(state["episodes"])
        self._noise = state.get("noise")  # a checkpoint of an earlier version has none
        if state["obs"] is None:
            return
        self._env.reset(seed=self._seed)
        self._env.load_state_dict(state["env"])
        self._memory = StepRollout.allocate(state["obs"], self._steps, self._policy.action_dim, self._device)
        self._memory.show(self._steps, state["obs"])
