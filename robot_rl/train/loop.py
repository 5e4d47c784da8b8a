"""The one loop. Every phase of every run is this function with other objects in it.

    collect  ->  replay  ->  sample  ->  update  ->  whatever is due
    sources      experience  learners                publish, metrics, evaluation, checkpoint

Behaviour cloning has no source and a pace that always owes an update. Residual RL has one source, or several
with a budget each, and pays its updates by a ratio of all their steps. Several learners, such as a policy and
a student of it, each have an algorithm, a batch recipe and a pace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from robot_rl.core.algorithm import Algorithm
from robot_rl.data.transitions import Segment
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.sources import Source
from robot_rl.rollout.weights import Publisher, load_weights
from robot_rl.train.schedule import Always, Counters, Every, Ratio

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A part of a run that a checkpoint restores."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Experience(Stateful, Protocol):
    """What keeps the segments that the sources collect."""

    def add(self, segment: Any, /) -> None: ...


class Batches(Stateful, Protocol):
    """A batch recipe: draws a learner's batches from experience, or from demonstrations."""

    def sample(self) -> Any:
        """Returns one batch."""
        ...


class Meter:
    """Means of metrics between two rows of metrics.jsonl; adds them up without waiting for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        for name, value in metrics.items():
            number = torch.as_tensor(value).detach().to(torch.float64)
            self._sums[name] = self._sums[name] + number if name in self._sums else number
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """Returns the means since the last call."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])


