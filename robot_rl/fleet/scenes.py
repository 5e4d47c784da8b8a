"""The way from the fleet page to the viewers of scenes (`scene_feed.py`), for who has the page's token.

A viewer has its files, its model and two WebSockets at the root of its own server; here they are all below
`/arms/<arm>/scene/`, or `/nodes/<machine>/<arm>/scene/` of another machine, whose agent begins the viewer and
carries bytes to its socket (`tunnel.py`). `page/scene.js` sends the viewer's requests there. Models are not
taken: `/drop` is not passed on.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import math
import re
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiohttp import (
    ClientError,
    ClientSession,
    ClientWebSocketResponse,
    UnixConnector,
    WSCloseCode,
    WSMsgType,
    web,
)
from yarl import URL

from robot_rl.core.errors import RobotRLError
from robot_rl.fleet.feeds import SCENE, SCENE_IDLE_S, Feeds
from robot_rl.fleet.hub import Hub

_SIGN_S = 5.0
"""Between two signs to another machine that somebody looks."""
_BEGIN_S = 30.0
_POLL_S = 0.1
_ACK = "state_ack"
"""What a page sends of each state, also while nobody sees it."""
_STREAMS = ("ui", "state")
_CODES = range(4000, 5000)
"""Of the end of a stream: what the viewer's own page understands."""
_PASSED = ("Content-Type", "Cross-Origin-Opener-Policy", "Cross-Origin-Embedder-Policy")
_PLACE = re.compile(r"(/arms/[^/]+|/nodes/[^/]+/[^/]+)/scene/(.*)", re.DOTALL)
"""Path of a viewer, and of a file within it."""
_OWN_SCRIPT = b'<script src="/scene.js"></script>'
_INLINE_HANDLER = b' oncontextmenu="event.preventDefault()"'
"""`scene.js` does the same: the policy of the page allows no script within a tag."""


class Viewer(Protocol):
    """The viewer of one arm's scene."""

    async def socket(self) -> str | None:
        """Returns the path of its socket on this machine; None until it is there. The first call begins it.

        Raises:
            RobotRLError: it cannot be begun; the message says why.
        """
        ...

    async def touch(self) -> None:
        """Notes that somebody looks at it."""


class _Here:
    """The viewer of an arm of this machine."""

    def __init__(self, feeds: Feeds, folder: Path) -> None:
        self._feeds, self._folder = feeds, folder

    async def socket(self) -> str | None:
        return self._feeds.socket(self._folder)

    async def touch(self) -> None:
        self._feeds.touch(self._folder)


class _There:
    """The viewer of an arm of another machine, which a socket of this one leads to."""

    def __init__(self, hub: Hub, node: str, arm: str, path: Path) -> None:
        self._hub, self._node, self._arm, self._path = hub, node, arm, path
        self._touched_s = -math.inf
        self._server: asyncio.Server | None = None
        self._beginning = asyncio.Lock()

    async def socket(self) -> str | None:
        try:
            if not await self._hub.has_viewer(self._node, self._arm):
                return None
        except RobotRLError:
            self.close()
            raise
        async with self._beginning:
            if self._server is None:
                carry = partial(self._hub.carry, self._node, self._arm)
                self._server = await asyncio.start_unix_server(carry, self._path)
        return str(self._path)

    async def touch(self) -> None:
        now_s = time.monotonic()
        if now_s - self._touched_s > _SIGN_S:
            self._touched_s = now_s
            await self._hub.note_seen(self._node, self._arm)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class Scenes:
    """The viewers of arms, each of which runs while somebody looks at it."""

    def __init__(self, hub: Hub) -> None:
        """Args: hub: leads to the arms of other machines."""
        self._hub, self._feeds = hub, Feeds(SCENE, idle_s=SCENE_IDLE_S)
        self._others, self._numbers = dict[tuple[str, str], _There](), itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="robot-rl-fleet-")
        """Of the sockets that lead to other machines; only this user can enter it."""

    def here(self, folder: Path) -> Viewer:
        """Returns the viewer of an arm of this machine, whose sockets are in `folder`."""
        return _Here(self._feeds, folder)

    def there(self, node: str, arm: str) -> Viewer:
        """Returns the viewer of an arm of another machine."""
        if (node, arm) not in self._others:
            for other in [other for other in self._others if other[0] not in self._hub.nodes]:
                self._others.pop(other).close()
            path = Path(self._folder.name, f"{next(self._numbers)}.sock")
            self._others[node, arm] = _There(self._hub, node, arm, path)
        return self._others[node, arm]

    async def close(self, _: object = None) -> None:
        """Ends the viewers of this machine, at the end of the server."""
        for other in self._others.values():
            other.close()
        await self._feeds.close()
        self._folder.cleanup()

    async def answer_there(self, request: web.Request) -> web.StreamResponse:
        """Answers a request for the viewer of an arm of another machine; errors as of `answer`."""
        node = request.match_info["node"]
        if node not in self._hub.nodes:
            raise web.HTTPNotFound(text=f"no machine {node!r} is connected")
        return await self.answer(request, self.there(node, request.match_info["name"]))

    async def answer(self, request: web.Request, shown: Viewer) -> web.StreamResponse:
        """Answers a request for a file or a stream of a viewer.

        Args:
            request: of the browser; `path` of its address is that within the viewer.
            shown: whose it is.

        Raises:
            HTTPException: of this path nothing is passed on, or there is no viewer; the text says why.
        """
        path = request.match_info["path"]
        if path == "drop" or ".." in path.split("/"):
            raise web.HTTPNotFound(text="the scene of an arm has no such page")
        origin = str(request.url.origin())
        if path in _STREAMS and request.headers.get("Origin", origin) != origin:
            raise web.HTTPForbidden(text="a scene is for its own page alone")
        try:
            socket = await _begun(shown)
            async with ClientSession("http://viewer", connector=UnixConnector(socket)) as viewer:
                if path in _STREAMS:
                    return await _stream(request, viewer, shown, path)
                return await _file(request, viewer)
        except (RobotRLError, ClientError, OSError) as error:
            raise web.HTTPServiceUnavailable(text=f"no scene: {error or 'no answer'}") from None


