"""Torn writes, flipped bits and full disks: what is kept, what is said, and that writing goes on."""

import errno
import multiprocessing
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.store import writer as store_writer
from robot_rl.data.store.check import repair, verify
from robot_rl.data.store.index import JournalIndex
from robot_rl.data.store.journal import HEADER, Kind, Segment
from robot_rl.data.store.layout import read_store_json, write_store_json
from robot_rl.data.store.reader import StoreReader

FLUSHES, STEPS = 4, 5


def recorded(bench: Any) -> list[int]:
    """Records one episode in 4 flushes of 5 steps; returns the size of the segment after each."""
    sizes: list[int] = []
    with bench.writer() as writer:
        for flush in range(FLUSHES):
            for step in range(STEPS):
                bench.append(writer, 0, STEPS * flush + step)
            writer.flush()
            sizes.append((bench.folder / "journal/000001.log").stat().st_size)
    return sizes


def records(bench: Any, kind: Kind) -> list[Any]:
    """Returns the records of a kind in the first segment."""
    segment = Segment(bench.folder / "journal", 1)
    return [found for found in segment.scan(0) if getattr(found, "kind", None) == kind]


def record(bench: Any, kind: Kind, nth: int) -> Any:
    """Returns the n-th of them."""
    return records(bench, kind)[nth]


def test_a_cut_at_any_byte_keeps_every_flush_before_it(bench: Any) -> None:
    """Every byte of the last flush: the 15 steps before it stay, whatever is left of it."""
    sizes = recorded(bench)
    path = bench.folder / "journal/000001.log"
    for end in reversed(range(sizes[2], sizes[3])):
        os.truncate(path, end)
        index = JournalIndex(bench.folder)
        assert [(record.b, record.c) for record in index.episodes[0].steps] == [(0, 5), (5, 5), (10, 5)]
        assert [problem.num_bytes for problem in index.problems] == [end - sizes[2]][: end > sizes[2]]
        if end == sizes[2] + HEADER.size:
            assert str(index.problems[0]) == (
                f"journal/000001.log, byte {sizes[2]}: torn, 64 bytes, 5 steps of episode 0 lost. "
                "A write that did not finish."
            )
    assert StoreReader(bench.folder).read(0).obs["state"][:, 1].tolist() == list(range(15))


def test_only_a_writer_cuts_the_torn_end_off(bench: Any) -> None:
    sizes = recorded(bench)
    path = bench.folder / "journal/000001.log"
    os.truncate(path, sizes[3] - 7)
    StoreReader(bench.folder)
    assert [problem.kind for problem in verify(bench.folder).problems] == ["torn"]
    assert path.stat().st_size == sizes[3] - 7
    writer = bench.writer()
    assert path.stat().st_size == sizes[2]
    assert [problem.steps for problem in writer.recovered] == [5]
    bench.episode(writer, 1, 2)
    writer.close()
    reader = StoreReader(bench.folder)
    assert reader.lengths().tolist() == [15, 2]
    assert reader.store_episode(1) == 1
    report = verify(bench.folder)
    assert report.problems == ()
    assert [problem.where for problem in report.lost] == [f"journal/000001.log, byte {sizes[2]}"]


def test_a_power_cut_that_left_zeros(bench: Any) -> None:
    """The length of the file reached the disk, the content of the last flush did not."""
    sizes = recorded(bench)
    path = bench.folder / "journal/000001.log"
    path.write_bytes(path.read_bytes()[: sizes[2] + HEADER.size] + bytes(sizes[3] - sizes[2] - HEADER.size))
    assert StoreReader(bench.folder).lengths().tolist() == [15]
    assert [problem.steps for problem in bench.writer().recovered] == [5]
    assert path.stat().st_size == sizes[2]


