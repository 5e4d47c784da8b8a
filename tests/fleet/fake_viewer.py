"""What the server of the page runs in its tests in the place of a viewer of scenes."""

import asyncio
import sys
import time
from pathlib import Path

from aiohttp import web

from robot_rl.fleet.feed import Output, has_ended

PAGE = """<html>
<head><title>viewer</title></head>
<body><canvas oncontextmenu="event.preventDefault()"></canvas><script>draw();</script></body>
</html>"""


LARGE_BYTES = 3_000_000
"""Of the file `/large/<number>`, each of which is the number."""


async def file(request: web.Request) -> web.Response:
    if request.path == "/":
        return web.Response(text=PAGE, content_type="text/html")
    if request.path.startswith("/large/"):
        return web.Response(body=bytes([int(request.path.rpartition("/")[2])]) * LARGE_BYTES)
    headers = {"Access-Control-Allow-Origin": "*", "Cross-Origin-Opener-Policy": "same-origin"}
    return web.Response(text=request.raw_path, headers=headers)


async def stream(request: web.Request) -> web.WebSocketResponse:
    """Answers with what it gets and who asks, and ends at `end`."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        if message.data == "end":
            await socket.close(code=4001)
        elif isinstance(message.data, bytes):
            await socket.send_bytes(message.data)
        else:
            await socket.send_str(f"{request.raw_path} {message.data}")
    return socket


async def serve(folder: Path) -> None:
    app, out = web.Application(), Output()
    for path in ("/ui", "/state", "/drop"):
        app.router.add_get(path, stream)
    app.router.add_get("/{path:.*}", file)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "v.sock")).start()
    out.send("viewer", time.monotonic_ns(), str(folder / "v.sock").encode())
    (folder / "begun").touch()
    while not await asyncio.to_thread(has_ended, 0.5):
        pass
    await runner.cleanup()
    (folder / "begun").unlink()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
