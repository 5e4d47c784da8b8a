"""Connections to the fleet's hub, of agents and of runs: opened outward, with TLS and a token.

A message is a few values in msgpack. It travels in parts, so that large weights on a slow connection delay
neither a stop order nor the pings by which a peer that is gone is noticed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import msgpack

from robot_rl import __version__
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.real.remote import client_context, tls_reason
from robot_rl.rollout.hub_config import HubConfig

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse
    from aiohttp.web import WebSocketResponse

VERSION = "X-Robot-RL-Version"
"""Header with the version of the package: all machines have the same."""
REASON = "X-Robot-RL-Reason"
"""Header with the words of a refusal: a client of WebSockets does not get the body."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of machines and jobs: they become names of folders."""
HEARTBEAT_S = 16.0
"""How often a peer is pinged; one that does not answer within half of it is gone."""
BACK_OFF_S = (0.5, 10.0)
"""Between two attempts to reach the hub: the first and the longest pause."""
_PART_BYTES = 1 << 17
_MOST_BYTES = 1 << 30
"""Of a message: the weights of a large policy."""
_ASK_S = 10.0
_REFUSALS = (401, 403, 426)
"""Statuses of a wrong token, a host that is not the hub's, another version: another attempt ends the same."""


class HubRefusedError(ConfigError):
    """The hub answers, and does not let this peer in."""


class TakenError(DeviceError):
    """Another peer has the name, perhaps our own connection of before the cut."""


class FullError(DeviceError):
    """Other runs were faster: the machine has more jobs than this run saw there."""


class Pace:
    """Spreads large messages over time, so that others have room on a slow line."""

    def __init__(self, most_mbit_s: float = 0.0) -> None:
        """Args: most_mbit_s: megabits per second; any amount if 0."""
        self._byte_s = 8e-6 / most_mbit_s if most_mbit_s else 0.0
        self._free_s = 0.0
        """When what was sent has had its time."""

    async def wait(self, octets: int) -> None:
        """Waits until so many bytes more are allowed."""
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s) + octets * self._byte_s
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)


class Connection:
    """Messages over one WebSocket, of either end."""

    def __init__(self, socket: ClientWebSocketResponse | WebSocketResponse) -> None:
        self.socket = socket
        self._numbers = itertools.count()
        self._parts = dict[int, bytearray]()

    async def send(self, *values: Any, pace: Pace | None = None) -> bool:
        """Sends a message, each part when `pace` allows; returns False if the connection is gone."""
        octets, number = memoryview(cast("bytes", msgpack.packb(values))), next(self._numbers)
        try:
            for begin in range(0, len(octets), _PART_BYTES):
                part = octets[begin : begin + _PART_BYTES]
                is_last = begin + _PART_BYTES >= len(octets)
                if pace is not None:
                    await pace.wait(len(part))
                head = (number << 1 | is_last).to_bytes(8, "little")
                await self.socket.send_bytes(head + part)
        except (ConnectionError, RuntimeError):  # aiohttp has both for a closed one
            return False
        return True

    async def messages(self) -> AsyncIterator[list[Any]]:
        """Yields what arrives, until the connection is gone or sends what is none of ours."""
        from aiohttp import WSMsgType

        async for part in self.socket:
            if part.type is not WSMsgType.BINARY:  # ERROR: its end is gone, or no ping was answered
                return
            head, octets = int.from_bytes(part.data[:8], "little"), part.data[8:]
            whole = self._parts.setdefault(head >> 1, bytearray())
            whole += octets
            if sum(map(len, self._parts.values())) > _MOST_BYTES:
                return
            if head & 1:
                try:
                    message: Any = msgpack.unpackb(bytes(self._parts.pop(head >> 1)))
                except (ValueError, msgpack.UnpackException):
                    return
                if not isinstance(message, list):
                    return
                yield message


@asynccontextmanager
async def connected(hub: HubConfig, path: str, query: Mapping[str, str]) -> AsyncGenerator[Connection]:
    """Opens a connection to the hub.

    Raises:
        HubRefusedError: the hub does not let this peer in; the message says why.
        TakenError: it has a peer of this name.
        FullError: the machine has more jobs than `query` allows with `most`.
        DeviceError: it cannot be reached, or does not know what is asked for.
    """
    import aiohttp

    async with opened(hub) as session:
        with _reached(hub):
            try:
                async with asyncio.timeout(_ASK_S):
                    how: Any = {"params": query, "heartbeat": HEARTBEAT_S, "max_msg_size": 2 * _PART_BYTES}
                    socket = await session.ws_connect(f"/{path}", **how)
            except aiohttp.WSServerHandshakeError as error:
                raise _refusal(hub, error.status, error.headers) from None
        async with socket:
            yield Connection(socket)


def machines(hub: HubConfig) -> list[dict[str, Any]]:
    """Returns what the hub knows of the machines that are connected to it; errors as of `fleet_state`."""
    return fleet_state(hub)["nodes"]


def fleet_state(hub: HubConfig) -> dict[str, Any]:
    """Returns what the hub knows: of its own machine, and in `nodes` of those that are connected to it.

    Raises:
        HubRefusedError: it does not let us in.
        DeviceError: it cannot be reached.
    """

    async def ask() -> dict[str, Any]:
        async with opened(hub) as session:
            return json.loads(await get(hub, session, "/state"))

    return asyncio.run(ask())


async def get(
    hub: HubConfig, session: ClientSession, path: str, query: Mapping[str, str] | None = None
) -> bytes:
    """Returns what the hub answers to a question; errors as of `fleet_state`."""
    with _reached(hub):
        async with asyncio.timeout(_ASK_S), session.get(path, params=query) as answer:
            if answer.status != 200:
                raise _refusal(hub, answer.status, answer.headers)
            return await answer.read()


def _refusal(hub: HubConfig, status: int, headers: Mapping[str, str] | None) -> Exception:
    """Returns the error for an answer of the hub, or of what stands before it."""
    why = f"hub {hub.address}: {(headers or {}).get(REASON, f'it answers with status {status}')}"
    if status in _REFUSALS:
        return HubRefusedError(why)
    return {409: TakenError, 412: FullError}.get(status, DeviceError)(why)


@contextmanager
def _reached(hub: HubConfig) -> Generator[None]:
    """Turns the errors of a connection that cannot be made into ours."""
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        cause = error.__cause__
        why = tls_reason(cause) if isinstance(cause, ssl.SSLError) else str(error) or "no answer"
        raise DeviceError(f"hub {hub.address}: {why}. `robot-rl fleet` serves it.") from error


def opened(hub: HubConfig) -> ClientSession:
    """Returns a session with the token.

    Raises:
        ConfigError: no token, no file `hub.ca`, or aiohttp is not installed.
    """
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise ConfigError(f"hub: {error}. Install it: pip install 'robot_rl[fleet]'.") from error
    context = client_context(hub.ca, at="hub.ca")
    headers = {"Authorization": f"Bearer {hub.token()}", VERSION: __version__}
    connector = aiohttp.TCPConnector(ssl=context)
    # A connection stays: only its beginning has a limit.
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(hub.address, headers=headers, timeout=timeout, connector=connector)
