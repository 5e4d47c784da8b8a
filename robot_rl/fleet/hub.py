"""Where machines of a fleet meet: each has one connection that it opened itself, so none needs an open port.

    agent (machine with arms) --/agent--> hub <--/job-- run (machine with the learner)

The hub keeps what agents show of their machines, and carries: orders of the page to them, and frames between
a run and the job that acts for it. It holds no lease: who may act is decided on the arm's machine.
Frames are msgpack: (job, kind, body) of agents, (kind, body) of runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import msgpack
from aiohttp import WSMsgType, web

from robot_rl import __version__
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.rollout.hub_line import HEARTBEAT_S, NAME, VERSION, frame

Json = dict[str, Any]
_SILENT_S = 4.0
"""An agent says every second what is there; another one may take the name of one that did not for so long."""
_ANSWER_S = 8.0
"""How long an order may take: the page waits 10 s."""


class Node:
    """A machine, while its agent is connected."""

    def __init__(self, name: str, line: web.WebSocketResponse) -> None:
        self.name, self.line = name, line
        self.jobs = dict[str, web.WebSocketResponse]()
        """The connections of runs, by job."""
        self.look: Json = {}
        """What the agent showed of its machine last."""
        self.heard_s = time.monotonic()
        """When it last sent anything."""
        self.answers = dict[int, asyncio.Future[str]]()

    async def send(self, job: str, kind: str, body: Any) -> None:
        """Sends a frame to the agent; one that is just leaving gets none."""
        with contextlib.suppress(ConnectionError):
            await self.line.send_bytes(frame(job, kind, body))


class Hub:
    """The machines that are connected, and the handlers of their connections."""

    def __init__(self) -> None:
        self.nodes = dict[str, Node]()
        self._orders = itertools.count(1)

    def look(self) -> list[Json]:
        """Returns what is known of each machine, by name; ready for `json.dumps`."""
        return [
            {
                "name": name,
                "silent_s": time.monotonic() - node.heard_s,
                "jobs": sorted(node.jobs),
                **node.look,
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
        if node not in self.nodes:
            raise ConfigError(
                f"node: got {node!r}, allowed: {', '.join(sorted(self.nodes)) or 'none is here'}"
            )
        at, number = self.nodes[node], next(self._orders)
        at.answers[number] = asyncio.get_running_loop().create_future()
        try:
            await at.send("", what, {"number": number, "device": device, "by": by})
            refusal = await asyncio.wait_for(at.answers[number], _ANSWER_S)
        except TimeoutError:
            raise DeviceError(
                f"{node} did not answer within {_ANSWER_S:g} s: use the e-stop button."
            ) from None
        finally:
            del at.answers[number]
        if refusal:
            raise DeviceError(refusal)

    async def agent(self, request: web.Request) -> web.WebSocketResponse:
        """Serves the connection of a machine's agent."""
        name = _name(request, "node")
        before = self.nodes.get(name)
        if before is not None and time.monotonic() - before.heard_s < _SILENT_S:
            raise web.HTTPConflict(text=f"node: {name!r} is connected already. Choose another name=")
        line = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=0)
        await line.prepare(request)
        node = self.nodes[name] = Node(name, line)
        try:
            async for message in line:
                if message.type is WSMsgType.BINARY:
                    node.heard_s = time.monotonic()
                    await self._from_agent(node, message.data)
        finally:
            if self.nodes.get(name) is node:
                del self.nodes[name]
            for run in list(node.jobs.values()):
                await run.close(message=b"its machine is gone")
            for answer in (one for one in node.answers.values() if not one.done()):
                answer.set_result(f"{name} is gone: use the e-stop button.")
        return line

    async def _from_agent(self, node: Node, data: bytes) -> None:
        job, kind, body = msgpack.unpackb(data)
        if kind == "look":
            node.look = body
        elif kind == "done":
            if (answer := node.answers.get(body["number"])) is not None and not answer.done():
                answer.set_result(body["refusal"])
        elif (run := node.jobs.get(job)) is not None:
            with contextlib.suppress(ConnectionError):
                await run.send_bytes(frame(kind, body))

    async def job(self, request: web.Request) -> web.WebSocketResponse:
        """Serves the connection of a run to the job that acts for it on a machine."""
        name, job = _name(request, "node"), _name(request, "job")
        node = self.nodes.get(name)
        if node is None:
            raise web.HTTPNotFound(text=f"no machine {name!r} is connected")
        if job in node.jobs:
            raise web.HTTPConflict(text=f"job {job!r} is another run's already")
        line = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=0)
        node.jobs[job] = line
        try:
            await line.prepare(request)
            async for message in line:
                if message.type is WSMsgType.BINARY:
                    kind, body = msgpack.unpackb(message.data)
                    await node.send(job, kind, body)
        finally:
            del node.jobs[job]
            await node.send(job, "alone", None)
        return line


def _name(request: web.Request, key: str) -> str:
    """Returns the name of a machine or job, of a peer of this version."""
    name, version = request.query.get(key, ""), request.headers.get(VERSION, "")
    if version != __version__:
        text = f"the hub has robot_rl {__version__}, this machine {version or 'none'}. Install one on all."
        raise web.HTTPConflict(text=text)
    if NAME.fullmatch(name) is None:
        raise web.HTTPBadRequest(text=f"{key}: got {name!r}, allowed: letters, digits, '.', '_' and '-'")
    return name
