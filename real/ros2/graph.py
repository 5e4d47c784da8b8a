"""The nodes and endpoints of a domain: ROS's `ros_discovery_info` and DDS's own discovery."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cyclonedds import builtin, core, qos

from robot_rl.real.ros2.api import LATCHED, QoS
from robot_rl.real.ros2.dds import READING_POLICIES, Participant
from robot_rl.real.ros2.types import Types

logger = logging.getLogger(__name__)

_TOPIC = "ros_discovery_info"
_INFO = "rmw_dds_common/msg/ParticipantEntitiesInfo"
_NODE = "rmw_dds_common/msg/NodeEntitiesInfo"
_GID = "rmw_dds_common/msg/Gid"
_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A writer somewhere in the domain."""

    guid: bytes
    participant: bytes
    topic: str
    """On the wire: `rt/joint_states`."""
    kind: str
    """On the wire: `sensor_msgs::msg::dds_::JointState_`."""
    offered: QoS


class Graph:
    """What one node knows of all others, and what it announces of itself."""

    def __init__(self, participant: Participant, types: Types, node: str, namespace: str) -> None:
        self._participant = participant
        self._types = types
        self._own = (node, namespace)
        self._lock = threading.Lock()
        self._nodes: dict[bytes, Any] = {}
        self._writers: dict[bytes, Endpoint] = {}
        self._watchers: list[tuple[str, Callable[[Endpoint], None]]] = []
        self._own_writers: list[bytes] = []
        self._own_readers: list[bytes] = []
        self._gid_bytes = types.fields(_GID)[0][1][1][1]  # 24 in Humble, 16 since
        self._info = types.codec(_INFO)
        self._found: Any = builtin.BuiltinDataReader(participant.entity, builtin.BuiltinTopicDcpsPublication)
        unread = core.ViewState.Any | core.SampleState.NotRead | core.InstanceState.Any
        self._unread = core.ReadCondition(self._found, unread)
        self._writer = participant.writer(_TOPIC, _INFO, LATCHED)
        participant.reader(_TOPIC, _INFO, QoS(depth=_BATCH, transient_local=True), self._on_info)
        participant.watch(self._unread, self._on_writers)

    def add(self, *, writers: tuple[bytes, ...] = (), readers: tuple[bytes, ...] = ()) -> None:
        """Announces endpoints of this node by their GUIDs."""
        with self._lock:
            self._own_writers += writers
            self._own_readers += readers
            self._announce()

    def remove(self, *guids: bytes) -> None:
        """Announces that endpoints of this node are gone."""
        with self._lock:
            self._own_writers = [guid for guid in self._own_writers if guid not in guids]
            self._own_readers = [guid for guid in self._own_readers if guid not in guids]
            self._announce()

    def node_names(self) -> list[str]:
        """Returns the full names of all nodes that live."""
        return sorted({_full_name(node) for node in self._live_nodes()})

    def publishers_of(self, wire_topic: str) -> list[str]:
        """Returns the full names of the nodes that write a topic, one entry for each writer.

        Two programs may have nodes of one name: only their number shows that.
        """
        with self._lock:
            writers = {one.guid for one in self._writers.values() if one.topic == wire_topic}
        return sorted(
            _full_name(node)
            for node in self._live_nodes()
            for gid in node.writer_gid_seq
            if bytes(gid.data[:16]) in writers
        )

    def topics_of(self, wire_kind: str) -> set[str]:
        """Returns the topics, on the wire, that have writers of a type."""
        with self._lock:
            return {one.topic for one in self._writers.values() if one.kind == wire_kind}

    def watch(self, wire_topic: str, callback: Callable[[Endpoint], None]) -> None:
        """Calls back for every writer of a topic, present and future."""
        with self._lock:
            self._watchers.append((wire_topic, callback))
            present = [one for one in self._writers.values() if one.topic == wire_topic]
        for one in present:
            callback(one)

    def unwatch(self, callback: Callable[[Endpoint], None]) -> None:
        """Ends `watch`."""
        with self._lock:
            self._watchers = [watcher for watcher in self._watchers if watcher[1] != callback]

    def _announce(self) -> None:
        name, namespace = self._own
        own = self._types.codec(_NODE).cls(
            node_namespace=namespace,
            node_name=name,
            reader_gid_seq=[self._gid(guid) for guid in self._own_readers],
            writer_gid_seq=[self._gid(guid) for guid in self._own_writers],
        )
        message = self._info.cls(gid=self._gid(self._participant.guid), node_entities_info_seq=[own])
        self._writer.write(self._info.encode(message))

    def _gid(self, guid: bytes) -> Any:
        return self._types.codec(_GID).cls(data=np.frombuffer(guid.ljust(self._gid_bytes, b"\0"), np.uint8))

    def _live_nodes(self) -> list[Any]:
        # A participant that died leaves its last message; its writers are gone.
        with self._lock:
            live = {one.participant for one in self._writers.values() if one.topic == _TOPIC}
            return [
                node
                for gid, info in self._nodes.items()
                if gid in live
                for node in info.node_entities_info_seq
            ]

    def _on_info(self, octets: bytes, _: Any) -> None:
        info = self._info.decode(octets)
        with self._lock:
            self._nodes[bytes(info.gid.data[:16])] = info

    def _on_writers(self) -> None:
        alive: list[Endpoint] = []
        with self._lock:
            with READING_POLICIES:
                found = self._found.read(_BATCH, condition=self._unread)
            for sample in found:
                guid = sample.key.bytes
                if sample.sample_info.instance_state != core.InstanceState.Alive:
                    self._forget(guid)
                    continue
                one = Endpoint(
                    guid=guid,
                    participant=sample.participant_key.bytes,
                    topic=sample.topic_name,
                    kind=sample.type_name,
                    offered=_quality(sample.qos),
                )
                self._writers[guid] = one
                alive.append(one)
            watchers = list(self._watchers)
        for one in alive:
            for wire_topic, callback in watchers:
                if wire_topic == one.topic:
                    callback(one)

    def _forget(self, guid: bytes) -> None:
        gone = self._writers.pop(guid, None)
        if gone is not None and gone.topic == _TOPIC:
            self._nodes.pop(gone.participant, None)


def _quality(policies: Any) -> QoS:
    """Returns what a writer offers; DDS's default where it says nothing: reliable, volatile."""
    policy = qos.Policy
    return QoS(
        reliable=policies[policy.Reliability] != policy.Reliability.BestEffort,
        transient_local=policies[policy.Durability] not in (None, policy.Durability.Volatile),
    )


def _full_name(node: Any) -> str:
    return f"{node.node_namespace.rstrip('/')}/{node.node_name}"