@dataclass
class Learner:
    """An algorithm, what it learns from, and how often."""

    algorithm: Algorithm
    batches: Batches
    pace: Ratio | Always
    """How many updates it owes."""
    publisher: Publisher | None = None
    """Takes snapshots of its weights for its sources; None if no source acts with them."""
    name: str = ""
    """Group of its metrics; empty for that of the phase."""
    meter: Meter = field(default_factory=Meter)
    updates: int = 0

    def update(self, stage: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Takes one update."""
        with stage("sample"):
            batch = self.batches.sample()
        with stage("update"):
            self.meter.add(self.algorithm.update(batch))
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates} | {name: part.state_dict() for name, part in self._parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = int(state["updates"])
        for name, part in self._parts():
            part.load_state_dict(state[name])

    def _parts(self) -> list[tuple[str, Stateful]]:
        names = ("algorithm", "batches", "pace", "publisher", "meter")
        return [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]


@dataclass
class Hook:
    """Something to do now and then; `read` returns the clock of its schedule."""

    name: str
    every: Every
    read: Callable[[Counters], float]
    action: Callable[[Counters], None]


@dataclass
class Pacer:
    """When the run ends, which sources still collect, and what is due."""

    finished: Callable[[Counters], bool]
    budgets: Sequence[int] = ()
    """Control steps that each source may collect; without any, sources collect until the run is finished."""
    hooks: Sequence[Hook] = ()
    """In the order they run; the checkpoint comes last, so that it holds what the others changed."""
    lost: dict[int, ActorError] = field(default_factory=lambda: dict[int, ActorError]())
    """Sources that cannot go on, and why; the others do."""

    @classmethod
    def of_budgets(cls, budgets: Sequence[int]) -> Pacer:
        """Returns the pacer of a run that ends when every source has spent its budget."""

        def finished(at: Counters) -> bool:
            return all(at.of_source(source) >= budget for source, budget in enumerate(budgets))

        return cls(finished, budgets)

    def is_spent(self, source: int, counters: Counters) -> bool:
        """Returns whether a source has spent its budget."""
        return bool(self.budgets) and counters.of_source(source) >= self.budgets[source]

    def require_source(self, number: int, counters: Counters) -> None:
        """Passes unless all of the run's sources that have not spent their budgets are lost.

        Raises:
            ActorError: of the first.
        """
        left = [source for source in range(number) if not self.is_spent(source, counters)]
        if self.lost and all(source in self.lost for source in left):
            raise next(iter(self.lost.values()))

    def run_due(self, counters: Counters) -> None:
        for hook in self.hooks:
            if hook.every.due(hook.read(counters)):
                hook.action(counters)

    def state_dict(self) -> dict[str, Any]:
        return {"hooks": {hook.name: hook.every.state_dict() for hook in self.hooks}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for hook in self.hooks:
            hook.every.load_state_dict(state["hooks"][hook.name])


@dataclass
class Run:
    """Everything the loop needs; `assemble` builds it, a checkpoint restores it."""

    learners: Sequence[Learner]
    """The first one leads: its updates are those of `counters`, and its weights are those that act."""
    pacer: Pacer
    stage: Callable[[str], AbstractContextManager[Any]]
    """Times a named stage."""
    sources: Sequence[Source] = ()
    experience: Experience | None = None
    """Keeps what the sources collect; None without sources. It may be the batches of a learner too."""
    counters: Counters = field(default_factory=Counters)
    result: Callable[[], Mapping[str, Any] | None] | None = None
    """Returns the weights of the result, where they may be others than the leader's newest; None: those."""

    @property
    def leader(self) -> Learner:
        return self.learners[0]

    @property
    def publisher(self) -> Publisher:
        """The publisher of the weights that act."""
        assert self.leader.publisher is not None, "a run with sources publishes the leader's weights"
        return self.leader.publisher

    def is_done(self, actor: int, source: Source) -> bool:
        """Returns whether a source collects no more; one that has spent its budget frees its device."""
        if actor in self.pacer.lost:
            return True
        is_spent = self.pacer.is_spent(actor, self.counters)
        if is_spent:
            source.rest()
        return is_spent

    def collected(self, actor: int, source: Source) -> Segment | None:
        """Returns what a source has collected; a source that cannot go on is left out from now on."""
        try:
            return source.collect(self.publisher)
        except ActorError as error:
            self.pacer.lost[actor] = error
            source.rest()
            logger.warning("%s The run goes on without it, if it has other sources.", error)
            return None

    def keep(self, segment: Segment) -> None:
        """Keeps and counts what a source collected."""
        assert self.experience is not None, "a run with sources keeps what they collect"
        self.experience.add(segment)
        self.counters.add(segment)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that influences learning, between two turns of the loop."""
        kept = None if self._is_batches else self.experience
        return {
            "counters": self.counters.state_dict(),
            "pacer": self.pacer.state_dict(),
            "sources": [source.state_dict() for source in self.sources],
            "experience": None if kept is None else kept.state_dict(),
            "learners": [learner.state_dict() for learner in self.learners],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, also of versions in which a run had one learner."""
        state = state if "learners" in state else _with_learners(state)
        self.counters.load_state_dict(state["counters"])
        self.pacer.load_state_dict(state["pacer"])
        if self.experience is not None and not self._is_batches:
            self.experience.load_state_dict(state["experience"])
        for parts, saved in ((self.sources, state["sources"]), (self.learners, state["learners"])):
            for part, one in zip(parts, saved, strict=True):
                part.load_state_dict(one)

    def hand_over(self, policy: torch.nn.Module) -> None:
        """Gives `policy` the leader's newest weights; what acts may be `publish_every` updates behind."""
        chosen = None if self.result is None else self.result()
        load_weights(policy, self.leader.algorithm.policy_weights() if chosen is None else chosen)

    @property
    def _is_batches(self) -> bool:
        """Returns whether the experience is a learner's batches too: then its state is the learner's."""
        experience: Any = self.experience
        return any(learner.batches is experience for learner in self.learners)


def train(run: Run) -> None:
    """Collects, learns and does what is due until the budgets are spent."""
    counters = run.counters
    while not run.pacer.finished(counters):
        run.pacer.require_source(len(run.sources), counters)
        for actor, source in enumerate(run.sources):
            if run.is_done(actor, source):
                continue
            with run.stage("collect"):
                segment = run.collected(actor, source)
            if segment is not None:
                segment.actor = actor
                with run.stage("replay"):
                    run.keep(segment)
        for learner in run.learners:
            for _ in range(learner.pace.owed(counters.env_steps)):
                learner.update(run.stage)
        counters.updates = run.leader.updates
        run.pacer.run_due(counters)


def _with_learners(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a run from that of versions in which it had one learner."""
    leader = {
        "updates": state["counters"]["updates"],
        "algorithm": state["algorithm"],
        "batches": state["experience"],
        "pace": state["pacer"]["updates"],
        "publisher": state["publisher"] if "publisher" in state else state["handle"],
        "meter": state["meter"],
    }
    return {**state, "learners": [leader]}
