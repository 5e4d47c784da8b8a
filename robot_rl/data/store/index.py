"""Index of a journal: the records of each episode. It is made from headers alone.

A missing step splits an episode, because no window may reach across it. Each part is an episode; all
but the last are unfinished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from robot_rl.core.errors import DatasetError
from robot_rl.data.store.journal import Kind, Problem, Record, Segment, segment_numbers
from robot_rl.data.store.layout import read_layout


@dataclass
class EpisodeIndex:
    """Records of one episode."""

    episode: int
    lane: int = 0
    begin: Record | None = None
    end: Record | None = None
    steps: list[Record] = field(default_factory=list[Record])
    pictures: list[Record] = field(default_factory=list[Record])

    def parts(self) -> list[list[Record]]:
        """Returns the runs of steps without a gap."""
        parts: list[list[Record]] = []
        expected = -1
        for record in self.steps:
            if record.b != expected:
                parts.append([])
            parts[-1].append(record)
            expected = record.b + record.c
        return parts

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yields the first missing step and the number of missing steps of each gap."""
        expected = 0
        for record in self.steps:
            if record.b > expected:
                yield expected, record.b - expected
            expected = record.b + record.c
        if self.end is not None and self.end.b > expected:
            yield expected, self.end.b - expected


class JournalIndex:
    """Every episode in the journal of a store; `refresh` adds what was appended since."""

    def __init__(self, folder: Path, *, check_all: bool = False) -> None:
        """Reads the headers of all records.

        Args:
            check_all: also read every payload, and leave damaged ones out. Otherwise only the payloads of
                the last flush are read: the disk had everything before it.
        """
        self.journal = folder / "journal"
        self.episodes: dict[int, EpisodeIndex] = {}
        self.segments: dict[int, Segment] = {}
        self.damage: list[Problem] = []
        self.torn: dict[int, Problem] = {}
        """Segment -> unfinished write at its end."""
        self.damaged_last: list[Problem] = []
        """The part of `damage` inside the last write: a power cut may lose any page of that write."""
        self.last_flush = 0
        """The number of that write."""
        self.num_records = 0
        self.touched: set[int] = set()
        """Episodes with new records; the reader that takes them in clears it."""
        self._check_all = check_all
        self.refresh()

    def refresh(self) -> bool:
        """Reads what was appended since; returns whether there was anything."""
        before = self.num_records
        numbers = segment_numbers(self.journal)
        for number in numbers:
            try:
                segment = self.segments.get(number) or Segment(self.journal, number)
            except FileNotFoundError:  # trimmed since it was listed: its episodes are sealed
                continue
            self.segments[number] = segment
            self._scan(segment, is_last=number == numbers[-1])
        return self.num_records > before

    @property
    def problems(self) -> list[Problem]:
        return [*self.damage, *(self.torn[number] for number in sorted(self.torn))]

    def gaps(self, noted: Iterable[Problem] = ()) -> list[Problem]:
        """Returns the missing steps inside episodes, unless a problem or a `noted` loss counts them."""
        counted: dict[int, list[Problem]] = {}
        for problem in (*noted, *self.problems):
            if problem.episode is not None and problem.first is not None:
                counted.setdefault(problem.episode, []).append(problem)
        gaps: list[Problem] = []
        for episode in self.episodes.values():
            for first, steps in episode.gaps():
                explained = sum(
                    problem.steps or 0
                    for problem in counted.get(episode.episode, ())
                    if problem.first is not None and first <= problem.first < first + steps
                )
                if explained < steps:
                    gaps.append(
                        Problem(
                            kind="gap",
                            where=f"episode {episode.episode}, step {first}",
                            steps=steps - explained,
                            episode=episode.episode,
                            first=first,
                            detail="Steps are missing.",
                        )
                    )
        return gaps

    def payload(self, record: Record) -> bytes:
        """Returns the payload of a record; raises `DatasetError` if it is damaged."""
        return self.segments[record.segment].read(record)

    def drop(self, episodes: set[int]) -> None:
        """Forgets episodes, and closes the segments that no other episode needs."""
        for episode in episodes:
            self.episodes.pop(episode, None)
        needed = {
            record.segment
            for episode in self.episodes.values()
            for record in (*episode.steps, *episode.pictures, episode.begin, episode.end)
            if record is not None
        }
        exist = set(segment_numbers(self.journal))
        for number in set(self.segments) - needed - exist:
            del self.segments[number]
            self.torn.pop(number, None)

    def _scan(self, segment: Segment, *, is_last: bool) -> None:
        records: list[Record] = []
        unread: list[tuple[int, Problem]] = []  # with the number of records before it
        self.torn.pop(segment.number, None)
        for found in segment.scan(segment.scanned):
            if isinstance(found, Record):
                records.append(found)
                segment.scanned = found.end
            elif found.kind == "torn":
                self.torn[segment.number] = found
            else:
                unread.append((len(records), found))
        self.damage += [problem for _, problem in unread]
        if not records:
            return
        last_flush = records[-1].flush
        good = [
            (not self._check_all and not (is_last and record.flush == last_flush))
            or segment.payload(record) is not None
            for record in records
        ]
        while is_last and records and not good[-1]:  # a power cut: the disk lacks the file's end
            self._add_torn(segment, records.pop())
            good.pop()
        begin = next((i for i, record in enumerate(records) if record.flush == last_flush), len(records))
        begin = begin if is_last else len(records)
        self._take(segment, records[:begin], good[:begin])
        if is_last:
            damaged_last = [problem for before, problem in unread if before >= begin]
            is_damaged = bool(damaged_last) or not all(good[begin:])
            damaged_last += self._take(segment, records[begin:], good[begin:], checks=is_damaged)
            self.last_flush, self.damaged_last = last_flush, damaged_last

    def _take(
        self, segment: Segment, records: list[Record], good: list[bool], *, checks: bool = False
    ) -> list[Problem]:
        """Adds the good records and returns the damage; `checks` leaves out steps that need a lost record."""
        kept = [record for record, is_good in zip(records, good, strict=True) if is_good]
        incomplete = self._incomplete(segment, kept) if checks else set()
        found: list[Problem] = []
        for record, is_good in zip(records, good, strict=True):
            if is_good and record not in incomplete:
                self._add(record)
                continue
            what = segment.describe(record)
            detail = f"The checksum of {what} does not match."
            if is_good:
                detail = f"A picture of {what}, or the beginning of the episode, was lost."
            found.append(
                segment.problem("damaged", record.offset, record.end - record.offset, record, detail)
            )
        self.damage += found
        return found

    def _incomplete(self, segment: Segment, records: list[Record]) -> set[Record]:
        """Returns the steps and ends of a write that need a lost picture or a lost beginning of an episode.

        They would show an earlier picture, or have the instruction of another episode.
        """
        try:
            layout = read_layout(self.journal.parent)
        except DatasetError:  # damaged as well: the store cannot be read before `repair`
            return set()
        begun = {episode.episode for episode in self.episodes.values() if episode.begin is not None}
        begun |= {record.a for record in records if record.kind == Kind.EPISODE}
        there = {record.b for record in records if record.kind == Kind.PICTURE}
        before = max((r.b for episode in self.episodes.values() for r in episode.pictures), default=-1)

        def is_whole(record: Record) -> bool:
            if record.kind not in (Kind.STEPS, Kind.END):
                return True
            steps = record.c if record.kind == Kind.STEPS else None
            shown = layout.pictures_in(segment.read(record), steps)
            return record.a in begun and all(picture <= before or picture in there for picture in shown)

        return {record for record in records if not is_whole(record)}

    def _add_torn(self, segment: Segment, record: Record) -> None:
        """Adds a record at the end, whose header is whole and payload is not, to the unfinished write."""
        after, num_bytes = self.torn.get(segment.number), segment.size() - record.offset
        torn = segment.problem("torn", record.offset, num_bytes, record, "A write that did not finish.")
        if after is not None:
            steps = None if torn.steps is None or after.steps is None else torn.steps + after.steps
            torn = replace(torn, steps=steps)
        segment.scanned = record.offset
        self.torn[segment.number] = torn

    def _add(self, record: Record) -> None:
        self.num_records += 1
        if record.kind == Kind.SEGMENT:
            return
        self.touched.add(record.a)
        episode = self.episodes.get(record.a)
        if episode is None:
            episode = self.episodes[record.a] = EpisodeIndex(record.a)
        match record.kind:
            case Kind.STEPS:
                episode.steps.append(record)
            case Kind.PICTURE:
                episode.pictures.append(record)
            case Kind.EPISODE:
                episode.begin = record
                episode.lane = record.b
            case Kind.END:
                episode.end = record
            case _:  # of a later format, which may add kinds but not change these
                pass
