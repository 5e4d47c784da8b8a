"""Where machines of a fleet meet: each has one connection that it opened itself, so none needs an open port.

    agent (machine with arms) --/agent--> hub <--/job-- run (machine with the learner)

The hub keeps what agents show of their machines, and carries: orders of the page to them, and messages
between a run and the job that acts for it. It holds no lease: who may act is decided on the arm's machine.
Messages are (job, kind, body) of agents, (kind, body) of runs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from robot_rl import __version__
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.fleet.tunnel import Streams
from robot_rl.rollout.hub_connection import HEARTBEAT_S, NAME, REASON, VERSION, Connection

Json = dict[str, Any]
_OF_RUNS = ("begin", "content", "weights", "has", "rest", "end")
"""What a run may send to its job."""
_SILENT_S = 4.0
"""An agent shows every second what is there; another may take the name of one that did not for so long."""
_ANSWER_S = 8.0
"""How long an order may take: the page waits 10 s."""
_STOP_BY_HAND = ": use the e-stop button"
_CLOSE_S = 1.0
"""How long a peer may take to agree that a connection ends."""
_WAITING = 256
"""Messages that may wait for a peer; one that fetches none of so many is cut off, and gets them again."""


Waiting = asyncio.Queue[list[Any] | None]
"""Messages that wait to be sent; None is the end."""


class Node:
    """A machine, while its agent is connected."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self.jobs = dict[str, Waiting]()
        """What waits to be sent to runs, by job; None ends the connection."""
        self.look: Json = {}
        """What the agent showed of its machine last."""
        self.runs: list[Any] = []
        """The newest runs of its machine."""
        self.heard_s = time.monotonic()
        """When it last sent anything."""
        self.answers = dict[int, asyncio.Future[Json]]()
        """To what was asked, by number."""
        self.streams = Streams(lambda kind, body: connection.send("", kind, body))
        """To the viewers of its arms' scenes."""

    def pass_on(self, job: str, message: list[Any] | None) -> None:
        """Sends a message to a run in its turn; one run that is slow delays nobody else."""
        waiting = self.jobs.get(job)
        if waiting is None:
            return
        if message is None or waiting.qsize() >= _WAITING:
            while not waiting.empty():
                waiting.get_nowait()
            message = None
        waiting.put_nowait(message)


