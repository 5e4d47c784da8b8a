"""Streams through a connection, without one: who is told what, and that none stays open."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from robot_rl.fleet import tunnel
from robot_rl.fleet.tunnel import Streams


class End:
    """An end of a connection, and the socket behind it: what it sent, and whether the other end is there."""

    def __init__(self) -> None:
        self.sent = list[tuple[str, Any]]()
        self.is_there = True
        self.streams = Streams(self._send)

    async def _send(self, kind: str, body: Any) -> bool:
        self.sent.append((kind, body.get("octets", body["number"])))
        return self.is_there


@asynccontextmanager
async def socket(serve: Callable[[Any, Any], Awaitable[None]]) -> AsyncGenerator[tuple[Any, Any]]:
    """Yields one end of a connection; a server of this process has the other, and serves it."""
    theirs = list[Any]()

    async def served(reader: Any, writer: Any) -> None:
        theirs.append(writer)
        await serve(reader, writer)

    async with await asyncio.start_server(served, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            for one in (writer, *theirs):
                one.transport.abort()
            await asyncio.sleep(0.01)


def play(use: Callable[[End], Awaitable[None]]) -> End:
    end = End()

    async def run() -> None:
        async with asyncio.timeout(10.0):
            await use(end)

    asyncio.run(run())
    return end


async def echo(reader: Any, writer: Any) -> None:
    while octets := await reader.read(100):
        writer.write(octets.upper())
    writer.close()


async def silent(reader: Any, writer: Any) -> None:
    while await reader.read(100):
        pass
    writer.close()


def test_what_comes_early_is_kept_and_both_ways_are_carried() -> None:
    async def use(end: End) -> None:
        end.streams.expect(3)
        end.streams.take("octets", {"number": 3, "octets": b"early"})
        async with socket(echo) as (reader, writer):
            carries = asyncio.create_task(end.streams.carry(3, reader, writer))
            while end.sent != [("octets", b"EARLY")]:
                await asyncio.sleep(0.01)
            end.streams.take("octets", {"number": 3, "octets": b"late"})
            while len(end.sent) < 2:
                await asyncio.sleep(0.01)
            end.streams.take("shut", {"number": 3})
            await carries

    assert play(use).sent == [("octets", b"EARLY"), ("octets", b"LATE")], "who shut it is not told so"


@pytest.mark.parametrize("how", ["shut", "gone"])
def test_a_stream_that_is_over_before_its_socket_is_open_is_not_carried(how: str) -> None:
    async def use(end: End) -> None:
        end.streams.expect(3)
        if how == "shut":
            end.streams.take("shut", {"number": 3})
        else:
            end.streams.close()
        async with socket(silent) as (reader, writer):
            await end.streams.carry(3, reader, writer)
            assert writer.is_closing()
        await end.streams.refuse(3)

    assert not play(use).sent


def test_an_end_that_closes_is_told_and_one_that_is_refused_too() -> None:
    async def closes(reader: Any, writer: Any) -> None:
        writer.close()

    async def use(end: End) -> None:
        end.streams.expect(3)
        async with socket(closes) as (reader, writer):
            await end.streams.carry(3, reader, writer)
        end.streams.expect(4)
        await end.streams.refuse(4)
        end.streams.take("octets", {"number": 4, "octets": b"for nobody"})

    assert play(use).sent == [("shut", 3), ("shut", 4)]


def test_a_connection_that_is_gone_ends_its_streams() -> None:
    async def use(end: End) -> None:
        async with socket(echo) as (reader, writer):
            end.streams.expect(3)
            carries = asyncio.create_task(end.streams.carry(3, reader, writer))
            end.is_there = False
            await asyncio.sleep(0)
            end.streams.take("octets", {"number": 3, "octets": b"x"})
            await carries
            assert writer.is_closing()

    play(use)


def test_a_reader_that_is_too_slow_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_MOST_BYTES", 10_000)

    async def stuck(reader: Any, writer: Any) -> None:
        pass

    async def use(end: End) -> None:
        async with socket(stuck) as (reader, writer):
            end.streams.expect(3)
            carries = asyncio.create_task(end.streams.carry(3, reader, writer))
            await asyncio.sleep(0)
            while not carries.done():
                end.streams.take("octets", {"number": 3, "octets": bytes(1 << 20)})
                await asyncio.sleep(0.001)

    assert play(use).sent == [("shut", 3)]
