"""Acting on the arms of other machines of the fleet, through its hub.

    learner -> [thread] --weights--> hub --> agent --> job: booked source on that machine's arm
    collect() <- turns  <----------- hub <-- agent <-- spool on that machine's disk

The arm is leased on its own machine, by a job there; this end asks, sends weights and takes turns in order,
each once, however often the connection was cut. While its machine is out of reach the run goes on without
it; the arm acts on for `hub.alone_s`, then rests, and what it did meanwhile arrives when it is back. What a
run took after its last checkpoint is lost with the run, as of an arm of its own machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from robot_rl.core.errors import DeviceError, RobotRLError
from robot_rl.data.transitions import Segment
from robot_rl.real.remote import back_off
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import BACK_OFF_S, Connection, FullError, Pace, connected, machines
from robot_rl.rollout.hub_devices import nodes_for
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.sources import Elsewhere
from robot_rl.rollout.weights import Published, Snapshot, newest_of
from robot_rl.rollout.wire import decode_turn, encode_weights
from robot_rl.sched.needs import Need

_LAG_S = 0.5
"""A learner that is so far behind what has arrived leaves updates out until it is not."""
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
    stays: Mapping[str, Any] | None = None
    """How pictures stay there, as `robot_rl.train.improve.stay` has it; None: they are sent."""


def job_name(*parts: str) -> str:
    """Returns a name for a job; what cannot be in one becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(("run", *filter(None, parts))))[:100]


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
        self._remote: _Remote | None = None
        self._failed = dict[str, str]()
        """Why machines that were tried cannot act."""
        self.node, self._taken = "", 0
        """The machine that acts, and the number of the last turn that the run took from there."""

    @property
    def is_ahead(self) -> bool:
        return self._remote is not None and self._remote.lag_s > _LAG_S

    def collect(self, published: Published) -> Segment | None:
        """Returns the next segment; None if there is none within `wait_s`.

        Raises:
            ActorError: what acts there has failed, no machine has what is needed, or it was away too long.
            WeightsError: nothing was published.
        """
        newest = newest_of(published)
        if self._remote is None:
            self._remote = self._begin(newest)
        self._remote.offer(newest)
        arrived = self._remote.take(self._wait_s)
        if arrived is None:
            self._check(self._remote)
            return None
        try:
            turn = decode_turn(arrived.octets)
        except DeviceError as error:
            raise ActorError(f"{self.node}: {error}") from error
        self._taken = arrived.number
        turn.segment.begins = self._begins or turn.segment.begins or not arrived.follows
        self._begins = False
        self.episodes.merge(turn.tally)
        return turn.segment

    def _begin(self, newest: Snapshot) -> _Remote:
        """Chooses a machine: the one of before, else the first with a free arm, else the first."""
        try:
            found = nodes_for(self._need, machines(self._hub))
        except RobotRLError as error:
            raise ActorError(" ".join((*self._failed.values(), str(error)))) from error
        left = [node for node in found if node not in self._failed]
        if not left:
            raise ActorError(" ".join(self._failed.values()))
        if self.node in left:  # it has the turns that were not fetched
            most = None
        else:
            self.node, self._taken = left[0], 0
            most = found[self.node]
        return _Remote(self._hub, self.node, self._job, newest, self._taken, self._say, most)

    def _check(self, remote: _Remote) -> None:
        """Leaves a machine that cannot act; the next turn chooses another one.

        Raises:
            ActorError: it has to be this one, or this one acted before.
        """
        if remote.is_full:
            self._leave("rest")
            self.node = ""
            return
        if remote.failure:
            why = f"{self.node}: {remote.failure}"
        elif remote.away_since_s is not None and time.monotonic() - remote.away_since_s > self._away_s:
            why = f"{self.node} has been out of reach for {self._away_s:g} s: {remote.why}"
        else:
            return
        self._leave("rest")
        if self._taken or self._need.node is not None:
            raise ActorError(why)
        self._failed[self.node] = why
        self._say(f"{why} Looks for another machine")

    def rest(self) -> None:
        """Has the arm brought to rest and given back; the run needs no more of it."""
        self._leave("end")

    def close(self) -> None:
        """Has the arm brought to rest and given back; what was not fetched waits for a resumed run."""
        self._leave("rest")

    def _leave(self, how: str) -> None:
        if self._remote is not None:
            self._remote.close(how)
            self._remote, self._begins = None, True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "node": self.node, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.node, self._taken = str(state["node"]), int(state["taken"])


@dataclass(frozen=True)
class _Arrived:
    """A turn, as it came."""

    number: int
    octets: bytes
    follows: bool
    """Whether it is the next one, and none before it was lost."""
    at_s: float


