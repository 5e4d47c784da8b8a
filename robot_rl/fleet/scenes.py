"""The way from the fleet page to the viewers of scenes (`scene_feed.py`), for who has the page's token.

A viewer has its files, its model and two WebSockets at the root of its own server; here they are all below
`/arms/<arm>/scene/`. `page/scene.js` sends the viewer's requests there. Models are not taken: `/drop` is not
passed on.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from robot_rl.core.errors import DeviceError
from robot_rl.fleet.feeds import SCENE, Feeds, NothingYetError

_IDLE_S = 45.0
"""Longer than a page that is seen is silent: one that only watches sends a sign every 30 s."""
_BEGIN_S = 30.0
_POLL_S = 0.1
_ACK = "state_ack"
"""What a page sends of each state, also while nobody sees it."""
_STREAMS = ("ui", "state")
_CODES = range(4000, 5000)
"""Of the end of a stream: what the viewer's own page understands."""
_PASSED = ("Content-Type", "Cross-Origin-Opener-Policy", "Cross-Origin-Embedder-Policy")
_OWN_SCRIPT = b'<script src="/scene.js"></script>'
_INLINE_HANDLER = b' oncontextmenu="event.preventDefault()"'
"""`scene.js` does the same: the policy of the page allows no script within a tag."""


class Scenes:
    """The viewers of this machine's arms, each of which runs while somebody looks at it."""

    def __init__(self) -> None:
        self._feeds = Feeds(SCENE, idle_s=_IDLE_S)
        self.close = self._feeds.close

    async def answer(self, request: web.Request, folder: Path, path: str) -> web.StreamResponse:
        """Answers a request for a file or a stream of the viewer.

        Args:
            request: of the browser.
            folder: of the arm's sockets.
            path: within the viewer.

        Raises:
            HTTPException: of this path nothing is passed on, or there is no viewer; the text says why.
        """
        if path == "drop" or ".." in path.split("/"):
            raise web.HTTPNotFound(text="the scene of an arm has no such page")
        origin = str(request.url.origin())
        if path in _STREAMS and request.headers.get("Origin", origin) != origin:
            raise web.HTTPForbidden(text="a scene is for its own page alone")
        try:
            socket = await self._begun(folder)
            async with ClientSession("http://viewer", connector=UnixConnector(socket)) as viewer:
                if path in _STREAMS:
                    return await self._stream(request, viewer, folder, path)
                return await _file(request, viewer)
        except (DeviceError, ClientError, TimeoutError) as error:
            raise web.HTTPServiceUnavailable(text=f"no scene: {error or 'no answer'}") from None

    async def _begun(self, folder: Path) -> str:
        """Returns the path of the viewer's socket, once it is there.

        Raises:
            DeviceError: it cannot be begun; the message says why.
            TimeoutError: it takes too long.
        """
        async with asyncio.timeout(_BEGIN_S):
            while True:
                try:
                    return self._feeds.newest(folder, "viewer").content.decode()
                except NothingYetError:
                    await asyncio.sleep(_POLL_S)

    async def _stream(
        self, request: web.Request, viewer: ClientSession, folder: Path, path: str
    ) -> web.WebSocketResponse:
        """Passes on a WebSocket; what a person's page sends keeps the viewer alive."""

        def note(content: Any) -> None:
            if content != _ACK:
                self._feeds.touch(folder)

        async with viewer.ws_connect(f"/{path}", params=request.query, max_msg_size=0) as behind:
            before = web.WebSocketResponse(compress=False, max_msg_size=1 << 20)
            await before.prepare(request)
            ways = (_carry(behind, before, lambda _: None), _carry(before, behind, note))
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
    note: Callable[[Any], None],
) -> None:
    """Passes messages on until an end closes."""
    async for message in source:
        note(message.data)
        if message.type is WSMsgType.TEXT:
            await target.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await target.send_bytes(message.data)


async def _file(request: web.Request, viewer: ClientSession) -> web.Response:
    """Fetches a file of the viewer; its page gets our script first, and a policy of its own."""
    # As the browser wrote it: the viewer compares names with files, and decodes nothing.
    before, _, name = request.raw_path.partition("/scene/")
    async with viewer.get(URL(f"/{name}", encoded=True)) as answer:
        content, status = await answer.read(), answer.status
        headers = {key: answer.headers[key] for key in _PASSED if key in answer.headers}
    if headers.get("Content-Type", "").startswith("text/html"):
        content = content.replace(b"<head>", b"<head>" + _OWN_SCRIPT, 1).replace(_INLINE_HANDLER, b"")
        headers["Content-Security-Policy"] = _policy(content, request.url.origin(), f"{before}/scene/")
    return web.Response(body=content, status=status, headers=headers)


def _policy(page: bytes, origin: URL, prefix: str) -> str:
    """Returns what the viewer's page may do: run its own code, and ask its own viewer, but give no orders."""
    scripts = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    inline = " ".join(f"'sha256-{each}'" for each in hashes)
    ours = f"{origin}{prefix}"
    own = f"{ours} {ours.replace('http', 'ws', 1)}"
    if ":" in (origin.host or ""):  # policies cannot name an IPv6 address
        own = "'self'"
    return (
        f"default-src 'none'; script-src 'self' 'unsafe-eval' {inline}; style-src 'unsafe-inline'; "
        f"img-src 'self'; connect-src {own}; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    )
