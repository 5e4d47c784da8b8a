"""Copies what a job recorded on the machine of its arm, through the hub, and goes on with an older copy.

Segments of a journal only grow, so a copy lacks their ends and whole segments, and nothing else. What was cut
off goes on at the byte where it was, and no step that is here is replaced or deleted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from robot_rl.core.errors import DatasetError, DeviceError
from robot_rl.core.files import make_folder, replace_file, sync_tree
from robot_rl.data.store.journal import segment_numbers, segment_path
from robot_rl.data.store.layout import STORE_JSON
from robot_rl.data.store.lock import WriterLock
from robot_rl.data.store.sealed import read_info
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import get, opened
from robot_rl.sched.lease_file import default_path

if TYPE_CHECKING:
    from aiohttp import ClientSession

PART_BYTES = 1 << 16
"""Of a segment in one answer: a slow line must not take longer than the hub waits for it."""


def kept_folder() -> Path:
    """Returns where this machine keeps what its jobs recorded, a store for each."""
    return default_path().parent / "kept"


def fetch(
    hub: HubConfig, node: str, job: str, out: Path, on_bytes: Callable[[int, int], None] = lambda *_: None
) -> tuple[Path, int]:
    """Makes `out` a copy of what a job has recorded until now.

    Args:
        hub: of the fleet.
        node: machine of the job.
        job: what recorded it.
        out: folder of the copy. One of another recording stays: the copy is `<out>-2` then, and so on.
        on_bytes: gets the bytes that are here, and those of the recording.

    Returns:
        The folder, and the bytes that were sent.

    Raises:
        HubRefusedError: the hub does not let us in.
        DeviceError: the hub, the machine or the recording is not there; the next call goes on.
        DatasetError: another process writes to the copy, or it was sealed.
        OSError: the disk refuses.
    """

    async def bring() -> tuple[Path, int]:
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

    async def run(self, out: Path) -> tuple[Path, int]:
        """Copies what is lacking; returns the folder and the bytes that were sent."""
        listed: Any = json.loads(await self._ask(self._at))
        sizes = {int(number): int(size) for number, size in listed["segments"].items()}
        self._total = sum(sizes.values())
        first = min(sizes, default=0)
        begin = await self._part(first, 0, min(PART_BYTES, sizes[first])) if sizes else b""
        folder = _folder_of(out, first, begin)
        make_folder(folder)
        lock = WriterLock(folder)
        try:
            for number, size in sorted(sizes.items()):
                await self._copy(number, size, segment_path(folder / "journal", number))
            sync_tree(folder)
            make_folder(folder / "meta")
            replace_file(folder / STORE_JSON, listed["store"])  # last: it lists segments that are here
        finally:
            lock.release()
        return folder, self._sent

    async def _copy(self, number: int, size: int, copy: Path) -> None:
        """Adds what a segment lacks, and cuts off what a crash there left unfinished."""
        with copy.open("ab") as into:
            if into.tell() > size:
                into.truncate(size)
                into.seek(size)
            self._note(into.tell())
            while into.tell() < size:
                octets = await self._part(number, into.tell(), size)
                into.write(octets)
                self._note(len(octets))

    async def _part(self, number: int, begin: int, end: int) -> bytes:
        """Returns the next bytes of a segment."""
        octets = await self._ask(f"{self._at}/{number}", {"from": str(begin), "to": str(end)})
        if not octets:
            raise DeviceError(f"{self._at}: segment {number} is shorter now than it was. Try again.")
        self._sent += len(octets)
        return octets

    def _note(self, octets: int) -> None:
        self._here += octets
        self._on_bytes(self._here, self._total)

    async def _ask(self, at: str, query: dict[str, str] | None = None) -> bytes:
        return await get(self._hub, self._session, at, query)


def _folder_of(out: Path, first: int, begin: bytes) -> Path:
    """Returns the folder of a recording whose first segment begins so: `out`, unless that has another one.

    Raises:
        DatasetError: the copy was sealed.
    """
    folder, number = out, 1
    while True:
        if read_info(folder) is not None:
            raise DatasetError(
                f"{folder}: was sealed, and a copy goes on only as it came. Move it to another folder first."
            )
        journal = folder / "journal"
        if not segment_numbers(journal) or _is_of(segment_path(journal, first), begin):
            return folder
        number += 1
        folder = out.with_name(f"{out.name}-{number}")


def _is_of(segment: Path, begin: bytes) -> bool:
    """Returns whether a file is a copy, or the beginning of one, of a segment that begins so."""
    if not segment.is_file():
        return False
    with segment.open("rb") as file:
        mine = file.read(len(begin))
    return bool(mine) and begin.startswith(mine)