def test_a_flipped_bit_costs_its_own_record(bench: Any, flip: Callable[[int, int], None]) -> None:
    """In the numbers of the second flush: steps 5 to 9 go, 0 to 4 and 10 to 19 stay, apart."""
    recorded(bench)
    hurt = record(bench, Kind.STEPS, 1)
    flip(1, hurt.offset + HEADER.size + 30)
    where = f"journal/000001.log, byte {hurt.offset}"
    with pytest.raises(DatasetError, match=rf"{where}: the checksum of steps 5 to 9 of episode 0 does not"):
        StoreReader(bench.folder).read(0)
    reader = StoreReader(bench.folder, check_all=True)
    assert reader.lengths().tolist() == [5, 10]
    assert [reader.first_step(i) for i in range(2)] == [0, 10]
    assert reader.read(1).obs["state"][:, 1].tolist() == list(range(10, 20))
    problems = verify(bench.folder).problems
    assert [(p.kind, p.where, p.steps) for p in problems] == [("damaged", where, 5)]
    assert len(repair(bench.folder)) == 1
    assert verify(bench.folder).problems == ()
    assert [problem.kind for problem in verify(bench.folder).lost] == ["damaged"]
    assert StoreReader(bench.folder).lengths().tolist() == [5, 10]
    assert (bench.folder / "journal/damaged/000001.log").exists()
    assert repair(bench.folder) == ()


def test_a_damaged_header_is_jumped_over(bench: Any, flip: Callable[[int, int], None]) -> None:
    recorded(bench)
    hurt = record(bench, Kind.STEPS, 1)
    flip(1, hurt.offset + 9)  # its length: reading can only resume by looking for the next record
    reader = StoreReader(bench.folder)
    assert reader.lengths().tolist() == [5, 10]
    assert [problem.kind for problem in reader.problems()] == ["damaged", "gap"]
    assert f"byte {hurt.offset}" in reader.problems()[0].where
    assert [problem.steps for problem in reader.problems()] == [None, 5]  # the gap knows how many
    repair(bench.folder)
    assert verify(bench.folder).problems == ()


def test_a_damaged_picture_costs_no_numbers(bench: Any, flip: Callable[[int, int], None]) -> None:
    bench.with_cameras()
    with bench.writer() as writer:
        for step in range(4):
            pictures = {key: bench.picture(key, 50 * step) for key in ("front.rgb", "wrist.rgb")}
            bench.append(writer, 0, step, pictures=pictures)
            writer.flush()
    hurt = record(bench, Kind.PICTURE, 4)  # of the third step, front
    flip(1, hurt.offset + HEADER.size + 40)
    episode = StoreReader(bench.folder).read(0)
    assert episode.obs["front.rgb"][1][0, 0, 0] == 50
    with pytest.raises(DatasetError, match="the checksum of picture 4 of episode 0 does not match"):
        episode.obs["front.rgb"][2]
    repair(bench.folder)
    mended = StoreReader(bench.folder).read(0)
    assert len(mended) == 4
    assert mended.obs["front.rgb"][np.arange(4)][:, 0, 0, 0].tolist() == [0, 50, 50, 150]
    assert mended.picture_stamp_ns["front.rgb"].tolist() == [0, 10_000_000, 10_000_000, 30_000_000]
    assert mended.obs["wrist.rgb"][2][0, 0, 0] == 100


def test_store_json_is_written_again_from_the_journal(bench: Any) -> None:
    recorded(bench)
    path = bench.folder / "meta/store.json"
    path.write_text("{")
    with pytest.raises(
        DatasetError, match=r"store\.json: damaged: .* `robot-rl replay repair` writes it again"
    ):
        StoreReader(bench.folder)
    assert [problem.where for problem in verify(bench.folder).problems] == ["meta/store.json"]
    repair(bench.folder)
    assert StoreReader(bench.folder).lengths().tolist() == [20]
    write_store_json(bench.folder, read_store_json(bench.folder) | {"format": 99})
    with pytest.raises(DatasetError, match=r"the store has format 99, this robot_rl knows up to 2"):
        verify(bench.folder)


def test_segments_of_a_long_episode(bench: Any) -> None:
    """An episode goes on in the next segment, which can be read without the first."""
    with bench.writer(segment_bytes=600, device="arm-1") as writer:
        writer.begin_episode(instruction="stay")
        for step in range(30):
            bench.append(writer, 0, step)
            writer.flush()
    segments = sorted((bench.folder / "journal").glob("*.log"))
    assert len(segments) > 3
    assert StoreReader(bench.folder).lengths().tolist() == [30]
    segments[0].unlink()
    episode = StoreReader(bench.folder).read(0)
    assert (episode.device, episode.meta.instruction) == ("arm-1", "stay")
    assert episode.obs["state"][-1, 1] == 29
    missing, gap = verify(bench.folder).problems
    assert (missing.kind, missing.where) == ("missing", "journal/000001.log")
    assert (gap.kind, gap.where) == ("gap", "episode 0, step 0")


