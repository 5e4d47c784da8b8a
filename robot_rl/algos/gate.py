"""Accepts the result of an improvement, or reverts it (RL-100, Lei et al. 2025, equation 9).

    accept the candidate  if  J_new >= J_best + margin |J_best|,  else revert to the best so far

The caller chooses J. Three are in use:

- `CriticScore`: the mean Q of the candidate's own actions in fixed states of the data, with fixed noise,
  by critics that do not learn meanwhile. It takes no control steps, but it is no estimate of the return: it
  does not know the states that the candidate will reach, and it accepts a candidate whose actions the
  critics overestimate. On pick_cube, without a gate, it rose from 0.39 after 100 updates to 0.54 after 800,
  where success was 0 (base 42 %).
- episodes in the simulator, see `train.improve.rl100`: an unbiased estimate that costs control steps.
- imagined episodes, likewise (RL-100 rolls the candidate through a learned model too, and takes the mean Q on
  the way; here success is counted): no control steps, and the bias of the model, whose members' disagreement
  ends an episode without success.

With margin 0.05 a true improvement of less than a twentieth is reverted too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from robot_rl.algos.chunk_critics import ChunkCritics
from robot_rl.core.policy import Policy


class Gate:
    """Keeps the best so far of some parts, and puts it back where a candidate is no better."""

    def __init__(
        self, parts: Mapping[str, Any], score: Callable[[], float], *, margin: float | None = 0.05
    ) -> None:
        """Keeps the parts as they are: the first incumbent, which is scored with the first candidate.

        Args:
            parts: what is accepted or reverted as one: a policy and its optimiser.
            score: returns J of the parts as they are.
            margin: see `judge`.
        """
        self._parts, self._score, self._margin = dict(parts), score, margin
        self._kept = self._snapshot()
        self._best: float | None = None
        self._accepted, self._judged = 0, 0

    def judge(self, candidate: float, incumbent: float) -> bool:
        """Returns whether the candidate's score is enough; NaN never is.

        The margin is a share of the incumbent's absolute score: with 0.05, -1 has to become -0.95.
        """
        return self._margin is None or candidate >= incumbent + self._margin * abs(incumbent)

    def decide(self) -> dict[str, float]:
        """Scores the parts, keeps them or puts the best so far back, bit for bit; returns metrics."""
        if self._best is None:
            candidate = self._snapshot()
            self._restore()
            self._best = self._score()
            self._restore(candidate)
        score = self._score()
        is_accepted = self.judge(score, self._best)
        if is_accepted:
            self._best, self._kept = score, self._snapshot()
        else:
            self._restore()
        self._judged += 1
        self._accepted += is_accepted
        share = self._accepted / self._judged
        return {"gate_score": score, "gate_best": self._best, "gate_accepted": share}

    def _snapshot(self) -> dict[str, Any]:
        return copy.deepcopy({name: part.state_dict() for name, part in self._parts.items()})

    def _restore(self, state: Mapping[str, Any] | None = None) -> None:
        for name, part in self._parts.items():
            part.load_state_dict((self._kept if state is None else state)[name])

    def state_dict(self) -> dict[str, Any]:
        """Returns the best so far and its score; their owners save the parts as they are."""
        found = {"best": self._best, "accepted": self._accepted, "judged": self._judged}
        return {**found, "kept": copy.deepcopy(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best = None if state["best"] is None else float(state["best"])
        self._accepted, self._judged = int(state["accepted"]), int(state["judged"])
        self._kept = copy.deepcopy(state["kept"])


class CriticScore:
    """The mean Q of what a policy does in fixed states of the data; see the head of the file."""

    def __init__(
        self, policy: Policy, critics: ChunkCritics, obs: dict[str, Tensor], features: Tensor, z: Tensor
    ) -> None:
        """Keeps states and noise, so that all candidates are scored in the same ones.

        Args:
            policy: as it is when it is scored.
            critics: as they are when it is scored.
            obs: R states.
            features: of these states, (R, F), which the critics read.
            z: noise of the chunks, (R, H, A).
        """
        self._policy, self._critics = policy, critics
        self._obs, self._features, self._z = obs, features, z

    @torch.no_grad()
    def __call__(self) -> float:
        chunks = self._policy.sample(self._policy.encode(self._obs), z=self._z).actions
        return float(self._critics.score(self._features, chunks).mean())
