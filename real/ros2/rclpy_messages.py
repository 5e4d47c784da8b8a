"""Converts messages of genuine ROS 2 to the attribute objects of this project, and back, field by field.

rosidl's own classes check every assignment and take no numpy arrays in sequences; ours take the values of
`api.Message`. The converters of a type are made once.
"""

from __future__ import annotations

import array
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from robot_rl.core.errors import nearest
from robot_rl.real.ros2.api import Message, Ros2Error
from robot_rl.real.ros2.names import check_kind

_DTYPES = {
    "boolean": np.bool_, "octet": np.uint8, "char": np.uint8, "int8": np.int8, "uint8": np.uint8,
    "int16": np.int16, "uint16": np.uint16, "int32": np.int32, "uint32": np.uint32, "int64": np.int64,
    "uint64": np.uint64, "float": np.float32, "double": np.float64,
}  # fmt: skip
# How rosidl stores sequences of numbers.
_CODES = {
    "char": "B", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q", "float": "f", "double": "d",
}  # fmt: skip
_PARTS = ("_Request", "_Response", "_Goal", "_Result", "_Feedback")

Convert = Callable[[Any], Any]


class RosMessages:
    """The types that one node uses."""

    def __init__(self) -> None:
        self._own: dict[type, type] = {}
        self._ros: dict[type, type] = {}
        self._walks: dict[type, list[tuple[str, Convert, Convert]]] = {}

    def ros_class(self, kind: str) -> Any:
        """Returns the genuine class of a message, service or action type, or of a part of one.

        Raises:
            Ros2Error: the package is not installed, or has no such type.
        """
        check_kind(kind)
        package, group, name = kind.split("/")
        try:
            module = importlib.import_module(f"{package}.{group}")
        except ImportError as error:
            raise Ros2Error(
                f"ros2: no Python module {package}.{group} for {kind!r}. Install the ROS package {package} "
                "(apt-get install ros-$ROS_DISTRO-...) or source the workspace that has it."
            ) from error
        part = next((part for part in _PARTS if name.endswith(part)), "") if group != "msg" else ""
        whole = getattr(module, name.removesuffix(part), None)
        if whole is None:
            known = [one for one in vars(module) if one[:1].isupper()]
            raise Ros2Error(f"ros2: {package} has no {group} {name!r}.{nearest(name, known)}")
        return getattr(whole, part[1:]) if part else whole

    def make(self, kind: str, fields: dict[str, Any]) -> Message:
        """Returns a new message of ours, with ROS's defaults.

        Raises:
            Ros2Error: no such type or field.
        """
        message = self.from_ros(self.ros_class(kind)())
        known = [field.name for field in dataclasses.fields(message)]
        for name, value in fields.items():
            if name not in known:
                raise Ros2Error(f"ros2: {kind} has no field {name!r}.{nearest(name, known)}")
            setattr(message, name, value)
        return message

    def from_ros(self, message: Any) -> Message:
        """Returns a message of ours."""
        ros = type(message)
        walk = self._walk(ros)
        return self._own[ros](**{name: convert(getattr(message, name)) for name, convert, _ in walk})

    def to_ros(self, message: Message) -> Any:
        """Returns a genuine message.

        Raises:
            Ros2Error: not a message of this node, or a field that does not fit its type.
        """
        ros = self._ros.get(type(message))
        if ros is None:
            raise Ros2Error(
                f"ros2: a {type(message).__name__} where a message is sent. Use node.message(...)."
            )
        filled = ros()
        for name, _, convert in self._walk(ros):
            try:
                setattr(filled, name, convert(getattr(message, name)))
            except (AssertionError, TypeError, ValueError, OverflowError) as error:
                raise Ros2Error(f"ros2: {ros.__name__}.{name} cannot be sent: {error}") from error
        return filled

    def _walk(self, ros: Any) -> list[tuple[str, Convert, Convert]]:
        """Returns the fields of a genuine class: name, how to read it, how to write it."""
        found = self._walks.get(ros)
        if found is None:
            names = list(ros.get_fields_and_field_types())
            found = [
                (name, *self._converters(slot)) for name, slot in zip(names, ros.SLOT_TYPES, strict=True)
            ]
            own = dataclasses.make_dataclass(ros.__name__, names, slots=True, eq=False)
            self._walks[ros], self._own[ros], self._ros[own] = found, own, ros
        return found

    def _converters(self, slot: Any) -> tuple[Convert, Convert]:
        """Returns how to read and write a field of a rosidl type."""
        if hasattr(slot, "value_type"):
            return self._of_many(slot)
        typename = getattr(slot, "typename", "")
        if hasattr(slot, "namespaces"):
            return self.from_ros, self.to_ros
        if typename == "octet":
            return lambda value: value[0], lambda value: bytes([value])
        if typename in ("float", "double"):
            return _same, float
        if typename == "boolean":
            return _same, bool
        return (_same, int) if typename in _DTYPES else (_same, str)

    def _of_many(self, slot: Any) -> tuple[Convert, Convert]:
        element, is_fixed = slot.value_type, hasattr(slot, "size")
        if hasattr(element, "namespaces"):
            return (
                lambda values: [self.from_ros(value) for value in values],
                lambda values: [self.to_ros(value) for value in values],
            )
        typename = getattr(element, "typename", "")
        dtype = _DTYPES.get(typename)
        if dtype is None:
            return list, lambda values: [str(value) for value in values]
        if typename == "octet":
            return (
                lambda values: np.frombuffer(b"".join(values), np.uint8),
                lambda values: [bytes([value]) for value in values],
            )
        if typename == "boolean":
            return lambda values: np.array(values, np.bool_), lambda values: [bool(value) for value in values]
        if is_fixed:
            return (
                lambda values: np.array(values, dtype),
                lambda values: np.asarray(_octets(values), dtype),
            )
        code = _CODES[typename]

        def to_array(values: Any) -> array.array[Any]:
            return array.array(code, np.ascontiguousarray(_octets(values), dtype).tobytes())

        return lambda values: np.frombuffer(values, dtype) if len(values) else np.zeros(0, dtype), to_array


def _octets(values: Any) -> Any:
    return np.frombuffer(values, np.uint8) if isinstance(values, bytes | bytearray | memoryview) else values


def _same(value: Any) -> Any:
    return value
