"""Streams of bytes through the connection of an agent, from a socket of the hub to one of its own machine.

    server of the page --socket of the hub-- Streams ==connection of the agent== Streams --viewer's socket

Messages are `open` (the hub's, which numbers the streams), `octets` and `shut`. An end reads on when what it
has read is sent, so a slow line slows down who sends.
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

    def __init__(self, send: Callable[[str, Json], Awaitable[Any]]) -> None:
        """Args: send: sends a message, kind and body, to the other end."""
        self._send = send
        self._writers = dict[int, asyncio.StreamWriter]()
        self._early = dict[int, list[bytes]]()
        """What has come for streams whose socket is not open yet."""

    def expect(self, number: int) -> None:
        """Keeps what comes for a stream until `carry`."""
        self._early[number] = []

    async def carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries a stream until one of its ends closes it."""
        self._writers[number] = writer
        for octets in self._early.pop(number, ()):
            writer.write(octets)
        try:
            while octets := await reader.read(_BLOCK_BYTES):
                await self._send("octets", {"number": number, "octets": octets})
        except OSError:  # the other end of the socket is gone
            pass
        finally:
            if self._writers.pop(number, None) is not None:
                await self._send("shut", {"number": number})
            writer.close()

    async def refuse(self, number: int) -> None:
        """Ends a stream that was expected."""
        self._early.pop(number, None)
        await self._send("shut", {"number": number})

    def take(self, kind: str, body: Json) -> None:
        """Takes `octets` or `shut` of the other end; those of streams that have ended are for nobody."""
        number = int(body["number"])
        writer = self._writers.get(number)
        if kind == "octets" and writer is None:
            if number in self._early:
                self._early[number].append(bytes(body["octets"]))
        elif kind == "octets" and writer is not None:
            writer.write(bytes(body["octets"]))
            if writer.transport.get_write_buffer_size() > _MOST_BYTES:
                writer.transport.abort()
        else:
            self._early.pop(number, None)
            if self._writers.pop(number, None) is not None and writer is not None:
                writer.close()

    def close(self) -> None:
        """Ends all streams; the connection is gone."""
        writers = list(self._writers.values())
        self._writers.clear()
        self._early.clear()
        for writer in writers:
            writer.close()
