"""A ROS graph in this process: what a node publishes and calls is kept, and answered as a test says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from robot_rl.real.ros2.api import DEFAULT, LATCHED, GoalCallbacks, Message, QoS, Ros2Error
from robot_rl.real.ros2.types import types_of

TYPES = types_of("jazzy")


def message(kind: str, **fields: Any) -> Message:
    return TYPES.message(kind, fields)


class FakeNode:
    """A `robot_rl.real.ros2.api.Node`; real message types, no wire."""

    name, namespace = "robot_rl_driver", "/"
    use_sim_time = False

    def __init__(self, services: dict[str, Callable[[Message], Message]] | None = None) -> None:
        self.services = services or {}
        """Name -> what answers a request."""
        self.published: list[tuple[str, Message]] = []
        self.called: list[str] = []
        self.clients = 0
        """Clients of services that are open."""
        self.heard: dict[str, list[tuple[Callable[[Message], None], QoS]]] = {}
        self.served: dict[str, Callable[[Message], Message]] = {}
        self.goals: list[tuple[str, Message]] = []
        self.is_accepting = True
        self.publishers: dict[str, list[str]] = {}
        self.kinds: dict[str, str] = {}
        self.is_closed = False
        self.on_subscribe: Callable[[str], None] = lambda topic: None
        """What happens as soon as somebody listens."""

    def message(self, kind: str, **fields: Any) -> Message:
        return message(kind, **fields)

    def resolve(self, name: str) -> str:
        return name

    def create_publisher(self, kind: str, topic: str, qos: QoS = DEFAULT) -> Any:
        self.publishers.setdefault(topic, []).append("/robot_rl_driver")
        self.kinds[topic] = kind

        def publish(sent: Message) -> None:
            TYPES.codec(kind).encode(sent)  # a wrong type or length fails here, as on the wire
            self.published.append((topic, sent))

        return SimpleNamespace(publish=publish, num_subscriptions=1)

    def create_subscription(
        self, kind: str, topic: str, callback: Callable[[Message], None], qos: QoS = DEFAULT
    ) -> Any:
        self.heard.setdefault(topic, []).append((callback, qos))
        self.on_subscribe(topic)
        return SimpleNamespace(num_publishers=1, close=lambda: None)

    def create_service(self, kind: str, name: str, callback: Callable[[Message], Message]) -> Any:
        self.served[name] = callback
        return SimpleNamespace(close=lambda: None)

    def create_client(self, kind: str, name: str) -> Any:
        def call(request: Message, timeout_s: float) -> Message:
            TYPES.codec(f"{kind}_Request").encode(request)
            self.called.append(name)
            if name not in self.services:
                raise Ros2Error(f"ros2: nobody answers {name}")
            return self.services[name](request)

        def close() -> None:
            self.clients -= 1

        self.clients += 1
        return SimpleNamespace(wait=lambda timeout_s: name in self.services, call=call, close=close)

    def create_action_client(self, kind: str, name: str) -> Any:
        def send(goal: Message, timeout_s: float) -> Any:
            TYPES.codec(f"{kind}_Goal").encode(goal)
            self.goals.append((name, goal))
            return SimpleNamespace(accepted=self.is_accepting)

        return SimpleNamespace(send=send)

    def create_action_server(self, kind: str, name: str, callbacks: GoalCallbacks) -> Any:
        raise NotImplementedError

    def now_ns(self) -> int:
        return 5_000_000_123

    def node_names(self) -> list[str]:
        return ["/robot_rl_driver", "/other"]

    def publishers_of(self, topic: str) -> list[str]:
        return self.publishers.get(topic, [])

    def topics_of(self, kind: str) -> list[str]:
        return sorted(topic for topic, sent in self.kinds.items() if sent == kind)

    def close(self) -> None:
        self.is_closed = True

    def hear(self, topic: str, sent: Message, offered: QoS = LATCHED) -> None:
        """Delivers a message to each subscription that matches its publisher, as ROS does."""
        for callback, wanted in self.heard[topic]:
            if wanted.reliable <= offered.reliable and wanted.transient_local <= offered.transient_local:
                callback(sent)

    def on(self, topic: str) -> list[Message]:
        """Returns what was published on a topic."""
        return [sent for name, sent in self.published if name == topic]


def manager(controllers: dict[str, tuple[str, list[str]]]) -> dict[str, Callable[[Message], Message]]:
    """Returns a controller_manager's services: name -> (state, claimed interfaces), which it changes."""

    def listed(_: Message) -> Message:
        rows = [
            message(
                "controller_manager_msgs/msg/ControllerState",
                name=name,
                state=state,
                claimed_interfaces=claims if state == "active" else [],
            )
            for name, (state, claims) in controllers.items()
        ]
        return message("controller_manager_msgs/srv/ListControllers_Response", controller=rows)

    def switched(request: Message) -> Message:
        assert request.strictness == 2
        for names, state in (
            (request.deactivate_controllers, "inactive"),
            (request.activate_controllers, "active"),
        ):
            for name in names:
                controllers[name] = (state, controllers[name][1])
        return message("controller_manager_msgs/srv/SwitchController_Response", ok=True)

    return {
        "controller_manager/list_controllers": listed,
        "controller_manager/switch_controller": switched,
    }
