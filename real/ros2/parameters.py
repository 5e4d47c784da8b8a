"""Parameters of a node as in ROS 2: typed, described, checked; six services and /parameter_events.

`ros2 param list`, `get`, `set`, `describe` and `dump` work on a node that has a `Parameters`. Names may
have dots; a type never changes. As every node of ROS it has `use_sim_time`, which takes effect at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from robot_rl.core.errors import nearest
from robot_rl.real.ros2.api import Message, Node, QoS, Ros2Error, call_once

Value = (
    bool
    | int
    | float
    | str
    | bytes
    | tuple[bool, ...]
    | tuple[int, ...]
    | tuple[float, ...]
    | tuple[str, ...]
)

_SCALARS: dict[type, tuple[int, str]] = {
    bool: (1, "bool_value"),
    int: (2, "integer_value"),
    float: (3, "double_value"),
    str: (4, "string_value"),
    bytes: (5, "byte_array_value"),
}
_ARRAYS: dict[type, tuple[int, str]] = {
    bool: (6, "bool_array_value"),
    int: (7, "integer_array_value"),
    float: (8, "double_array_value"),
    str: (9, "string_array_value"),
}
_TYPES = (
    "not set", "bool", "integer", "double", "string", "byte array", "bool array", "integer array",
    "double array", "string array",
)  # fmt: skip
"""Names of rcl_interfaces/msg/ParameterType, in its order."""
_EVENTS = QoS(depth=1000)
_SIM_TIME = "use_sim_time"

Check = Callable[[Mapping[str, Value]], str | None]
"""Gets the new values; returns why they are refused, or None."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter."""

    name: str
    value: Value
    element: type[bool] | type[int] | type[float] | type[str] = float
    """Of an array that is empty at first."""
    description: str = ""
    read_only: bool = False
    minimum: float = -math.inf
    """Of a number; with `maximum`, the range that `ros2 param describe` shows."""
    maximum: float = math.inf

    @property
    def type(self) -> int:
        """rcl_interfaces/msg/ParameterType."""
        return _kind_of(self.value, self.element)[0]

    @property
    def has_range(self) -> bool:
        return (self.minimum, self.maximum) != (-math.inf, math.inf)


