"""What the sources collect, replayed and recorded, and how learners draw their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.data.pool import EpisodePool
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.transitions import StepBatch
from robot_rl.train.loop import Experience
from robot_rl.train.recording import Recorder


class OneForEach:
    """The replays of several sources: the steps of each go to its own, in which it is the only actor."""

    def __init__(self, replays: Sequence[Experience]) -> None:
        """Args: replays: one of each source, in the order of the run's sources."""
        self._replays = replays

    def add(self, segment: StepBatch) -> None:
        self._replays[segment.actor].add(replace(segment, actor=0))

    def state_dict(self) -> dict[str, Any]:
        return {"sources": [replay.state_dict() for replay in self._replays]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for replay, saved in zip(self._replays, state["sources"], strict=True):
            replay.load_state_dict(saved)


@dataclass
class StaleSteps:
    """The rule of a replay for steps whose policy is older than a bound."""

    bound: int
    """Learner updates by which the weights that acted may be older than the learner's."""
    then: Literal["drop", "keep"]
    learner: Callable[[], int]
    """Returns the updates that the learner has made."""
    count: int = 0
    """Stale steps since the last row of metrics, dropped or kept."""

    def drops(self, steps: StepBatch) -> bool:
        """Counts the steps if they are stale, and returns whether the replay leaves them out."""
        if self.learner() - steps.policy_version <= self.bound:
            return False
        self.count += steps.cost
        return self.then == "drop"


class SourceReplay:
    """The replay of one source, and the recorder of its steps, if there is one.

    A checkpoint then has the length of the record, and what the record lacks.
    """

    def __init__(
        self, replay: ReplayBuffer, *, recorder: Recorder | None = None, stale: StaleSteps | None = None
    ) -> None:
        """Puts them together.

        Args:
            replay: of the source.
            recorder: new, or of a run whose checkpoint follows; its pictures are exact.
            stale: what becomes of steps of an old policy; None: they are kept.
        """
        self._replay, self._recorder, self._stale = replay, recorder, stale
        self._is_recorded = recorder is not None and replay.keeps_all
        self._is_cut = False  # the last steps were dropped: what follows does not continue what is there

    def add(self, steps: StepBatch) -> None:
        if self._recorder is not None:
            self._recorder.add(steps)
        if self._stale is not None and self._stale.drops(steps):
            self._is_cut, self._is_recorded = True, False  # the record has more than the replay from now on
            return
        if self._is_cut:
            self._is_cut, steps = False, replace(steps, begins=True)
        self._replay.add(steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns where record and replay stand, after everything so far is on the disk."""
        if self._recorder is None:
            return self._replay.state_dict()
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
        if self._recorder is None:
            return self._replay.load_state_dict(state)
        if "recorder" in state:
            self._recorder.load_state_dict(state["recorder"])
        if "unrecorded" not in state:  # stale steps were dropped, or an earlier version kept all in it
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
    """Keeps the steps of the sources, and counts what becomes of them."""

    def __init__(
        self,
        replay: Experience,
        *,
        earlier: EpisodePool | None = None,
        stale: StaleSteps | None = None,
        has_person: bool = False,
    ) -> None:
        """Puts them together.

        Args:
            replay: takes the steps of the sources.
            earlier: what earlier runs experienced, if learners draw from it.
            stale: counts the steps of an old policy.
            has_person: whether a person can take over; then their share is counted.
        """
        self._replay, self._earlier, self._stale, self._has_person = replay, earlier, stale, has_person
        self._added, self._by_person = 0, 0

    def add(self, segment: StepBatch) -> None:
        self._replay.add(segment)
        self._added += segment.cost
        self._by_person += segment.cost * (segment.source == "human")

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
        """Returns the online replay; demonstrations are built again from their files."""
        state: dict[str, Any] = {"replay": self._replay.state_dict()}
        if self._has_person:
            state["shares"] = [self._added, self._by_person]
        return state if self._earlier is None else state | {"earlier": self._earlier.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        replay = state["replay"]
        self._replay.load_state_dict(_joined(replay, state["recorder"]) if "recorder" in state else replay)
        if self._earlier is not None:
            self._earlier.load_state_dict(state["earlier"])
        self._added, self._by_person = state.get("shares", (0, 0))


class Batch(Protocol):
    """What a learner reads at once."""

    def to(self, device: str) -> Any: ...


class Draws:
    """A batch recipe: each batch is drawn with the recipe's own generator."""

    def __init__(
        self, draw: Callable[[np.random.Generator], Batch], *, seed: int, device: str = "cpu"
    ) -> None:
        """Args: draw: returns a batch; seed: of the draws; device: where the batches go."""
        self._draw, self._device = draw, device
        self._rng = np.random.default_rng(seed)

    def sample(self) -> Any:
        batch = self._draw(self._rng)
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
