"""The agent's end of what jobs recorded on its machine: what is there, its bytes, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DeviceError
from robot_rl.core.files import listed
from robot_rl.data.store.journal import segment_numbers, segment_path
from robot_rl.data.store.layout import STORE_JSON
from robot_rl.data.store.lock import is_being_written
from robot_rl.rollout.fetch import PART_BYTES, kept_folder
from robot_rl.rollout.hub_connection import NAME

Json = dict[str, Any]


class Kept:
    """Answers the hub, for a run that fetches what its arm recorded."""

    kinds = frozenset({"kept", "part"})
    """Of messages that are for it."""

    def __init__(self, send: Callable[[str, Json], Awaitable[bool]]) -> None:
        """Args: send: sends a message, kind and body, to the hub, when its line allows that."""
        self._folder, self._send = kept_folder(), send

    def jobs(self) -> list[str]:
        """Returns the jobs that have recorded something here."""
        return sorted(path.name for path in self._folder.glob("*") if (path / STORE_JSON).is_file())

    async def answer(self, kind: str, body: Json) -> None:
        """Answers a message."""
        try:
            look = self._list if kind == "kept" else self._part
            answer = await asyncio.to_thread(look, body)
        except (DeviceError, OSError, ValueError, OverflowError) as error:
            answer = {"refusal": str(error)}
        await self._send("done", {"number": body["number"], "refusal": "", **answer})

    def _list(self, body: Json) -> Json:
        folder = self._of(str(body["job"]))
        store = (folder / STORE_JSON).read_text()  # before the segments, of which it must not know more
        journal = folder / "journal"
        sizes = {number: segment_path(journal, number).stat().st_size for number in segment_numbers(journal)}
        return {"store": store, "segments": {str(number): size for number, size in sizes.items()}}

    def _part(self, body: Json) -> Json:
        begin, end = int(body["from"]), int(body["to"])
        with segment_path(self._of(str(body["job"])) / "journal", int(body["segment"])).open("rb") as segment:
            segment.seek(begin)
            return {"octets": segment.read(max(0, min(PART_BYTES, end - begin)))}

    def _of(self, job: str) -> Path:
        folder = self._folder / job
        if NAME.fullmatch(job) is None or not (folder / STORE_JSON).is_file():
            raise DeviceError(f"no recording of {job!r} is kept here")
        return folder

    def delete_old(self, days: float) -> list[str]:
        """Deletes recordings to which nothing was added for so long; returns their jobs."""
        deleted, before_s = list[str](), time.time() - 86400.0 * days
        for job in self.jobs():
            with contextlib.suppress(OSError):  # it is being changed
                folder = self._folder / job
                newest_s = max(path.stat().st_mtime for path in listed(folder))
                if newest_s < before_s and not is_being_written(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    deleted.append(job)
        return deleted
