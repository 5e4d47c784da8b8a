"""Names of nodes, topics and services: rules, namespaces, `~`, remapping, and names on the wire.

Rules as in ROS 2's rmw and rcl: https://design.ros2.org/articles/topic_and_service_names.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from robot_rl.real.ros2.api import Ros2Error

_TOKEN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_LETTERS = 255
_KIND = re.compile(r"[a-z][a-z0-9_]*/(msg|srv|action)/[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a node, and how it resolves others."""

    node: str
    namespace: str
    """Absolute: `/` or `/left/arm`."""
    remap: Mapping[str, str] = field(default_factory=dict[str, str])
    """From -> to, each relative to the node as in `ros2 run ... --ros-args -r from:=to`."""

    @property
    def full_name(self) -> str:
        return _join(self.namespace, self.node)

    def resolve(self, name: str) -> str:
        """Returns the absolute name after remapping.

        Raises:
            Ros2Error: the name is not valid.
        """
        absolute = self._expand(name)
        for source, target in self.remap.items():
            if source.startswith("__"):
                continue
            node, colon, pattern = source.rpartition(":")
            if (not colon or node == self.node) and self._expand(pattern) == absolute:
                return self._expand(target)
        return absolute

    def _expand(self, name: str) -> str:
        expanded = name.replace("{node}", self.node)
        for word in ("{namespace}", "{ns}"):
            expanded = expanded.replace(word, self.namespace.rstrip("/"))
        if expanded == "~":
            expanded = self.full_name
        elif expanded.startswith("~/"):
            expanded = _join(self.full_name, expanded[2:])
        elif not expanded.startswith("/"):
            expanded = _join(self.namespace, expanded)
        _check(expanded, given=name, what="topic or service")
        return expanded


def names(node: str, namespace: str = "", remap: Mapping[str, str] | None = None) -> Names:
    """Returns the names of a node; `__node` (or `__name`) and `__ns` remap its own.

    Raises:
        Ros2Error: a name that ROS does not allow.
    """
    rules = dict(remap or {})
    node = rules.get("__node", rules.get("__name", node))
    namespace = rules.get("__ns", namespace)
    if not _TOKEN.fullmatch(node) or len(node) > _MAX_LETTERS:
        raise Ros2Error(
            f"ros2: node name {node!r}, allowed: letters, digits and _, no digit first, at most "
            f"{_MAX_LETTERS}. A namespace goes into namespace=."
        )
    absolute = "/" + namespace.strip("/")
    if absolute != "/":
        _check(absolute, given=namespace, what="namespace")
    found = Names(node=node, namespace=absolute, remap=rules)
    for source, target in rules.items():
        if not source.startswith("__"):
            found._expand(source.rpartition(":")[2])
            found._expand(target)
    return found


def check_kind(kind: str) -> None:
    """Raises a Ros2Error unless this is a ROS type name in full."""
    if not _KIND.fullmatch(kind):
        raise Ros2Error(
            f"ros2: type {kind!r}, allowed: package/msg/Name, package/srv/Name or package/action/Name, "
            "for instance sensor_msgs/msg/JointState."
        )


def dds_type(kind: str) -> str:
    """Returns `sensor_msgs::msg::dds_::JointState_` for `sensor_msgs/msg/JointState`."""
    package, group, name = kind.split("/")
    return f"{package}::{group}::dds_::{name}_"


def topic_on_wire(name: str) -> str:
    """Returns the DDS name of a topic."""
    return f"rt{name}"


def topic_from_wire(name: str) -> str | None:
    """Returns the topic of a DDS name; None of one that ROS did not make."""
    return name[2:] if name.startswith("rt/") else None


def request_on_wire(name: str) -> str:
    """Returns the DDS topic of the requests to a service."""
    return f"rq{name}Request"


def reply_on_wire(name: str) -> str:
    """Returns the DDS topic of the replies of a service."""
    return f"rr{name}Reply"


def _join(namespace: str, name: str) -> str:
    return f"{namespace.rstrip('/')}/{name}"


def _check(absolute: str, *, given: str, what: str) -> None:
    tokens = absolute[1:].split("/")
    if not all(_TOKEN.fullmatch(token) for token in tokens) or len(absolute) > _MAX_LETTERS - 8:
        raise Ros2Error(
            f"ros2: {what} name {given!r} (in full {absolute!r}), allowed: words of letters, digits and _, "
            "no digit first, between single slashes; ~/ first for the node's own."
        )
