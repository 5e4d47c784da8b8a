"""Pictures of this machine's arms, while somebody looks: a process for each arm (`fleet/camera_feed.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from aiohttp import web

from robot_rl.core.errors import DeviceError

_PROGRAM = "robot_rl.fleet.camera_feed"
_IDLE_S = 4.0
"""A process ends so long after the last request for a picture."""
_AGAIN_S = 5.0
"""From the end of a process that failed to its next start."""
_END_S = 3.0
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Picture:
    """The newest picture of a camera."""

    jpeg: bytes
    stamp_ns: int
    """When it was taken, monotonic."""

    @property
    def age_s(self) -> float:
        return 1e-9 * (time.monotonic_ns() - self.stamp_ns)


class _View:
    """One arm that somebody looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked_s = folder, time.monotonic()
        self.pictures = dict[str, Picture]()
        self.problems = dict[str, str]()
        """Why there is no new picture: of a camera, of all under ""."""
        self.follows = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Runs the process until nobody looks."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _PROGRAM, str(self.folder)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which ends it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        watch = asyncio.create_task(self._end_when_idle(process.stdin))
        try:
            messages = msgpack.Unpacker()
            while octets := await process.stdout.read(_BLOCK_BYTES):
                messages.feed(octets)
                for name, stamp_ns, content in messages:
                    self._take(name, stamp_ns, content)
        finally:
            watch.cancel()
            process.stdin.close()
            await _ended(process)
        if process.returncode and not self.problems.get(""):
            self.problems[""] = f"the process that looks ended with exit code {process.returncode}"
        if self.problems.get(""):
            await asyncio.sleep(_AGAIN_S)  # the next request after that begins it again

    def _take(self, name: str, stamp_ns: int, content: Any) -> None:
        if isinstance(content, bytes):
            self.pictures[name] = Picture(content, stamp_ns)
            self.problems.pop(name, None)
        else:
            self.problems[name] = str(content)

    async def _end_when_idle(self, stdin: asyncio.StreamWriter) -> None:
        while (left_s := self.asked_s + _IDLE_S - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        stdin.close()  # the process ends by that


class Pictures:
    """The newest pictures of arms; a request for one keeps the process that takes them alive."""

    def __init__(self) -> None:
        self._views = dict[str, _View]()

    def newest(self, folder: Path, camera: str) -> Picture:
        """Returns the newest picture of a camera of the arm whose sockets are in `folder`.

        Raises:
            DeviceError: there is none yet, or it cannot be read.
        """
        view = self._views.get(folder.name)
        if view is None or view.follows.done():
            view = self._views[folder.name] = _View(folder)
            view.follows.add_done_callback(lambda _: self._forget(folder.name))
        view.asked_s = time.monotonic()
        problem = view.problems.get(camera) or view.problems.get("")
        if problem:
            raise DeviceError(problem)
        if camera not in view.pictures:
            raise DeviceError("no picture yet")
        return view.pictures[camera]

    async def close(self, _: web.Application) -> None:
        """Ends all processes, at the end of the server."""
        tasks = [view.follows for view in self._views.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, arm: str) -> None:
        if arm in self._views and self._views[arm].follows.done():
            del self._views[arm]


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Waits for the end of a process whose input is closed; one that hangs is killed."""
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
