"""What is gone without a trace in the journal itself is noticed: whole segments, ends of them, store.json."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.store.check import repair, verify
from robot_rl.data.store.journal import HEADER, Kind, Record, Segment, segment_numbers, segment_path
from robot_rl.data.store.layout import read_layout, read_store_json, write_store_json
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.seal import seal


def recorded(bench: Any) -> list[Path]:
    """Records three episodes, each in a segment of its own, and returns the segments."""
    for episode in range(3):
        with bench.writer() as writer:
            writer.begin_episode(instruction=f"task {episode}", device="arm")
            bench.episode(writer, episode, 5)
    return [segment_path(bench.folder / "journal", number) for number in (1, 2, 3)]


def records(bench: Any, segment: int) -> list[Record]:
    found = Segment(bench.folder / "journal", segment).scan(0)
    return [record for record in found if isinstance(record, Record)]


def sizes(bench: Any) -> dict[str, int]:
    return read_store_json(bench.folder)["segments"]


def test_every_finished_segment_is_listed_with_its_length(bench: Any) -> None:
    segments = recorded(bench)
    assert sizes(bench) == {path.stem: path.stat().st_size for path in segments}
    with bench.writer() as writer:
        bench.append(writer, 3, 0)
        writer.flush()
        assert sorted(sizes(bench)) == ["000001", "000002", "000003"]
        writer.mark()  # finishes the fourth
        assert sorted(sizes(bench)) == ["000001", "000002", "000003", "000004"]
    assert verify(bench.folder).problems == ()


def test_a_last_segment_that_is_gone_is_noticed(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    last = recorded(bench)[2]
    num_bytes = last.stat().st_size
    last.unlink()
    (problem,) = verify(bench.folder).problems
    assert (problem.kind, problem.where, problem.num_bytes) == ("missing", "journal/000003.log", num_bytes)
    reader = StoreReader(bench.folder)
    assert "1 problems, the first: journal/000003.log: missing" in caplog.text
    assert reader.lengths().tolist() == [5, 5]
    assert [str(problem) for problem in reader.problems()] == [str(problem)]
    with bench.writer() as writer:  # it does not take the number of the one that may be found again
        bench.episode(writer, 3, 2)
    assert segment_numbers(bench.folder / "journal") == [1, 2, 4]
    assert [found.where for found in repair(bench.folder)] == ["journal/000003.log"]
    report = verify(bench.folder)
    assert report.problems == ()
    assert [lost.where for lost in report.lost] == ["journal/000003.log"]
    caplog.clear()
    StoreReader(bench.folder)
    assert caplog.text == ""


def test_a_finished_segment_that_ends_a_flush_earlier_is_noticed(bench: Any) -> None:
    with bench.writer() as writer:
        for step in range(4):
            bench.append(writer, 0, step)
            writer.flush()
    path = bench.folder / "journal/000001.log"
    last = records(bench, 1)[-1]
    was = path.stat().st_size
    os.truncate(path, last.offset)
    (problem,) = verify(bench.folder).problems
    assert (problem.kind, problem.where) == ("missing", f"journal/000001.log, byte {last.offset}")
    assert problem.num_bytes == was - last.offset
    assert len(repair(bench.folder)) == 1
    assert verify(bench.folder).problems == ()
    assert sizes(bench) == {"000001": last.offset}


def test_what_a_crash_left_and_what_was_sealed_is_neither_missing(bench: Any) -> None:
    recorded(bench)
    content = read_store_json(bench.folder)
    del content["segments"]  # as a crash, or an earlier version, leaves it
    write_store_json(bench.folder, content)
    assert verify(bench.folder).problems == ()
    with bench.writer() as writer:
        assert sorted(sizes(bench)) == ["000001", "000002", "000003"]
        mark = writer.mark()
        bench.episode(writer, 3, 4)
    writer = bench.writer()
    writer.rewind(mark)  # takes the fourth away
    writer.close()
    assert sorted(sizes(bench)) == ["000001", "000002", "000003"]
    assert seal(bench.folder).trimmed_segments == 3
    assert sizes(bench) == {}
    assert verify(bench.folder).problems == ()


@pytest.mark.parametrize("gone", ["sealed", "rewound"])
def test_what_went_while_the_list_was_behind_is_not_missing(
    bench: Any, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """The disk is full when segments are finished; they are gone when there is room again."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = bench.writer()
    with monkeypatch.context() as patched:
        patched.setattr("robot_rl.data.store.flusher.note_finished", full)
        bench.episode(writer, 0, 3)
        mark = writer.mark()
        bench.episode(writer, 1, 3)
        writer.mark()
        if gone == "sealed":
            assert writer.seal().trimmed_segments == 2
        else:
            writer.rewind(mark)
    assert not read_store_json(bench.folder).get("segments")
    writer.close()
    assert sorted(sizes(bench)) == ([] if gone == "sealed" else ["000001"])
    assert verify(bench.folder).problems == ()


