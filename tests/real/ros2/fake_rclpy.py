"""A stand-in for rclpy where no ROS 2 is: its documented API, within one process.

Its messages check assignments as rosidl's do (a float field takes no int, a sequence of numbers is an
array.array). Callbacks run on the thread that spins the executor. It is as unkind as genuine rclpy (7.1.3),
where that is so by chance always:

- an answer to what was asked outside of the executor's thread is lost (there: 3 of 5,000);
- a coroutine that waits goes on when something else wakes the executor, not when its future is set;
- a task that raises ends the executor, and nothing runs after its shutdown;
- actions are not remapped; sys.argv is read where `init` gets no arguments;
- a subscription never hears a publisher of a lower quality of service: there is an event, no message;
- every node publishes /parameter_events, and an entry of the graph is an endpoint, not a node;
- what does not work raises RCLError, InvalidHandle or a name's exception.
"""

import array
import contextlib
import enum
import itertools
import queue
import re
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Parameter(NamedTuple):
    """rclpy.parameter.Parameter."""

    name: str
    value: Any = None


class Future:
    """rclpy.task.Future."""

    def __init__(self, *, executor: Any = None) -> None:
        self._event, self._callbacks, self._value = threading.Event(), [], None
        self._lock = threading.Lock()

    def __await__(self):
        while not self.done():
            yield
        return self._value

    def done(self) -> bool:
        return self._event.is_set()

    def result(self) -> Any:
        return self._value

    def set_result(self, value: Any) -> None:
        with self._lock:
            self._value = value
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def cancel(self) -> None:
        self._event.set()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        with self._lock:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback(self)


# rclpy's own names.
ShutdownException = type("ShutdownException", (Exception,), {})
ExternalShutdownException = type("ExternalShutdownException", (Exception,), {})
RCLError = type("RCLError", (RuntimeError,), {})
InvalidHandle = type("InvalidHandle", (RuntimeError,), {})
InvalidNodeNameException = type("InvalidNodeNameException", (ValueError,), {})
InvalidTopicNameException = type("InvalidTopicNameException", (ValueError,), {})


