"""ROS types at run time: message classes, their bytes on the wire (CDR), DDS types and type hashes.

Definitions come from rosbags and from `tables`; rosbags compiles the codecs. Messages are
dataclasses with slots: a field that does not exist cannot be set, one that is left out is zero.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import threading
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import numpy as np

from robot_rl.core.errors import nearest
from robot_rl.real.ros2.api import Message, Ros2Error
from robot_rl.real.ros2.names import check_kind, dds_type
from robot_rl.real.ros2.tables import DEFAULTS, DEFINITIONS, OF_DISTRO

# rosbags' trees: (BASE, (name, bound)), (NAME, kind), (ARRAY | SEQUENCE, (element, length)).
BASE, NAME, ARRAY, SEQUENCE = 1, 2, 3, 4
Tree = tuple[int, Any]
_LINE = re.compile(
    r"(?P<type>[A-Za-z0-9_/]+)(?:<=(?P<bound>\d+))?(?P<array>\[(?P<most><=)?(?P<length>\d*)\])?\s+"
    r"(?P<name>[A-Za-z][A-Za-z0-9_]*)\s*(?:=\s*(?P<value>.+))?"
)
_BASES = {
    "bool": np.bool_, "byte": np.uint8, "char": np.uint8, "int8": np.int8, "uint8": np.uint8,
    "int16": np.int16, "uint16": np.uint16, "int32": np.int32, "uint32": np.uint32, "int64": np.int64,
    "uint64": np.uint64, "float32": np.float32, "float64": np.float64,
}  # fmt: skip
# The field of a struct without fields: DDS has no empty ones.
_EMPTY = ("structure_needs_at_least_one_member", (BASE, ("uint8", 0)))
# Short samples are copied once, so that their arrays are aligned; pictures are too large for that.
_COPY_BYTES = 4096


class SampleError(Ros2Error):
    """Bytes from the network that do not fit their topic."""


class Codec:
    """One message type: its class, and messages to and from bytes."""

    def __init__(self, types: Types, kind: str, cls: type[Any]) -> None:
        self.kind = kind
        self.cls = cls
        self._store = types.store
        self._definition: Any = None
        self._arrays: list[tuple[str, Any, int]] = []
        self._parts: list[tuple[str, Codec, bool]] = []
        for name, (node, inner) in types.fields(kind):
            element, length = inner if node in (ARRAY, SEQUENCE) else ((node, inner), 0)
            if element[0] == NAME:
                part = types.codec(element[1])
                if part._arrays or part._parts:
                    self._parts.append((name, part, node != NAME))
            elif node in (ARRAY, SEQUENCE) and element[1][0] != "string":
                self._arrays.append((name, np.dtype(_BASES[element[1][0]]), length if node == ARRAY else -1))

    def encode(self, message: Message) -> bytearray:
        """Returns CDR with its header, padded to four bytes.

        Raises:
            Ros2Error: a field that does not fit its type; names it.
        """
        if type(message) is not self.cls:
            raise Ros2Error(
                f"ros2: a {type(message).__name__} where {self.kind} is sent. Make it with "
                f"node.message({self.kind!r}, ...)."
            )
        definition = self._definition or self._compile()
        try:
            self.settle(message)
            size = definition.getsize_cdr(0, message, self._store)
            octets = bytearray((size + 7) & ~3)
            octets[1] = 1
            definition.serialize_cdr_le(memoryview(octets)[4:], 0, message, self._store)
        except (struct.error, TypeError, AttributeError, ValueError, IndexError) as error:
            if isinstance(error, Ros2Error):
                raise
            raise Ros2Error(f"ros2: {self.kind} cannot be sent: {error}. Message: {message!r}") from error
        return octets

    def decode(self, octets: bytes) -> Message:
        """Returns a message; its arrays are read-only.

        Raises:
            SampleError: the bytes are no such message.
        """
        definition = self._definition or self._compile()
        if len(octets) < 4 or octets[0] or octets[1] > 1:
            raise SampleError(f"ros2: {self.kind}: {len(octets)} bytes that are no CDR.")
        body = octets[4:] if len(octets) < _COPY_BYTES else memoryview(octets)[4:]
        reads = definition.deserialize_cdr_le if octets[1] else definition.deserialize_cdr_be
        try:
            message, end = reads(body, 0, self.cls, self._store)
        except Exception as error:  # foreign bytes may make rosbags raise anything
            raise SampleError(f"ros2: {self.kind}: {len(octets)} bytes of another type: {error}") from error
        if end > len(body) or end + 3 < len(body):
            raise SampleError(f"ros2: {self.kind}: {len(octets)} bytes of another type: {end + 4} expected.")
        return message

    def settle(self, message: Message) -> None:
        """Converts number fields to arrays of the exact type, which rosbags does not check."""
        for name, dtype, length in self._arrays:
            value = getattr(message, name)
            if type(value) is not np.ndarray or value.dtype != dtype or not value.flags.c_contiguous:
                if isinstance(value, bytes | bytearray | memoryview):
                    value = np.frombuffer(value, np.uint8)
                value = np.ascontiguousarray(value, dtype)
                setattr(message, name, value)
            if value.ndim != 1 or (length >= 0 and len(value) != length):
                raise Ros2Error(
                    f"ros2: {self.kind}: {name} has shape {value.shape}, allowed: one dimension"
                    + (f" of {length}." if length >= 0 else ". Use reshape(-1).")
                )
        for name, part, many in self._parts:
            value = getattr(message, name)
            for one in value if many else (value,):
                part.settle(one)

    def _compile(self) -> Any:
        self._definition = self._store.get_msgdef(self.kind)
        return self._definition


class Types:
    """The types of one ROS distribution."""

    def __init__(self, distro: str) -> None:
        try:
            from rosbags.typesys import Stores, get_typestore
        except ImportError as error:
            raise Ros2Error(
                "ros2: rosbags is not installed, which brings ROS's message definitions: "
                "pip install -e '.[ros2]'."
            ) from error
        self.distro = distro
        self.store: Any = get_typestore(Stores[f"ROS2_{distro.upper()}"])
        self._lock = threading.RLock()
        self._codecs: dict[str, Codec] = {}
        self._idl: dict[tuple[str, bool], type[Any]] = {}
        definitions: dict[str, Any] = self.store.fielddefs
        for kind, (constants, fields) in list(definitions.items()):
            definitions[kind] = (constants, [(name, _without_char(tree)) for name, tree in fields])
        for kind, text in {**DEFINITIONS, **OF_DISTRO.get(distro, {})}.items():
            self.add(kind, text)

    def add(self, kind: str, text: str) -> None:
        """Adds a type from its .msg, .srv or .action text, before its first use."""
        check_kind(kind)
        sections = [
            part.split("\n") for part in re.split(r"(?:^|\n)\s*---\s*(?:\n|$)", text.replace(";", "\n"))
        ]
        package, group, _ = kind.split("/")
        parsed = [_parse(lines, package, kind) for lines in sections]
        if group == "msg":
            self._define(kind, *parsed[0])
        elif group == "srv":
            self._define(f"{kind}_Request", *parsed[0])
            self._define(f"{kind}_Response", *parsed[1])
            self._define_service(kind)
        else:
            self._define_action(kind, parsed)

    def codec(self, kind: str) -> Codec:
        """Returns the codec of a message type.

        Raises:
            Ros2Error: an undefined type.
        """
        found = self._codecs.get(kind)
        if found is not None:
            return found
        check_kind(kind)
        with self._lock:  # nodes of several threads share the types
            if kind not in self._codecs:
                cls = self._make_class(kind)
                self.store.types[kind] = cls  # rosbags decodes into our classes
                self._codecs[kind] = Codec(self, kind, cls)
            return self._codecs[kind]

    def message(self, kind: str, fields: dict[str, Any]) -> Message:
        """Returns a new message.

        Raises:
            Ros2Error: no such type or field.
        """
        codec = self.codec(kind)
        try:
            message = codec.cls(**fields)
        except TypeError as error:
            known = [name for name, _ in self.fields(kind)]
            unknown = sorted(set(fields) - set(known))
            raise Ros2Error(
                f"ros2: {kind} has no field {unknown[0]!r}.{nearest(unknown[0], known)}"
                if unknown
                else f"ros2: {kind}: {error}"
            ) from error
        codec.settle(message)
        return message

    def fields(self, kind: str) -> list[tuple[str, Tree]]:
        """Returns the fields of a type: (name, tree)."""
        if kind not in self.store.fielddefs:
            raise Ros2Error(
                f"ros2: no definition of {kind!r}.{nearest(kind, self.store.fielddefs)} "
                "Types of your own: Types.add(kind, text of the .msg file)."
            )
        return self.store.fielddefs[kind][1]

    def type_hash(self, kind: str) -> str:
        """Returns `RIHS01_...` (REP 2016)."""
        self.fields(kind)
        return self.store.hash_rihs01(kind)

    def idl(self, kind: str, *, opaque: bool = False) -> type[Any]:
        """Returns the DDS type. CycloneDDS drops samples that do not fit it, but not from an opaque one."""
        from cyclonedds.idl import make_idl_struct

        key = (kind, opaque)
        with self._lock:
            if key not in self._idl:
                fields = [_EMPTY] if opaque else self.fields(kind)
                members = {name: self._idl_of(tree) for name, tree in fields}
                name = dds_type(kind).replace("::", ".")
                self._idl[key] = make_idl_struct(name.rpartition(".")[2], name, members)
            return self._idl[key]

    def _define(self, kind: str, constants: list[Any], fields: list[tuple[str, Tree]]) -> None:
        if kind in self._codecs:
            raise Ros2Error(f"ros2: {kind} is in use already. Add definitions before the first message.")
        self.store.fielddefs[kind] = (constants, fields or [_EMPTY])

    def _define_service(self, kind: str) -> None:
        """Adds the types of service introspection; the hash of a service contains them (not in Humble)."""
        if self.distro == "humble":
            return
        event = [("info", (NAME, "service_msgs/msg/ServiceEventInfo"))]
        event += [
            (part.lower(), (SEQUENCE, ((NAME, f"{kind}_{part}"), 1))) for part in ("Request", "Response")
        ]
        self._define(f"{kind}_Event", [], event)
        whole = [
            (f"{part.lower()}_message", (NAME, f"{kind}_{part}")) for part in ("Request", "Response", "Event")
        ]
        self._define(kind, [], whole)

    def _define_action(self, kind: str, parsed: list[Any]) -> None:
        for part, (constants, fields) in zip(("Goal", "Result", "Feedback"), parsed, strict=True):
            self._define(f"{kind}_{part}", constants, fields)
        goal_id = ("goal_id", (NAME, "unique_identifier_msgs/msg/UUID"))
        stamp = ("stamp", (NAME, "builtin_interfaces/msg/Time"))
        self._define(f"{kind}_SendGoal_Request", [], [goal_id, ("goal", (NAME, f"{kind}_Goal"))])
        self._define(f"{kind}_SendGoal_Response", [], [("accepted", (BASE, ("bool", 0))), stamp])
        self._define(f"{kind}_GetResult_Request", [], [goal_id])
        result = [("status", (BASE, ("int8", 0))), ("result", (NAME, f"{kind}_Result"))]
        self._define(f"{kind}_GetResult_Response", [], result)
        self._define(f"{kind}_FeedbackMessage", [], [goal_id, ("feedback", (NAME, f"{kind}_Feedback"))])
        for service in ("SendGoal", "GetResult"):
            self._define_service(f"{kind}_{service}")

    def _make_class(self, kind: str) -> type[Any]:
        constants = {name: value for name, _, value in self.store.fielddefs.get(kind, ((), ()))[0]}
        defaults = DEFAULTS.get(kind, {})
        members: list[Any] = []
        for name, tree in self.fields(kind):
            make = partial(_value, defaults[name]) if name in defaults else self._default(tree)
            members.append((name, Any, dataclasses.field(default_factory=make)))
        name = kind.rpartition("/")[2]
        return dataclasses.make_dataclass(
            name, members, namespace={**constants, "KIND": kind, "__module__": __name__}, slots=True, eq=False
        )

    def _default(self, tree: Tree) -> Any:
        node, inner = tree
        if node == BASE:
            return str if inner[0] == "string" else type(_BASES[inner[0]](0).item())
        if node == NAME:
            return self.codec(inner).cls
        element, length = inner
        count = length if node == ARRAY else 0
        if element[0] == BASE and element[1][0] != "string":
            return partial(np.zeros, count, _BASES[element[1][0]])
        return partial(_repeat, self._default(element), count)

    def _idl_of(self, tree: Tree) -> Any:
        from cyclonedds.idl import types as idl

        node, inner = tree
        if node == NAME:
            return self.idl(inner)
        if node == BASE:
            name, bound = inner
            if name == "string":
                return idl.bounded_str[bound] if bound else str
            return bool if name == "bool" else getattr(idl, "uint8" if name == "byte" else name)
        element, length = inner
        if node == ARRAY:
            return idl.array[self._idl_of(element), length]
        return idl.sequence[(self._idl_of(element), length) if length else self._idl_of(element)]


@cache
def types_of(distro: str) -> Types:
    """Returns the types of a distribution, made once per process: codecs are compiled."""
    return Types(distro)


def _parse(lines: Iterable[str], package: str, kind: str) -> tuple[list[Any], list[tuple[str, Tree]]]:
    constants: list[Any] = []
    fields: list[tuple[str, Tree]] = []
    for line in (text.partition("#")[0].strip() for text in lines):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise Ros2Error(
                f"ros2: definition of {kind}: line {line!r}, allowed: `type name` or `type NAME=value`."
            )
        if match["value"] is not None:
            constants.append((match["name"], match["type"], _constant(match["type"], match["value"])))
        else:
            fields.append((match["name"], _tree(match, package)))
    return constants, fields


def _tree(match: re.Match[str], package: str) -> Tree:
    kind = match["type"]
    if kind in _BASES or kind == "string":
        inner: Tree = (BASE, ("uint8" if kind == "char" else kind, int(match["bound"] or 0)))
    else:
        parts = kind.split("/")
        inner = (NAME, f"{parts[0] if len(parts) > 1 else package}/msg/{parts[-1]}")
    if match["array"] is None:
        return inner
    length = int(match["length"] or 0)
    return (ARRAY if length and not match["most"] else SEQUENCE, (inner, length))


def _constant(kind: str, text: str) -> Any:
    if kind == "string":
        return text.strip("\"'")
    if kind == "bool":
        return text.lower() in ("true", "1")
    return float(text) if kind.startswith("float") else int(text, 0)


def _without_char(tree: Tree) -> Tree:
    """Replaces char by uint8: its meaning in .msg files, and in the hashes of ROS."""
    node, inner = tree
    if node == BASE:
        return (BASE, ("uint8", 0)) if inner[0] == "char" else tree
    if node == NAME:
        return tree
    element, length = inner
    return (node, (_without_char(element), length))


def _value(value: Any) -> Any:
    return value


def _repeat(make: Any, count: int) -> list[Any]:
    return [make() for _ in range(count)]
