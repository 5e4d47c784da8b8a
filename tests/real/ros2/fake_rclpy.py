"""A stand-in for rclpy where no ROS 2 is: its documented API, within one process.

Its messages check assignments as rosidl's do (a float field takes no int, a sequence of numbers is an
array.array). Callbacks run on the thread that spins the executor, coroutines between them.
"""

import array
import contextlib
import enum
import queue
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np


def slot(kind: str, **attributes: Any) -> Any:
    """Returns what rosidl_parser.definition has for a field: its name tells its class."""
    return types.SimpleNamespace(kind=kind, **attributes)


def basic(typename: str) -> Any:
    return slot("BasicType", typename=typename)


def named(cls: type) -> Any:
    return slot("NamespacedType", namespaces=["demo", "msg"], name=cls.__name__, cls=cls)


def many(element: Any) -> Any:
    return slot("UnboundedSequence", value_type=element)


def fixed(element: Any, size: int) -> Any:
    return slot("Array", value_type=element, size=size)


STRING = slot("UnboundedString")
_ZEROS = {"boolean": False, "octet": b"\0", "float": 0.0, "double": 0.0}
_CODES = {"double": "d", "float": "f", "uint8": "B", "int32": "i"}


def _default(one: Any) -> Any:
    if one.kind == "NamespacedType":
        return one.cls()
    if one.kind == "Array":
        return np.zeros(one.size, {"uint8": np.uint8, "double": np.float64}[one.value_type.typename])
    if one.kind == "UnboundedSequence":
        code = _CODES.get(getattr(one.value_type, "typename", ""))
        return array.array(code) if code else []
    return "" if one.kind == "UnboundedString" else _ZEROS.get(one.typename, 0)


def message(name: str, /, **slots: Any) -> type:
    """Returns a class as rosidl generates it."""

    def init(self: Any) -> None:
        for field, one in slots.items():
            object.__setattr__(self, field, _default(one))

    def check(self: Any, field: str, value: Any) -> None:
        expected = _default(slots[field])
        assert type(value) is type(expected), f"{field}: {type(value).__name__}"
        if isinstance(expected, array.array):
            assert value.typecode == expected.typecode
        if isinstance(expected, np.ndarray):
            assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        object.__setattr__(self, field, value)

    return type(
        name,
        (),
        {
            "__init__": init,
            "__setattr__": check,
            "SLOT_TYPES": tuple(slots.values()),
            "get_fields_and_field_types": classmethod(lambda cls: dict.fromkeys(slots, "")),
        },
    )


Time = message("Time", sec=basic("int32"), nanosec=basic("uint32"))
All = message(
    "All",
    stamp=named(Time),
    stamps=many(named(Time)),
    name=STRING,
    names=many(STRING),
    flag=basic("boolean"),
    flags=many(basic("boolean")),
    byte=basic("octet"),
    bytes=many(basic("octet")),
    number=basic("double"),
    numbers=many(basic("double")),
    pixels=many(basic("uint8")),
    uuid=fixed(basic("uint8"), 16),
)
Trigger = type(
    "Trigger",
    (),
    {
        "Request": message("Trigger_Request", structure_needs_at_least_one_member=basic("uint8")),
        "Response": message("Trigger_Response", success=basic("boolean"), message=STRING),
    },
)
Count = type(
    "Count",
    (),
    {
        "Goal": message("Count_Goal", order=basic("int32")),
        "Result": message("Count_Result", sequence=many(basic("int32"))),
        "Feedback": message("Count_Feedback", last=basic("int32")),
    },
)


class Future:
    """rclpy.task.Future."""

    def __init__(self, *, executor: Any = None) -> None:
        self._event, self._callbacks, self._value = threading.Event(), [], None

    def __await__(self):
        while not self.done():
            yield
        return self._value

    def done(self) -> bool:
        return self._event.is_set()

    def result(self) -> Any:
        return self._value

    def set_result(self, value: Any) -> None:
        self._value = value
        self._event.set()
        for callback in self._callbacks:
            callback(self)

    def cancel(self) -> None:
        self._event.set()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)
        if self.done():
            callback(self)


# rclpy's own names.
ShutdownException = type("ShutdownException", (Exception,), {})
ExternalShutdownException = type("ExternalShutdownException", (Exception,), {})