async def _begun(shown: Viewer) -> str:
    """Returns the path of a viewer's socket, once it is there.

    Raises:
        RobotRLError: it cannot be begun; the message says why.
        TimeoutError: it takes too long.
    """
    async with asyncio.timeout(_BEGIN_S):
        while (socket := await shown.socket()) is None:
            await asyncio.sleep(_POLL_S)
        return socket


async def _stream(
    request: web.Request, viewer: ClientSession, shown: Viewer, path: str
) -> web.WebSocketResponse:
    """Passes on a WebSocket; what a person's page sends keeps the viewer alive."""

    async def note(content: Any) -> None:
        if content != _ACK:
            await shown.touch()

    async def ignore(_: Any) -> None:
        pass

    async with viewer.ws_connect(f"/{path}", params=request.query, max_msg_size=0) as behind:
        before = web.WebSocketResponse(compress=False, max_msg_size=1 << 20)
        await before.prepare(request)
        ways = (_carry(behind, before, ignore), _carry(before, behind, note))
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        own = behind.close_code or 0
        await before.close(code=own if own in _CODES else WSCloseCode.GOING_AWAY)
    return before


async def _carry(
    source: web.WebSocketResponse | ClientWebSocketResponse,
    target: web.WebSocketResponse | ClientWebSocketResponse,
    note: Callable[[Any], Awaitable[None]],
) -> None:
    """Passes messages on until an end closes."""
    async for message in source:
        await note(message.data)
        if message.type is WSMsgType.TEXT:
            await target.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await target.send_bytes(message.data)


async def _file(request: web.Request, viewer: ClientSession) -> web.Response:
    """Fetches a file of the viewer; its page gets our script first, and a policy of its own."""
    # As the browser wrote it: the viewer compares names with files, and decodes nothing.
    found = _PLACE.fullmatch(request.raw_path)
    assert found is not None, "routes have such paths"
    before, name = found.groups()
    async with viewer.get(URL(f"/{name}", encoded=True)) as answer:
        content, status = await answer.read(), answer.status
        headers = {key: answer.headers[key] for key in _PASSED if key in answer.headers}
    is_page = headers.get("Content-Type", "").startswith("text/html")
    if is_page:
        content = content.replace(b"<head>", b"<head>" + _OWN_SCRIPT, 1).replace(_INLINE_HANDLER, b"")
    policy = _policy(content if is_page else b"", request.url.origin(), f"{before}/scene/")
    headers["Content-Security-Policy"] = policy  # also of a script, which a worker may run
    return web.Response(body=content, status=status, headers=headers)


def _policy(page: bytes, origin: URL, prefix: str) -> str:
    """Returns what the viewer's page may do: run its own code, and ask its own viewer, but give no orders."""
    scripts = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    inline = "".join(f" 'sha256-{each}'" for each in hashes)
    ours = f"{origin}{prefix}"
    own = f"{ours} {ours.replace('http', 'ws', 1)}"
    if ":" in (origin.host or ""):  # policies cannot name an IPv6 address
        own = "'self'"
    return (
        f"default-src 'none'; script-src 'self' 'unsafe-eval'{inline}; style-src 'unsafe-inline'; "
        f"img-src 'self'; connect-src {own}; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'; sandbox allow-scripts allow-same-origin"
    )
