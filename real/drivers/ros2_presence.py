"""Which driver has an arm: every one says so on the ROS graph, and listens before it takes it.

    <controller_manager>/robot_rl_driver  std_msgs/String, JSON, ten times a second

Nothing is shared but the graph: this works on two computers, and under two lease folders. Who hears another
driver gives way to the one that is further: starting, connected, driving. Of two that are equally far the
one with the lower id stays; two that drive at once both stop. A driver that was frozen for so long that
others may have taken it for dead counts as connected for a while: it gives way to one that took over.
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
"""Until the publishers of a driver that was killed have gone: a participant's lease is 10 s with CycloneDDS,
20 s with Fast DDS."""
_EVERY_S = 0.1
_ALIVE_NS = 1_000_000_000
"""A driver that is silent for longer is dead, or frozen."""
_STRING = "std_msgs/msg/String"


class Phase(IntEnum):
    """How far a driver is with an arm."""

    STARTING = 0
    """It listens; nothing of it commands."""
    CONNECTED = 1
    DRIVING = 2
    """It has activated its controller."""


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What a driver says of itself."""

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
    """Says that this driver is there, on a thread of its own, and knows what others say."""

    def __init__(
        self, node: Node, manager: str, station: str, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Begins, as one that is starting.

        Args:
            node: of the driver.
            manager: name of the controller_manager node: the arm's own, whatever the station is called.
            station: for the messages of others.
            clock_ns: monotonic.
        """
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
        self._said_ns = self._since_ns = clock_ns()
        self._was_frozen = False
        # By a service of it after remapping: that is where two stations mean the same arm.
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
            self._closing.set()  # who is refused says no more
            raise
        self.set_phase(Phase.CONNECTED)

    def set_phase(self, phase: Phase) -> None:
        """Says from now on, and at once, how far this driver is."""
        self._own = replace(self._own, phase=phase)
        self._say()

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
        # Besides this one's publisher are those of drivers that are heard, and give way.
        while len(self._node.publishers_of(self.topic)) > 1 + len(self._living()):
            if time.monotonic() > end_s:
                raise DeviceError(
                    f"ros2: on {self.topic} is another driver of this arm, which says nothing: it is frozen. "
                    "End it first; `ros2 topic info -v` shows its node."
                )
            self._listen(_EVERY_S)

    def _living(self) -> list[Presence]:
        """Returns the other drivers that are heard."""
        now_ns = self._clock_ns()
        with self._news:
            return [other for other, heard_ns in self._others.values() if now_ns - heard_ns <= _ALIVE_NS]

    def _phase(self, now_ns: int) -> Phase:
        is_late = now_ns - self._said_ns > _ALIVE_NS
        frozen = is_late or (self._was_frozen and now_ns - self._since_ns <= _ALIVE_NS)
        return min(self._own.phase, Phase.CONNECTED) if frozen else self._own.phase

    def _run(self) -> None:
        while not self._closing.wait(_EVERY_S):
            self._say()

    def _say(self) -> None:
        now_ns = self._clock_ns()
        if now_ns - self._said_ns > _ALIVE_NS:
            self._was_frozen, self._since_ns = True, now_ns
        self._said_ns = now_ns
        said = replace(self._own, phase=self._phase(now_ns))
        try:
            self._publisher.publish(self._node.message(_STRING, data=json.dumps(asdict(said))))
        except DeviceError as error:  # silence makes others take the arm; whoever drives it must know
            logger.error("ros2: %s: %s", self.topic, error)

    def _on_beat(self, message: Message) -> None:
        other = _read(str(message.data))
        if other.id == self._own.id:
            return
        with self._news:
            self._others[other.id] = (other, self._clock_ns())
            self._news.notify_all()


def _read(text: str) -> Presence:
    """Returns what a beat says; one that cannot be read is of another version, and has the arm."""
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
