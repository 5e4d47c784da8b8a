"""The node interface of all ROS code in this project; names as in rclpy.

Two transports implement it: genuine `rclpy` where ROS 2 is installed, and a pip-only one on the
same wire (CycloneDDS). Types are ROS names, `sensor_msgs/msg/JointState`; messages are
attribute objects made by `Node.message`, the same for both. Callbacks run on one thread of the
node, one at a time, and should return soon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from robot_rl.core.errors import DeviceError

Message = Any
"""Attributes as in the .msg file; arrays of numbers are numpy arrays, others lists."""


class Ros2Error(DeviceError):
    """ROS 2 is missing, or does not answer."""


@dataclass(frozen=True, kw_only=True)
class QoS:
    """Quality of service, by ROS's names."""

    depth: int = 10
    reliable: bool = True
    transient_local: bool = False
    """Late subscribers get the last `depth` messages."""

    def lacks(self, offered: QoS) -> str:
        """Returns the policy for which a subscription of this quality matches no such publisher, if any."""
        if self.reliable and not offered.reliable:
            return "reliability"
        return "durability" if self.transient_local and not offered.transient_local else ""


DEFAULT = QoS()
SENSOR = QoS(depth=5, reliable=False)
LATCHED = QoS(depth=1, transient_local=True)


def nanoseconds(stamp: Message) -> int:
    """Returns a builtin_interfaces Time or Duration as one number."""
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


def qos_warning(topic: str, policy: str) -> str:
    """Returns the warning about a publisher that ROS never matches with our subscription."""
    return (
        f"ros2: {topic}: there is a publisher of which nothing is heard: its {policy} is less than our "
        f"subscription asks for. Compare them with `ros2 topic info -v {topic}`, and change the publisher's."
    )


class GoalStatus(IntEnum):
    """Where a goal stands: action_msgs/msg/GoalStatus."""

    UNKNOWN = 0
    ACCEPTED = 1
    EXECUTING = 2
    CANCELING = 3
    SUCCEEDED = 4
    CANCELED = 5
    ABORTED = 6


class Publisher(Protocol):
    """Sends messages on a topic."""

    def publish(self, message: Message) -> None: ...

    @property
    def num_subscriptions(self) -> int:
        """Matched subscriptions."""
        ...


class Subscription(Protocol):
    """Receives messages of a topic."""

    @property
    def num_publishers(self) -> int:
        """Publishers of other nodes."""
        ...

    def close(self) -> None: ...


class Service(Protocol):
    """Answers requests, or serves the goals of an action."""

    def close(self) -> None: ...


class Client(Protocol):
    """Asks a service."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for a server; returns whether there is one."""
        ...

    def call(self, request: Message, timeout_s: float) -> Message:
        """Calls and returns the response; not from within a callback.

        Raises:
            Ros2Error: no answer in time, or the server cannot answer this transport.
        """
        ...

    def close(self) -> None: ...


class GoalHandle(Protocol):
    """A goal as its server sees it."""

    @property
    def goal(self) -> Message: ...

    @property
    def cancel_requested(self) -> bool: ...

    def feedback(self, feedback: Message) -> None: ...

    def succeed(self, result: Message) -> None: ...

    def cancel(self, result: Message) -> None: ...

    def abort(self, result: Message) -> None: ...


@dataclass(frozen=True, kw_only=True)
class GoalCallbacks:
    """The callbacks of an action's server."""

    execute: Callable[[GoalHandle], None]
    """Runs on its own thread for each accepted goal."""
    accept: Callable[[Message], bool]
    """Whether to accept a goal."""
    cancel: Callable[[GoalHandle], bool]
    """Whether to cancel a goal."""


class ClientGoal(Protocol):
    """A goal as its client sees it."""

    @property
    def accepted(self) -> bool: ...

    def result(self, timeout_s: float) -> tuple[int, Message]:
        """Returns (GoalStatus, result): 4 succeeded, 5 cancelled, 6 aborted."""
        ...

    def cancel(self, timeout_s: float) -> bool:
        """Returns whether the server accepts to cancel."""
        ...


class ActionClient(Protocol):
    """Sends goals."""

    def wait(self, timeout_s: float) -> bool: ...

    def send(
        self, goal: Message, timeout_s: float, on_feedback: Callable[[Message], None] | None = None
    ) -> ClientGoal: ...


class Node(Protocol):
    """One ROS node."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str: ...

    @property
    def use_sim_time(self) -> bool:
        """Whether `now_ns` follows /clock; may be set at any time."""
        ...

    @use_sim_time.setter
    def use_sim_time(self, value: bool) -> None: ...

    def resolve(self, name: str) -> str:
        """Returns the absolute name of a topic, service or action after remapping."""
        ...

    def message(self, kind: str, **fields: Any) -> Message:
        """Returns a message of a type; fields that are left out are zero or empty, as in ROS."""
        ...

    def create_publisher(self, kind: str, topic: str, qos: QoS = DEFAULT) -> Publisher: ...

    def create_subscription(
        self, kind: str, topic: str, callback: Callable[[Message], None], qos: QoS = DEFAULT
    ) -> Subscription: ...

    def create_service(self, kind: str, name: str, callback: Callable[[Message], Message]) -> Service: ...

    def create_client(self, kind: str, name: str) -> Client: ...

    def create_action_server(self, kind: str, name: str, callbacks: GoalCallbacks) -> Service: ...

    def create_action_client(self, kind: str, name: str) -> ActionClient: ...

    def now_ns(self) -> int:
        """Returns ROS time: wall-clock, or the time of /clock with `use_sim_time`."""
        ...

    def node_names(self) -> list[str]:
        """Returns the full names of all nodes that are seen, own ones included."""
        ...

    def publishers_of(self, topic: str) -> list[str]:
        """Returns the full names of the nodes that publish a topic, one entry for each publisher."""
        ...

    def topics_of(self, kind: str) -> list[str]:
        """Returns the names of the topics that somebody publishes messages of a type on."""
        ...

    def close(self) -> None: ...


def call_once(node: Node, kind: str, name: str, timeout_s: float, **fields: Any) -> Message:
    """Calls a service with a client of this one call, and returns the response.

    Raises:
        Ros2Error: no server, or no answer.
    """
    client = node.create_client(kind, name)
    try:
        return client.call(node.message(f"{kind}_Request", **fields), timeout_s)
    finally:
        client.close()
