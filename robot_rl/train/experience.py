"""What the learner draws from: replayed steps, or windows of demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from robot_rl.algos.progress import ProgressBatch, ProgressSampler
from robot_rl.core.policy import DemoBatch
from robot_rl.data.demos import ChunkSampler
from robot_rl.data.pool import EpisodePool
from robot_rl.data.replay import StepBatch, TransitionBatch
from robot_rl.data.transitions import ChunkBatch

Added = TypeVar("Added", int, None, covariant=True)


class Keeper(Protocol[Added]):
    """Keeps the steps of one source: a replay, or a recorder."""

    def add(self, steps: StepBatch) -> Added: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class OneForEach(Generic[Added]):
    """Keepers of several sources: the steps of each go to its own, in which it is the only actor."""

    def __init__(self, keepers: Sequence[Keeper[Added]]) -> None:
        """Args: keepers: one of each source, in the order of the run's sources."""
        self._keepers = keepers

    def add(self, steps: StepBatch) -> Added:
        return self._keepers[steps.actor].add(replace(steps, actor=0))

    def state_dict(self) -> dict[str, Any]:
        return {"sources": [keeper.state_dict() for keeper in self._keepers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for keeper, saved in zip(self._keepers, state["sources"], strict=True):
            keeper.load_state_dict(saved)


@dataclass
class StaleSteps:
    """What a replay does with steps whose policy is older than a bound."""

    bound: int
    """Learner updates by which the weights that acted may be older than the learner's."""
    then: Literal["drop", "keep"]
    learner: Callable[[], int]
    """Returns the updates that the learner has made."""
    count: int = 0
    """Stale steps since the last row of metrics, dropped or kept."""
    _cut: set[int] = field(default_factory=lambda: set[int]())
    """Actors whose last steps were dropped: what follows does not continue what the replay has of them."""

    def passed(self, steps: StepBatch) -> StepBatch | None:
        """Returns what the replay takes of the steps; None if they are dropped."""
        if self.learner() - steps.policy_version > self.bound:
            self.count += len(steps.reward)
            if self.then == "drop":
                self._cut.add(steps.actor)
                return None
        if steps.actor in self._cut:
            self._cut.remove(steps.actor)
            return replace(steps, begins=True)
        return steps


class ReplayExperience:
    """Keeps the steps of the sources, and draws learners' batches from them."""

    def __init__(
        self,
        replay: Keeper[int],
        *,
        draw: Callable[[np.random.Generator], TransitionBatch | ChunkBatch],
        seed: int,
        device: str = "cpu",
        recorder: Keeper[None] | None = None,
        earlier: EpisodePool | None = None,
        stale: StaleSteps | None = None,
        has_person: bool = False,
    ) -> None:
        """Puts them together.

        Args:
            replay: takes the steps of the sources.
            draw: returns a learner's batch, from that replay or from what mixes it with others.
            seed: of the draws.
            device: where the batches go.
            recorder: keeps every step on the disk.
            earlier: what earlier runs experienced, if `draw` takes from it.
            stale: what becomes of steps of an old policy; None: they are as good as any.
            has_person: whether a person can take over; then their share is counted.
        """
        self._recorder, self._earlier, self._has_person = recorder, earlier, has_person
        self._stale = stale
        self._replay, self._draw = replay, draw
        self._rng = np.random.default_rng(seed)
        self._device = device
        self._added, self._by_person = 0, 0

    def add(self, steps: StepBatch) -> int:
        if self._recorder is not None:
            self._recorder.add(steps)
        kept = steps if self._stale is None else self._stale.passed(steps)
        count = len(steps.reward) if kept is None else self._replay.add(kept)
        self._added += count
        self._by_person += count * (steps.source == "human")
        return count

    def sample(self) -> TransitionBatch | ChunkBatch:
        batch = self._draw(self._rng)
        return batch if self._device == "cpu" else batch.to(self._device)

    def metrics(self) -> dict[str, float]:
        """Returns how reuse does, and since the last call the stale steps and a person's share of all."""
        found = {} if self._earlier is None else self._earlier.metrics()
        row = {f"replay/{name}": value for name, value in found.items()}
        if self._stale is not None and self._stale.count:
            row["collect/stale_steps"] = float(self._stale.count)
            self._stale.count = 0
        if self._has_person and self._added:
            row["collect/human_share"] = self._by_person / self._added
            self._added, self._by_person = 0, 0
        return row

    def state_dict(self) -> dict[str, Any]:
        """Returns the online replay and the generator; demonstrations are built again from their files."""
        state: dict[str, Any] = {"replay": self._replay.state_dict(), "rng": self._rng.bit_generator.state}
        if self._has_person:
            state["shares"] = [self._added, self._by_person]
        parts = {"recorder": self._recorder, "earlier": self._earlier}
        return state | {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replay.load_state_dict(state["replay"])
        if (
            self._recorder is not None and "recorder" in state
        ):  # else the checkpoint is from before there was one
            self._recorder.load_state_dict(state["recorder"])
        if self._earlier is not None:
            self._earlier.load_state_dict(state["earlier"])
        self._rng.bit_generator.state = state["rng"]
        self._added, self._by_person = state.get("shares", (0, 0))


class DemoExperience:
    """Windows of demonstrations; there is nothing to add to them."""

    def __init__(
        self, sampler: ChunkSampler | ProgressSampler, *, batch: int, seed: int, device: str = "cpu"
    ) -> None:
        self._sampler, self._batch, self._device = sampler, batch, device
        self._rng = np.random.default_rng(seed)

    def add(self, steps: StepBatch) -> int:
        raise RuntimeError("demonstrations are read only: a run that collects needs a ReplayExperience")

    def sample(self) -> DemoBatch | ProgressBatch:
        batch = self._sampler.sample(self._batch, self._rng)
        return batch if self._device == "cpu" else batch.to(self._device)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
