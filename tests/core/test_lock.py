"""A lock of one process: who has it is told, and nothing but its own file is locked."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from robot_rl.core.lock import NOTE_BYTES, HeldError, ProcessLock, is_held, locked

HOLD = """
import sys
from pathlib import Path
from robot_rl.core.lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]), note="station left", public=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_who_has_it_is_told_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    lock = ProcessLock(path, note="station left, user ada")
    assert is_held(path)
    with pytest.raises(HeldError, match=rf"^process {os.getpid()} on \S+ \(station left, user ada\)$"):
        ProcessLock(path)
    lock.release()
    lock.release()
    assert not is_held(path)
    ProcessLock(path, note="x" * 10_000).release()
    assert path.stat().st_size == NOTE_BYTES


def test_what_the_caller_wrote_behind_the_note_stays(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = ProcessLock(path)
    os.pwrite(lock.fileno(), b"token 12", 4096)
    lock.release()
    lock = ProcessLock(path)
    assert os.pread(lock.fileno(), 8, 4096) == b"token 12"
    lock.release()


def test_a_change_waits_for_its_turn_as_long_as_it_may(tmp_path: Path) -> None:
    path, done = tmp_path / "lock", list[str]()
    first = ProcessLock(path)
    with pytest.raises(HeldError, match=f"process {os.getpid()}"), locked(path, wait_s=0.0):
        pass

    def change() -> None:
        with locked(path, wait_s=60.0):
            done.append("second")

    second = Thread(target=change)
    second.start()
    done.append("first")
    first.release()
    second.join()
    assert done == ["first", "second"]
    with pytest.raises(KeyError), locked(path, wait_s=0.0):
        raise KeyError
    assert not is_held(path)


def test_a_killed_holder_lets_go_and_a_stopped_one_does_not(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(HeldError, match=rf"process {child.pid} .*station left"):
            ProcessLock(tmp_path / "lock", public=True)
    finally:
        child.kill()
        child.communicate()
    ProcessLock(tmp_path / "lock", public=True).release()


def test_a_public_lock_is_open_to_all_users_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        ProcessLock(tmp_path / "lock", public=True).release()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o666


def test_a_public_lock_follows_no_link_and_shares_no_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "soft").symlink_to(victim)
    (tmp_path / "hard").hardlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    for name in ("soft", "hard", "pipe"):
        with pytest.raises(OSError, match=r"symbolic link|no plain file"):
            ProcessLock(tmp_path / name, public=True)
    assert victim.read_text() == "precious"


def test_a_file_that_is_deleted_while_it_is_waited_for_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first look finds a file that is gone once it is locked: the one that is there now counts.
    path, opened = tmp_path / "lock", os.open
    path.write_text("")
    deleted: list[int] = []

    def slow(name: Path, flags: int, mode: int = 0o777) -> int:
        handle = opened(name, flags, mode)
        if not deleted:
            deleted.append(handle)
            path.unlink()
        return handle

    monkeypatch.setattr(os, "open", slow)
    lock = ProcessLock(path)
    monkeypatch.undo()
    with pytest.raises(HeldError):
        ProcessLock(path)
    lock.release()
