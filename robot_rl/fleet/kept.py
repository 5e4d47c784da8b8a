"""The agent's end of recordings that stay on its machine: what is there, their bytes, and their end."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DeviceError
from robot_rl.core.files import listed
from robot_rl.data.store.lock import is_being_written
from robot_rl.rollout.hub_connection import NAME
from robot_rl.rollout.kept import KeptFile, kept_folder

Json = dict[str, Any]
_PART_BYTES = 1 << 16
"""That are sent at once: a slow line must not take longer than the hub waits for an answer."""


class Kept:
    """Answers the hub, for a run that fetches what its arm recorded."""

    kinds = frozenset({"kept", "part"})
    """Of messages that are for it."""

    def __init__(self, send: Callable[[str, Json], Awaitable[bool]]) -> None:
        """Args: send: sends a message, kind and body, to the hub, when its line allows that."""
        self._folder, self._send = kept_folder(), send

    def jobs(self) -> list[str]:
        """Returns the jobs that have a recording here."""
        return sorted(path.name for path in self._folder.glob("*") if NAME.fullmatch(path.name))

    def take(self, kind: str, body: Json) -> Coroutine[Any, Any, None]:
        """Takes a message; returns what is still to be done."""
        number, job = int(body["number"]), str(body["job"])
        if kind == "kept":
            return self._answer(number, lambda: {"files": self._files(job)})
        file = KeptFile(path=str(body["path"]), size=int(body["to"]), mtime_ns=0)
        begin = int(body["from"])
        return self._answer(number, lambda: {"octets": self._part(job, file, begin)})

    async def _answer(self, number: int, look: Callable[[], Json]) -> None:
        try:
            answer = await asyncio.to_thread(look)
        except (DeviceError, OSError) as error:
            answer = {"refusal": str(error)}
        await self._send("done", {"number": number, "refusal": "", **answer})

    def _files(self, job: str) -> list[Json]:
        folder, found = self._of(job), list[Json]()
        for path in listed(folder):
            if path.is_file() and path.suffix != ".lock":
                seen = path.stat()
                name = path.relative_to(folder).as_posix()
                found.append(asdict(KeptFile(path=name, size=seen.st_size, mtime_ns=seen.st_mtime_ns)))
        return found

    def _part(self, job: str, file: KeptFile, begin: int) -> bytes:
        with (self._of(job) / file.path).open("rb") as octets:
            octets.seek(begin)
            return octets.read(max(0, min(_PART_BYTES, file.size - begin)))

    def _of(self, job: str) -> Path:
        folder = self._folder / job
        if NAME.fullmatch(job) is None or not folder.is_dir():
            raise DeviceError(f"no recording of {job!r} is kept here")
        return folder

    def delete_old(self, days: float) -> list[str]:
        """Deletes recordings to which nothing was added for so long; returns their names."""
        deleted, before_s = list[str](), time.time() - 86400.0 * days
        for job in self.jobs():
            folder = self._folder / job
            newest_s = max((path.stat().st_mtime for path in listed(folder)), default=folder.stat().st_mtime)
            if newest_s < before_s and not is_being_written(folder):
                shutil.rmtree(folder, ignore_errors=True)
                deleted.append(job)
        return deleted
