"""Opens a node: genuine rclpy where ROS 2 is installed, else the same wire with pip packages only."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from robot_rl.core.errors import nearest
from robot_rl.real.ros2.api import (
    DEFAULT,
    ActionClient,
    GoalCallbacks,
    Message,
    Node,
    QoS,
    Ros2Error,
    Service,
    nanoseconds,
    qos_warning,
)
from robot_rl.real.ros2.discovery import discovery
from robot_rl.real.ros2.names import check_kind, dds_type, names, topic_from_wire, topic_on_wire
from robot_rl.real.ros2.types import Codec, types_of

if TYPE_CHECKING:
    from robot_rl.real.ros2.dds import Participant, Reader, Writer
    from robot_rl.real.ros2.graph import Endpoint, Graph
    from robot_rl.real.ros2.service import DdsClient, DdsService, Deferred

logger = logging.getLogger(__name__)

Transport = Literal["auto", "rclpy", "dds"]
_CLOCK_QOS = QoS(depth=1, reliable=False)


def open_node(
    name: str,
    *,
    namespace: str = "",
    transport: Transport = "auto",
    domain_id: int | None = None,
    remap: Mapping[str, str] | None = None,
    use_sim_time: bool = False,
) -> Node:
    """Opens a node.

    Args:
        name: Without its namespace.
        namespace: `left/arm`; empty for none.
        transport: `auto` takes rclpy if it can be imported, else `dds` (pip install -e '.[ros2]'), and
            logs a warning where rclpy is found and cannot be imported.
        domain_id: None for ROS_DOMAIN_ID.
        remap: Names from -> to; `__node` and `__ns` for the node's own.
        use_sim_time: Whether `now_ns` follows /clock.

    Raises:
        Ros2Error: neither transport is installed, or a name or setting is not valid.
    """
    if transport not in ("auto", "rclpy", "dds"):
        raise Ros2Error(f"ros2: transport {transport!r}.{nearest(transport, ('auto', 'rclpy', 'dds'))}")
    if transport == "rclpy" or (transport == "auto" and _has_rclpy()):
        from robot_rl.real.ros2.rclpy_node import RclpyNode

        return RclpyNode(
            name, namespace=namespace, domain_id=domain_id, remap=remap, use_sim_time=use_sim_time
        )
    return DdsNode(name, namespace=namespace, domain_id=domain_id, remap=remap, use_sim_time=use_sim_time)


def _has_rclpy() -> bool:
    """Whether rclpy can be imported; one of another Python is found on the path, and cannot."""
    if importlib.util.find_spec("rclpy") is None:
        return False
    from robot_rl.real.ros2.rclpy_guards import rclpy_module

    try:
        rclpy_module("executors")
    except Ros2Error as error:
        logger.warning("%s Going on without it, on CycloneDDS.", error)
        return False
    return True


class DdsPublisher:
    """Sends messages on a topic; `publish` may be called from any thread and never waits long."""

    def __init__(self, writer: Writer, codec: Codec) -> None:
        self._writer, self._codec = writer, codec

    def publish(self, message: Message) -> None:
        self._writer.write(self._codec.encode(message))

    @property
    def num_subscriptions(self) -> int:
        return len(self._writer.matched())


class DdsSubscription:
    """Receives messages of a topic."""

    def __init__(self, node: DdsNode, reader: Reader, topic: str, wanted: QoS) -> None:
        self._node, self._reader = node, reader
        self.topic, self.wanted = topic, wanted

    @property
    def num_publishers(self) -> int:
        own = self._node.participant.guid
        return sum(self._reader.participant_of(handle) != own for handle in self._reader.matched())

    @property
    def is_matched(self) -> bool:
        """Whether there is a publisher, of this node or another."""
        return bool(self._reader.matched())

    def on_publisher(self, found: Endpoint) -> None:
        """Warns of a publisher that matches no subscription of this node."""
        lacks = self.wanted.lacks(found.offered)
        if lacks and all(one.wanted.lacks(found.offered) for one in self._node.subscriptions_of(self.topic)):
            logger.warning(qos_warning(self.topic, lacks))

    def close(self) -> None:
        self._node.graph.unwatch(self.on_publisher)
        self._node.subscriptions_of(self.topic).remove(self)
        self._node.graph.remove(self._reader.guid)
        self._node.participant.close_endpoint(self._reader)


class DdsNode:
    """A node on ROS 2's wire without ROS; it has one participant and one thread."""

    def __init__(
        self,
        name: str,
        *,
        namespace: str = "",
        domain_id: int | None = None,
        remap: Mapping[str, str] | None = None,
        use_sim_time: bool = False,
    ) -> None:
        self._names = names(name, namespace, remap)
        settings = discovery(domain_id=domain_id)
        self.types = types_of(settings.distro)
        from robot_rl.real.ros2.dds import Participant
        from robot_rl.real.ros2.graph import Graph

        self.participant: Participant = Participant(settings, self.types, name=self._names.full_name)
        self.graph: Graph = Graph(self.participant, self.types, self.name, self.namespace)
        self.graph.add()
        self._subscriptions: dict[str, list[DdsSubscription]] = {}
        self._clock: DdsSubscription | None = None
        self._sim_time_ns = 0
        self.participant.start()
        self.use_sim_time = use_sim_time

    @property
    def name(self) -> str:
        return self._names.node

    @property
    def namespace(self) -> str:
        return self._names.namespace

    @property
    def use_sim_time(self) -> bool:
        return self._clock is not None

    @use_sim_time.setter
    def use_sim_time(self, value: bool) -> None:
        if value and self._clock is None:
            kind = "rosgraph_msgs/msg/Clock"
            self._clock = self.create_subscription(kind, "/clock", self._on_clock, _CLOCK_QOS)
        elif not value and self._clock is not None:
            self._clock.close()
            self._clock, self._sim_time_ns = None, 0

    def resolve(self, name: str) -> str:
        return self._names.resolve(name)

    def message(self, kind: str, **fields: Any) -> Message:
        return self.types.message(kind, fields)

    def create_publisher(self, kind: str, topic: str, qos: QoS = DEFAULT) -> DdsPublisher:
        codec = self.types.codec(kind)
        writer = self.participant.writer(topic_on_wire(self.resolve(topic)), kind, qos)
        self.graph.add(writers=(writer.guid,))
        return DdsPublisher(writer, codec)

    def create_subscription(
        self, kind: str, topic: str, callback: Callable[[Message], None], qos: QoS = DEFAULT
    ) -> DdsSubscription:
        decode = self.types.codec(kind).decode

        def on_sample(octets: bytes, _: Any) -> None:
            callback(decode(octets))

        name = self.resolve(topic)
        reader = self.participant.reader(topic_on_wire(name), kind, qos, on_sample)
        self.graph.add(readers=(reader.guid,))
        made = DdsSubscription(self, reader, name, qos)
        self.subscriptions_of(name).append(made)
        self.graph.watch(topic_on_wire(name), made.on_publisher)
        return made

    def subscriptions_of(self, topic: str) -> list[DdsSubscription]:
        """Returns this node's subscriptions of a topic, by its absolute name."""
        return self._subscriptions.setdefault(topic, [])

    def create_service(
        self, kind: str, name: str, callback: Callable[[Message], Message | Deferred]
    ) -> DdsService:
        """Serves; the callback returns the response, or a `service.Deferred` that is completed later."""
        from robot_rl.real.ros2.service import DdsService

        check_kind(kind)
        full_name = self.resolve(name)
        return DdsService(self.participant, self.graph, self.types, kind, full_name, callback)

    def create_client(self, kind: str, name: str) -> DdsClient:
        from robot_rl.real.ros2.service import DdsClient

        check_kind(kind)
        return DdsClient(self.participant, self.graph, self.types, kind, self.resolve(name))

    def create_action_server(self, kind: str, name: str, callbacks: GoalCallbacks) -> Service:
        from robot_rl.real.ros2.action import DdsActionServer

        return DdsActionServer(self, kind, name, callbacks)

    def create_action_client(self, kind: str, name: str) -> ActionClient:
        from robot_rl.real.ros2.action_client import DdsActionClient

        return DdsActionClient(self, kind, name)

    def now_ns(self) -> int:
        return time.time_ns() if self._clock is None else self._sim_time_ns

    def node_names(self) -> list[str]:
        return self.graph.node_names()

    def topics_of(self, kind: str) -> list[str]:
        return sorted(filter(None, map(topic_from_wire, self.graph.topics_of(dds_type(kind)))))

    def publishers_of(self, topic: str) -> list[str]:
        return self.graph.publishers_of(topic_on_wire(self.resolve(topic)))

    def close(self) -> None:
        self.participant.close()

    def _on_clock(self, message: Message) -> None:
        self._sim_time_ns = nanoseconds(message.clock)
