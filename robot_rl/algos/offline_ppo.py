"""PPO inside the denoising chain without an environment: RL-100's offline phase (Lei et al. 2025; BPPO).

First the critics of `iql` learn from the data, and stay as they are from then on. Then, in states of the
data, chunks are sampled from the policy of the last gate with their chains, and `ChainPPO` follows

    min(r_k A, clip(r_k) A),   A = Q(s, a) - V(s) of the final actions a, for every denoising step k

where r_k is the ratio against the policy that sampled: the base at first, the last accepted one later
(Zhuang et al. 2023, whose policy has one step). Every so many updates, and after the last one, the gate
judges the result.
Deviations: no model of the dynamics; the clip range does not decay; advantages are normalised in a batch.
B batch, H chunk length, A action dim.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from robot_rl.algos.chain_ppo import ChainPPO
from robot_rl.algos.config.on_policy import OfflinePPOConfig
from robot_rl.algos.gate import Gate
from robot_rl.algos.iql import IQL
from robot_rl.algos.learner import Learner, PolicyModule
from robot_rl.data.transitions import ChunkBatch


class OfflinePPO(Learner):
    """Learns critics of the data, then a policy by them."""

    def __init__(
        self,
        policy: PolicyModule,
        learner: ChainPPO,
        iql: IQL,
        gate: Gate,
        cfg: OfflinePPOConfig,
        seed: int,
    ) -> None:
        """Starts from the policy's present weights.

        Args:
            policy: what `learner` changes in place.
            learner: takes its steps.
            iql: critics of the policy's features as they are now.
            gate: guards the policy and the learner's optimiser.
            cfg: how long, and when the gate judges.
            seed: of the sampled chains.
        """
        super().__init__()
        self._policy, self._learner, self._iql, self._gate, self._cfg = policy, learner, iql, gate, cfg
        self._behaviour = copy.deepcopy(policy)
        self._origin = copy.deepcopy(policy)
        """Encodes what the critics read; it stays."""
        self._generator = Generator(next(policy.parameters()).device).manual_seed(seed)

    def update(self, batch: ChunkBatch) -> Mapping[str, Tensor | float]:
        """Takes a step of the critics, or one of the policy."""
        self._updates += 1
        improved = self._updates - self._cfg.critic_updates
        with torch.no_grad():
            features = self._origin.encode(batch.obs)["features"]
            if improved <= 0:
                return self._update_critics(features, batch)
            encoded = self._behaviour.encode(batch.obs)
            sample = self._behaviour.sample(encoded, mode="explore", record=True, generator=self._generator)
            advantage = self._iql.advantage(features, sample.actions)
        assert sample.chain is not None, "a policy that records returns its chain"
        metrics = self._learner.update_policy(batch.obs, sample.chain, advantage)
        if improved % self._cfg.gate.every == 0 or improved == self._cfg.updates:
            metrics = metrics | self._gate.decide()
            self._behaviour.load_state_dict(self._policy.state_dict())
            self._learner.begin()
        return metrics | {"advantage": advantage.mean(), "advantage_std": advantage.std()}

    def _update_critics(self, features: Tensor, batch: ChunkBatch) -> Mapping[str, Tensor]:
        ends = batch.prefix
        assert ends is not None, "draw with prefixes=critics.lengths"
        flat = {key: value.flatten(0, 1) for key, value in ends.next_obs.items()}
        after = self._origin.encode(flat)["features"]
        return self._iql.update(features, batch, after.view(*ends.reward.shape, -1))

    def policy_weights(self) -> Mapping[str, Tensor]:
        return self._policy.state_dict()

    def _parts(self) -> Mapping[str, Any]:
        """Returns all but the base, which is there again on resume."""
        return {
            "learner": self._learner,
            "iql": self._iql,
            "gate": self._gate,
            "behaviour": self._behaviour,
            "generator": self._generator,
        }