# --- the last write ---------------------------------------------------------------------------------


def two_flushes(bench: Any, monkeypatch: pytest.MonkeyPatch, *, block: int) -> int:
    """Records three lanes, 2 steps each and then 6, in records of `block` steps; returns the first's size."""
    monkeypatch.setattr(store_writer, "block_capacity", lambda _: 3 * block)
    size = 0
    with bench.writer() as out:
        for step in range(8):
            for lane in range(3):
                grey = 10 * (step // 2) + lane  # the cameras are half as fast
                stamps = {key: 20_000_000 * (step // 2) for key in bench.features if key.endswith(".rgb")}
                pictures = {key: bench.picture(key, grey) for key in stamps}
                more = {"pictures": pictures, "picture_stamp_ns": stamps}
                bench.append(out, lane, step, lane=lane, **more)
            if step == 1:
                out.flush()
                size = (bench.folder / "journal/000001.log").stat().st_size
    return size


def assert_right(bench: Any) -> None:
    """All steps of the first flush are there, and no step has anything of another."""
    reader = StoreReader(bench.folder)
    seen: set[tuple[int, int]] = set()
    for i in range(len(reader)):
        episode = reader.read(i)
        lane, steps = reader.store_episode(i), episode.obs["state"][:, 1].astype(int)
        assert set(episode.obs["state"][:, 0]) == {lane}
        assert steps.tolist() == list(range(reader.first_step(i), reader.first_step(i) + len(steps)))
        seen |= {(lane, step) for step in steps.tolist()}
        for key in (key for key in bench.features if key.endswith(".rgb")):
            grey = episode.obs[key][np.arange(len(steps))][:, 0, 0, 0]
            assert grey.tolist() == [10 * (step // 2) + lane for step in steps]
    assert seen >= {(lane, step) for lane in range(3) for step in range(2)}


def test_a_bad_record_in_the_last_flush_is_noted_and_costs_itself(
    bench: Any, monkeypatch: pytest.MonkeyPatch, flip: Callable[[int, int], None]
) -> None:
    """Steps 4 and 5 of the second lane: a writer says so, and what is before and after them can be read."""
    two_flushes(bench, monkeypatch, block=2)
    hurt = next(found for found in records(bench, Kind.STEPS) if (found.a, found.b) == (1, 4))
    flip(1, hurt.offset + HEADER.size + 30)
    where = f"journal/000001.log, byte {hurt.offset}"
    assert [(p.kind, p.where, p.steps) for p in verify(bench.folder).problems] == [("damaged", where, 2)]
    (lost,) = bench.writer().recovered
    assert (lost.where, lost.episode, lost.first, lost.steps) == (where, 1, 4, 2)
    report = verify(bench.folder)
    assert (report.problems, report.lost, report.steps) == ((), (lost,), 22)
    reader = StoreReader(bench.folder)
    assert reader.lengths().tolist() == [8, 4, 2, 8]
    assert [reader.first_step(i) for i in range(4)] == [0, 0, 6, 0]
    assert_right(bench)
    bench.opened.pop().close()
    assert bench.writer().recovered == ()


def test_a_bad_header_in_the_last_flush_is_noted_with_its_gap(
    bench: Any, monkeypatch: pytest.MonkeyPatch, flip: Callable[[int, int], None]
) -> None:
    two_flushes(bench, monkeypatch, block=2)
    hurt = next(found for found in records(bench, Kind.STEPS) if (found.a, found.b) == (1, 4))
    flip(1, hurt.offset + 9)
    found = [(lost.kind, lost.steps) for lost in bench.writer().recovered]
    assert found == [("damaged", None), ("gap", 2)]
    assert verify(bench.folder).problems == ()
    assert StoreReader(bench.folder).lengths().tolist() == [8, 4, 2, 8]


def test_older_damage_waits_for_repair(bench: Any, flip: Callable[[int, int], None]) -> None:
    recorded(bench)
    flip(1, record(bench, Kind.STEPS, 1).offset + HEADER.size + 30)
    assert bench.writer().recovered == ()
    bench.opened.pop().close()
    assert [problem.kind for problem in verify(bench.folder).problems] == ["damaged"]


def test_no_step_of_the_last_flush_shows_the_picture_of_another(
    bench: Any, monkeypatch: pytest.MonkeyPatch, flip: Callable[[int, int], None]
) -> None:
    """The front camera's picture of steps 4 and 5 of lane 1, which a reader never sees with another one."""
    bench.with_cameras()
    two_flushes(bench, monkeypatch, block=2)
    hurt = [found for found in records(bench, Kind.PICTURE) if (found.a, found.d) == (1, 0)][2]
    flip(1, hurt.offset + HEADER.size + 40)
    for _ in range(2):  # before a writer has been there, and after
        assert StoreReader(bench.folder).lengths().tolist() == [8, 4, 2, 8]
        assert_right(bench)
        bench.writer().close()
    picture, steps = verify(bench.folder).lost
    assert (picture.steps, picture.episode) == (0, 1)
    assert (steps.first, steps.steps) == (4, 2)
    assert "A picture of steps 4 to 5 of episode 1, or" in steps.detail


def test_any_pages_of_the_last_write_may_be_missing(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut in the middle of it: all that was flushed before is right, and so is what is left of it."""
    bench.with_cameras()
    size = two_flushes(bench, monkeypatch, block=1)
    path = bench.folder / "journal/000001.log"
    whole = path.read_bytes()
    kept: set[int] = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        content = bytearray(
            whole[: len(whole) - int(rng.integers(0, 2) * rng.integers(0, len(whole) - size))]
        )
        for begin in range(size, len(content), 256):
            if rng.random() < 0.1:
                end = min(begin + 256, len(content))
                content[begin:end] = bytes(end - begin)
        shutil.rmtree(bench.folder / "journal")
        path.parent.mkdir()
        path.write_bytes(content)
        content = read_store_json(bench.folder)  # as before the write: the segment was not finished
        write_store_json(bench.folder, content | {"lost": [], "segments": {}})
        assert_right(bench)
        bench.writer().close()
        assert_right(bench)
        report = verify(bench.folder)
        assert report.problems == ()
        assert bool(report.lost) == (report.steps < 24)
        kept.add(report.steps)
    assert len(kept) > 3


# --- a full disk -----------------------------------------------------------------------------------


def test_a_full_disk_stops_appending_and_loses_nothing(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = bench.writer()
    bench.append(writer, 0, 0)
    writer.flush()
    size = (bench.folder / "journal/000001.log").stat().st_size
    pwrite = os.pwrite

    def full(handle: int, content: Any, offset: int) -> int:
        if offset > size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(handle, content[: len(content) // 2], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        bench.append(writer, 0, 1)
        with pytest.raises(DatasetError, match=r"the disk is full .* 1 steps are safe, 1 wait in memory"):
            writer.flush()
        with pytest.raises(DatasetError, match=r"the disk is full .* make room, then flush\(\) writes them"):
            bench.append(writer, 0, 2)
        assert (bench.folder / "journal/000001.log").stat().st_size == size
        assert verify(bench.folder).problems == ()
        with pytest.raises(DatasetError, match="the disk is full"):
            writer.flush()
    assert writer.flush() == 2
    bench.append(writer, 0, 2)
    writer.close()
    assert StoreReader(bench.folder).read(0).obs["state"][:, 1].tolist() == [0, 1, 2]


def _fill(bench: Any, answer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    writer = bench.writer()
    flushed = 0
    try:
        for step in range(10_000):
            bench.append(writer, 0, step)
            if step % 20 == 19:
                flushed = writer.flush()
    except DatasetError as error:
        answer.send((flushed, str(error)))
    os._exit(0)


def test_a_real_limit_on_the_file(bench: Any, tmp_path: Path) -> None:
    """The kernel refuses to let the segment grow beyond 20,000 bytes."""
    here, there = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_fill, args=(bench, there))
    child.start()
    flushed, message = here.recv()
    child.join()
    assert "the disk is full" in message
    assert flushed > 100
    assert verify(bench.folder).problems == ()
    assert StoreReader(bench.folder).lengths().tolist() == [flushed]
    with bench.writer() as writer:
        bench.episode(writer, 1, 3)
    assert StoreReader(bench.folder).lengths().tolist() == [flushed, 3]


def test_a_writer_that_is_closed_on_a_full_disk_says_what_is_lost(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = bench.writer()
    bench.append(writer, 0, 0)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DatasetError, match=r"This writer was closed instead: 1 steps are lost\."):
        writer.close()
    monkeypatch.undo()
    with bench.writer() as again:
        bench.episode(again, 0, 2)
    assert StoreReader(bench.folder).lengths().tolist() == [2]