class Executor:
    """rclpy.executors.SingleThreadedExecutor."""

    def __init__(self, *, context: Any) -> None:
        self.work: queue.Queue[Any] = queue.Queue()
        self.thread: threading.Thread | None = None
        self._open = True

    def add_node(self, node: Any) -> None:
        node.executor = self

    def create_task(self, callback: Callable[..., Any], *values: Any) -> Future:
        task = Future()
        self.work.put(lambda: task.set_result(callback(*values)))
        return task

    def spin(self) -> None:
        self.thread = threading.current_thread()
        waiting: list[Any] = []
        while self._open:
            with contextlib.suppress(queue.Empty):
                step = self.work.get(timeout=0.002)()
                waiting += [step] if hasattr(step, "send") else []
                waiting = [one for one in waiting if _goes_on(one)]
        raise ShutdownException

    def shutdown(self) -> None:
        self._open = False

    def hears(self) -> bool:
        """Whether an answer to what is asked now will be heard."""
        return threading.current_thread() is self.thread


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
        self.middleware = "rmw_fastrtps_cpp"

    def install(self, patch: Any) -> None:
        """Puts the modules of rclpy and of its message packages where they are imported from."""
        world = self

        def create_node(name: str, **keys: Any) -> Node:
            return Node(world, name, **keys)

        class Context:
            up = False

            def ok(self) -> bool:
                return self.up

        def init(
            *, args: Any = None, context: Any, domain_id: Any = None, signal_handler_options: Any = None
        ) -> None:
            context.up, context.args = True, sys.argv if args is None else args

        def shutdown(*, context: Any) -> None:
            context.up = False

        policy = enum.Enum("Policy", "RELIABLE BEST_EFFORT TRANSIENT_LOCAL VOLATILE")
        events: dict[str, Any] = {
            "SubscriptionEventCallbacks": lambda **keys: types.SimpleNamespace(**keys),
        }
        modules = {
            "rclpy": {"Context": Context, "init": init, "shutdown": shutdown, "create_node": create_node},
            "rclpy.executors": {
                "SingleThreadedExecutor": Executor,
                "ShutdownException": ShutdownException,
                "ExternalShutdownException": ExternalShutdownException,
            },
            "rclpy.parameter": {"Parameter": Parameter},
            "rclpy.utilities": {"get_rmw_implementation_identifier": lambda: world.middleware},
            "rclpy.event_handler": events,
            "rclpy.signals": {"SignalHandlerOptions": enum.Enum("Options", "NO ALL")},
            "rclpy.qos": {
                "QoSProfile": lambda **keys: types.SimpleNamespace(**keys),
                "ReliabilityPolicy": policy,
                "DurabilityPolicy": policy,
                "qos_policy_name_from_kind": lambda kind: kind,
            },
            "rclpy.task": {"Future": Future},
            "rclpy.action": {
                "ActionServer": ActionServer,
                "ActionClient": ActionClient,
                "GoalResponse": enum.Enum("GoalResponse", "REJECT ACCEPT"),
                "CancelResponse": enum.Enum("CancelResponse", "REJECT ACCEPT"),
            },
            "std_msgs": {},
            "std_msgs.msg": {
                "Bool": message("Bool", data=basic("boolean")),
                "String": message("String", data=STRING),
            },
            "std_srvs": {},
            "std_srvs.srv": {"Trigger": Trigger},
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
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InvalidNodeNameException(f"Invalid node name: no letters or digits:\n  '{name}'")
        self.world, self._name, self.keys = world, name, keys
        self.executor: Any = None
        self.is_open = True
        self.parameters = {one.name: one for one in keys["parameter_overrides"]}
        words = [*keys["context"].args, *(keys["cli_args"] or [])]
        rules = [word.split(":=") for before, word in itertools.pairwise(words) if before == "-r"]
        self._rules = {self._expand(source): self._expand(target) for source, target in rules}
        world.nodes.append(self)
        self.create_publisher(object, "/parameter_events", fair_quality())

    def get_name(self) -> str:
        return self._name

    def get_namespace(self) -> str:
        return "/" + self.keys["namespace"].strip("/")

    def _expand(self, name: str) -> str:
        if name.startswith("~/"):
            name = f"{self._name}/{name[2:]}"
        if not re.fullmatch(r"[\w/]+", name) or "//" in name:
            raise InvalidTopicNameException(f"Invalid topic name:\n  '{name}'\n   ^")
        return name if name.startswith("/") else f"{self.get_namespace().rstrip('/')}/{name}"

    def resolve_topic_name(self, name: str) -> str:
        expanded = self._expand(name)
        return self._rules.get(expanded, expanded)

    def use(self) -> None:
        """Raises once it is destroyed."""
        if not self.is_open:
            raise InvalidHandle("cannot use Destroyable because destruction was requested")

    def get_clock(self) -> Any:
        return types.SimpleNamespace(now=lambda: types.SimpleNamespace(nanoseconds=time.time_ns()))

    def get_parameter(self, name: str) -> Parameter:
        return self.parameters[name]

    def set_parameters(self, parameters: list[Parameter]) -> None:
        self.use()
        self.parameters |= {one.name: one for one in parameters}

    def get_node_names_and_namespaces(self) -> list[tuple[str, str]]:
        self.use()
        return [(node.get_name(), node.get_namespace()) for node in self.world.nodes]

    @property
    def publishers(self) -> list[Any]:
        return [one for one in self.world.publishers if one.node is self]

    def get_topic_names_and_types(self) -> list[tuple[str, list[str]]]:
        """As rclpy's, also of topics that are only subscribed to."""
        self.use()
        ends = [*self.world.publishers, *self.world.subscriptions]
        kinds = {one.topic_name: set[str]() for one in ends}
        for one in ends:
            kinds[one.topic_name].add(one.kind)
        return [(name, sorted(found)) for name, found in kinds.items()]

    def get_publishers_info_by_topic(self, topic: str) -> list[Any]:
        self.use()
        return [
            types.SimpleNamespace(node_name=one.node.get_name(), node_namespace=one.node.get_namespace())
            for one in self.world.publishers
            if one.topic_name == topic
        ]

    def count_publishers(self, topic: str) -> int:
        return len(self.get_publishers_info_by_topic(topic))

    def create_publisher(self, cls: type, topic: str, profile: Any) -> Any:
        self.use()
        name = self.resolve_topic_name(topic)

        def publish(sent: Any) -> None:
            self.use()
            assert type(sent) is cls
            for one in self.world.subscriptions:
                if one.topic_name == name and not lacking(one.profile, profile):
                    one.node.executor.work.put(lambda one=one: one.callback(sent))

        kind = f"demo/msg/{cls.__name__}"
        made = types.SimpleNamespace(node=self, topic_name=name, kind=kind, profile=profile, publish=publish)
        made.get_subscription_count = lambda: sum(one.topic_name == name for one in self.world.subscriptions)
        self.world.publishers.append(made)
        for one in self.world.subscriptions:
            _tell(one, made)
        return made

    def create_subscription(
        self, cls: type, topic: str, callback: Any, profile: Any, *, event_callbacks: Any = None
    ) -> Any:
        self.use()
        name = self.resolve_topic_name(topic)
        made = types.SimpleNamespace(
            node=self,
            topic_name=name,
            kind=f"demo/msg/{cls.__name__}",
            callback=callback,
            profile=profile,
            events=event_callbacks,
        )
        self.world.subscriptions.append(made)
        for one in self.world.publishers:
            _tell(made, one)
        return made

    def create_service(self, cls: Any, name: str, callback: Any) -> Any:
        self.use()
        made = types.SimpleNamespace(
            node=self,
            name=self.resolve_topic_name(name),
            answer=lambda asked: callback(asked, cls.Response()),
        )
        self.world.servers[made.name] = made
        return made

    def create_client(self, cls: Any, name: str) -> Any:
        self.use()
        return Client(self, self.resolve_topic_name(name))

    def destroy_subscription(self, made: Any) -> None:
        self.world.subscriptions.remove(made)

    def destroy_service(self, made: Any) -> None:
        del self.world.servers[made.name]

    def destroy_client(self, made: Any) -> None:
        pass

    def destroy_node(self) -> None:
        self.is_open = False
        self.world.nodes.remove(self)


def fair_quality() -> Any:
    """Returns reliable and volatile."""
    words = {"reliability": "RELIABLE", "durability": "VOLATILE"}
    return types.SimpleNamespace(**{key: types.SimpleNamespace(name=word) for key, word in words.items()})


def lacking(wanted: Any, offered: Any) -> str:
    """Returns the policy that keeps a subscription and a publisher apart, by DDS's rules."""
    if (wanted.reliability.name, offered.reliability.name) == ("RELIABLE", "BEST_EFFORT"):
        return "RELIABILITY"
    if (wanted.durability.name, offered.durability.name) == ("TRANSIENT_LOCAL", "VOLATILE"):
        return "DURABILITY"
    return ""


def _tell(subscription: Any, publisher: Any) -> None:
    """Raises the event of a quality of service that does not match."""
    lack, events = lacking(subscription.profile, publisher.profile), subscription.events
    if subscription.topic_name == publisher.topic_name and lack and events is not None:
        event = types.SimpleNamespace(last_policy_kind=lack)
        subscription.node.executor.work.put(lambda: events.incompatible_qos(event))


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
        heard = self._node.executor.hears()

        def answer() -> None:
            response = server.answer(request)
            if heard:
                self._node.executor.work.put(lambda: future.set_result(response))

        server.node.executor.work.put(answer)
        return future

    def remove_pending_request(self, future: Future) -> None:
        pass


class ServerGoal:
    """rclpy.action.server.ServerGoalHandle."""

    def __init__(self, request: Any, client: Executor, hear: Any) -> None:
        self.request, self._hear, self.status = request, hear, 2
        self._client, self._answer, self._is_asked = client, Future(), False
        self._response: Any = None
        self.goal_id = types.SimpleNamespace(uuid=uuid.uuid4().bytes)

    @property
    def is_cancel_requested(self) -> bool:
        return self.status == 3

    def get_result_async(self) -> Future:
        self._is_asked = self._client.hears()
        self._client.work.put(self._deliver)
        return self._answer

    def send_result(self, response: Any) -> None:
        self._response = response
        self._client.work.put(self._deliver)

    def _deliver(self) -> None:
        if self._is_asked and self._response is not None and not self._answer.done():
            self._answer.set_result(self._response)

    def publish_feedback(self, feedback: Any) -> None:
        self._hear(types.SimpleNamespace(goal_id=self.goal_id, feedback=feedback))

    def succeed(self) -> None:
        self.status = 4

    def canceled(self) -> None:
        if self.status != 3:
            raise RCLError(
                "Failed to update goal state: goal_handle attempted invalid transition, at ./x.c:95"
            )
        self.status = 5

    def abort(self) -> None:
        self.status = 6


class ActionServer:
    """rclpy.action.ActionServer."""

    def __init__(self, node: Node, kind: Any, name: str, **callbacks: Any) -> None:
        self.node, self.callbacks, self.name = node, callbacks, node._expand(name)
        node.world.servers[self.name] = self

    def destroy(self) -> None:
        del self.node.world.servers[self.name]

    async def execute(self, goal: ServerGoal) -> None:
        result = await self.callbacks["execute_callback"](goal)
        goal.send_result(types.SimpleNamespace(status=goal.status, result=result))


class ActionClient:
    """rclpy.action.ActionClient."""

    def __init__(self, node: Node, kind: Any, name: str) -> None:
        self._node, self._name = node, node._expand(name)

    def server_is_ready(self) -> bool:
        return self._name in self._node.world.servers

    def wait_for_server(self, *, timeout_sec: float) -> bool:
        return self.server_is_ready()

    def send_goal_async(self, request: Any, feedback_callback: Any) -> Future:
        server, sent, own = self._node.world.servers[self._name], Future(), self._node.executor
        work, heard = server.node.executor.work, own.hears()
        goal = ServerGoal(request, own, lambda one: own.work.put(lambda: feedback_callback(one)))
        handle = types.SimpleNamespace(
            goal_id=goal.goal_id,
            get_result_async=goal.get_result_async,
            cancel_goal_async=lambda: self._cancel(server, goal),
        )

        def ask() -> Any:
            handle.accepted = server.callbacks["goal_callback"](request).name == "ACCEPT"
            handle.status = goal.status
            if heard:
                own.work.put(lambda: sent.set_result(handle))
            return server.execute(goal) if handle.accepted else None

        work.put(ask)
        return sent

    def _cancel(self, server: Any, goal: ServerGoal) -> Future:
        future, own = Future(), self._node.executor
        heard = own.hears()

        def ask() -> None:
            agreed = goal.status == 2 and server.callbacks["cancel_callback"](goal).name == "ACCEPT"
            goal.status = 3 if agreed else goal.status
            canceling = [types.SimpleNamespace(goal_id=goal.goal_id)] if agreed else []
            response = types.SimpleNamespace(goals_canceling=canceling)
            if heard:
                own.work.put(lambda: future.set_result(response))

        server.node.executor.work.put(ask)
        return future
