"""The one loop. Every phase of every run is this function with other objects in it.

    collect  ->  replay  ->  sample  ->  update  ->  whatever is due
    sources      experience              algorithm    publish, metrics, evaluation, checkpoint

Behaviour cloning has no source and a pacer that always owes an update; residual RL has one
source, or several with a budget each, and pays its updates by a ratio of all their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from robot_rl.core.algorithm import Algorithm
from robot_rl.data.transitions import StepBatch
from robot_rl.rollout.sources import Source
from robot_rl.rollout.weights import Publisher, load_weights
from robot_rl.train.meter import Meter
from robot_rl.train.schedule import Always, Counters, Every, Ratio


class Experience(Protocol):
    """What the learner draws from: a replay, or demonstrations."""

    def add(self, steps: Any) -> int:
        """Keeps what its sources collect and returns how many control steps that is."""
        ...

    def sample(self) -> Any:
        """Returns one learner batch."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class Hook:
    """Something to do now and then; `read` says which clock its schedule follows."""

    name: str
    every: Every
    read: Callable[[Counters], float]
    action: Callable[[Counters], None]


@dataclass
class Pacer:
    """When the run ends, how many updates it owes, and what is due."""

    finished: Callable[[Counters], bool]
    updates: Ratio | Always
    budgets: Sequence[int] = ()
    """Control steps that each source may collect; without any, sources collect until the run is finished."""
    hooks: Sequence[Hook] = ()
    """In the order they run; the checkpoint comes last, so that it holds what the others changed."""

    def is_spent(self, source: int, counters: Counters) -> bool:
        """Whether a source has spent its budget."""
        return bool(self.budgets) and counters.of_source(source) >= self.budgets[source]

    def run_due(self, counters: Counters) -> None:
        for hook in self.hooks:
            if hook.every.due(hook.read(counters)):
                hook.action(counters)

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self.updates.state_dict(),
            "hooks": {h.name: h.every.state_dict() for h in self.hooks},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates.load_state_dict(state["updates"])
        for hook in self.hooks:
            hook.every.load_state_dict(state["hooks"][hook.name])


@dataclass
class Run:
    """Everything the loop needs; `assemble` builds it, a checkpoint restores it."""

    sources: Sequence[Source]
    experience: Experience
    algorithm: Algorithm
    publisher: Publisher
    pacer: Pacer
    meter: Meter
    stage: Callable[[str], AbstractContextManager[Any]]
    """Times a named stage."""
    counters: Counters = field(default_factory=Counters)

    def state_dict(self) -> dict[str, Any]:
        """Returns all that influences learning, between two turns of the loop."""
        parts = {name: getattr(self, name).state_dict() for name in self._parts}
        return {**parts, "sources": [source.state_dict() for source in self.sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._parts:
            old = {"publisher": "handle"}.get(name, name)  # its name in earlier checkpoints
            getattr(self, name).load_state_dict(state[name] if name in state else state[old])
        for source, saved in zip(self.sources, state["sources"], strict=True):
            source.load_state_dict(saved)

    def hand_over(self, policy: torch.nn.Module) -> None:
        """Gives `policy` the learner's newest weights; what acts may be `publish_every` updates behind."""
        load_weights(policy, self.algorithm.policy_weights())

    _parts = ("counters", "experience", "algorithm", "publisher", "pacer", "meter")


def train(run: Run) -> None:
    """Collects, learns and does what is due until the budgets are spent."""
    counters = run.counters
    while not run.pacer.finished(counters):
        for actor, source in enumerate(run.sources):
            if run.pacer.is_spent(actor, counters):
                continue
            with run.stage("collect"):
                steps = source.collect(run.publisher)
            if isinstance(steps, StepBatch):
                steps.actor = actor
            if steps is not None:
                with run.stage("replay"):
                    counters.add(actor, run.experience.add(steps))
        for _ in range(run.pacer.updates.owed(counters.env_steps)):
            with run.stage("sample"):
                batch = run.experience.sample()
            with run.stage("update"):
                run.meter.add(run.algorithm.update(batch))
            counters.updates += 1
        run.pacer.run_due(counters)
