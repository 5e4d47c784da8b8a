"""Servers of actions as rcl_action lays them out: three services and two topics below `<name>/_action/`.

    send_goal    asks for a goal; accepted or not
    cancel_goal  asks to cancel one, all, or all up to a time
    get_result   answers when the goal has ended
    feedback     of all goals
    status       of all goals that the server knows; latched

What is answered when is as in rclcpp_action.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from robot_rl.real.ros2.api import LATCHED, GoalCallbacks, Message, Node, Ros2Error, Service, nanoseconds
from robot_rl.real.ros2.api import GoalStatus as Status
from robot_rl.real.ros2.service import Deferred

logger = logging.getLogger(__name__)

ENDED = frozenset({Status.SUCCEEDED, Status.CANCELED, Status.ABORTED})
_ALLOWED = {
    Status.SUCCEEDED: {Status.EXECUTING, Status.CANCELING},
    Status.ABORTED: {Status.EXECUTING, Status.CANCELING},
    Status.CANCELED: {Status.CANCELING},
    Status.CANCELING: {Status.ACCEPTED, Status.EXECUTING},
}
RESULT_KEPT_S = 10.0
"""rcl_action's default."""
# action_msgs/srv/CancelGoal
_NONE, _REJECTED, _UNKNOWN_GOAL, _GOAL_TERMINATED = 0, 1, 2, 3


class DeferringNode(Node, Protocol):
    """A node whose services may answer later."""

    def create_service(
        self, kind: str, name: str, callback: Callable[[Message], Message | Deferred]
    ) -> Service: ...


class ServerGoal:
    """A goal as its server sees it; for any thread.

    `succeed`, `cancel` and `abort` raise a Ros2Error if the goal has ended before, `cancel` also if nobody
    asked for it.
    """

    def __init__(self, server: DdsActionServer, goal_id: bytes, goal: Message, stamp_ns: int) -> None:
        self._server, self.goal, self.id, self.stamp_ns = server, goal, goal_id, stamp_ns
        self.status = Status.ACCEPTED
        self.result: Message | None = None
        self.ended_s = 0.0
        self.waiting: list[Deferred] = []

    @property
    def cancel_requested(self) -> bool:
        return self.status == Status.CANCELING

    def feedback(self, feedback: Message) -> None:
        self._server.publish_feedback(self.id, feedback)

    def succeed(self, result: Message) -> None:
        self._server.move(self, Status.SUCCEEDED, result)

    def cancel(self, result: Message) -> None:
        self._server.move(self, Status.CANCELED, result)

    def abort(self, result: Message) -> None:
        self._server.move(self, Status.ABORTED, result)


