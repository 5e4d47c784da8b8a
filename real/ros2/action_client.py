"""Clients of actions: goals, feedback, results and cancelling; see `action` for what is on the wire."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from robot_rl.real.ros2.action import ENDED
from robot_rl.real.ros2.api import DEFAULT, Client, Message, Node, QoS, Ros2Error, Subscription
from robot_rl.real.ros2.api import GoalStatus as Status

_FOREVER_S = 1e6
_POLL_S = 0.01


class MatchedSubscription(Subscription, Protocol):
    """A subscription that knows whether there is a publisher."""

    @property
    def is_matched(self) -> bool: ...


class MatchingNode(Node, Protocol):
    """A node with such subscriptions."""

    def create_subscription(
        self, kind: str, topic: str, callback: Callable[[Message], None], qos: QoS = DEFAULT
    ) -> MatchedSubscription: ...


class ClientGoal:
    """A goal as its client sees it."""

    def __init__(
        self,
        node: Node,
        what: str,
        cancel: Client,
        goal_id: bytes,
        on_feedback: Callable[[Message], None] | None,
    ) -> None:
        self._node, self._what, self._cancel = node, what, cancel
        self.id, self.on_feedback = goal_id, on_feedback
        self.accepted = False
        self.status = Status.UNKNOWN
        """From the status topic."""
        self.response: Message | None = None
        self.error: Ros2Error | None = None
        self.over = threading.Event()
        """There is a response, or an error."""

    def result(self, timeout_s: float) -> tuple[int, Message]:
        """Waits for the end and returns (status, result).

        Raises:
            Ros2Error: it did not end in time, the server is gone, or it was rejected.
        """
        if not self.accepted:
            raise Ros2Error(f"{self._what}: the goal was rejected: it has no result.")
        if not self.over.wait(timeout_s):
            raise Ros2Error(
                f"{self._what}: the goal has not ended within {timeout_s:g} s (it is "
                f"{self.status.name.lower()}). Wait longer, or cancel it."
            )
        if self.response is None:
            raise Ros2Error(
                f"{self._what}: no result; the goal was {self.status.name.lower()}, what became "
                "of it is not known. Stop the arm by other means, then start the controller again."
            ) from self.error
        return int(self.response.status), self.response.result

    def cancel(self, timeout_s: float) -> bool:
        """Asks to cancel; returns whether the server will. The result says how the goal ended.

        Raises:
            Ros2Error: the server does not answer.
        """
        request = self._node.message("action_msgs/srv/CancelGoal_Request")
        request.goal_info.goal_id.uuid = self.id
        response = self._cancel.call(request, timeout_s)
        return any(bytes(info.goal_id.uuid) == self.id for info in response.goals_canceling)


class DdsActionClient:
    """Sends goals to one action."""

    def __init__(self, node: MatchingNode, kind: str, name: str) -> None:
        self._node, self._kind = node, kind
        self._what = f"action {node.resolve(name)}"
        self._goals: dict[bytes, ClientGoal] = {}
        base = f"{node.resolve(name)}/_action"
        self._topics = [
            node.create_subscription(f"{kind}_FeedbackMessage", f"{base}/feedback", self._on_feedback),
            # Not latched: earlier goals do not matter, and some servers do not latch it.
            node.create_subscription("action_msgs/msg/GoalStatusArray", f"{base}/status", self._on_status),
        ]
        self._send = node.create_client(f"{kind}_SendGoal", f"{base}/send_goal")
        self._cancel = node.create_client("action_msgs/srv/CancelGoal", f"{base}/cancel_goal")
        self._result = node.create_client(f"{kind}_GetResult", f"{base}/get_result")

    def wait(self, timeout_s: float) -> bool:
        """Waits until all services and topics of the server are there; returns whether they are."""
        end_s = time.monotonic() + timeout_s
        for client in (self._send, self._cancel, self._result):
            if not client.wait(max(0.0, end_s - time.monotonic())):
                return False
        while not all(topic.is_matched for topic in self._topics):
            if time.monotonic() > end_s:
                return False
            time.sleep(_POLL_S)
        return True

    def send(
        self, goal: Message, timeout_s: float, on_feedback: Callable[[Message], None] | None = None
    ) -> ClientGoal:
        """Sends a goal and waits for whether it is accepted; feedback arrives on the node's thread.

        Raises:
            Ros2Error: no server, or no answer in time.
        """
        end_s = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            raise Ros2Error(
                f"{self._what}: no server (waited {timeout_s:g} s). Start the controller; check "
                "ROS_DOMAIN_ID, namespace and remapping."
            )
        sent = ClientGoal(self._node, self._what, self._cancel, uuid.uuid4().bytes, on_feedback)
        self._goals[sent.id] = sent  # before the request: feedback may be faster than the answer
        request = self._node.message(f"{self._kind}_SendGoal_Request", goal=goal)
        request.goal_id.uuid = sent.id
        try:
            sent.accepted = bool(self._send.call(request, end_s - time.monotonic()).accepted)
        finally:
            if not sent.accepted:
                self._goals.pop(sent.id, None)
        if sent.accepted:
            # Requested at once, as every client does: some servers end a goal only after this request.
            name = f"result {sent.id.hex()[:8]}"
            threading.Thread(target=self._fetch, args=(sent,), name=name, daemon=True).start()
        return sent

    def _fetch(self, goal: ClientGoal) -> None:
        request = self._node.message(f"{self._kind}_GetResult_Request")
        request.goal_id.uuid = goal.id
        try:
            response = self._result.call(request, _FOREVER_S)
            if response.status in ENDED:
                goal.response = response
        except Ros2Error as error:  # the server is gone, or this node is closed
            goal.error = error
        self._goals.pop(goal.id, None)
        goal.over.set()

    def _on_feedback(self, message: Message) -> None:
        goal = self._goals.get(bytes(message.goal_id.uuid))
        if goal is not None and goal.on_feedback is not None:
            goal.on_feedback(message.feedback)

    def _on_status(self, message: Message) -> None:
        for one in message.status_list:
            goal = self._goals.get(bytes(one.goal_info.goal_id.uuid))
            if goal is not None:
                goal.status = Status(one.status)
