"""Sources of segments.

A source acts with a policy whose weights it takes from a `Publisher`, and returns segments. The loop is the
same for this process and another one, for simulated and real arms.
B envs, A action dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.arrays import to_numpy
from robot_rl.data.transitions import Segment, StepBatch
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.policies.executor import Act, ChunkExecutor
from robot_rl.rollout.stepping import step
from robot_rl.rollout.weights import Published, Subscriber

Array = NDArray[Any]
LOGGED = ("success", "limited", "diverged", "overflowed", "reset_class", "domain_scale")
"""Of `infos`: what the figures of the episodes are made of, in addition to rewards and ends."""


class Source(Protocol):
    """What yields segments: leased simulators, leased robots, imagination."""

    def collect(self, published: Published) -> Segment | None:
        """Returns the segment that is complete now, or None if there is none yet."""
        ...

    @property
    def is_ahead(self) -> bool:
        """Whether segments have waited for long, of a source that does not wait for the learner."""
        ...

    @property
    def episodes(self) -> EpisodeLog:
        """The figures of the episodes that ended."""
        ...

    def rest(self) -> None:
        """Frees what others wait for: the source has spent its budget, and `collect` is not called again."""
        ...

    def close(self) -> None:
        """Brings the arm to rest, and closes the env."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Here:
    """What sources in this process have in common: they act when they are asked, under the run's leases."""

    is_ahead = False

    def rest(self) -> None:
        """Frees nothing: the run's own leases are for all its sources."""


