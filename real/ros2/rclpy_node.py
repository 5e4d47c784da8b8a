"""A node on genuine rclpy: an implementation of `api.Node`.

It uses the documented API of rclpy (Humble to Lyrical). Without ROS 2 it is tested against a stand-in with
the faults that genuine rclpy (Jazzy) showed; where rclpy can be imported, the tests of the transport use it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from robot_rl.real.ros2.api import (
    DEFAULT,
    ActionClient,
    GoalCallbacks,
    Message,
    QoS,
    Ros2Error,
    Service,
    qos_warning,
)
from robot_rl.real.ros2.rclpy_action import RclpyActionClient, RclpyActionServer
from robot_rl.real.ros2.rclpy_guards import guarded, rclpy_module, translated
from robot_rl.real.ros2.rclpy_messages import RosMessages

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_DRAIN_S = 1.0
"""How long a node that closes waits for the results of its goals to go out."""
_TICK_S = 0.01
_CYCLONE = "rmw_cyclonedds_cpp"


class RclpyNode:
    """One node with its own context, executor and thread."""

    def __init__(
        self,
        name: str,
        *,
        namespace: str = "",
        domain_id: int | None = None,
        remap: Mapping[str, str] | None = None,
        use_sim_time: bool = False,
    ) -> None:
        """Opens the node.

        Raises:
            Ros2Error: rclpy cannot be imported, or refuses a name or a rule.
        """
        self._rclpy = rclpy_module()
        self._context: Any = self._rclpy.Context()
        rules = [word for source, target in (remap or {}).items() for word in ("-r", f"{source}:={target}")]
        with translated(f"node {name!r} in namespace {namespace!r}, remapping {dict(remap or {})}"):
            # Not sys.argv: --ros-args there would change one process of a station only. Names are in the
            # station file: ros2.namespace, ros2.remap.
            no_signals = rclpy_module("signals").SignalHandlerOptions.NO  # those are the program's
            self._rclpy.init(
                args=[], context=self._context, domain_id=domain_id, signal_handler_options=no_signals
            )
            try:
                self.ros: Any = self._rclpy.create_node(
                    name,
                    context=self._context,
                    namespace=namespace,
                    cli_args=["--ros-args", *rules] if rules else None,
                    parameter_overrides=[_sim_time(use_sim_time)],
                    start_parameter_services=False,  # `parameters.Parameters` serves them, on both
                )
            except Exception:
                self._rclpy.shutdown(context=self._context)
                raise
        self.messages = RosMessages()
        self.unfinished: set[object] = set()
        """Goals without a sent result."""
        self._wanted: dict[str, list[QoS]] = {}
        self._executor: Any = rclpy_module("executors").SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.ros)
        self._thread = threading.Thread(target=self._spin, name=f"rclpy {name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self.ros.get_name()

    @property
    def namespace(self) -> str:
        return self.ros.get_namespace()

    @property
    def use_sim_time(self) -> bool:
        return bool(self.ros.get_parameter("use_sim_time").value)

    @use_sim_time.setter
    def use_sim_time(self, value: bool) -> None:
        with translated("use_sim_time"):
            self.ros.set_parameters([_sim_time(value)])

    def resolve(self, name: str) -> str:
        with translated(f"name {name!r}"):
            return self.ros.resolve_topic_name(name)

    def message(self, kind: str, **fields: Any) -> Message:
        return self.messages.make(kind, fields)

    def create_publisher(self, kind: str, topic: str, qos: QoS = DEFAULT) -> RclpyPublisher:
        cls = self.messages.ros_class(kind)
        with translated(f"publisher of {topic!r} ({kind})"):
            return RclpyPublisher(self, self.ros.create_publisher(cls, topic, _profile(qos)))

    def create_subscription(
        self, kind: str, topic: str, callback: Callable[[Message], None], qos: QoS = DEFAULT
    ) -> RclpySubscription:
        cls, name = self.messages.ros_class(kind), self.resolve(topic)
        heard = guarded(lambda message: callback(self.messages.from_ros(message)), topic)
        self._wanted.setdefault(name, []).append(qos)
        with translated(f"subscription of {topic!r} ({kind})"):
            try:
                made = self.ros.create_subscription(
                    cls, topic, heard, _profile(qos), event_callbacks=self._events(name)
                )
            except RuntimeError:  # UnsupportedEventTypeError: this middleware has no such events
                made = self.ros.create_subscription(cls, topic, heard, _profile(qos))
        return RclpySubscription(self, made, lambda: self._wanted[name].remove(qos))

    def create_service(self, kind: str, name: str, callback: Callable[[Message], Message]) -> RclpyService:
        def answer(request: Any, empty: Any) -> Any:
            try:
                return self.messages.to_ros(callback(self.messages.from_ros(request)))
            except Exception:  # it would end the executor
                logger.exception("ros2: service %s failed; the answer is empty", name)
                return empty

        cls = self.messages.ros_class(kind)
        with translated(f"service {name!r} ({kind})"):
            return RclpyService(self, self.ros.create_service(cls, name, answer))

    def create_client(self, kind: str, name: str) -> RclpyClient:
        cls = self.messages.ros_class(kind)
        with translated(f"client of {name!r} ({kind})"):
            return RclpyClient(self, self.ros.create_client(cls, name))

    def create_action_server(self, kind: str, name: str, callbacks: GoalCallbacks) -> Service:
        return RclpyActionServer(self, kind, name, callbacks)

    def create_action_client(self, kind: str, name: str) -> ActionClient:
        return RclpyActionClient(self, kind, name)

    def now_ns(self) -> int:
        return self.ros.get_clock().now().nanoseconds

    def node_names(self) -> list[str]:
        with translated("names of nodes"):
            found = self.ros.get_node_names_and_namespaces()
        return sorted({f"{namespace.rstrip('/')}/{name}" for name, namespace in found})

    def publishers_of(self, topic: str) -> list[str]:
        with translated(f"publishers of {topic!r}"):
            found = self.ros.get_publishers_info_by_topic(self.resolve(topic))
        return sorted(f"{one.node_namespace.rstrip('/')}/{one.node_name}" for one in found)

    def topics_of(self, kind: str) -> list[str]:
        with translated(f"topics of {kind}"):
            found = self.ros.get_topic_names_and_types()
            return sorted(name for name, kinds in found if kind in kinds and self.ros.count_publishers(name))

    def run(self, function: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Runs a function on the executor's thread and returns what it returns.

        rclpy's clients note a request after sending it: from any other thread, a faster answer is lost.

        Raises:
            Ros2Error: an error of the function, or the thread did not run it in time or has ended.
        """
        if threading.current_thread() is self._thread:
            raise Ros2Error(f"ros2: {what} called from within a callback: call from another thread.")
        done = threading.Event()
        outcome: list[Any] = []
        errors: list[Exception] = []

        def step() -> None:
            try:
                outcome.append(function())
            except Exception as error:  # it would end the executor
                errors.append(error)
            done.set()

        self.run_soon(step, what)
        end_s = time.monotonic() + timeout_s
        while not done.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic()))):
            if not self._thread.is_alive() or time.monotonic() >= end_s:
                raise Ros2Error(
                    f"ros2: {what}: the node {self.name} did not come to it within {timeout_s:g} s. Is it "
                    "closed, or is one of its callbacks slow?"
                )
        with translated(what):
            if errors:
                raise errors[0]
        return outcome[0]

    def run_soon(self, function: Callable[[], Any], what: str) -> None:
        """Runs a function on the executor's thread; it must not raise.

        Raises:
            Ros2Error: the node is closed.
        """
        if not self._context.ok():
            raise Ros2Error(f"ros2: {what}: the node is closed.")
        with translated(what):
            self._executor.create_task(function)

    def wait_for(
        self, ask: Callable[[], Any], timeout_s: float, what: str, is_there: Callable[[], bool]
    ) -> Any:
        """Asks on the executor's thread, and waits for the answer: `ask` returns rclpy's future of it.

        Raises:
            Ros2Error: not in time, the other side is gone, or called from within a callback.
        """
        end_s = time.monotonic() + timeout_s
        timeout_s = round(timeout_s, 2)  # for the messages: it may be what others have left of it
        future = self.run(ask, timeout_s, what)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic()))):
            if not is_there():
                self.run_soon(future.cancel, what)
                raise Ros2Error(
                    f"ros2: {what}: the server went before it answered; "
                    "whether it did what was asked is not known."
                )
            if time.monotonic() >= end_s:
                self.run_soon(future.cancel, what)
                raise Ros2Error(
                    f"ros2: {what} did not answer within {timeout_s:g} s. Is its node busy?{_middleware()}"
                )
        with translated(what):
            return future.result()

    def close(self) -> None:
        if not self._context.ok():
            return
        is_own = threading.current_thread() is self._thread
        if not is_own:
            self._drain()
        self._executor.shutdown()
        if not is_own:
            self._thread.join()
        self.ros.destroy_node()
        self._rclpy.shutdown(context=self._context)

    def _drain(self) -> None:
        """Waits until the results of ended goals are sent: their clients would wait for ever."""
        end_s = time.monotonic() + _DRAIN_S
        while self.unfinished and time.monotonic() < end_s:
            time.sleep(_TICK_S)
        with contextlib.suppress(Ros2Error):  # once more: the step that ended a goal sends its result
            self.run(lambda: None, max(0.0, end_s - time.monotonic()), "closing")

    def _events(self, topic: str) -> Any:
        """Returns callbacks that warn of publishers that match no subscription of this node.

        rclpy's own warning ignores that a second subscription of the topic may match them.
        """

        def warn(event: Any) -> None:
            if all(qos.reliable or qos.transient_local for qos in self._wanted[topic]):
                name = rclpy_module("qos").qos_policy_name_from_kind(event.last_policy_kind)
                logger.warning(qos_warning(topic, str(name).lower()))

        try:
            module = rclpy_module("event_handler")
        except Ros2Error:
            module = rclpy_module("qos_event")  # its name in Humble
        return module.SubscriptionEventCallbacks(incompatible_qos=guarded(warn, topic))

    def _spin(self) -> None:
        executors = rclpy_module("executors")
        with contextlib.suppress(executors.ExternalShutdownException, executors.ShutdownException):
            self._executor.spin()