class _Remote:
    """What acts on another machine: a thread talks to it, and connects again when it was cut off."""

    def __init__(
        self,
        hub: HubConfig,
        node: str,
        job: NodeJob,
        weights: Snapshot,
        taken: int,
        say: Callable[[str], None],
        most: int | None,
    ) -> None:
        """Begins to connect.

        Args:
            hub: of the fleet.
            node: name of the machine.
            job: what acts there.
            weights: that it begins with.
            taken: number of the last turn that the run has from there, 0 for none.
            say: gets what a person may want to know.
            most: other jobs that may be there already, else it is full; None: any number.
        """
        self._hub, self._node, self._job, self._say = hub, node, job, say
        self._weights, self._is_loaded = weights, True
        self._sent: tuple[int, int] | None = None
        """Stamp of the weights that were sent last on this connection."""
        self._pace = Pace(hub.most_mbit_s)
        self._turns = queue.Queue[_Arrived]()
        self.received = self._taken = taken
        """Number of the last turn that has arrived."""
        self._late: _Arrived | None = None
        """The turn that was taken last, if others waited behind it."""
        self.away_since_s: float | None = time.monotonic()
        """Since when it cannot be reached; None while it can."""
        self.why, self.failure = "it was never reached", ""
        self._has_begun = self._was_reached = self._wants_content = False
        self._most, self.is_full = most, False
        """Whether other runs were faster, and no arm is free there any more."""
        self._leaves = ""
        """How it is left: `rest` or `end`."""
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"node {node}", daemon=True)
        self._thread.start()

    @property
    def lag_s(self) -> float:
        """How long the oldest turn has waited, of those that wait."""
        late = self._late
        return 0.0 if late is None or self._turns.empty() else time.monotonic() - late.at_s

    def offer(self, newest: Snapshot) -> None:
        """Sends weights, if they are others; only the newest of those that wait."""
        if newest.stamp != self._weights.stamp:
            self._weights = newest
            self._wake()

    def take(self, wait_s: float) -> _Arrived | None:
        """Returns the next turn, which the other end may then forget."""
        try:
            arrived = self._turns.get(timeout=wait_s)
        except queue.Empty:
            return None
        self._late, self._taken = arrived, arrived.number
        self._wake()
        return arrived

    def close(self, how: str) -> None:
        """Leaves it; Args: how: `rest` or `end`, as in `NodeSource`."""
        self._leaves = how
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
        """Connects again and again, until it is left."""
        pauses, query = back_off(*BACK_OFF_S), {"node": self._node, "job": self._job.name}
        if self._most is not None:
            query["most"] = str(self._most)
        while True:
            try:
                async with connected(self._hub, "job", query) as hub:
                    query.pop("most", None)  # it has its place
                    await self._talk(hub)
                pauses, self.why = back_off(*BACK_OFF_S), "its connection ended"
            except FullError:
                self.is_full = True
                return
            except DeviceError as error:  # a refusal is none: it ends this
                self.why = str(error)
            if self._leaves or self.failure:
                return
            if self.away_since_s is None:
                self.away_since_s = time.monotonic()
                self._say(f"{self._node} is out of reach: {self.why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next(pauses)):
                    while not self._leaves:
                        self._news.clear()
                        await self._news.wait()

    async def _talk(self, hub: Connection) -> None:
        """Talks to the job until the connection, or what acts there, ends."""
        has = self._taken if self._taken else None
        self._has_begun, self._wants_content, is_answered = False, False, False
        self._is_loaded, self._sent = True, None
        await hub.send("begin", {"alone_s": self._hub.alone_s, "has": has})
        sends = asyncio.create_task(self._send_news(hub))
        try:
            async for kind, body in hub.messages():
                self._note_reached()
                is_answered = is_answered or kind in ("needs", "begun")
                if kind == "needs":
                    self._wants_content = True
                elif kind == "begun":
                    self._has_begun = True
                elif kind == "loaded":
                    self._is_loaded = True
                elif kind == "says":
                    self._say(f"{self._node}: {body}")
                elif kind == "turn" and is_answered:  # else it was on its way to the connection before
                    self._arrive(int(body["number"]), body["turn"])
                elif kind == "failed":
                    self.failure = str(body)
                    await hub.send("end", None)
                    return
                elif kind == "ended" and self._leaves:
                    return
                self._news.set()
        finally:
            sends.cancel()

    def _note_reached(self) -> None:
        if self.away_since_s is not None and self._was_reached:
            self._say(f"{self._node} is back, with what its arm did meanwhile")
        self.away_since_s, self._was_reached = None, True

    async def _send_content(self, hub: Connection) -> None:
        job, weights = self._job, self._weights
        self._sent = weights.stamp
        content = {name: getattr(job, name) for name in ("source", "holder", "config", "files", "stays")}
        await hub.send("content", {**content, "weights": encode_weights(weights)}, pace=self._pace)

    async def _send_news(self, hub: Connection) -> None:
        """Sends what the job needs, which turns were taken, newer weights one by one, and how it is left."""
        acknowledged, sending = self._taken, None
        try:
            while True:
                self._news.clear()
                if self._leaves:
                    await hub.send(self._leaves, None)
                    return
                if self._wants_content:
                    self._wants_content = False
                    sending = asyncio.create_task(self._send_content(hub))
                if self._taken > acknowledged:
                    acknowledged = self._taken
                    await hub.send("has", acknowledged)
                if self._has_begun and self._is_loaded and self._weights.stamp != self._sent:
                    self._sent, self._is_loaded = self._weights.stamp, False
                    octets = encode_weights(self._weights)
                    sending = asyncio.create_task(hub.send("weights", octets, pace=self._pace))
                await self._news.wait()
        finally:
            if sending is not None:
                sending.cancel()

    def _arrive(self, number: int, octets: bytes) -> None:
        """Takes a turn, unless it was sent again."""
        if number > self.received:
            follows, self.received = number == self.received + 1, number
            self._turns.put(_Arrived(number, octets, follows, time.monotonic()))