class Elsewhere(ABC):
    """What sources that act in other processes have in common: a resumed run begins new episodes there."""

    def __init__(self) -> None:
        self.episodes = EpisodeLog(0)
        self._begins = True
        """Whether the next segment continues none of before."""

    def rest(self) -> None:
        """Ends what acts, and gives its device back."""
        self.close()

    @abstractmethod
    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the episodes' figures alone: an arm cannot be put back to where it was."""
        return {"episodes": self.episodes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the figures; episodes of before are cut short there."""
        self.episodes.load_state_dict(state["episodes"])
        self._begins = True


class InlineSource(Here):
    """Acts in all envs, in this process: steps them, and returns the step at once."""

    def __init__(
        self,
        env: VectorEnv,
        policy: torch.nn.Module,
        executor: ChunkExecutor,
        *,
        seed: int,
        label: str = "sim",
        advise: Callable[[], Array] | None = None,
    ) -> None:
        """Begins with new episodes.

        Args:
            env: where.
            policy: the acting copy inside `executor`.
            executor: acts.
            seed: of the episodes.
            label: recorded as the source of every step.
            advise: returns what an expert would do now (B, A), noted with every step.
        """
        self._env, self._executor = env, executor
        self._seed, self._label, self._advise = seed, label, advise
        self._weights = Subscriber(policy)
        self._obs: Obs | None = None
        self._act: Act | None = None
        self.episodes = EpisodeLog(env.num_envs, env.reset_classes)

    def collect(self, published: Published) -> StepBatch:
        """Returns one control step of all envs, complete with the base's next action."""
        if self._obs is None or self._act is None:
            self._obs, self._act = self._begin(published)
        obs, act, version = self._obs, self._act, self._weights.version
        expert_action = None if self._advise is None else self._advise()
        moment = step(self._env, obs, act.action)
        ended, infos = moment.ended, moment.infos
        final_obs, final_base = moment.next_obs, None
        if ended.any():
            final_obs = moment.final_obs
            # Before the reset: the noise is that of the ended episode, not of the next one.
            final_base = self._executor.base_action(final_obs, ended)
            self._executor.reset(ended)
        if "human" in infos:  # a plan from before a person moved the arm is of another state
            self._executor.reset(infos["human"])
        self._obs, self._act = moment.next_obs, self._next_act(moment.next_obs, published)
        next_base = self._act.base_action
        if final_base is not None:
            next_base = np.where(ended[:, None], final_base, next_base)
        self.episodes.add(moment.reward, ended, infos)
        return StepBatch(
            obs=obs,
            action=infos["commanded_action"],
            executed_target_rad=infos.get("executed_target_rad"),
            base_action=act.base_action,
            reward=moment.reward,
            terminated=moment.terminated,
            truncated=moment.truncated,
            next_obs=final_obs,
            next_base_action=next_base,
            success=infos["success"],
            source=infos.get("source", self._label),
            policy_version=version,
            policy_action=infos.get("policy_action"),
            instruction=infos.get("instruction"),
            stamp_ns=infos.get("stamp_ns"),
            latent=act.latent,
            decides=act.decides,
            picture_stamp_ns=infos.get("picture_stamp_ns"),
            expert_action=expert_action,
            reset_row=_starts(infos),
        )

    def close(self) -> None:
        """Closes the env."""
        self._env.close()

    def _begin(self, published: Published) -> tuple[Obs, Act]:
        obs, _ = self._env.reset(seed=self._seed)
        self._executor.reset()
        return obs, self._next_act(obs, published)

    def _next_act(self, obs: Obs, published: Published) -> Act:
        self._weights.refresh(published)
        return self._executor.act(obs)

    def state_dict(self) -> dict[str, Any]:
        """Returns env, executor, acting weights, and the action that is pending."""
        act = self._act
        return {
            **self._weights.state_dict(),
            "env": self._env.state_dict(),
            "executor": self._executor.state_dict(),
            "pending": None if act is None else dict(vars(act)),
            "obs": self._obs,
            "episodes": self.episodes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state)
        self.episodes.load_state_dict(state["episodes"])
        if state["pending"] is None:
            return
        self._env.reset(seed=self._seed)
        self._env.load_state_dict(state["env"])
        self._executor.load_state_dict(state["executor"])
        self._obs, self._act = dict(state["obs"]), Act(**state["pending"])


@dataclass(frozen=True)
class Tally:
    """What an `EpisodeLog` has counted since the last `drain`."""

    ended: Array
    """(n, 4), of each episode that ended: return, length, success, class of its start or -1."""
    limited: int
    """Actions that safety limited."""
    nan_resets: int
    classes: tuple[str, ...]
    domain_scale: float | None = None
    """The newest scale of the curriculum on randomisation; None without one."""
    overflows: int | None = None
    """See `EpisodeLog.overflows`."""


class EpisodeLog:
    """Returns, lengths and successes of the episodes that ended since the last `take`.

    Where episodes begin in rows of a bank, the success of each class is counted too: that of all depends on
    the mixture, and says nothing of how far training is.
    """

    def __init__(self, num_envs: int, classes: tuple[str, ...] = ()) -> None:
        """Counts episodes of `num_envs` envs; `classes`: `VectorEnv.reset_classes`."""
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self._ended = np.zeros((0, 4))
        self._limited, self._classes = 0, classes
        self.nan_resets = 0
        """Episodes cut short because a simulation diverged, since the run began."""
        self.overflows: int | None = None
        """Those of them that ran out of room for contacts or rows of constraints; None without a limit."""
        self._domain_scale: float | None = None

    def add(self, reward: Array, ended: Array, infos: Mapping[str, Any], *, steps: int | Array = 1) -> None:
        """Adds the rewards and ends of `steps` control steps of each env."""
        self._return += reward
        self._length += steps
        self._limited += int(np.sum(infos.get("limited", 0)))
        self.nan_resets += int(np.sum(infos.get("diverged", 0)))
        if "overflowed" in infos:
            self._add_overflows(int(np.sum(infos["overflowed"])))
        self._domain_scale = infos.get("domain_scale", self._domain_scale)
        if ended.any():
            kind = infos.get("reset_class", np.full(len(ended), -1))
            parts = (self._return, self._length, infos["success"], kind)
            self._ended = np.concatenate([self._ended, np.stack([part[ended] for part in parts], axis=1)])
            self._return[ended], self._length[ended] = 0.0, 0

    def add_turns(self, turns: Sequence[Mapping[str, Any]]) -> int:
        """Adds what several calls of `add` would, and returns the control steps, over all envs.

        What is on a device is fetched in one copy, after the last turn.

        Args: turns: `reward`, `ended`, perhaps `steps`, and what each has of `LOGGED`, (N,) each.
        """
        total = 0
        for row in _on_host(turns):
            reward, ended, steps = row.pop("reward"), row.pop("ended"), row.pop("steps", 1)
            self.add(reward, ended, row, steps=steps)
            total += int(np.sum(np.broadcast_to(steps, len(reward))))
        return total

    def _add_overflows(self, more: int | None) -> None:
        if more is not None:
            self.overflows = (self.overflows or 0) + more

    def drain(self) -> Tally:
        """Returns the counts since the last call, for a log in another process."""
        tally = Tally(
            self._ended, self._limited, self.nan_resets, self._classes, self._domain_scale, self.overflows
        )
        self._ended, self._limited, self.nan_resets, self.overflows = np.zeros((0, 4)), 0, 0, None
        return tally

    def merge(self, tally: Tally) -> None:
        """Takes what a log in another process has counted."""
        self._ended = np.concatenate([self._ended, tally.ended])
        self._limited += tally.limited
        self.nan_resets += tally.nan_resets
        self._add_overflows(tally.overflows)
        self._classes = tally.classes
        self._domain_scale = tally.domain_scale

    def take(self) -> dict[str, float]:
        """Returns their means and counts since the last call."""
        means: dict[str, float] = {"episodes": float(len(self._ended)), "safety_clamps": float(self._limited)}
        if self._domain_scale is not None:
            means["domain_scale"] = self._domain_scale
        if len(self._ended):
            names = ("return", "length", "success")
            means |= dict(zip(names, self._ended[:, :3].mean(axis=0).tolist(), strict=True))
        for number, name in enumerate(self._classes):
            success = self._ended[self._ended[:, 3] == number, 2]
            if len(success):
                means |= {f"episodes_{name}": float(len(success)), f"success_{name}": float(success.mean())}
        self._ended, self._limited = np.zeros((0, 4)), 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {
            "return": self._return.copy(),
            "length": self._length.copy(),
            "ended": self._ended,
            "limited": self._limited,
            "nan_resets": self.nan_resets,
            "overflows": self.overflows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._return, self._length = state["return"].copy(), state["length"].copy()
        ended = state["ended"]  # (n, 3) of a checkpoint that knows no classes
        self._ended = np.concatenate([ended, np.full((len(ended), 4 - ended.shape[1]), -1.0)], axis=1)
        self._limited = int(state["limited"])
        self.nan_resets = int(state["nan_resets"])
        self.overflows = state.get("overflows")  # not in older checkpoints


def _on_host(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns turns in numpy arrays; a turn may lack what others have. float64 has all their numbers."""
    rows = [dict(turn) for turn in turns]
    places = [(row, name) for row in rows for name, value in row.items() if isinstance(value, Tensor)]
    if not places:
        return rows
    whole = to_numpy(torch.stack([row[name].double() for row, name in places]))
    for (row, name), numbers in zip(places, whole, strict=True):
        kind: Any = row[name].dtype
        is_whole = not kind.is_floating_point
        row[name] = numbers.astype(bool if kind == torch.bool else int) if is_whole else numbers
    return rows


def _starts(infos: Mapping[str, Any]) -> Array | None:
    """Returns the class and the row (B, 2) in which each env's episode began; None without a bank."""
    if "reset_class" not in infos:
        return None
    return np.stack([infos["reset_class"], infos["reset_row"]], axis=1)
