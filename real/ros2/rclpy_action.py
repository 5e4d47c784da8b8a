"""Actions on genuine rclpy; see `rclpy_node`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from robot_rl.real.ros2.api import GoalCallbacks, GoalStatus, Message, Ros2Error
from robot_rl.real.ros2.rclpy_guards import guarded, rclpy_module, translated
from robot_rl.real.ros2.rclpy_messages import RosMessages

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
_ASK_S = 5.0
"""Longest wait for the node's thread to ask for a result."""


class SpinningNode(Protocol):
    """The part of `rclpy_node.RclpyNode` that is used here."""

    ros: Any
    messages: RosMessages
    unfinished: set[object]

    def resolve(self, name: str) -> str: ...

    def message(self, kind: str, **fields: Any) -> Message: ...

    def run(self, function: Callable[[], Any], timeout_s: float, what: str) -> Any: ...

    def run_soon(self, function: Callable[[], Any], what: str) -> None: ...

    def wait_for(
        self, ask: Callable[[], Any], timeout_s: float, what: str, is_there: Callable[[], bool]
    ) -> Any: ...


class RclpyGoal:
    """A goal as its server sees it."""

    def __init__(self, node: SpinningNode, handle: Any) -> None:
        self._node, self._handle = node, handle
        self.goal = node.messages.from_ros(handle.request)
        self.result: Message | None = None

    @property
    def cancel_requested(self) -> bool:
        return self._handle.is_cancel_requested

    def feedback(self, feedback: Message) -> None:
        sent = self._node.messages.to_ros(feedback)
        with translated("action: feedback"):
            self._handle.publish_feedback(sent)

    def succeed(self, result: Message) -> None:
        self._end(result, self._handle.succeed)

    def cancel(self, result: Message) -> None:
        self._end(result, self._handle.canceled)

    def abort(self, result: Message) -> None:
        self._end(result, self._handle.abort)

    def _end(self, result: Message, end: Callable[[], None]) -> None:
        if self.result is not None:
            raise Ros2Error("action: a goal that has ended cannot end again. End a goal once.")
        with translated("action: the end of a goal"):
            end()
        self.result = result


class RclpyActionServer:
    """Serves one action; `execute` runs on its own thread, and rclpy awaits it."""

    def __init__(self, node: SpinningNode, kind: str, name: str, callbacks: GoalCallbacks) -> None:
        self._node, self._kind, self._execute = node, kind, callbacks.execute
        action = rclpy_module("action")

        def on_goal(request: Any) -> Any:
            agreed = _agreed(lambda: callbacks.accept(node.messages.from_ros(request)), name)
            return action.GoalResponse.ACCEPT if agreed else action.GoalResponse.REJECT

        def on_cancel(handle: Any) -> Any:
            agreed = _agreed(lambda: callbacks.cancel(RclpyGoal(node, handle)), name)
            return action.CancelResponse.ACCEPT if agreed else action.CancelResponse.REJECT

        cls = node.messages.ros_class(kind)
        with translated(f"action server {name!r} ({kind})"):
            self._made: Any = action.ActionServer(
                node.ros,
                cls,
                node.resolve(name),  # rclpy remaps topics and services, but no actions
                execute_callback=self._run,
                goal_callback=on_goal,
                cancel_callback=on_cancel,
            )

    def close(self) -> None:
        self._made.destroy()

    async def _run(self, handle: Any) -> Any:
        goal = RclpyGoal(self._node, handle)
        over: Any = rclpy_module("task").Future(executor=self._node.ros.executor)
        self._node.unfinished.add(goal)
        try:
            threading.Thread(target=self._execute_one, args=(goal, over), daemon=True).start()
            await over
            return self._node.messages.to_ros(goal.result)
        finally:
            self._node.unfinished.discard(goal)

    def _execute_one(self, goal: RclpyGoal, over: Any) -> None:
        try:
            self._execute(goal)
        except Exception:
            logger.exception("action %s: executing a goal failed; it is aborted", self._kind)
        with contextlib.suppress(Ros2Error):  # the node is closed
            if goal.result is None:
                goal.abort(self._node.message(f"{self._kind}_Result"))
            # On the executor's thread, which this wakes: set from here, it would not be seen before the next
            # message, and never if the node closes.
            self._node.run_soon(lambda: over.set_result(None), self._kind)