class RclpyPublisher:
    """Sends messages on a topic."""

    def __init__(self, node: RclpyNode, made: Any) -> None:
        self._node, self._made = node, made
        self._topic = str(made.topic_name)

    def publish(self, message: Message) -> None:
        sent = self._node.messages.to_ros(message)
        with translated(f"publishing on {self._topic}"):
            self._made.publish(sent)

    @property
    def num_subscriptions(self) -> int:
        with translated(f"subscriptions of {self._topic}"):
            return self._made.get_subscription_count()


class RclpySubscription:
    """Receives messages of a topic."""

    def __init__(self, node: RclpyNode, made: Any, on_close: Callable[[], None]) -> None:
        self._node, self._made, self._on_close = node, made, on_close
        self._topic = str(made.topic_name)

    @property
    def num_publishers(self) -> int:
        with translated(f"publishers of {self._topic}"):
            found = self._node.ros.count_publishers(self._topic)
            own = sum(one.topic_name == self._topic for one in self._node.ros.publishers)
        return max(0, found - own)  # the graph may not have ours yet

    def close(self) -> None:
        self._on_close()
        self._node.ros.destroy_subscription(self._made)


class RclpyService:
    """Answers requests."""

    def __init__(self, node: RclpyNode, made: Any) -> None:
        self._node, self._made = node, made

    def close(self) -> None:
        self._node.ros.destroy_service(self._made)


