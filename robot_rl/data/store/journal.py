"""Framing of the journal: records that hold their own length and checksum.

A segment `journal/NNNNNN.log` is a sequence of records. The first (SEGMENT) holds the format and the
layout of the store. A record is a header of 64 bytes and a payload:

    magic 4s | kind u16 | format u16 | length u32 | payload crc32 u32 | flush u64 | keys 4 x i64 |
    4 bytes of zero | crc32 of the above u32

The header has its own crc, so an index can trust the length and read headers alone; the keys hold what
an index needs. After damage, reading resumes at the next magic whose header is whole. Everything is
little-endian.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import listed

FORMAT = 2
"""Version of the journal and of store.json. Format 1 is a dataset folder without either."""

MAGIC = b"\xf5RRJ"
HEADER = struct.Struct("<4sHHIIQ4q4xI")
_CHECKED = HEADER.size - 4  # bytes of the header that its crc covers
_WINDOW = 1 << 20  # bytes read at a time in search of the next record


class Kind(IntEnum):
    """What a record holds, and its keys."""

    SEGMENT = 1
    """JSON of the store's layout; keys: format, segment number."""
    EPISODE = 2
    """JSON of instruction and device; keys: episode, lane."""
    PICTURE = 3
    """One compressed picture; keys: episode, picture, stamp in ns, camera."""
    STEPS = 4
    """Columns of consecutive steps of one episode; keys: episode, first step, steps, 1 if it ended."""
    END = 5
    """What the last step led to, if known; keys: episode, steps, 1 if known."""


class Record(NamedTuple):
    """Header of a record, and where it stands."""

    segment: int
    offset: int
    kind: int
    length: int
    crc: int
    flush: int
    """Counts the writes: records of one number were handed to the disk together."""
    a: int
    b: int
    c: int
    d: int

    @property
    def end(self) -> int:
        return self.offset + HEADER.size + self.length


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Bytes that hold no whole record, or missing steps."""

    kind: str
    """torn (an unfinished write at the end), damaged (in the middle), gap (steps are missing)."""
    where: str
    """File and byte, or episode and step."""
    num_bytes: int = 0
    steps: int | None = 0
    """Steps lost with it; None: unknown."""
    episode: int | None = None
    first: int | None = None
    """First of the lost steps, where it is known."""
    detail: str = ""

    def __str__(self) -> str:
        steps = "an unknown number of steps" if self.steps is None else f"{self.steps} steps"
        episode = "" if self.episode is None else f" of episode {self.episode}"
        lost = f"{self.num_bytes:,} bytes, {steps}{episode} lost"
        return f"{self.where}: {self.kind}, {lost}. {self.detail}".rstrip()


def pack(kind: Kind, payload: bytes, keys: tuple[int, int, int, int], flush: int) -> bytes:
    """Returns a record as bytes."""
    head = HEADER.pack(MAGIC, kind, FORMAT, len(payload), zlib.crc32(payload), flush, *keys, 0)[:_CHECKED]
    return b"".join((head, struct.pack("<I", zlib.crc32(head)), payload))


def segment_path(journal: Path, number: int) -> Path:
    """Returns the file of a segment."""
    return journal / f"{number:06d}.log"


def segment_numbers(journal: Path) -> list[int]:
    """Returns the segments that exist, in order."""
    return sorted(int(path.stem) for path in listed(journal, "*.log") if path.stem.isdecimal())


class Segment:
    """A segment that is being read; it stays readable after its file was removed."""

    def __init__(self, journal: Path, number: int) -> None:
        self.number = number
        self.name = f"journal/{number:06d}.log"
        self.fd = os.open(segment_path(journal, number), os.O_RDONLY | os.O_CLOEXEC)
        self.scanned = 0
        """The index holds everything before this byte."""

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def header(self, offset: int) -> Record | None:
        """Returns the record whose header begins at a byte, None if there is no whole header."""
        head = os.pread(self.fd, HEADER.size, offset)
        if len(head) < HEADER.size:
            return None
        magic, kind, _, length, crc, flush, a, b, c, d, check = HEADER.unpack(head)
        if magic != MAGIC or check != zlib.crc32(head[:_CHECKED]):
            return None
        return Record(self.number, offset, kind, length, crc, flush, a, b, c, d)

    def payload(self, record: Record) -> bytes | None:
        """Returns the payload, None if it is damaged."""
        payload = os.pread(self.fd, record.length, record.offset + HEADER.size)
        if len(payload) != record.length or zlib.crc32(payload) != record.crc:
            return None
        return payload

    def read(self, record: Record) -> bytes:
        """Returns the payload; raises `DatasetError` if it is damaged."""
        payload = self.payload(record)
        if payload is None:
            raise DatasetError(
                f"{self.name}, byte {record.offset}: the checksum of {self.describe(record)} does not match. "
                "`robot-rl replay repair` takes it out of the store and prints what is lost; "
                "all other records stay."
            )
        return payload

    @staticmethod
    def describe(record: Record) -> str:
        """Returns what a record holds, in words."""
        words: dict[int, str] = {
            Kind.STEPS: f"steps {record.b} to {record.b + record.c - 1} of episode {record.a}",
            Kind.PICTURE: f"picture {record.b} of episode {record.a}",
            Kind.EPISODE: f"the beginning of episode {record.a}",
            Kind.END: f"the end of episode {record.a}",
        }
        return words.get(record.kind, "the head of the segment")

    def scan(self, start: int) -> Iterator[Record | Problem]:
        """Yields the records from a byte on, and problems where bytes between them are no record.

        A problem of kind `torn` comes last: no whole record follows it.
        """
        offset, size = start, self.size()
        last: Record | None = None
        while offset < size:
            record = self.header(offset)
            if record is not None and record.end <= size:
                yield record
                last, offset = record, record.end
                continue
            # A record that lost bytes covers the beginning of its successor: look inside it as well.
            inside = last is not None and self.payload(last) is None
            begin = last.offset + HEADER.size if inside and last is not None else offset + 1
            found = None if record is not None else self._next_record(begin, size)
            if found is None:
                yield self.problem("torn", offset, size - offset, record, "A write that did not finish.")
                return
            if found > offset:
                detail = "No record can be read there; reading resumed at the next one."
                yield self.problem("damaged", offset, found - offset, None, detail)
            offset, last = found, None

    def problem(self, kind: str, offset: int, num_bytes: int, record: Record | None, detail: str) -> Problem:
        """Returns the problem of some bytes; `record` is the one that they hold, where it is known."""
        is_steps = record is not None and record.kind == Kind.STEPS
        return Problem(
            kind=kind,
            where=f"{self.name}, byte {offset}",
            num_bytes=num_bytes,
            steps=None if record is None else record.c if is_steps else 0,
            episode=None if record is None else record.a,
            first=record.b if record is not None and is_steps else None,
            detail=detail,
        )

    def _next_record(self, start: int, size: int) -> int | None:
        """Returns the first byte from `start` where a whole record begins."""
        while start < size:
            window = os.pread(self.fd, _WINDOW + len(MAGIC), start)
            at = window.find(MAGIC)
            while at >= 0:
                record = self.header(start + at)
                if record is not None and record.end <= size:
                    return start + at
                at = window.find(MAGIC, at + 1)
            start += _WINDOW
        return None
