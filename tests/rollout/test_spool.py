"""The spool: numbers in order over lives of both ends, whole files or none."""

from pathlib import Path

import pytest

from robot_rl.core.errors import StorageError
from robot_rl.rollout.spool import Spool


def test_what_is_put_is_read_and_taken_in_order(tmp_path: Path) -> None:
    puts, takes = Spool(tmp_path / "turns"), Spool(tmp_path / "turns")
    assert [puts.put(word) for word in (b"a", b"b", b"c")] == [1, 2, 3]
    assert [takes.read(number) for number in (1, 2, 3, 4)] == [b"a", b"b", b"c", None]
    takes.take(2)
    assert [takes.read(number) for number in (1, 2, 3)] == [None, None, b"c"]
    takes.take(1)  # an old acknowledgement changes nothing
    assert (takes.taken, takes.read(3)) == (2, b"c")


def test_numbers_go_on_after_all_was_taken(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    first.put(b"a")
    first.take(1)
    second = Spool(tmp_path)
    assert (second.newest, second.put(b"b")) == (1, 2)
    assert Spool(tmp_path).newest == 2


def test_a_file_that_was_not_finished_is_none(tmp_path: Path) -> None:
    (tmp_path / "000000000001~").write_bytes(b"half")
    spool = Spool(tmp_path)
    assert (spool.newest, spool.read(1)) == (0, None)
    assert spool.put(b"whole") == 1
    assert spool.read(1) == b"whole"


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "turns")
    (tmp_path / "turns").rmdir()
    with pytest.raises(StorageError, match="turns: No such file or directory"):
        spool.put(b"a")
