"""Streams of bytes through the connection of an agent, from a socket of the hub to one of its own machine.

    server of the page --socket of the hub-- Streams ==connection of the agent== Streams --viewer's socket

Messages are `open` (the hub's, which numbers the streams), `octets` and `shut`. Each end expects a stream
before it waits for anything. An end reads on when what it has read is sent: a slow line slows it down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Json = dict[str, Any]
_BLOCK_BYTES = 1 << 16
_MOST_BYTES = 1 << 26
"""That may wait for a reader which is slower than the line; the stream ends then."""


class Streams:
    """The streams of one connection, at either end of it."""

    def __init__(self, send: Callable[[str, Json], Awaitable[bool]]) -> None:
        """Args: send: sends a message, kind and body, to the other end; False if that is gone."""
        self._send = send
        self._writers = dict[int, asyncio.StreamWriter]()
        self._early = dict[int, list[bytes]]()
        """What has come for streams that are expected, and whose socket is not open yet."""

    def expect(self, number: int) -> None:
        """Keeps what comes for a stream until `carry`."""
        self._early[number] = []

    async def carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries an expected stream until one of its ends closes it, which may have happened already."""
        early = self._early.pop(number, None)
        if early is None:
            writer.close()
            return
        self._writers[number] = writer
        writer.writelines(early)
        try:
            while octets := await reader.read(_BLOCK_BYTES):
                if not await self._send("octets", {"number": number, "octets": octets}):
                    break
        except OSError:  # the other end of the socket is gone
            pass
        finally:
            is_first = self._writers.pop(number, None) is not None
            writer.close()
            if is_first:
                await self._send("shut", {"number": number})

    async def refuse(self, number: int) -> None:
        """Ends a stream that was expected."""
        if self._early.pop(number, None) is not None:
            await self._send("shut", {"number": number})

    def take(self, kind: str, body: Json) -> None:
        """Takes `octets` or `shut` of the other end; those of streams that have ended are for nobody."""
        number = int(body["number"])
        writer = self._writers.get(number)
        if kind == "shut":
            self._early.pop(number, None)
            if writer is not None:
                del self._writers[number]
                writer.close()
        elif writer is None:
            self._early.get(number, []).append(bytes(body["octets"]))
        else:
            writer.write(bytes(body["octets"]))
            if writer.transport.get_write_buffer_size() > _MOST_BYTES:
                writer.transport.abort()

    def close(self) -> None:
        """Ends all streams; the connection is gone."""
        writers = list(self._writers.values())
        self._writers.clear()
        self._early.clear()
        for writer in writers:
            writer.close()
