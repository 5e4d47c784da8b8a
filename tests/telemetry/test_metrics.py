import errno
import json
import math
import os

import numpy as np
import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.telemetry.metrics import FILE_NAME, MetricsWriter, as_float, read_metrics


class FakeTensor:
    """Looks like a torch tensor on a device."""

    def __init__(self, value: float) -> None:
        self._value = value

    def detach(self) -> "FakeTensor":
        return self

    def cpu(self) -> "FakeTensor":
        return self

    def numpy(self) -> np.ndarray:
        return np.array(self._value, np.float32)


def write_steps(folder, steps, **kwargs):
    with MetricsWriter(folder, **kwargs) as writer:
        for step in steps:
            writer.write(step, "residual", {"critic/loss": 0.1 * step}, updates=2 * step)


def events(folder) -> list[tuple[int, str, float]]:
    """Returns (step, tag, value) of every event that TensorBoard will show."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    found = []
    for path in sorted((folder / "tensorboard").glob("events*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_rows_come_back_as_they_were_written(tmp_path):
    clock = ManualClock()
    with MetricsWriter(tmp_path, tensorboard=False, clock=clock) as writer:
        clock.advance(1.5)
        writer.write(10, "bc", {"bc/loss": np.float32(0.5), "eval/success": True, "actor/q": FakeTensor(2.0)})
        # On disk before the writer closes: a killed run loses no row.
        expected = {"step": 10, "updates": 0, "phase": "bc", "wall_s": 1.5}
        values = {"bc/loss": 0.5, "eval/success": 1.0, "actor/q": 2.0}
        assert read_metrics(tmp_path / "metrics.jsonl") == [{**expected, **values}]


def test_the_disk_has_the_rows_that_a_checkpoint_counts(tmp_path, monkeypatch):
    """Every sync notes how many bytes of the file it covers: those survive a power cut."""
    path, fsync, safe = tmp_path / "metrics.jsonl", os.fsync, {}

    def synced(handle):
        fsync(handle)
        safe[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fsync", synced)
    writer = MetricsWriter(tmp_path, tensorboard=False)
    assert tmp_path.stat().st_ino in safe  # the file's name, too
    writer.write(1, "bc", {"bc/loss": 0.5})
    assert safe[path.stat().st_ino] == 0
    assert writer.state_dict() == {"rows": 1}
    assert safe[path.stat().st_ino] == path.stat().st_size > 0
    writer.write(2, "bc", {"bc/loss": 0.25})
    writer.close()
    assert safe[path.stat().st_ino] == path.stat().st_size
    writer.close()
    write_steps(tmp_path, [], tensorboard=False)  # a resumed run writes the rows anew
    assert safe[path.stat().st_ino] == path.stat().st_size > 0


def test_nan_is_null_in_the_file_and_nan_again_when_read(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, "bc", {"bc/loss": math.nan, "bc/norm": math.inf})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["bc/loss"] is None
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(row["bc/loss"])
    assert math.isnan(row["bc/norm"])


@pytest.mark.parametrize("value", [np.zeros(3), "0.5", None, np.zeros((2, 2))])
def test_what_is_not_one_number_is_refused(value):
    with pytest.raises(ValueError, match="metrics: 'critic/q' must be one number, got shape"):
        as_float("critic/q", value)


def test_a_name_without_a_group_is_refused(tmp_path):
    with (
        MetricsWriter(tmp_path, tensorboard=False) as writer,
        pytest.raises(ValueError, match="got 'success', allowed is '<group>/<name>', such as 'eval/success'"),
    ):
        writer.write(0, "bc", {"success": 0.5})


def test_torn_lines_are_left_out(tmp_path, caplog):
    write_steps(tmp_path, [1, 2], tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "phase": "resid')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert "line 3 is torn" in caplog.text


def test_a_resumed_writer_drops_the_torn_line_and_goes_on(tmp_path):
    clock = ManualClock()
    with MetricsWriter(tmp_path, tensorboard=False, clock=clock) as writer:
        clock.advance(20)
        writer.write(1, "bc", {})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2')
    clock.advance(1000)  # the time between two processes is nobody's training time
    with MetricsWriter(tmp_path, tensorboard=False, clock=clock) as writer:
        clock.advance(5)
        writer.write(2, "bc", {})
    # 20 s before the crash and 5 s after the restart.
    assert [(row["step"], row["wall_s"]) for row in read_metrics(path)] == [(1, 20.0), (2, 25.0)]


def test_rows_that_a_resumed_writer_misses_are_counted(tmp_path, caplog):
    """A file that was cut between two rows looks like a shorter one."""
    write_steps(tmp_path, [1, 2, 3], tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.load_state_dict({"rows": 1})
        assert "gone" not in caplog.text
        writer.load_state_dict({"rows": 3})
    assert "metrics.jsonl: 2 rows at its end are gone" in caplog.text


def test_a_resume_drops_later_rows_and_their_events(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in (10, 20, 30, 40):
            writer.write(step, "residual", {"critic/loss": step})
        writer.load_state_dict({"rows": 2})
        writer.write(30, "residual", {"critic/loss": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [10, 20, 30]
    assert events(tmp_path) == [
        (10, "critic/loss", 10.0),
        (20, "critic/loss", 20.0),
        (30, "critic/loss", 0.5),
    ]


def test_a_phase_without_control_steps_resumes_by_its_row(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, "bc", {"bc/loss": 3.0}, updates=100)
        saved = writer.state_dict()
        writer.write(0, "bc", {"bc/loss": 2.0}, updates=200)
    with MetricsWriter(tmp_path) as writer:
        writer.load_state_dict(saved)
        writer.write(0, "bc", {"bc/loss": 1.0}, updates=200)
    assert [row["bc/loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [3.0, 1.0]
    # TensorBoard's axis: updates as long as no control step was made.
    assert events(tmp_path) == [(100, "bc/loss", 3.0), (200, "bc/loss", 1.0)]


def test_half_a_line_that_a_full_disk_left_is_taken_back(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.write(1, "improve", {"learn/loss": 1.0})
        with (tmp_path / FILE_NAME).open("a") as file:
            file.write('{"step": 2, "upd')  # what the write before got onto the disk
        metrics.write(2, "improve", {"learn/loss": 2.0})
    assert [row["learn/loss"] for row in read_metrics(tmp_path / FILE_NAME)] == [1.0, 2.0]


def test_what_the_disk_refused_once_is_written_anew(tmp_path, monkeypatch):
    """After a failed fsync Linux counts the pages as clean: a second one comes back and brings nothing."""
    metrics, path = MetricsWriter(tmp_path, tensorboard=False), tmp_path / FILE_NAME
    metrics.write(1, "improve", {"learn/loss": 1.0})
    before = path.stat().st_ino

    def refuse(handle):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            metrics.state_dict()
        with pytest.raises(OSError, match="Input/output error"):
            metrics.load_state_dict({"rows": 0})
    metrics.write(2, "improve", {"learn/loss": 2.0})  # the old file goes on
    assert metrics.state_dict() == {"rows": 2}
    assert path.stat().st_ino != before
    assert [row["learn/loss"] for row in read_metrics(path)] == [1.0, 2.0]
    metrics.close()


def test_an_altered_row_is_left_out_with_a_word_and_stays_in_the_file(tmp_path, caplog):
    write_steps(tmp_path, [1, 2, 3], tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    altered = path.read_bytes().replace(b'"step": 2', b'"step": 6')
    path.write_bytes(altered)
    assert [row["step"] for row in read_metrics(path)] == [1, 3]
    assert "line 2 is damaged, left out" in caplog.text
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.load_state_dict({"rows": 2})  # of the three that were written: not those of steps 1 and 3
    assert path.read_bytes() == b"".join(altered.splitlines(keepends=True)[:2])


def test_no_flipped_bit_of_a_row_is_read_as_another_number(tmp_path):
    write_steps(tmp_path, [1, 2], tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    content, rows = path.read_bytes(), read_metrics(path)
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        assert all(row in rows for row in read_metrics(path)), flipped


def test_rows_without_a_checksum_are_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "phase": "bc", "wall_s": 1.5, "bc/loss": null}\n')
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["step"], row["wall_s"]) == (4, 1.5)


def test_an_end_of_line_that_was_altered_costs_two_rows_not_the_order(tmp_path):
    write_steps(tmp_path, [1, 2, 3, 4], tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\x0b", 1))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        assert writer.num_rows == 4
        writer.load_state_dict({"rows": 3})
    assert [row["step"] for row in read_metrics(path)] == [3]