class Hub:
    """The machines that are connected, and the handlers of their connections."""

    def __init__(self) -> None:
        self.nodes = dict[str, Node]()
        self._orders = itertools.count(1)
        self._open = set[web.WebSocketResponse]()

    def look(self, here: str) -> list[Json]:
        """Returns what is known of each machine, by name; ready for `json.dumps`.

        Args: here: the hub's own `place`; an agent that has it shows the hub's machine.
        """
        now_s = time.monotonic()
        return [
            {
                **node.look,
                "runs": node.runs,
                "name": name,
                "silent_s": now_s - node.heard_s,
                "jobs": sorted(node.jobs),
                "is_here": node.look.get("place") == here,
            }
            for name, node in sorted(self.nodes.items())
        ]

    async def order(self, node: str, what: str, device: str, by: str) -> None:
        """Has an agent carry out an order.

        Args:
            node: name of the machine.
            what: `stop` or `clear`.
            device: the arm, or the device.
            by: name of the person.

        Raises:
            ConfigError: there is no such machine.
            DeviceError: the order was refused, or is not known to be done.
        """
        await self._ask(node, what, {"device": device, "by": by}, else_do=_STOP_BY_HAND)

    async def picture(self, node: str, device: str, camera: str) -> tuple[bytes, float]:
        """Returns the newest picture of a camera of an arm, as JPEG, and its largest possible age in seconds.

        Raises:
            ConfigError: there is no such machine.
            DeviceError: there is no picture; the message says why.
        """
        asked_s = time.monotonic()
        answer = await self._ask(node, "picture", {"device": device, "camera": camera})
        return bytes(answer["jpeg"]), float(answer["age_s"]) + time.monotonic() - asked_s

    async def has_viewer(self, node: str, device: str) -> bool:
        """Returns whether the viewer of an arm's scene is there; the first question begins it.

        Raises:
            ConfigError: there is no such machine.
            DeviceError: there is none; the message says why.
        """
        return bool((await self._ask(node, "scene", {"device": device}))["is_there"])

    async def note_seen(self, node: str, device: str) -> None:
        """Has the viewer of an arm's scene stay for longer."""
        if (at := self.nodes.get(node)) is not None:
            await at.connection.send("", "seen", {"device": device})

    async def carry(
        self, node: str, device: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carries a connection of the server to the viewer of an arm's scene, until one closes it."""
        at, number = self.nodes.get(node), next(self._orders)
        if at is None:
            writer.close()
            return
        at.streams.expect(number)
        await at.connection.send("", "open", {"number": number, "device": device})
        await at.streams.carry(number, reader, writer)

    async def _ask(self, node: str, what: str, body: Json, else_do: str = "") -> Json:
        """Has an agent do something, and returns its answer; `else_do` ends the message where there is none.

        Raises:
            ConfigError: there is no such machine.
            DeviceError: it is refused, or there is no answer.
        """
        if node not in self.nodes:
            there = ", ".join(sorted(self.nodes)) or "none is here"
            raise ConfigError(f"node: got {node!r}, allowed: {there}")
        at, number = self.nodes[node], next(self._orders)
        at.answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_ANSWER_S):
                await at.connection.send("", what, {"number": number, **body})
                answer = await at.answers[number]
        except TimeoutError:
            raise DeviceError(f"{node} did not answer within {_ANSWER_S:g} s{else_do}.") from None
        finally:
            del at.answers[number]
        if answer.get("is_gone"):
            raise DeviceError(f"{node} is gone{else_do}.")
        if answer["refusal"]:
            raise DeviceError(str(answer["refusal"]))
        return answer

    async def agent(self, request: web.Request) -> web.WebSocketResponse:
        """Serves the connection of a machine's agent."""
        name = _name(request, "node")
        before = self.nodes.get(name)
        if before is not None and time.monotonic() - before.heard_s < _SILENT_S:
            raise _refused(web.HTTPConflict, f"node: {name!r} is connected already. Choose another name=")
        socket = await self._opened(request)
        node = self.nodes[name] = Node(name, Connection(socket))
        if before is not None:
            await _leave(before)
        try:
            async for message in node.connection.messages():
                node.heard_s = time.monotonic()
                self._from_agent(node, *message)
        finally:
            self._open.discard(socket)
            if self.nodes.get(name) is node:
                del self.nodes[name]
            await _leave(node)
        return socket

    def _from_agent(self, node: Node, job: Any, kind: Any, body: Any) -> None:
        if kind == "look":
            node.look = cast("Json", body) if isinstance(body, dict) else {}
        elif kind == "runs":
            node.runs = cast("list[Any]", body) if isinstance(body, list) else []
        elif kind in ("octets", "shut"):
            node.streams.take(kind, cast("Json", body))
        elif kind == "done":
            if (answer := node.answers.get(body["number"])) is not None and not answer.done():
                answer.set_result(body)
        else:
            node.pass_on(job, [kind, body])

    async def job(self, request: web.Request) -> web.WebSocketResponse:
        """Serves the connection of a run to the job that acts for it on a machine."""
        name, job = _name(request, "node"), _name(request, "job")
        node = self.nodes.get(name)
        if node is None:
            raise _refused(web.HTTPNotFound, f"no machine {name!r} is connected")
        if job in node.jobs:
            raise _refused(web.HTTPConflict, f"job {job!r} is another run's already")
        most = request.query.get("most", "")
        if most.isdecimal() and len(node.jobs) > int(most):
            raise _refused(web.HTTPPreconditionFailed, f"{name!r} has got other jobs meanwhile")
        node.jobs[job], orders = Waiting(), Waiting()
        passes = asyncio.create_task(_pass_on(node.connection, orders))
        try:
            socket = await self._opened(request)
            connection = Connection(socket)
            answers = asyncio.create_task(_pass_on(connection, node.jobs[job], ends=True))
            try:
                async for kind, body in connection.messages():
                    if kind in _OF_RUNS:
                        orders.put_nowait([job, kind, body])
                    if orders.qsize() > _WAITING:
                        break
            finally:
                answers.cancel()
                self._open.discard(socket)
        finally:
            orders.put_nowait([job, "alone", None])
            orders.put_nowait(None)
            try:
                await asyncio.shield(passes)  # its end arrives also where aiohttp cancels this
            finally:  # not before: what the run's next connection sends must not come first
                del node.jobs[job]
        return socket

    async def kept(self, request: web.Request) -> web.Response:
        """Answers with what a job has recorded on a machine, or with the next bytes of one segment."""
        at, query = request.match_info, request.query
        node, body = at["node"], {"job": at["job"]}
        try:
            if not at["segment"]:
                found = await self._ask(node, "kept", body)
                return web.json_response({name: found[name] for name in ("store", "segments")})
            span = {name: int(query[name]) for name in ("from", "to")}
            asked = {**body, "segment": int(at["segment"].removeprefix("/")), **span}
            return web.Response(body=(await self._ask(node, "part", asked))["octets"])
        except (ConfigError, DeviceError) as error:
            raise _refused(web.HTTPNotFound, str(error)) from None
        except (KeyError, ValueError, OverflowError):
            raise _refused(web.HTTPBadRequest, "allowed: ?from=<byte>&to=<byte>") from None

    async def _opened(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=1 << 20, timeout=_CLOSE_S)
        await socket.prepare(request)
        self._open.add(socket)
        return socket

    async def close(self, _: web.Application) -> None:
        """Ends all connections, at the end of the server."""
        await asyncio.gather(*(socket.close(message=b"the hub ends") for socket in self._open))


async def _leave(node: Node) -> None:
    """Ends what goes through a machine that is gone."""
    for job in list(node.jobs):
        node.pass_on(job, None)
    node.streams.close()
    for answer in node.answers.values():
        if not answer.done():
            answer.set_result({"is_gone": True})
    await node.connection.socket.close()


async def _pass_on(connection: Connection, waiting: Waiting, *, ends: bool = False) -> None:
    """Sends what waits until None comes, then, if it `ends`, closes the connection."""
    while (message := await waiting.get()) is not None:
        await connection.send(*message)
    if ends:
        await connection.socket.close(message=b"its machine is gone")


def _refused(kind: Callable[..., web.HTTPException], why: str) -> web.HTTPException:
    return kind(text=why, headers={REASON: why})


def _name(request: web.Request, key: str) -> str:
    """Returns the name of a machine or job, of a peer of this version."""
    name, version = request.query.get(key, ""), request.headers.get(VERSION, "")
    if version != __version__:
        why = f"the hub has robot_rl {__version__}, this machine {version or 'none'}. Install one on all."
        raise _refused(web.HTTPUpgradeRequired, why)
    if NAME.fullmatch(name) is None:
        why = f"{key}: got {name!r}, allowed: letters, digits, '.', '_' and '-'"
        raise _refused(web.HTTPBadRequest, why)
    return name
