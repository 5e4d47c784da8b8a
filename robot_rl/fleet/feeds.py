"""What is to be seen of this machine's arms, while somebody looks: a process for each, and what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from robot_rl.core.errors import DeviceError

CAMERAS = "robot_rl.fleet.camera_feed"
CAMERA_IDLE_S = 4.0
"""Nobody looks at cameras whose pictures were not fetched for so long."""
SCENE = "robot_rl.fleet.scene_feed"
SCENE_IDLE_S = 45.0
"""Longer than a page that is seen is silent: one that only watches sends a sign every 30 s."""
_AGAIN_S = 5.0
"""From the end of a process that failed to its next start."""
_END_S = 3.0
"""How long a process may take to end."""
_BLOCK_BYTES = 1 << 16


class NothingYetError(DeviceError):
    """The process has begun, and has sent nothing of that name."""


@dataclass(frozen=True)
class Seen:
    """The newest of one name."""

    content: bytes
    stamp_ns: int
    """When it was measured, monotonic."""

    @property
    def age_s(self) -> float:
        return 1e-9 * (time.monotonic_ns() - self.stamp_ns)


class _Feed:
    """The process of one arm."""

    def __init__(self, program: str, folder: Path, idle_s: float) -> None:
        self._command = (sys.executable, "-m", program, str(folder))
        self._idle_s, self.asked_s = idle_s, time.monotonic()
        self.seen = dict[str, Seen]()
        self.problems = dict[str, str]()
        """Why there is nothing new of a name; of all names under ""."""
        self._is_over = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Ends the process."""
        self._is_over.set()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        """Runs the process until nobody asks."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which ends it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        watch = asyncio.create_task(self._end_when_idle(process, process.stdin))
        messages = msgpack.Unpacker()
        try:
            while octets := await process.stdout.read(_BLOCK_BYTES):
                messages.feed(octets)
                for name, stamp_ns, content in messages:
                    self._take(name, stamp_ns, content)
        except (ValueError, TypeError) as error:
            self.problems[""] = f"the process that looks sends what is no message: {error!r}"
            self._is_over.set()
        code = await process.wait()
        watch.cancel()
        if code and not self.problems.get(""):
            self.problems[""] = f"the process that looks ended with exit code {code}"
        if self.problems.get(""):
            await self._passes(_AGAIN_S)  # the next request after that begins it again

    async def _end_when_idle(self, process: asyncio.subprocess.Process, stdin: asyncio.StreamWriter) -> None:
        """Ends the process by the end of its input, or, if it hangs, by force."""
        while (left_s := self.asked_s + self._idle_s - time.monotonic()) > 0 and await self._passes(left_s):
            pass
        stdin.close()
        await asyncio.sleep(_END_S)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _passes(self, seconds: float) -> bool:
        """Waits; returns False, and at once, when all is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_over.wait()
        return not self._is_over.is_set()

    def _take(self, name: str, stamp_ns: int, content: Any) -> None:
        if isinstance(content, bytes):
            self.seen[name] = Seen(content, stamp_ns)
            self.problems.pop(name, None)
        else:
            self.problems[name] = str(content)


class Feeds:
    """The processes of one program, each of which lives while somebody asks for what it sends."""

    def __init__(self, program: str, *, idle_s: float) -> None:
        """Args: idle_s: a process ends so long after the last request."""
        self._program, self._idle_s = program, idle_s
        self._feeds = dict[str, _Feed]()

    def newest(self, folder: Path, name: str) -> Seen:
        """Returns the newest of a name, of the arm whose sockets are in `folder`; begins its process.

        Raises:
            NothingYetError: it has sent nothing yet.
            DeviceError: there is nothing new; the message says why.
        """
        feed = self._feeds.get(folder.name)
        if feed is None or feed.task.done():
            feed = self._feeds[folder.name] = _Feed(self._program, folder, self._idle_s)
            feed.task.add_done_callback(lambda _: self._forget(folder.name))
        feed.asked_s = time.monotonic()
        if problem := feed.problems.get(name) or feed.problems.get(""):
            raise DeviceError(problem)
        if name not in feed.seen:
            raise NothingYetError("nothing yet")
        return feed.seen[name]

    def socket(self, folder: Path) -> str | None:
        """Returns the path of the socket of a scene's viewer, None until it is there; errors: `newest`."""
        try:
            return self.newest(folder, "viewer").content.decode()
        except NothingYetError:
            return None

    def touch(self, folder: Path) -> None:
        """Notes that somebody looks at an arm."""
        if (feed := self._feeds.get(folder.name)) is not None:
            feed.asked_s = time.monotonic()

    async def close(self, _: object = None) -> None:
        """Ends all processes, at the end of the server or the agent."""
        await asyncio.gather(*(feed.end() for feed in self._feeds.values()))

    def _forget(self, arm: str) -> None:
        if arm in self._feeds and self._feeds[arm].task.done():
            del self._feeds[arm]