class RclpyClientGoal:
    """A goal as its client sees it."""

    def __init__(self, node: SpinningNode, handle: Any, what: str, is_there: Callable[[], bool]) -> None:
        self._node, self._handle, self._what, self._is_there = node, handle, what, is_there
        self.id = bytes(handle.goal_id.uuid)
        self._result: Any = node.run(handle.get_result_async, _ASK_S, what) if handle.accepted else None

    @property
    def accepted(self) -> bool:
        return self._handle.accepted

    def result(self, timeout_s: float) -> tuple[int, Message]:
        if self._result is None:
            raise Ros2Error(f"{self._what}: the goal was rejected: it has no result.")
        end_s = time.monotonic() + timeout_s
        while not self._result.done():  # the future is kept for later calls
            if not self._is_there():
                raise Ros2Error(
                    f"{self._what}: no result; the goal was {self._status()}, what became of it is not "
                    "known. Stop the arm by other means, then start the controller again."
                )
            if time.monotonic() >= end_s:
                raise Ros2Error(
                    f"{self._what}: the goal has not ended within {timeout_s:g} s (it is {self._status()}). "
                    "Wait longer, or cancel it."
                )
            time.sleep(_LOOK_S)
        with translated(self._what):
            response = self._result.result()
        return GoalStatus(response.status), self._node.messages.from_ros(response.result)

    def cancel(self, timeout_s: float) -> bool:
        response = self._node.wait_for(self._handle.cancel_goal_async, timeout_s, self._what, self._is_there)
        return any(bytes(one.goal_id.uuid) == self.id for one in response.goals_canceling)

    def _status(self) -> str:
        """Returns the goal's status from the status topic."""
        return GoalStatus(self._handle.status).name.lower()


class RclpyActionClient:
    """Sends goals to one action."""

    def __init__(self, node: SpinningNode, kind: str, name: str) -> None:
        self._node = node
        full_name, cls = node.resolve(name), node.messages.ros_class(kind)
        self._what = f"action {full_name}"
        with translated(f"client of {self._what} ({kind})"):
            # By its resolved name: rclpy remaps topics and services, but no actions.
            self._made: Any = rclpy_module("action").ActionClient(node.ros, cls, full_name)

    def wait(self, timeout_s: float) -> bool:
        with translated(self._what):
            return self._made.wait_for_server(timeout_sec=timeout_s)

    def send(
        self, goal: Message, timeout_s: float, on_feedback: Callable[[Message], None] | None = None
    ) -> RclpyClientGoal:
        end_s = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            raise Ros2Error(
                f"{self._what}: no server (waited {timeout_s:g} s). Start the controller; check "
                "ROS_DOMAIN_ID, namespace and remapping."
            )

        def hear(message: Any) -> None:
            if on_feedback is not None:
                on_feedback(self._node.messages.from_ros(message.feedback))

        is_there, sent = self._made.server_is_ready, self._node.messages.to_ros(goal)
        handle = self._node.wait_for(
            lambda: self._made.send_goal_async(sent, guarded(hear, self._what)),
            max(0.0, end_s - time.monotonic()),
            self._what,
            is_there,
        )
        return RclpyClientGoal(self._node, handle, self._what, is_there)


def _agreed(ask: Callable[[], bool], name: str) -> bool:
    """Whether a callback agrees; a failure means no, and does not end the executor."""
    try:
        return bool(ask())
    except Exception:
        logger.exception("action %s: a callback failed, which means no", name)
        return False
