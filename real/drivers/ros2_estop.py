"""The e-stop inputs of a driver's node: a button on a topic, and a service.

    ~/estop  std_msgs/Bool    true stops; false, published all the time, shows that the button works
    ~/estop  std_srvs/Trigger stops

ROS matches no best-effort publisher with a reliable subscription, and repeats a latched message to latched
subscriptions only. So there is one subscription of each kind: it gets reliable buttons reliably, best-effort
ones at all, and also a button that was pressed before it existed. Repeated messages do no harm.
"""

from __future__ import annotations

from collections.abc import Callable

from robot_rl.real.ros2.api import DEFAULT, LATCHED, SENSOR, Message, Node

_TOPIC = "~/estop"


class EstopButton:
    """Listens to the button, and measures its silence, at most `max_age_s` (`ros2.estop_max_age_s`)."""

    def __init__(
        self, node: Node, max_age_s: float | None, press: Callable[[str], None], clock_ns: Callable[[], int]
    ) -> None:
        """Subscribes and serves; calls `press` with the reason, on the node's thread."""
        self._node, self._max_age_s, self._press, self._clock_ns = node, max_age_s, press, clock_ns
        self._heard_ns: int | None = None
        for qos in (SENSOR, DEFAULT, LATCHED):
            node.create_subscription("std_msgs/msg/Bool", _TOPIC, self._on_message, qos)
        node.create_service("std_srvs/srv/Trigger", _TOPIC, self._on_call)

    def silence(self) -> str:
        """Returns the error of a button that is silent for too long; empty if there is none."""
        age_s = self._age_s()
        if self._max_age_s is None or age_s <= self._max_age_s:
            return ""
        since = "yet" if self._heard_ns is None else f"for {age_s:.2f} s"
        topic = self._node.resolve(_TOPIC)
        return (
            f"the e-stop button is silent: nothing has come on {topic} {since}, allowed: "
            f"{self._max_age_s:g} s (ros2.estop_max_age_s). Is the button on, and what publishes it?"
        )

    def left_s(self) -> float:
        """Returns for how long the button may still be silent."""
        return float("inf") if self._max_age_s is None else max(0.0, self._max_age_s - self._age_s())

    def _age_s(self) -> float:
        return float("inf") if self._heard_ns is None else 1e-9 * (self._clock_ns() - self._heard_ns)

    def _on_message(self, message: Message) -> None:
        self._heard_ns = self._clock_ns()
        if message.data:
            self._press("e-stop: true on ~/estop")

    def _on_call(self, request: Message) -> Message:
        self._press("e-stop: ~/estop was called")
        return self._node.message(
            "std_srvs/srv/Trigger_Response", success=True, message="stopping; a person clears it"
        )