class RclpyClient:
    """Asks a service."""

    def __init__(self, node: RclpyNode, made: Any) -> None:
        self._node, self._made = node, made

    def wait(self, timeout_s: float) -> bool:
        with translated(f"service {self._made.srv_name}"):
            return self._made.wait_for_service(timeout_sec=timeout_s)

    def call(self, request: Message, timeout_s: float) -> Message:
        end_s = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            raise Ros2Error(
                f"ros2: nobody serves {self._made.srv_name} (waited {timeout_s:g} s). Start the server; "
                "check ROS_DOMAIN_ID, namespace and remapping."
            )
        sent = self._node.messages.to_ros(request)
        what = f"service {self._made.srv_name}"
        left_s = max(0.0, end_s - time.monotonic())
        response = self._node.wait_for(
            lambda: self._made.call_async(sent), left_s, what, self._made.service_is_ready
        )
        return self._node.messages.from_ros(response)

    def close(self) -> None:
        self._node.ros.destroy_client(self._made)


def _sim_time(value: bool) -> Any:
    return rclpy_module("parameter").Parameter("use_sim_time", value=value)


def _middleware() -> str:
    """Returns a hint for clients on other middlewares: servers without rclpy do not answer them."""
    own = str(rclpy_module("utilities").get_rmw_implementation_identifier())
    if own == _CYCLONE:
        return ""
    return (
        f" This node is on {own}; a server without rclpy (robot_rl's pip transport) answers CycloneDDS only: "
        f"set RMW_IMPLEMENTATION={_CYCLONE} here."
    )


def _profile(qos: QoS) -> Any:
    module = rclpy_module("qos")
    reliability, durability = module.ReliabilityPolicy, module.DurabilityPolicy
    return module.QoSProfile(
        depth=qos.depth,
        reliability=reliability.RELIABLE if qos.reliable else reliability.BEST_EFFORT,
        durability=durability.TRANSIENT_LOCAL if qos.transient_local else durability.VOLATILE,
    )
