"""Connections to the fleet's hub, of agents and of runs: opened outward, with TLS and a token."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import msgpack

from robot_rl import __version__
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.rollout.hub_config import HubConfig

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

VERSION = "X-Robot-RL-Version"
"""Header with the version of the package: all machines have the same."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names of machines and jobs: they become names of folders."""
HEARTBEAT_S = 10.0
"""How often a peer is pinged; one that does not answer within half of it is gone."""
_ASK_S = 10.0


class HubRefusedError(ConfigError):
    """The hub answers, and does not let this peer in."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@asynccontextmanager
async def connected(
    hub: HubConfig, path: str, query: Mapping[str, str]
) -> AsyncGenerator[ClientWebSocketResponse]:
    """Opens a connection to the hub.

    Raises:
        HubRefusedError: the hub does not let this peer in; the message says why.
        DeviceError: it cannot be reached.
    """
    import aiohttp

    async with _session(hub) as session:
        with _reached(hub):
            try:
                how: Any = {"params": query, "heartbeat": HEARTBEAT_S, "max_msg_size": 0}
                line = await session.ws_connect(f"/{path}", **how)
            except aiohttp.WSServerHandshakeError:
                async with session.get(f"/{path}", params=query) as answer:  # it says why
                    why = f"hub {hub.address}: {await answer.text()}"
                    raise HubRefusedError(answer.status, why) from None
        async with line:
            yield line


def machines(hub: HubConfig) -> list[dict[str, Any]]:
    """Returns what the hub knows of the machines that are connected to it.

    Raises:
        HubRefusedError: it does not let us in.
        DeviceError: it cannot be reached.
    """

    async def ask() -> list[dict[str, Any]]:
        async with _session(hub) as session:
            with _reached(hub):
                answer = await session.get("/state")
            if answer.status != 200:
                raise HubRefusedError(answer.status, f"hub {hub.address}: {await answer.text()}")
            return (await answer.json())["nodes"]

    return asyncio.run(ask())


def frame(*parts: Any) -> bytes:
    """Returns a frame of a line: its parts in msgpack."""
    return cast("bytes", msgpack.packb(parts))


@contextmanager
def _reached(hub: HubConfig) -> Generator[None]:
    """Turns the errors of a connection that cannot be made into ours."""
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise DeviceError(f"hub {hub.address}: {error}. `robot-rl fleet` serves it.") from error


def _session(hub: HubConfig) -> ClientSession:
    """Returns a session with the token.

    Raises:
        ConfigError: no token, or aiohttp is not installed.
    """
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise ConfigError(f"hub: {error}. Install it: pip install 'robot_rl[fleet]'.") from error
    context = ssl.create_default_context(cafile=hub.ca)
    headers = {"Authorization": f"Bearer {hub.token()}", VERSION: __version__}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ASK_S)  # a line stays
    return aiohttp.ClientSession(
        hub.address, headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(ssl=context)
    )
