"""Acting on the arms of other machines of the fleet, through its hub.

    learner -> [thread] --weights--> hub --> agent --> job: booked source on that machine's arm
    collect() <- turns  <----------- hub <-- agent <-- spool on that machine's disk

The arm is leased on its own machine, by a job there; this end asks, sends weights and takes turns in order,
each once, however often the connection was cut. While its machine is out of reach the run goes on without
it; the arm acts on for `hub.alone_s`, then rests, and what it did meanwhile arrives when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from robot_rl.core.errors import DeviceError, RobotRLError
from robot_rl.data.transitions import Segment
from robot_rl.hal.device import DeviceSpec
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_line import HubRefusedError, connected, frame, machines
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.sources import Elsewhere
from robot_rl.rollout.weights import Published, Snapshot, newest_of
from robot_rl.rollout.wire import decode_turn, encode_weights
from robot_rl.sched.needs import Need, choose

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse

_LAG_S = 0.5
"""A learner that is so far behind what has arrived leaves updates out until it is not."""
_PAUSES_S = (0.5, 10.0)
"""Between two attempts to reach the machine: the first and the longest pause."""
_END_S = 45.0
"""How long the arm may take to come to rest at the end."""


@dataclass(frozen=True, kw_only=True)
class NodeJob:
    """What another machine needs to act for a run."""

    name: str
    """Of the job: the same in every life of the run."""
    source: str
    """Name of the source in the run's settings."""
    holder: str
    """Of the lease there."""
    config: str
    """The run's settings (YAML), as they are read there."""
    files: Mapping[str, bytes]
    """The base policy."""


@dataclass(frozen=True)
class Occupied:
    """Slots of another machine's device that somebody has."""

    device: str
    slots: int
    holder: str