class Parameters:
    """The parameters of one node."""

    def __init__(self, node: Node, parameters: Iterable[Parameter] = (), check: Check | None = None) -> None:
        self._node = node
        self._check = check
        self._lock = threading.RLock()
        self._known: dict[str, Parameter] = {}
        self._events = node.create_publisher(
            "rcl_interfaces/msg/ParameterEvent", "/parameter_events", _EVENTS
        )
        self._serve()
        about = "Whether the node's time is that of /clock"
        sim_time = Parameter(name=_SIM_TIME, value=node.use_sim_time, description=about)
        for parameter in (sim_time, *parameters):
            self.declare(parameter)

    def declare(self, parameter: Parameter) -> None:
        """Adds a parameter.

        Raises:
            Ros2Error: it is declared already, or its value is outside of its own range.
        """
        with self._lock:
            reason = f"{parameter.name!r} is declared already" if parameter.name in self._known else None
            reason = reason or _out_of_range(parameter, parameter.value)
            if reason:
                raise Ros2Error(f"parameter of {self._node.name}: {reason}.")
            self._known[parameter.name] = parameter
        self._publish({parameter.name: parameter.value}, "new_parameters")

    def __getitem__(self, name: str) -> Value:
        with self._lock:
            if name not in self._known:
                raise Ros2Error(f"parameter of {self._node.name}: no {name!r}.{nearest(name, self._known)}")
            return self._known[name].value

    def _apply(self, values: dict[str, Value]) -> str | None:
        """Sets all, or none and returns why."""
        with self._lock:
            reason = next((text for name in values if (text := self._refused(name, values[name]))), None)
            reason = reason or (self._check(values) if self._check else None)
            if reason:
                return reason
            for name, value in values.items():
                self._known[name] = replace(self._known[name], value=value)
            if _SIM_TIME in values:
                self._node.use_sim_time = bool(values[_SIM_TIME])
        self._publish(values, "changed_parameters")
        return None

    def _refused(self, name: str, value: Value) -> str | None:
        parameter = self._known.get(name)
        if parameter is None:
            return f"{name!r} is not declared"
        if parameter.read_only:
            return f"{name!r} is read-only"
        got = _kind_of(value, parameter.element)[0]
        if got != parameter.type:
            return f"{name!r} is {_TYPES[parameter.type]}, got {_TYPES[got]}"
        return _out_of_range(parameter, value)

    def _publish(self, values: Mapping[str, Value], field: str) -> None:
        now_ns = self._node.now_ns()
        event = self._node.message("rcl_interfaces/msg/ParameterEvent", node=_full_name(self._node))
        event.stamp.sec, event.stamp.nanosec = divmod(now_ns, 1_000_000_000)
        setattr(event, field, [self._message(name, value) for name, value in values.items()])
        self._events.publish(event)

    def _message(self, name: str, value: Value) -> Message:
        parameter = self._known[name]
        encoded = encode(self._node, value, parameter.element)
        return self._node.message("rcl_interfaces/msg/Parameter", name=name, value=encoded)

    # Services. Where a name is not declared, ROS answers with an empty list.

    def _serve(self) -> None:
        answers = {
            "DescribeParameters": ("describe_parameters", self._on_describe),
            "GetParameters": ("get_parameters", self._on_get),
            "GetParameterTypes": ("get_parameter_types", self._on_types),
            "ListParameters": ("list_parameters", self._on_list),
            "SetParameters": ("set_parameters", self._on_set),
            "SetParametersAtomically": ("set_parameters_atomically", self._on_set_atomically),
        }
        for kind, (name, answer) in answers.items():
            self._node.create_service(f"rcl_interfaces/srv/{kind}", f"~/{name}", answer)

    def _asked(self, names: Iterable[str]) -> list[Parameter]:
        with self._lock:
            found = [self._known.get(name) for name in names]
        return [] if None in found else cast("list[Parameter]", found)

    def _answer(self, kind: str, **fields: Any) -> Message:
        return self._node.message(f"rcl_interfaces/srv/{kind}_Response", **fields)

    def _on_describe(self, request: Message) -> Message:
        found = self._asked(request.names)
        return self._answer("DescribeParameters", descriptors=[_described(self._node, one) for one in found])

    def _on_get(self, request: Message) -> Message:
        found = self._asked(request.names)
        return self._answer(
            "GetParameters", values=[encode(self._node, one.value, one.element) for one in found]
        )

    def _on_types(self, request: Message) -> Message:
        return self._answer("GetParameterTypes", types=[one.type for one in self._asked(request.names)])

    def _on_list(self, request: Message) -> Message:
        with self._lock:
            names = [
                name for name in sorted(self._known) if _is_listed(name, request.prefixes, int(request.depth))
            ]
        prefixes = sorted({name.rpartition(".")[0] for name in names if "." in name})
        result = self._node.message("rcl_interfaces/msg/ListParametersResult", names=names, prefixes=prefixes)
        return self._answer("ListParameters", result=result)

    def _on_set(self, request: Message) -> Message:
        return self._answer("SetParameters", results=[self._result([one]) for one in request.parameters])

    def _on_set_atomically(self, request: Message) -> Message:
        return self._answer("SetParametersAtomically", result=self._result(request.parameters))

    def _result(self, parameters: Iterable[Message]) -> Message:
        values = {one.name: decode(one.value) for one in parameters}
        unset = next((name for name, value in values.items() if value is None), None)
        reason = f"{unset!r} cannot be unset" if unset else self._apply(cast("dict[str, Value]", values))
        return self._node.message(
            "rcl_interfaces/msg/SetParametersResult", successful=reason is None, reason=reason or ""
        )


