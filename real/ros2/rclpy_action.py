"""Actions on genuine rclpy; see `rclpy_node`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from robot_rl.real.ros2.api import GoalHandle, GoalStatus, Message, Ros2Error
from robot_rl.real.ros2.rclpy_node import guarded, rclpy_module

if TYPE_CHECKING:
    from robot_rl.real.ros2.rclpy_node import RclpyNode

logger = logging.getLogger(__name__)

_LOOK_S = 0.02


class RclpyGoal:
    """A goal as its server sees it."""

    def __init__(self, node: RclpyNode, handle: Any) -> None:
        self._node, self._handle = node, handle
        self._goal = node.messages.from_ros(handle.request)
        self.result: Message | None = None

    @property
    def goal(self) -> Message:
        return self._goal

    @property
    def cancel_requested(self) -> bool:
        return self._handle.is_cancel_requested

    def feedback(self, feedback: Message) -> None:
        self._handle.publish_feedback(self._node.messages.to_ros(feedback))

    def succeed(self, result: Message) -> None:
        self._end(result, self._handle.succeed)

    def cancel(self, result: Message) -> None:
        self._end(result, self._handle.canceled)

    def abort(self, result: Message) -> None:
        self._end(result, self._handle.abort)

    def _end(self, result: Message, end: Callable[[], None]) -> None:
        if self.result is not None:
            raise Ros2Error("action: a goal that has ended cannot end again. End a goal once.")
        self.result = result
        end()


class RclpyActionServer:
    """Serves one action; rclpy waits, while `execute` runs on a thread of its own."""

    def __init__(
        self,
        node: RclpyNode,
        kind: str,
        name: str,
        *,
        execute: Callable[[GoalHandle], None],
        accept: Callable[[Message], bool],
        cancel: Callable[[GoalHandle], bool],
    ) -> None:
        self._node, self._kind, self._execute = node, kind, execute
        action = rclpy_module("action")

        def on_goal(request: Any) -> Any:
            agreed = _agreed(lambda: accept(node.messages.from_ros(request)), name)
            return action.GoalResponse.ACCEPT if agreed else action.GoalResponse.REJECT

        def on_cancel(handle: Any) -> Any:
            agreed = _agreed(lambda: cancel(RclpyGoal(node, handle)), name)
            return action.CancelResponse.ACCEPT if agreed else action.CancelResponse.REJECT

        self._made: Any = action.ActionServer(
            node.ros,
            node.messages.ros_class(kind),
            name,
            execute_callback=self._run,
            goal_callback=on_goal,
            cancel_callback=on_cancel,
        )

    def close(self) -> None:
        self._made.destroy()

    async def _run(self, handle: Any) -> Any:
        goal = RclpyGoal(self._node, handle)
        over: Any = rclpy_module("task").Future(executor=self._node.ros.executor)
        threading.Thread(target=self._execute_one, args=(goal, over), daemon=True).start()
        await over
        return self._node.messages.to_ros(goal.result)

    def _execute_one(self, goal: RclpyGoal, over: Any) -> None:
        try:
            self._execute(goal)
        except Exception:
            logger.exception("action %s: executing a goal failed; it is aborted", self._kind)
        if goal.result is None:
            goal.abort(self._node.message(f"{self._kind}_Result"))
        over.set_result(None)


class RclpyClientGoal:
    """A goal as its client sees it."""

    def __init__(self, node: RclpyNode, handle: Any, what: str, is_there: Callable[[], bool]) -> None:
        self._node, self._handle, self._what, self._is_there = node, handle, what, is_there
        self.id = bytes(handle.goal_id.uuid)
        self._result: Any = handle.get_result_async() if handle.accepted else None

    @property
    def accepted(self) -> bool:
        return self._handle.accepted

    def result(self, timeout_s: float) -> tuple[int, Message]:
        if self._result is None:
            raise Ros2Error(f"{self._what}: the goal was rejected: it has no result.")
        end_s = time.monotonic() + timeout_s
        while not self._result.done():  # the future is kept: a result may be asked for again
            if not self._is_there():
                raise Ros2Error(
                    f"{self._what}: no result; what became of the goal is not known. Stop the arm by other "
                    "means, then start the controller again."
                )
            if time.monotonic() >= end_s:
                raise Ros2Error(
                    f"{self._what}: the goal has not ended within {timeout_s:g} s. Wait longer, or cancel it."
                )
            time.sleep(_LOOK_S)
        response = self._result.result()
        return GoalStatus(response.status), self._node.messages.from_ros(response.result)

    def cancel(self, timeout_s: float) -> bool:
        future = self._handle.cancel_goal_async()
        response = self._node.wait_for(future, timeout_s, self._what, self._is_there)
        return bool(response.goals_canceling)


class RclpyActionClient:
    """Sends goals to one action."""

    def __init__(self, node: RclpyNode, kind: str, name: str) -> None:
        self._node = node
        self._what = f"action {node.resolve(name)}"
        self._made: Any = rclpy_module("action").ActionClient(node.ros, node.messages.ros_class(kind), name)

    def wait(self, timeout_s: float) -> bool:
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

        is_there = self._made.server_is_ready
        future = self._made.send_goal_async(self._node.messages.to_ros(goal), guarded(hear, self._what))
        handle = self._node.wait_for(future, end_s - time.monotonic(), self._what, is_there)
        return RclpyClientGoal(self._node, handle, self._what, is_there)


def _agreed(ask: Callable[[], bool], name: str) -> bool:
    """Whether a callback says yes; one that fails says no, and does not end the executor."""
    try:
        return bool(ask())
    except Exception:
        logger.exception("action %s: a callback failed, which means no", name)
        return False
