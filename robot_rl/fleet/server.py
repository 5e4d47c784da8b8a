"""The web server of the fleet page: one page, its state as JSON, pictures, orders, and the hub's connections.

Everything needs the token: once in the address, then in a cookie that no script reads; programs send it in a
header. Orders need a header that no form of another page can send, and requests have to name a host that is
ours, so that neither another page in the browser nor a name that points here can give any.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from robot_rl.core.errors import ConfigError, DeviceError, RobotRLError, StorageError
from robot_rl.fleet.feeds import CAMERA_IDLE_S, CAMERAS, Feeds
from robot_rl.fleet.hub import Hub
from robot_rl.fleet.scenes import Scenes
from robot_rl.fleet.state import FleetState, clear_device, stop_arm
from robot_rl.rollout.hub_config import token_path
from robot_rl.rollout.hub_connection import REASON

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
COOKIE = "robot-rl-fleet"
ORDER = "X-Robot-RL"
"""Header of an order."""
AGE = "X-Robot-RL-Age"
"""Header of a picture: how old it is, in seconds."""
_STAY = ("/agent", "/job")
"""Where programs stay connected."""
_SHORTEST = 16
"""Letters of a token."""
_PAGE = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def token_of_machine() -> str:
    """Returns the token of this user's fleet page; the first call makes it, readable by this user alone.

    Raises:
        StorageError: it cannot be written, or what is there is none.
    """
    path = token_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if not path.exists():
            with open(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(24))
            with contextlib.suppress(FileExistsError):  # another page was faster
                os.link(made, path)
        token = path.read_text().strip()
    finally:
        made.unlink(missing_ok=True)
    if len(token) < _SHORTEST:
        raise StorageError(f"{path}: holds no token. Remove it; the next start makes another.")
    return token


def make_app(runs: Path, token: str, hosts: frozenset[str]) -> web.Application:
    """Returns the application.

    Args:
        runs: folder of run folders.
        token: what every request has to have.
        hosts: names under which it is reached, without the port.
    """
    state, looking, hub = FleetState(runs), asyncio.Lock(), Hub()
    pictures, scenes = Feeds(CAMERAS, idle_s=CAMERA_IDLE_S), Scenes(hub)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (request.url.host or "") not in hosts:
            why = f"host {request.url.host}: allowed are {', '.join(sorted(hosts))}; names= adds others"
            raise web.HTTPForbidden(text=why, headers={REASON: why})
        given = request.query.get("token", "")
        if given and request.path == "/" and _equal(given, token):
            found = web.HTTPFound("/")
            secure = request.secure
            found.set_cookie(COOKIE, token, httponly=True, samesite="Strict", secure=secure)
            raise found
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        is_program = _equal(bearer, token)
        is_page = _equal(request.cookies.get(COOKIE, ""), token) and request.path not in _STAY
        if not (is_program or is_page):
            why = "wrong token. Open the address that `robot-rl fleet` printed; a program needs its file."
            raise web.HTTPUnauthorized(text=why, headers={REASON: why})
        if request.path in _STAY:
            return await handler(request)
        if request.method != "GET" and ORDER not in request.headers:
            raise web.HTTPForbidden(text="orders come from the page alone")
        response = await handler(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def page(request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name") or "fleet.html"
        return web.FileResponse(_PAGE / name)

    async def look(_: web.Request) -> web.StreamResponse:
        async with looking:  # one look at a time, however many pages are open
            seen = await asyncio.to_thread(state.look)
        return web.json_response({**seen, "nodes": hub.look(seen["place"])})

    async def arm_of(request: web.Request, camera: str | None = None) -> Path:
        arm = request.match_info["name"]
        try:
            return await asyncio.to_thread(state.require_folder, arm, camera)
        except DeviceError as error:
            raise web.HTTPNotFound(text=str(error)) from None

    async def picture(request: web.Request) -> web.StreamResponse:
        camera = request.match_info["camera"]
        folder = await arm_of(request, camera)
        try:
            seen = pictures.newest(folder, camera)
        except DeviceError as error:
            return _without_picture(error)
        return _picture(seen.content, seen.age_s)

    async def picture_there(request: web.Request) -> web.StreamResponse:
        try:
            seen = await hub.picture(*(request.match_info[key] for key in ("node", "name", "camera")))
        except ConfigError as error:
            raise web.HTTPNotFound(text=str(error)) from None
        except DeviceError as error:
            return _without_picture(error)
        return _picture(*seen)

    async def scene(request: web.Request) -> web.StreamResponse:
        return await scenes.answer(request, scenes.here(await arm_of(request)))

    async def stop(request: web.Request) -> web.StreamResponse:
        return await _ordered(request, stop_arm)

    async def clear(request: web.Request) -> web.StreamResponse:
        return await _ordered(request, clear_device)

    async def order(request: web.Request) -> web.StreamResponse:
        node, what = request.match_info["node"], request.match_info["what"]
        return await _answered(request, lambda device, by: hub.order(node, what, device, by))

    app = web.Application(middlewares=[guarded])
    app.router.add_get("/", page)
    app.router.add_get("/{name:fleet\\.(?:js|css)|scene\\.js}", page)
    app.router.add_get("/state", look)
    app.router.add_get("/arms/{name}/cameras/{camera}", picture)
    app.router.add_get("/nodes/{node}/{name}/cameras/{camera}", picture_there)
    app.router.add_get("/arms/{name}/scene/{path:.*}", scene)
    app.router.add_get("/nodes/{node}/{name}/scene/{path:.*}", scenes.answer_there)
    app.router.add_get("/kept/{node}/{job}{segment:(?:/[0-9]+)?}", hub.kept)
    app.router.add_post("/arms/{name}/stop", stop)
    app.router.add_post("/devices/{name}/clear", clear)
    app.router.add_post("/nodes/{node}/{name}/{what:stop|clear}", order)
    app.router.add_get("/agent", hub.agent)
    app.router.add_get("/job", hub.job)
    app.on_shutdown.extend([hub.close, pictures.close, scenes.close])
    return app


def _picture(jpeg: bytes, age_s: float) -> web.Response:
    return web.Response(body=jpeg, content_type="image/jpeg", headers={AGE: f"{age_s:.2f}"})


def _without_picture(error: DeviceError) -> web.Response:
    """Returns why there is no picture: no error of the page."""
    return web.json_response({"problem": str(error)}, status=202)


async def _ordered(request: web.Request, order: Callable[[str, str], None]) -> web.StreamResponse:
    """Carries out an order of this machine."""
    return await _answered(request, lambda name, by: asyncio.to_thread(order, name, by))


async def _answered(request: web.Request, order: Callable[[str, str], Awaitable[None]]) -> web.StreamResponse:
    """Carries an order out, and answers with what went wrong, if anything did."""
    try:
        body: Any = await request.json()
        by = str(body["by"])
    except (ValueError, KeyError, TypeError):
        raise web.HTTPBadRequest(text='the body of an order is {"by": "<name>"}') from None
    try:
        await order(request.match_info["name"], by)
    except RobotRLError as error:
        return web.json_response({"error": str(error)}, status=409)
    return web.json_response({"done": True})


def serve(
    app: web.Application, *, host: str, port: int, cert: Path | None, key: Path | None, up: Callable[[], None]
) -> None:
    """Serves until Ctrl-C; calls `up` once the port is open.

    Raises:
        OSError: the port cannot be opened.
    """
    context = None
    if cert is not None and key is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
    web.run_app(app, host=host, port=port, ssl_context=context, print=lambda _: up())


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
