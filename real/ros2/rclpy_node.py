"""A node on genuine rclpy: what `api.Node` promises, in rclpy's own terms.

Written against the documented API of rclpy (Humble to Lyrical) and tested against a stand-in for it;
it has not been measured where this project is developed, which has no ROS 2. Where rclpy can be
imported, the tests of the transport run with it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from robot_rl.real.ros2.api import DEFAULT, ActionClient, ActionServer, GoalHandle, Message, QoS, Ros2Error
from robot_rl.real.ros2.rclpy_messages import RosMessages

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class RclpyNode:
    """One node with a context, an executor and a thread of its own."""

    def __init__(
        self,
        name: str,
        *,
        namespace: str = "",
        domain_id: int | None = None,
        remap: Mapping[str, str] | None = None,
        use_sim_time: bool = False,
    ) -> None:
        """Opens the node, in a context of its own.

        Raises:
            Ros2Error: rclpy cannot be imported.
        """
        self._rclpy = rclpy_module()
        self._context: Any = self._rclpy.Context()
        no_signals = rclpy_module("signals").SignalHandlerOptions.NO  # those are the program's
        self._rclpy.init(context=self._context, domain_id=domain_id, signal_handler_options=no_signals)
        rules = [word for source, target in (remap or {}).items() for word in ("-r", f"{source}:={target}")]
        self.ros: Any = self._rclpy.create_node(
            name,
            context=self._context,
            namespace=namespace,
            cli_args=["--ros-args", *rules] if rules else None,
            parameter_overrides=[rclpy_module("parameter").Parameter("use_sim_time", value=use_sim_time)],
            start_parameter_services=False,  # `parameters.Parameters` serves them, on either transport
        )
        self.messages = RosMessages()
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

    def resolve(self, name: str) -> str:
        """Returns the absolute name of a topic, service or action after remapping."""
        return self.ros.resolve_topic_name(name)

    def message(self, kind: str, **fields: Any) -> Message:
        return self.messages.make(kind, fields)

    def create_publisher(self, kind: str, topic: str, qos: QoS = DEFAULT) -> RclpyPublisher:
        made = self.ros.create_publisher(self.messages.ros_class(kind), topic, _profile(qos))
        return RclpyPublisher(self, made)

    def create_subscription(
        self, kind: str, topic: str, callback: Callable[[Message], None], qos: QoS = DEFAULT
    ) -> RclpySubscription:
        heard = guarded(lambda message: callback(self.messages.from_ros(message)), topic)
        made = self.ros.create_subscription(self.messages.ros_class(kind), topic, heard, _profile(qos))
        return RclpySubscription(self, made)

    def create_service(self, kind: str, name: str, callback: Callable[[Message], Message]) -> RclpyService:
        def answer(request: Any, empty: Any) -> Any:
            try:
                return self.messages.to_ros(callback(self.messages.from_ros(request)))
            except Exception:  # it would end the executor
                logger.exception("ros2: service %s failed; the answer is empty", name)
                return empty

        return RclpyService(self, self.ros.create_service(self.messages.ros_class(kind), name, answer))

    def create_client(self, kind: str, name: str) -> RclpyClient:
        return RclpyClient(self, self.ros.create_client(self.messages.ros_class(kind), name))

    def create_action_server(
        self,
        kind: str,
        name: str,
        *,
        execute: Callable[[GoalHandle], None],
        accept: Callable[[Message], bool],
        cancel: Callable[[GoalHandle], bool],
    ) -> ActionServer:
        from robot_rl.real.ros2.rclpy_action import RclpyActionServer

        return RclpyActionServer(self, kind, name, execute=execute, accept=accept, cancel=cancel)

    def create_action_client(self, kind: str, name: str) -> ActionClient:
        from robot_rl.real.ros2.rclpy_action import RclpyActionClient

        return RclpyActionClient(self, kind, name)

    def now_ns(self) -> int:
        return self.ros.get_clock().now().nanoseconds

    def node_names(self) -> list[str]:
        found = self.ros.get_node_names_and_namespaces()
        return sorted({f"{namespace.rstrip('/')}/{name}" for name, namespace in found})

    def publishers_of(self, topic: str) -> list[str]:
        found = self.ros.get_publishers_info_by_topic(self.resolve(topic))
        return sorted({f"{one.node_namespace.rstrip('/')}/{one.node_name}" for one in found})

    def wait_for(self, future: Any, timeout_s: float, what: str, is_there: Callable[[], bool]) -> Any:
        """Waits for what the executor's thread completes.

        Raises:
            Ros2Error: not in time, the other side is gone, or called from within a callback.
        """
        if threading.current_thread() is self._thread:
            raise Ros2Error(f"ros2: {what} called from within a callback: call from another thread.")
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        end_s = time.monotonic() + timeout_s
        while not done.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic()))):
            if not is_there():
                future.cancel()
                raise Ros2Error(
                    f"ros2: {what}: the server went before it answered; "
                    "whether it did what was asked is not known."
                )
            if time.monotonic() >= end_s:
                future.cancel()
                raise Ros2Error(f"ros2: {what} did not answer within {timeout_s:g} s. Is its node busy?")
        return future.result()

    def close(self) -> None:
        if not self._context.ok():
            return
        self._executor.shutdown()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.ros.destroy_node()
        self._rclpy.shutdown(context=self._context)

    def _spin(self) -> None:
        executors = rclpy_module("executors")
        with contextlib.suppress(executors.ExternalShutdownException, executors.ShutdownException):
            self._executor.spin()


class RclpyPublisher:
    """Sends messages on a topic."""

    def __init__(self, node: RclpyNode, made: Any) -> None:
        self._node, self._made = node, made

    def publish(self, message: Message) -> None:
        self._made.publish(self._node.messages.to_ros(message))

    @property
    def num_subscriptions(self) -> int:
        return self._made.get_subscription_count()


class RclpySubscription:
    """Receives messages of a topic."""

    def __init__(self, node: RclpyNode, made: Any) -> None:
        self._node, self._made = node, made

    @property
    def num_publishers(self) -> int:
        return self._node.ros.count_publishers(self._made.topic_name)

    def close(self) -> None:
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
        return self._made.wait_for_service(timeout_sec=timeout_s)

    def call(self, request: Message, timeout_s: float) -> Message:
        end_s = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            raise Ros2Error(
                f"ros2: nobody serves {self._made.srv_name} (waited {timeout_s:g} s). Start the server; "
                "check ROS_DOMAIN_ID, namespace and remapping."
            )
        future = self._made.call_async(self._node.messages.to_ros(request))
        what = f"service {self._made.srv_name}"
        left_s = max(0.0, end_s - time.monotonic())
        try:
            response = self._node.wait_for(future, left_s, what, self._made.service_is_ready)
        finally:
            self._made.remove_pending_request(future)
        return self._node.messages.from_ros(response)

    def close(self) -> None:
        self._node.ros.destroy_client(self._made)


def guarded(callback: Callable[[Any], None], what: str) -> Callable[[Any], None]:
    """Returns a callback whose failure does not end the executor."""

    def call(message: Any) -> None:
        try:
            callback(message)
        except Exception:
            logger.exception("ros2: the callback of %s failed", what)

    return call


def rclpy_module(name: str = "") -> Any:
    """Returns rclpy or a module of it.

    Raises:
        Ros2Error: it cannot be imported.
    """
    try:
        return importlib.import_module(f"rclpy.{name}" if name else "rclpy")
    except ImportError as error:
        raise Ros2Error(
            f"ros2: rclpy cannot be imported ({error}). Source your ROS 2, whose Python must be this one, or "
            "use transport=dds: pip install 'robot-rl[ros2]'."
        ) from error


def _profile(qos: QoS) -> Any:
    module = rclpy_module("qos")
    reliability, durability = module.ReliabilityPolicy, module.DurabilityPolicy
    return module.QoSProfile(
        depth=qos.depth,
        reliability=reliability.RELIABLE if qos.reliable else reliability.BEST_EFFORT,
        durability=durability.TRANSIENT_LOCAL if qos.transient_local else durability.VOLATILE,
    )