class Executor:
    """rclpy.executors.SingleThreadedExecutor."""

    def __init__(self, *, context: Any) -> None:
        self.work: queue.Queue[Any] = queue.Queue()
        self._open = True

    def add_node(self, node: Any) -> None:
        node.executor = self

    def spin(self) -> None:
        waiting: list[Any] = []
        while self._open:
            with contextlib.suppress(queue.Empty):
                step = self.work.get(timeout=0.002)()
                waiting += [step] if hasattr(step, "send") else []
            waiting = [one for one in waiting if _goes_on(one)]
        raise ShutdownException

    def shutdown(self) -> None:
        self._open = False


def _goes_on(coroutine: Any) -> bool:
    try:
        coroutine.send(None)
    except StopIteration:
        return False
    return True


class World:
    """Who is there."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.subscriptions: list[Any] = []
        self.publishers: list[Any] = []
        self.servers: dict[str, Any] = {}

    def install(self, patch: Any) -> None:
        """Puts the modules of rclpy and of its message packages where they are imported from."""
        world = self

        def create_node(name: str, **keys: Any) -> Node:
            return Node(world, name, **keys)

        class Context:
            up = False

            def ok(self) -> bool:
                return self.up

        def init(*, context: Any, domain_id: Any = None, signal_handler_options: Any = None) -> None:
            context.up = True

        def shutdown(*, context: Any) -> None:
            context.up = False

        policy = enum.Enum("Policy", "RELIABLE BEST_EFFORT TRANSIENT_LOCAL VOLATILE")
        modules = {
            "rclpy": {"Context": Context, "init": init, "shutdown": shutdown, "create_node": create_node},
            "rclpy.executors": {
                "SingleThreadedExecutor": Executor,
                "ShutdownException": ShutdownException,
                "ExternalShutdownException": ExternalShutdownException,
            },
            "rclpy.parameter": {"Parameter": lambda name, *, value: (name, value)},
            "rclpy.signals": {"SignalHandlerOptions": enum.Enum("Options", "NO ALL")},
            "rclpy.qos": {
                "QoSProfile": lambda **keys: types.SimpleNamespace(**keys),
                "ReliabilityPolicy": policy,
                "DurabilityPolicy": policy,
            },
            "rclpy.task": {"Future": Future},
            "rclpy.action": {
                "ActionServer": ActionServer,
                "ActionClient": ActionClient,
                "GoalResponse": enum.Enum("GoalResponse", "REJECT ACCEPT"),
                "CancelResponse": enum.Enum("CancelResponse", "REJECT ACCEPT"),
            },
            "demo": {},
            "demo.msg": {"All": All, "Time": Time},
            "demo.srv": {"Trigger": Trigger},
            "demo.action": {"Count": Count},
        }
        for name, attributes in modules.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)


class Node:
    """rclpy.node.Node."""

    def __init__(self, world: World, name: str, **keys: Any) -> None:
        self.world, self._name, self.keys = world, name, keys
        self.executor: Any = None
        world.nodes.append(self)

    def get_name(self) -> str:
        return self._name

    def get_namespace(self) -> str:
        return "/" + self.keys["namespace"].strip("/")

    def resolve_topic_name(self, name: str) -> str:
        if name.startswith("~/"):
            name = f"{self._name}/{name[2:]}"
        return name if name.startswith("/") else f"{self.get_namespace().rstrip('/')}/{name}"

    def get_clock(self) -> Any:
        return types.SimpleNamespace(now=lambda: types.SimpleNamespace(nanoseconds=time.time_ns()))

    def get_node_names_and_namespaces(self) -> list[tuple[str, str]]:
        return [(node.get_name(), node.get_namespace()) for node in self.world.nodes]

    def get_publishers_info_by_topic(self, topic: str) -> list[Any]:
        return [
            types.SimpleNamespace(node_name=one.node.get_name(), node_namespace=one.node.get_namespace())
            for one in self.world.publishers
            if one.topic_name == topic
        ]

    def count_publishers(self, topic: str) -> int:
        return len(self.get_publishers_info_by_topic(topic))

    def create_publisher(self, cls: type, topic: str, profile: Any) -> Any:
        name = self.resolve_topic_name(topic)

        def publish(sent: Any) -> None:
            assert type(sent) is cls
            for one in self.world.subscriptions:
                if one.topic_name == name:
                    one.node.executor.work.put(lambda one=one: one.callback(sent))

        made = types.SimpleNamespace(node=self, topic_name=name, profile=profile, publish=publish)
        made.get_subscription_count = lambda: sum(one.topic_name == name for one in self.world.subscriptions)
        self.world.publishers.append(made)
        return made

    def create_subscription(self, cls: type, topic: str, callback: Any, profile: Any) -> Any:
        name = self.resolve_topic_name(topic)
        made = types.SimpleNamespace(node=self, topic_name=name, callback=callback, profile=profile)
        self.world.subscriptions.append(made)
        return made

    def create_service(self, cls: Any, name: str, callback: Any) -> Any:
        made = types.SimpleNamespace(
            node=self,
            name=self.resolve_topic_name(name),
            answer=lambda asked: callback(asked, cls.Response()),
        )
        self.world.servers[made.name] = made
        return made

    def create_client(self, cls: Any, name: str) -> Any:
        return Client(self, self.resolve_topic_name(name))

    def destroy_subscription(self, made: Any) -> None:
        self.world.subscriptions.remove(made)

    def destroy_service(self, made: Any) -> None:
        del self.world.servers[made.name]

    def destroy_client(self, made: Any) -> None:
        pass

    def destroy_node(self) -> None:
        self.world.nodes.remove(self)


class Client:
    """rclpy.client.Client."""

    def __init__(self, node: Node, name: str) -> None:
        self._world, self._node, self.srv_name = node.world, node, name

    def service_is_ready(self) -> bool:
        return self.srv_name in self._world.servers

    def wait_for_service(self, *, timeout_sec: float) -> bool:
        return self.service_is_ready()

    def call_async(self, request: Any) -> Future:
        future, server = Future(), self._world.servers[self.srv_name]

        def answer() -> None:
            response = server.answer(request)
            self._node.executor.work.put(lambda: future.set_result(response))

        server.node.executor.work.put(answer)
        return future

    def remove_pending_request(self, future: Future) -> None:
        pass


class ServerGoal:
    """rclpy.action.server.ServerGoalHandle."""

    def __init__(self, request: Any, hear: Any) -> None:
        self.request, self._hear, self.status, self.answer = request, hear, 2, Future()
        self.goal_id = types.SimpleNamespace(uuid=uuid.uuid4().bytes)

    @property
    def is_cancel_requested(self) -> bool:
        return self.status == 3

    def publish_feedback(self, feedback: Any) -> None:
        self._hear(types.SimpleNamespace(goal_id=self.goal_id, feedback=feedback))

    def succeed(self) -> None:
        self.status = 4

    def canceled(self) -> None:
        assert self.status == 3
        self.status = 5

    def abort(self) -> None:
        self.status = 6


class ActionServer:
    """rclpy.action.ActionServer."""

    def __init__(self, node: Node, kind: Any, name: str, **callbacks: Any) -> None:
        self.node, self.callbacks, self.name = node, callbacks, node.resolve_topic_name(name)
        node.world.servers[self.name] = self

    def destroy(self) -> None:
        del self.node.world.servers[self.name]

    async def execute(self, goal: ServerGoal) -> None:
        result = await self.callbacks["execute_callback"](goal)
        goal.answer.set_result(types.SimpleNamespace(status=goal.status, result=result))


class ActionClient:
    """rclpy.action.ActionClient."""

    def __init__(self, node: Node, kind: Any, name: str) -> None:
        self._node, self._name = node, node.resolve_topic_name(name)

    def server_is_ready(self) -> bool:
        return self._name in self._node.world.servers

    def wait_for_server(self, *, timeout_sec: float) -> bool:
        return self.server_is_ready()

    def send_goal_async(self, request: Any, feedback_callback: Any) -> Future:
        server, sent = self._node.world.servers[self._name], Future()
        work = server.node.executor.work
        goal = ServerGoal(request, lambda one: self._node.executor.work.put(lambda: feedback_callback(one)))

        def ask() -> Any:
            accepted = server.callbacks["goal_callback"](request).name == "ACCEPT"
            sent.set_result(
                types.SimpleNamespace(
                    accepted=accepted,
                    goal_id=goal.goal_id,
                    get_result_async=lambda: goal.answer,
                    cancel_goal_async=lambda: self._cancel(server, goal),
                )
            )
            return server.execute(goal) if accepted else None

        work.put(ask)
        return sent

    def _cancel(self, server: Any, goal: ServerGoal) -> Future:
        future = Future()

        def ask() -> None:
            agreed = goal.status == 2 and server.callbacks["cancel_callback"](goal).name == "ACCEPT"
            goal.status = 3 if agreed else goal.status
            future.set_result(types.SimpleNamespace(goals_canceling=[goal.goal_id] if agreed else []))

        server.node.executor.work.put(ask)
        return future