def nodes_for(need: Need, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the machines that have what is needed, those with a free device first.

    Args:
        need: what a job needs.
        nodes: what the hub knows of each machine.

    Raises:
        DeviceError: none has it; the message says what the nearest lacks, and who has that.
    """
    if not nodes:
        raise DeviceError("needs.node: no machine is connected to the hub. `robot-rl agent` joins one.")
    specs, taken = list[DeviceSpec](), list[Occupied]()
    for node in nodes:
        for row in node.get("devices", []):
            if row["kind"] != need.kind:
                continue
            name = f"{row['name']}@{node['name']}"
            specs.append(
                DeviceSpec(
                    name=name,
                    kind=row["kind"],
                    real=row["real"],
                    slots=row["slots"],
                    node=node["name"],
                    labels=row["labels"],
                )
            )
            taken += [Occupied(name, held["slots"], held["holder"]) for held in row["held"]]
    return list(dict.fromkeys(spec.node for spec in choose(need, specs, taken)))


class NodeSource(Elsewhere):
    """A `Source` on an arm of another machine."""

    def __init__(
        self,
        job: NodeJob,
        hub: HubConfig,
        *,
        need: Need,
        wait_s: float,
        away_s: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            job: what acts there.
            hub: of the fleet.
            need: what the arm has to have, and its machine.
            wait_s: how long `collect` waits for a turn.
            away_s: a machine that is out of reach for so long is lost.
            say: gets what a person may want to know.
        """
        super().__init__()
        self._job, self._hub, self._need = job, hub, need
        self._wait_s, self._away_s, self._say = wait_s, away_s, say
        self._line: _Line | None = None
        self._nodes: list[str] | None = None
        self.node = ""
        """The machine that acts."""

    @property
    def is_ahead(self) -> bool:
        line = self._line
        return line is not None and line.oldest_s is not None and time.monotonic() - line.oldest_s > _LAG_S

    def collect(self, published: Published) -> Segment | None:
        """Returns the next segment; None if there is none within `wait_s`.

        Raises:
            ActorError: what acts there has failed, no machine has what is needed, or it was away too long.
            WeightsError: nothing was published.
        """
        newest = newest_of(published)
        if self._line is None:
            self._line = self._begin(newest)
        self._line.offer(newest)
        octets = self._line.take(self._wait_s)
        if octets is None:
            self._check(self._line)
            return None
        try:
            turn = decode_turn(octets)
        except DeviceError as error:
            raise ActorError(f"{self.node}: {error}") from error
        turn.segment.begins, self._begins = self._begins or turn.segment.begins, False
        self.episodes.merge(turn.tally)
        return turn.segment

    def _begin(self, newest: Snapshot) -> _Line:
        try:
            if self._nodes is None:
                self._nodes = nodes_for(self._need, machines(self._hub))
        except RobotRLError as error:
            raise ActorError(str(error)) from error
        self.node = self._nodes.pop(0)
        return _Line(self._hub, self.node, self._job, newest, self._say)

    def _check(self, line: _Line) -> None:
        """Goes to the next machine if this one does not want to.

        Raises:
            ActorError: there is no other, it acted before, or it is away too long.
        """
        if line.failure:
            why = f"{self.node}: {line.failure}"
            self.close()
            if line.received or not self._nodes:
                raise ActorError(why)
            self._say(f"{why} Trying {self._nodes[0]}")
        elif line.away_since_s is not None and time.monotonic() - line.away_since_s > self._away_s:
            why = f"{self.node} has been out of reach for {self._away_s:g} s: {line.why}"
            self.close()
            raise ActorError(why)

    def close(self) -> None:
        """Has the arm brought to rest and given back; a machine out of reach does that by itself."""
        if self._line is not None:
            self._line.close()
            self._line, self._begins = None, True


class _Line:
    """The connection to a job, in a thread that makes it again when it is cut."""

    def __init__(
        self, hub: HubConfig, node: str, job: NodeJob, weights: Snapshot, say: Callable[[str], None]
    ) -> None:
        self._hub, self._node, self._job, self._say = hub, node, job, say
        self._weights = weights
        self._turns = queue.Queue[tuple[float, int, bytes]]()
        self.received = 0
        """Number of the last turn that has arrived."""
        self._knows = False
        """Whether that is known: the first turn of a resumed run is any."""
        self._taken = 0
        self.oldest_s: float | None = None
        """When the oldest turn that was not taken arrived."""
        self.away_since_s: float | None = time.monotonic()
        self.why = "it was never reached"
        self.failure = ""
        self._is_over = False
        self._loop = asyncio.new_event_loop()
        self._news, self._ended = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"node {node}", daemon=True)
        self._thread.start()

    def offer(self, newest: Snapshot) -> None:
        """Sends weights, if they are others; only the newest of those that wait."""
        if newest.version != self._weights.version:
            self._weights = newest
            self._wake()

    def take(self, wait_s: float) -> bytes | None:
        """Returns the next turn, which the other end may then forget."""
        try:
            self.oldest_s, number, octets = self._turns.get(timeout=wait_s)
        except queue.Empty:
            self.oldest_s = None
            return None
        self._taken = number
        self._wake()
        return octets

    def close(self) -> None:
        self._is_over = True
        self._wake()
        self._thread.join(_END_S)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._news.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep())
        except Exception as error:  # of the thread: `collect` raises it
            self.failure = str(error) if isinstance(error, RobotRLError) else repr(error)
        finally:
            self._loop.close()

    async def _keep(self) -> None:
        """Connects again and again, until it is over."""
        pause_s = _PAUSES_S[0]
        while True:
            try:
                query = {"node": self._node, "job": self._job.name}
                async with connected(self._hub, "job", query) as line:
                    pause_s = _PAUSES_S[0]
                    await self._talk(line)
                self.why = "its connection ended"
            except HubRefusedError as error:
                if error.status not in (404, 409):  # it is away, or the hub has not noticed that we were
                    raise
                self.why = str(error)
            except (DeviceError, ConnectionError) as error:
                self.why = str(error)
            if self._is_over or self.failure:
                return
            if self.away_since_s is None:
                self.away_since_s = time.monotonic()
                self._say(f"{self._node} is out of reach: {self.why}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._until_over(), pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    async def _until_over(self) -> None:
        while not self._is_over:
            self._news.clear()
            await self._news.wait()

    async def _talk(self, line: ClientWebSocketResponse) -> None:
        weights = self._weights
        await _send(
            line,
            "begin",
            {
                "source": self._job.source,
                "holder": self._job.holder,
                "config": self._job.config,
                "files": dict(self._job.files),
                "alone_s": self._hub.alone_s,
                "weights": encode_weights(weights),
                "has": self._taken if self._knows else None,
            },
        )
        sends = asyncio.create_task(self._send_news(line, weights.version))
        try:
            async for message in line:
                kind, body = msgpack.unpackb(message.data)
                self._is_back()
                if kind == "turn":
                    self._arrived(body["number"], body["turn"])
                elif kind == "failed":
                    self.failure = body
                    await _send(line, "end", None)
                elif kind == "ended":
                    self._ended.set()
                if self.failure or (self._is_over and self._ended.is_set()):
                    return
        finally:
            sends.cancel()

    def _is_back(self) -> None:
        if self.away_since_s is not None and self.received:
            self._say(f"{self._node} is back, with what its arm did meanwhile")
        self.away_since_s = None

    def _arrived(self, number: int, octets: bytes) -> None:
        """Takes a turn that is the next one; another was sent again, or follows one that was lost."""
        if self._knows and number <= self.received:
            return
        self.received, self._knows = number, True
        now_s = time.monotonic()
        if self.oldest_s is None:
            self.oldest_s = now_s
        self._turns.put((now_s, number, octets))

    async def _send_news(self, line: ClientWebSocketResponse, version: int) -> None:
        """Sends the newest weights, which turns were taken, and the end."""
        taken = 0
        while True:
            self._news.clear()
            if self._is_over:
                await _send(line, "end", None)
                return
            if self._taken > taken:
                taken = self._taken
                await _send(line, "has", taken)
            if self._weights.version != version:
                version = self._weights.version
                await _send(line, "weights", encode_weights(self._weights))
            await self._news.wait()


async def _send(line: ClientWebSocketResponse, kind: str, body: Any) -> None:
    with contextlib.suppress(ConnectionError):  # cut off now; the reader sees it
        await line.send_bytes(frame(kind, body))
