"""What the learner draws from: replayed steps, or windows of demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from robot_rl.algos.progress import ProgressBatch, ProgressSampler
from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.core.policy import DemoBatch
from robot_rl.data.demos import ChunkSampler
from robot_rl.data.pool import EpisodePool
from robot_rl.data.replay import ReplayBuffer, StepBatch, TransitionBatch
from robot_rl.data.transitions import ChunkBatch
from robot_rl.train.recording import Recorder


class Keeper(Protocol):
    """Keeps the steps of one source: a replay, with its record or without."""

    def add(self, steps: StepBatch) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class OneForEach:
    """Keepers of several sources: the steps of each go to its own, in which it is the only actor."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        """Args: keepers: one of each source, in the order of the run's sources."""
        self._keepers = keepers

    def add(self, steps: StepBatch) -> int:
        return self._keepers[steps.actor].add(replace(steps, actor=0))

    def state_dict(self) -> dict[str, Any]:
        return {"sources": [keeper.state_dict() for keeper in self._keepers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for keeper, saved in zip(self._keepers, state["sources"], strict=True):
            keeper.load_state_dict(saved)


class RecordedReplay:
    """A replay whose every step a recorder keeps: a checkpoint says how far, and what the record lacks."""

    def __init__(self, replay: ReplayBuffer, recorder: Recorder) -> None:
        """Args: recorder: new, or of a run whose checkpoint follows; its pictures are exact."""
        self._replay, self._recorder = replay, recorder
        self._is_recorded = True

    def add(self, steps: StepBatch) -> int:
        self._recorder.add(steps)
        return self._replay.add(steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns where record and replay stand, after everything so far is on the disk."""
        recorder = self._recorder.state_dict()
        if self._is_recorded:
            return {"recorder": recorder, "unrecorded": self._replay.unrecorded()}
        return {"recorder": recorder, "replay": self._replay.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores both: the replay from the record, which then ends where the checkpoint was made.

        Raises:
            CheckpointError: the record is damaged.
            DatasetError: it is not as it was.
        """
        if "recorder" in state:
            self._recorder.load_state_dict(state["recorder"])
        if "unrecorded" not in state:  # of a version that kept all in it, and recorded pictures with losses
            self._is_recorded = False
            return self._replay.load_state_dict(state.get("replay", state))
        try:
            self._replay.load_recorded(state["unrecorded"], self._recorder.newest_first())
        except DatasetError as error:
            raise CheckpointError(
                f"the replay cannot be restored from what the run recorded: {error} Resuming needs "
                "experience/ as it was: bring it back, or begin a new run, which can reuse this one."
            ) from error


class ReplayExperience:
    """Keeps the steps of the sources, and draws learners' batches from them."""

    def __init__(
        self,
        replay: Keeper,
        *,
        draw: Callable[[np.random.Generator], TransitionBatch | ChunkBatch],
        seed: int,
        device: str = "cpu",
        earlier: EpisodePool | None = None,
        has_person: bool = False,
    ) -> None:
        """Puts them together.

        Args:
            replay: takes the steps of the sources.
            draw: returns a learner's batch, from that replay or from what mixes it with others.
            seed: of the draws.
            device: where the batches go.
            earlier: what earlier runs experienced, if `draw` takes from it.
            has_person: whether a person can take over; then their share is counted.
        """
        self._earlier, self._has_person = earlier, has_person
        self._replay, self._draw = replay, draw
        self._rng = np.random.default_rng(seed)
        self._device = device
        self._added, self._by_person = 0, 0

    def add(self, steps: StepBatch) -> int:
        count = self._replay.add(steps)
        self._added += count
        self._by_person += count * (steps.source == "human")
        return count

    def sample(self) -> TransitionBatch | ChunkBatch:
        batch = self._draw(self._rng)
        return batch if self._device == "cpu" else batch.to(self._device)

    def metrics(self) -> dict[str, float]:
        """Returns how reuse does in this process, and a person's share of the steps since the last call."""
        found = {} if self._earlier is None else self._earlier.metrics()
        row = {f"replay/{name}": value for name, value in found.items()}
        if self._has_person and self._added:
            row["collect/human_share"] = self._by_person / self._added
            self._added, self._by_person = 0, 0
        return row

    def state_dict(self) -> dict[str, Any]:
        """Returns the online replay and the generator; demonstrations are built again from their files."""
        state: dict[str, Any] = {"replay": self._replay.state_dict(), "rng": self._rng.bit_generator.state}
        if self._has_person:
            state["shares"] = [self._added, self._by_person]
        return state if self._earlier is None else state | {"earlier": self._earlier.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        replay = state["replay"]
        self._replay.load_state_dict(_joined(replay, state["recorder"]) if "recorder" in state else replay)
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


def _joined(replay: Mapping[str, Any], recorder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state of recorded replays from that of versions which kept replays and recorders apart."""
    if "sources" not in replay:
        return {"replay": replay, "recorder": recorder}
    return {"sources": [_joined(*both) for both in zip(replay["sources"], recorder["sources"], strict=True)]}
