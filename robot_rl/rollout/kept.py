"""Recordings that stayed on the machines of arms, and how a run's own machine fetches one through the hub.

A recording is fetched file by file, in small parts; what was cut off goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

from robot_rl.core.errors import DeviceError
from robot_rl.core.files import swap_folder, sync_tree
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import ASK_S, opened, reached, refusal
from robot_rl.sched.lease_file import default_path

if TYPE_CHECKING:
    from aiohttp import ClientSession


def kept_folder() -> Path:
    """Returns where this machine keeps the recordings of jobs, a folder for each."""
    return default_path().parent / "kept"


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file of a recording, as it was when it was listed; it may have grown since."""

    path: str
    """Below the recording's folder, with `/`."""
    size: int
    """Bytes."""
    mtime_ns: int

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts:
            raise ValueError(f"a file of a recording named {self.path!r}")

    def is_at(self, path: Path) -> bool:
        """Returns whether a local file is a copy of it."""
        if not path.is_file():
            return False
        found = path.stat()
        return (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)


def fetch(
    hub: HubConfig, node: str, job: str, out: Path, on_bytes: Callable[[int, int], None] = lambda *_: None
) -> int:
    """Makes `out` a copy of a recording as it is now; files that it has already are not sent again.

    Args:
        hub: of the fleet.
        node: machine of the recording.
        job: what recorded it.
        out: folder of the copy; an older copy is replaced once the new one is complete.
        on_bytes: gets the bytes that are here, and those of all files.

    Returns:
        Bytes that were sent.

    Raises:
        HubRefusedError: the hub does not let us in.
        DeviceError: the hub, the machine or the recording is not there; what has arrived stays for the next
            attempt.
        OSError: the disk refuses.
    """

    async def bring() -> int:
        async with opened(hub) as session:
            return await _Fetch(hub, session, f"/kept/{quote(node)}/{quote(job)}", on_bytes).run(out)

    return asyncio.run(bring())


class _Fetch:
    """One attempt to copy a recording."""

    def __init__(
        self, hub: HubConfig, session: ClientSession, at: str, on_bytes: Callable[[int, int], None]
    ) -> None:
        self._hub, self._session, self._at, self._on_bytes = hub, session, at, on_bytes
        self._total = self._here = self._sent = 0

    async def run(self, out: Path) -> int:
        """Copies all files to a folder next to `out`, then puts that there; returns the bytes sent."""
        beginning = out.with_name(f".{out.name}.fetched")
        files = [KeptFile(**file) for file in json.loads(await self._ask(self._at))]
        self._total = sum(file.size for file in files)
        for file in files:
            copy = beginning / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not file.is_at(copy) and file.is_at(out / file.path):
                shutil.copy2(out / file.path, copy)
            if file.is_at(copy):
                self._note(file.size)
            else:
                await self._copy(file, copy)
        wanted = {beginning / file.path for file in files}
        for left in [path for path in beginning.rglob("*") if path.is_file() and path not in wanted]:
            left.unlink()  # of an attempt before
        sync_tree(beginning)
        swap_folder(beginning, out)
        return self._sent

    async def _copy(self, file: KeptFile, copy: Path) -> None:
        """Copies a file, or the rest of it."""
        part = copy.with_name(f"{copy.name}.{file.mtime_ns}")  # one of another time has another content
        with part.open("ab") as into:
            self._note(into.tell())
            while into.tell() < file.size:
                query = {"from": str(into.tell()), "to": str(file.size)}
                octets = await self._ask(f"{self._at}/{quote(file.path)}", query)
                if not octets:
                    raise DeviceError(f"{self._at}: {file.path} is shorter now than it was. Try again.")
                into.write(octets)
                self._sent += len(octets)
                self._note(len(octets))
        os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
        part.replace(copy)

    def _note(self, octets: int) -> None:
        self._here += octets
        self._on_bytes(self._here, self._total)

    async def _ask(self, at: str, query: dict[str, str] | None = None) -> bytes:
        with reached(self._hub):
            async with asyncio.timeout(ASK_S), self._session.get(at, params=query) as answer:
                if answer.status != 200:
                    raise refusal(self._hub, answer.status, answer.headers)
                return await answer.read()