class DdsActionServer:
    """Serves one action; each accepted goal is executed on its own thread."""

    def __init__(
        self,
        node: DeferringNode,
        kind: str,
        name: str,
        callbacks: GoalCallbacks,
        result_kept_s: float = RESULT_KEPT_S,
    ) -> None:
        self._node, self._kind, self._callbacks = node, kind, callbacks
        self._result_kept_s = result_kept_s
        self._lock = threading.RLock()
        self._goals: dict[bytes, ServerGoal] = {}
        base = f"{node.resolve(name)}/_action"
        self._feedback = node.create_publisher(f"{kind}_FeedbackMessage", f"{base}/feedback")
        self._status = node.create_publisher("action_msgs/msg/GoalStatusArray", f"{base}/status", LATCHED)
        self._services = [
            node.create_service(f"{kind}_SendGoal", f"{base}/send_goal", self._on_goal),
            node.create_service("action_msgs/srv/CancelGoal", f"{base}/cancel_goal", self._on_cancel),
            node.create_service(f"{kind}_GetResult", f"{base}/get_result", self._on_result),
        ]

    def close(self) -> None:
        for service in self._services:
            service.close()

    def move(self, goal: ServerGoal, status: Status, result: Message | None = None) -> None:
        """Takes a goal to its next state and publishes that."""
        with self._lock:
            allowed = _ALLOWED[status]
            if goal.status not in allowed:
                names = " or ".join(sorted(one.name.lower() for one in allowed))
                raise Ros2Error(
                    f"action {self._kind}: a goal that is {goal.status.name.lower()} cannot become "
                    f"{status.name.lower()}, allowed from: {names}. End a goal once."
                )
            goal.status = status
            waiting: list[Deferred] = []
            if status in ENDED:
                goal.result, goal.ended_s = result, time.monotonic()
                waiting, goal.waiting = goal.waiting, []
            self._publish_status()
        for deferred in waiting:
            deferred.complete(self._result_of(goal))

    def publish_feedback(self, goal_id: bytes, feedback: Message) -> None:
        """Publishes the feedback of a goal."""
        message = self._node.message(f"{self._kind}_FeedbackMessage", feedback=feedback)
        message.goal_id.uuid = goal_id
        self._feedback.publish(message)

    def _on_goal(self, request: Message) -> Message:
        goal_id = bytes(request.goal_id.uuid)
        stamp_ns = self._node.now_ns()
        accepted = goal_id not in self._goals and bool(self._callbacks.accept(request.goal))
        if accepted:
            goal = ServerGoal(self, goal_id, request.goal, stamp_ns)
            with self._lock:
                self._forget_old()
                self._goals[goal_id] = goal
                self._publish_status()
            name = f"{self._kind} {goal_id.hex()[:8]}"
            threading.Thread(target=self._run, args=(goal,), name=name, daemon=True).start()
        response = self._node.message(f"{self._kind}_SendGoal_Response", accepted=accepted)
        response.stamp.sec, response.stamp.nanosec = divmod(stamp_ns, 1_000_000_000)
        return response

    def _run(self, goal: ServerGoal) -> None:
        try:
            with self._lock:
                if goal.status == Status.ACCEPTED:  # else it was cancelled before: `execute` sees that
                    goal.status = Status.EXECUTING
                    self._publish_status()
            self._callbacks.execute(goal)
        except Exception:
            logger.exception("action %s: executing a goal failed; it is aborted", self._kind)
        if goal.status not in ENDED:
            with contextlib.suppress(Ros2Error):  # the node is closed
                goal.abort(self._node.message(f"{self._kind}_Result"))

    def _on_cancel(self, request: Message) -> Message:
        goal_id, stamp = bytes(request.goal_info.goal_id.uuid), request.goal_info.stamp
        code, asked = self._to_cancel(goal_id, nanoseconds(stamp))
        agreed = [goal for goal in asked if self._callbacks.cancel(goal)]
        canceling: list[ServerGoal] = []
        for goal in agreed:
            with self._lock:
                if goal.status in _ALLOWED[Status.CANCELING]:  # it may have ended meanwhile
                    self.move(goal, Status.CANCELING)
                    canceling.append(goal)
        if asked and not canceling:
            code = _REJECTED if not agreed else _GOAL_TERMINATED
        return self._node.message(
            "action_msgs/srv/CancelGoal_Response",
            return_code=code,
            goals_canceling=[self._info(goal) for goal in canceling],
        )

    def _to_cancel(self, goal_id: bytes, stamp_ns: int) -> tuple[int, list[ServerGoal]]:
        """Returns the goals of a cancel request: one by its id, those up to a time, or all."""
        has_id = any(goal_id)
        with self._lock:
            if has_id and goal_id not in self._goals and not stamp_ns:
                return _UNKNOWN_GOAL, []
            meant = [
                goal
                for goal in self._goals.values()
                if (has_id and goal.id == goal_id)
                or (stamp_ns and goal.stamp_ns <= stamp_ns)
                or not (has_id or stamp_ns)
            ]
            found = [goal for goal in meant if goal.status in _ALLOWED[Status.CANCELING]]
        return (_GOAL_TERMINATED if has_id and not stamp_ns and not found else _NONE), found

    def _on_result(self, request: Message) -> Message | Deferred:
        with self._lock:
            self._forget_old()
            goal = self._goals.get(bytes(request.goal_id.uuid))
            if goal is not None and goal.status not in ENDED:
                deferred = Deferred()
                goal.waiting.append(deferred)
                return deferred
        return self._result_of(goal)

    def _result_of(self, goal: ServerGoal | None) -> Message:
        kind = f"{self._kind}_GetResult_Response"
        if goal is None:
            return self._node.message(kind, status=int(Status.UNKNOWN))
        return self._node.message(kind, status=int(goal.status), result=goal.result)

    def _forget_old(self) -> None:
        oldest_s = time.monotonic() - self._result_kept_s
        for goal in list(self._goals.values()):
            if goal.status in ENDED and goal.ended_s < oldest_s:
                del self._goals[goal.id]

    def _publish_status(self) -> None:
        statuses = [
            self._node.message(
                "action_msgs/msg/GoalStatus", goal_info=self._info(goal), status=int(goal.status)
            )
            for goal in self._goals.values()
        ]
        self._status.publish(self._node.message("action_msgs/msg/GoalStatusArray", status_list=statuses))

    def _info(self, goal: ServerGoal) -> Message:
        info = self._node.message("action_msgs/msg/GoalInfo")
        info.goal_id.uuid = goal.id
        info.stamp.sec, info.stamp.nanosec = divmod(goal.stamp_ns, 1_000_000_000)
        return info
