import numpy as np
import pytest

from robot_rl.telemetry.flight import FlightRecorder


def record(recorder: FlightRecorder, moments: range) -> None:
    """Records two envs with state [t, -t] each."""
    for t in moments:
        recorder.record(state=np.array([[t, -t], [10 * t, 0]], float), action=np.full((2, 1), t, np.float32))


def test_the_last_moments_are_kept_oldest_first(tmp_path):
    recorder = FlightRecorder(3)
    record(recorder, range(5))
    path = recorder.dump(tmp_path / "dumps", "NaN in qacc", seed=np.array([7, 8]))
    assert path is not None
    assert path == tmp_path / "dumps" / "nan-in-qacc-0000.npz"
    with np.load(path) as found:
        assert found["state"].shape == (3, 2, 2)
        assert found["state"][:, 0, 0].tolist() == [2, 3, 4]
        assert found["action"].dtype == np.float32
        assert found["seed"].tolist() == [7, 8]
        assert str(found["reason"]) == "NaN in qacc"
    assert sorted(path.parent.iterdir()) == [path]


def test_a_snapshot_is_of_its_moment_however_late_it_is_written(tmp_path):
    recorder = FlightRecorder(3)
    record(recorder, range(5))
    write = recorder.snapshot(tmp_path, "fault")
    record(recorder, range(5, 9))
    path = write()
    assert path is not None
    assert np.load(path)["state"][:, 0, 0].tolist() == [2, 3, 4]


def test_half_a_file_is_not_left_on_a_full_disk(tmp_path):
    recorder = FlightRecorder(3)
    record(recorder, range(5))
    (tmp_path / "fault-0000.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        recorder.dump(tmp_path, "fault")
    assert list(tmp_path.iterdir()) == []


def test_a_ring_that_is_not_full_holds_only_what_was_recorded(tmp_path):
    recorder = FlightRecorder(8)
    record(recorder, range(2))
    path = recorder.dump(tmp_path, "fault")
    assert path is not None
    assert np.load(path)["state"][:, 1, 0].tolist() == [0, 10]


def test_a_repeating_fault_does_not_fill_the_disk(tmp_path):
    recorder = FlightRecorder(1, max_dumps=2)
    record(recorder, range(1))
    written = [recorder.dump(tmp_path, "fault") for _ in range(4)]
    assert [path and path.name for path in written] == ["fault-0000.npz", "fault-0001.npz", None, None]


def test_another_process_does_not_overwrite_a_dump(tmp_path):
    for _ in range(2):
        recorder = FlightRecorder(1)
        record(recorder, range(1))
        recorder.dump(tmp_path, "fault")
    assert len(list(tmp_path.iterdir())) == 2


def test_moments_with_other_names_are_refused():
    recorder = FlightRecorder(2)
    recorder.record(state=np.zeros(3))
    with pytest.raises(ValueError, match=r"got \['action'\], the first moment had \['state'\]"):
        recorder.record(action=np.zeros(3))


def test_a_recorder_needs_room():
    with pytest.raises(ValueError, match="capacity is 0, allowed is 1 moment or more"):
        FlightRecorder(0)
