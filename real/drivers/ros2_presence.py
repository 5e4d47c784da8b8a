"""Keeps two drivers off one arm: each publishes its presence on the ROS graph, and listens before it starts.

    <controller_manager>/robot_rl_driver  std_msgs/String, JSON, ten times a second

Only the graph is shared: this works on two computers, and under two lease folders. Of two drivers, the one
in the earlier phase gives way: starting, connected, driving. In the same phase the one with the lower id
stays; two that drive at once both stop. A driver that was frozen for so long that others may have thought it
dead counts as connected for a while: it gives way to one that took over.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import IntEnum

from robot_rl.core.errors import DeviceError
from robot_rl.real.ros2.api import SENSOR, Message, Node, QoS

logger = logging.getLogger(__name__)

_LISTEN_S = 1.0
"""Before a driver takes an arm: ten beats of another that it has found."""
_REMAINS_S = 22.0
"""Time until the publishers of a killed driver have gone: a participant's lease is 10 s with CycloneDDS, 20 s
with Fast DDS."""
_EVERY_S = 0.1
_ALIVE_NS = 1_000_000_000
"""A driver that is silent for longer is dead, or frozen."""
_STRING = "std_msgs/msg/String"


class Phase(IntEnum):
    """How far a driver is with an arm."""

    STARTING = 0
    """It listens, and sends no commands."""
    CONNECTED = 1
    DRIVING = 2
    """It has activated its controller."""


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What a driver publishes about itself."""

    id: str
    """Random, of this driver alone."""
    host: str
    pid: int
    station: str
    phase: Phase

    def __str__(self) -> str:
        return (
            f"the driver of station {self.station} (pid {self.pid} on {self.host}, {self.phase.name.lower()})"
        )


class PresenceBeat:
    """Publishes this driver's presence, on a separate thread, and receives those of others."""

    def __init__(
        self, node: Node, manager: str, station: str, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Begins in phase STARTING; `manager`, the controller_manager's name, identifies the arm."""
        self._node, self._clock_ns = node, clock_ns
        self._own = Presence(
            id=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            station=station,
            phase=Phase.STARTING,
        )
        self._news = threading.Condition()
        self._others: dict[str, tuple[Presence, int]] = {}
        self._sent_ns = self._since_ns = clock_ns()
        self._was_frozen = False
        # By a service of it after remapping: there two stations of one arm have the same name.
        self.topic = f"{node.resolve(f'{manager}/list_controllers').rpartition('/')[0]}/robot_rl_driver"
        self._subscription = node.create_subscription(_STRING, self.topic, self._on_beat, SENSOR)
        self._publisher = node.create_publisher(_STRING, self.topic, QoS(depth=1))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Listens, waits for what killed drivers left on the graph to go, and is connected from then on.

        Raises:
            DeviceError: another driver has the arm, or starts at the same time and comes first; names it.
        """
        try:
            self._listen(_LISTEN_S)
            self._await_remains()
        except DeviceError:
            self._closing.set()  # a refused driver publishes no more
            raise
        self.set_phase(Phase.CONNECTED)

    def set_phase(self, phase: Phase) -> None:
        """Publishes another phase, at once and from now on."""
        self._own = replace(self._own, phase=phase)
        self._send()

    def rival(self) -> Presence | None:
        """Returns a living driver to which this one has to give way."""
        own, phase = self._own, self._phase(self._clock_ns())
        for other in self._living():
            both_drive = phase == other.phase == Phase.DRIVING
            if other.phase > phase or (other.phase == phase and (both_drive or other.id < own.id)):
                return other
        return None

    @property
    def is_lost(self) -> bool:
        """Whether another driver has taken over from this one while it was frozen."""
        rival = self.rival()
        return rival is not None and rival.phase == Phase.DRIVING != self._phase(self._clock_ns())

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _listen(self, seconds: float) -> None:
        with self._news:
            self._news.wait_for(self.rival, seconds)
        rival = self.rival()
        if rival is not None:
            raise DeviceError(f"ros2: {rival} has this arm. End it first.")

    def _await_remains(self) -> None:
        end_s = time.monotonic() + _REMAINS_S
        # The others have this one's publisher, and those of known drivers, which give way.
        while len(self._node.publishers_of(self.topic)) > 1 + len(self._living()):
            if time.monotonic() > end_s:
                raise DeviceError(
                    f"ros2: on {self.topic} is another driver of this arm, which says nothing: it is frozen. "
                    "End it first; `ros2 topic info -v` shows its node."
                )
            self._listen(_EVERY_S)

    def _living(self) -> list[Presence]:
        """Returns the other drivers whose messages are recent."""
        now_ns = self._clock_ns()
        with self._news:
            return [other for other, heard_ns in self._others.values() if now_ns - heard_ns <= _ALIVE_NS]

    def _phase(self, now_ns: int) -> Phase:
        is_late = now_ns - self._sent_ns > _ALIVE_NS
        frozen = is_late or (self._was_frozen and now_ns - self._since_ns <= _ALIVE_NS)
        return min(self._own.phase, Phase.CONNECTED) if frozen else self._own.phase

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_S):
            self._send()

    def _send(self) -> None:
        now_ns = self._clock_ns()
        if now_ns - self._sent_ns > _ALIVE_NS:
            self._was_frozen, self._since_ns = True, now_ns
        self._sent_ns = now_ns
        sent = replace(self._own, phase=self._phase(now_ns))
        try:
            self._publisher.publish(self._node.message(_STRING, data=json.dumps(asdict(sent))))
        except DeviceError as error:  # others may take the arm now: the log has to show it
            logger.error("ros2: %s: %s", self.topic, error)

    def _on_beat(self, message: Message) -> None:
        other = _read(str(message.data))
        if other.id == self._own.id:
            return
        with self._news:
            self._others[other.id] = (other, self._clock_ns())
            self._news.notify_all()


def _read(text: str) -> Presence:
    """Returns the presence in a message; an unreadable one is of another version, and has the arm."""
    try:
        fields = json.loads(text)
        return Presence(
            id=str(fields["id"]),
            host=str(fields["host"]),
            pid=int(fields["pid"]),
            station=str(fields["station"]),
            phase=Phase(fields["phase"]),
        )
    except (ValueError, KeyError, TypeError):
        return Presence(id="", host="?", pid=0, station=f"of another version {text!r}", phase=Phase.CONNECTED)