def test_the_instruction_of_an_episode_is_not_guessed(
    bench: Any, flip: Callable[[int, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    recorded(bench)
    (begin,) = (found for found in records(bench, 2) if found.kind == Kind.EPISODE)
    flip(2, begin.offset + 30)  # its header: nothing says any more that it was there
    reader = StoreReader(bench.folder)
    assert "the first: journal/000002.log, byte" in caplog.text
    assert reader.read(0).meta.instruction == "task 0"
    for ask in (reader.read, reader.words):
        with pytest.raises(DatasetError, match=r"episode 1: its beginning, with .* is lost. `robot-rl"):
            ask(1)
    repair(bench.folder)  # from here on the loss is known, and the store's own stands for it
    assert StoreReader(bench.folder).read(1).meta.instruction == "reach the ball"


def test_no_step_sees_an_earlier_picture_in_silence(bench: Any, flip: Callable[[int, int], None]) -> None:
    bench.with_cameras()
    with bench.writer() as writer:
        for step in range(4):
            pictures = {key: bench.picture(key, 50 * step) for key in ("front.rgb", "wrist.rgb")}
            bench.append(writer, 0, step, pictures=pictures)
            writer.flush()
    pictures = [found for found in records(bench, 1) if found.kind == Kind.PICTURE]
    flip(1, pictures[4].offset + HEADER.size - 8)  # in the header of the front camera's third
    with pytest.raises(DatasetError, match=r"episode 0: a picture of front.rgb is lost"):
        StoreReader(bench.folder).read(0)
    assert len(StoreReader(bench.folder, check_all=True).read(0)) == 4  # who asks for what is left, gets it
    repair(bench.folder)
    assert len(StoreReader(bench.folder).read(0)) == 4


def test_no_flipped_bit_of_store_json_is_read(bench: Any) -> None:
    recorded(bench)
    path = bench.folder / "meta/store.json"
    content, layout, refused = path.read_bytes(), read_layout(bench.folder), 0
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            assert read_layout(bench.folder) == layout, flipped
        except DatasetError as error:
            refused += "store.json: damaged: " in str(error)
    assert refused > 0.9 * len(content)
    for damage in (b"\xff", b"[]", b'{"format": 2}', b'{"format": "2"}', content[:100]):
        path.write_bytes(damage)
        assert [problem.where for problem in verify(bench.folder).problems] == ["meta/store.json"]
        repair(bench.folder)
        assert verify(bench.folder).problems == ()


def test_a_damaged_info_json_is_one_told_error(bench: Any) -> None:
    recorded(bench)
    seal(bench.folder)
    path = bench.folder / "meta/info.json"
    for damage in (b"{", b"\xff", b"{}", b'{"total_episodes": "3", "features": {}}'):
        path.write_bytes(damage)
        with pytest.raises(
            DatasetError, match=r"meta/info.json: it does not match its checksum: .* Copy it again"
        ):
            StoreReader(bench.folder)
