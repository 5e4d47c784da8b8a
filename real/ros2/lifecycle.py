"""A managed node: the life cycle of ROS 2 (configure, activate, deactivate, cleanup, shutdown).

The states, transitions and services of https://design.ros2.org/articles/node_lifecycle.html, with the
numbers of lifecycle_msgs: `ros2 lifecycle set /node configure` and launch's LifecycleNode work on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

from robot_rl.core.errors import nearest
from robot_rl.real.ros2.api import Message, Node, Ros2Error

logger = logging.getLogger(__name__)


class State(IntEnum):
    """The state of a node; ten and above while a callback runs."""

    UNKNOWN = 0
    UNCONFIGURED = 1
    INACTIVE = 2
    ACTIVE = 3
    FINALIZED = 4
    CONFIGURING = 10
    CLEANINGUP = 11
    SHUTTINGDOWN = 12
    ACTIVATING = 13
    DEACTIVATING = 14
    ERRORPROCESSING = 15


class Transition(NamedTuple):
    """One arrow of the state machine."""

    id: int
    label: str
    start: State
    goal: State


_SUCCESS, _FAILURE, _ERROR = 0, 1, 2
_OUTCOMES = ("transition_success", "transition_failure", "transition_error")


def _outcomes(first_id: int, start: State, success: State, failure: State, error: State) -> list[Transition]:
    goals = (success, failure, error)
    return [Transition(first_id + k, _OUTCOMES[k], start, goals[k]) for k in range(3)]


def _machine() -> list[Transition]:
    unconfigured, inactive, active, finalized = list(State)[1:5]
    broken = State.ERRORPROCESSING
    return [
        Transition(1, "configure", unconfigured, State.CONFIGURING),
        *_outcomes(10, State.CONFIGURING, inactive, unconfigured, broken),
        Transition(2, "cleanup", inactive, State.CLEANINGUP),
        *_outcomes(20, State.CLEANINGUP, unconfigured, inactive, broken),
        Transition(3, "activate", inactive, State.ACTIVATING),
        *_outcomes(30, State.ACTIVATING, active, inactive, broken),
        Transition(4, "deactivate", active, State.DEACTIVATING),
        *_outcomes(40, State.DEACTIVATING, inactive, active, broken),
        Transition(5, "shutdown", unconfigured, State.SHUTTINGDOWN),
        Transition(6, "shutdown", inactive, State.SHUTTINGDOWN),
        Transition(7, "shutdown", active, State.SHUTTINGDOWN),
        *_outcomes(50, State.SHUTTINGDOWN, finalized, finalized, broken),
        *_outcomes(60, broken, unconfigured, finalized, finalized),
    ]


TRANSITIONS = _machine()
CALLBACKS = ("configure", "cleanup", "activate", "deactivate", "shutdown", "error")


class Lifecycle:
    """The life cycle of one node; the node starts unconfigured."""

    def __init__(self, node: Node, callbacks: Mapping[str, Callable[[], bool]]) -> None:
        """Takes the callbacks of transitions by their labels, and that of "error".

        A callback returns whether it worked; one that raises leads to "error". Without a callback, or if it
        fails too, "error" leads to the end. All other transitions without a callback work.

        Raises:
            Ros2Error: a callback of another name.
        """
        for label in callbacks:
            if label not in CALLBACKS:
                raise Ros2Error(
                    f"lifecycle of {node.name}: no transition {label!r}.{nearest(label, CALLBACKS)}"
                )
        self._node = node
        self._callbacks = {"error": lambda: False, **callbacks}
        self._lock = threading.RLock()
        self._state = State.UNCONFIGURED
        self._events = node.create_publisher("lifecycle_msgs/msg/TransitionEvent", "~/transition_event")
        answers = {
            "change_state": ("ChangeState", self._on_change),
            "get_state": ("GetState", self._on_state),
            "get_available_states": ("GetAvailableStates", self._on_states),
            "get_available_transitions": ("GetAvailableTransitions", self._on_transitions),
            "get_transition_graph": ("GetAvailableTransitions", self._on_graph),
        }
        for name, (kind, answer) in answers.items():
            node.create_service(f"lifecycle_msgs/srv/{kind}", f"~/{name}", answer)

    def _go(self, transition: Transition) -> bool:
        self._enter(transition)
        outcome = self._run(transition.label)
        self._leave(outcome)
        if outcome == _ERROR:
            self._leave(self._run("error"))
        return outcome == _SUCCESS

    def _run(self, label: str) -> int:
        callback = self._callbacks.get(label)
        try:
            return _SUCCESS if callback is None or callback() else _FAILURE
        except Exception:
            logger.exception("lifecycle of %s: %s failed", self._node.name, label)
            return _ERROR

    def _leave(self, outcome: int) -> None:
        self._enter(next(t for t in TRANSITIONS if t.start == self._state and t.label == _OUTCOMES[outcome]))

    def _enter(self, transition: Transition) -> None:
        self._state = transition.goal
        event = self._node.message("lifecycle_msgs/msg/TransitionEvent", timestamp=self._node.now_ns())
        _fill(event, transition)
        self._events.publish(event)

    def _on_change(self, request: Message) -> Message:
        asked = request.transition
        with self._lock:
            possible = [one for one in TRANSITIONS if one.start == self._state]
            # As in rcl: a label wins over the number.
            found = next(
                (t for t in possible if (t.label == asked.label if asked.label else t.id == asked.id)), None
            )
            done = found is not None and self._go(found)
        return self._node.message("lifecycle_msgs/srv/ChangeState_Response", success=done)

    def _on_state(self, request: Message) -> Message:
        return self._node.message(
            "lifecycle_msgs/srv/GetState_Response", current_state=self._named(self._state)
        )

    def _on_states(self, request: Message) -> Message:
        states = [self._named(state) for state in State]
        return self._node.message("lifecycle_msgs/srv/GetAvailableStates_Response", available_states=states)

    def _on_transitions(self, request: Message) -> Message:
        return self._described([one for one in TRANSITIONS if one.start == self._state])

    def _on_graph(self, request: Message) -> Message:
        return self._described(TRANSITIONS)

    def _described(self, transitions: list[Transition]) -> Message:
        found: list[Message] = []
        for transition in transitions:
            found.append(self._node.message("lifecycle_msgs/msg/TransitionDescription"))
            _fill(found[-1], transition)
        return self._node.message(
            "lifecycle_msgs/srv/GetAvailableTransitions_Response", available_transitions=found
        )

    def _named(self, state: State) -> Message:
        return self._node.message("lifecycle_msgs/msg/State", id=int(state), label=_label(state))


def _fill(message: Message, transition: Transition) -> None:
    message.transition.id, message.transition.label = transition.id, transition.label
    message.start_state.id, message.start_state.label = int(transition.start), _label(transition.start)
    message.goal_state.id, message.goal_state.label = int(transition.goal), _label(transition.goal)


def _label(state: State) -> str:
    return state.name.lower()