def get_remote(node: Node, of: str, names: Iterable[str], timeout_s: float = 5.0) -> dict[str, Value | None]:
    """Returns parameters of another node; None where it has none of that name, or has not set it.

    Raises:
        Ros2Error: the node does not answer.
    """
    kind, service = "rcl_interfaces/srv/GetParameters", f"{of}/get_parameters"

    def ask(some: list[str]) -> list[Value | None]:
        return [decode(one) for one in call_once(node, kind, service, timeout_s, names=some).values]

    asked = list(names)
    values = ask(asked)
    if len(values) != len(asked):  # an unknown or unset one makes the whole answer empty: one by one
        values = [next(iter(ask([name])), None) for name in asked]
    return dict(zip(asked, values, strict=True))


def set_remote(node: Node, of: str, values: Mapping[str, Value], timeout_s: float = 5.0) -> None:
    """Sets parameters of another node, all or none.

    Raises:
        Ros2Error: the node does not answer, or refuses.
    """
    parameters = [
        node.message("rcl_interfaces/msg/Parameter", name=name, value=encode(node, value))
        for name, value in values.items()
    ]
    name = f"{of}/set_parameters_atomically"
    result = call_once(
        node, "rcl_interfaces/srv/SetParametersAtomically", name, timeout_s, parameters=parameters
    ).result
    if not result.successful:
        raise Ros2Error(f"parameter of {of}: {result.reason}.")


def encode(node: Node, value: Value, element: type = float) -> Message:
    """Returns a rcl_interfaces/msg/ParameterValue; `element` is for an empty array."""
    kind, field = _kind_of(value, element)
    encoded = list(value) if isinstance(value, tuple) else value
    return node.message("rcl_interfaces/msg/ParameterValue", type=kind, **{field: encoded})


def decode(message: Message) -> Value | None:
    """Returns the value of a ParameterValue, or None if it is not set."""
    for element, (kind, field) in _SCALARS.items():
        if kind == message.type:
            return element(getattr(message, field))
    for element, (kind, field) in _ARRAYS.items():
        if kind == message.type:
            return tuple(element(one) for one in getattr(message, field))
    return None


def _kind_of(value: Value, element: type) -> tuple[int, str]:
    if isinstance(value, tuple):
        return _ARRAYS[type(value[0]) if value else element]
    return _SCALARS[type(value)]


def _out_of_range(parameter: Parameter, value: Value) -> str | None:
    if not parameter.has_range:
        return None
    least, most = parameter.minimum, parameter.maximum
    for number in value if isinstance(value, tuple) else (value,):
        if not least <= cast(float, number) <= most:
            return f"{parameter.name!r} must be within {least:g} and {most:g}, got {number!r}"
    return None


def _described(node: Node, parameter: Parameter) -> Message:
    descriptor = node.message(
        "rcl_interfaces/msg/ParameterDescriptor",
        name=parameter.name,
        type=parameter.type,
        description=parameter.description,
        read_only=parameter.read_only,
    )
    if not parameter.has_range:
        return descriptor
    least, most = parameter.minimum, parameter.maximum
    if parameter.type in (_SCALARS[int][0], _ARRAYS[int][0]):
        big = 2**63 - 1
        limits = {"from_value": int(max(least, -big)), "to_value": int(min(most, big))}
        descriptor.integer_range = [node.message("rcl_interfaces/msg/IntegerRange", **limits)]
    else:
        limits = {"from_value": least, "to_value": most}
        descriptor.floating_point_range = [node.message("rcl_interfaces/msg/FloatingPointRange", **limits)]
    return descriptor


def _is_listed(name: str, prefixes: Iterable[str], depth: int) -> bool:
    """Whether `list_parameters` names it; depth 0 is any, 1 what has no further dot."""
    below = [name[len(prefix) + 1 :] for prefix in prefixes if name.startswith(f"{prefix}.")]
    if not list(prefixes):
        below = [name]
    return any(depth == 0 or rest.count(".") < depth for rest in below) or name in prefixes


def _full_name(node: Node) -> str:
    return f"{node.namespace.rstrip('/')}/{node.name}"
