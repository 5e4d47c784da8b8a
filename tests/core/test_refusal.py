"""What the disk or the memory refuses is said with where, what is whole, and what to do."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from robot_rl.core.errors import DatasetError, StorageError
from robot_rl.core.refusal import is_refusal, refusals, refusing


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left"),
            r"the disk is full \(.*No space left.*Make room, then do it again\.",
        ),
        (OSError(errno.EIO, "Input/output error"), r"the disk refuses .*`dmesg`"),
        (OSError(errno.ENOMEM, "Cannot allocate"), r"there is not enough memory .*End other programs"),
        (MemoryError(), r"there is not enough memory \(MemoryError\)\. It is whole\. End other programs"),
        (
            PermissionError(errno.EACCES, "Denied"),
            r"the right to read or write is missing .*Give it, or choose",
        ),
        (FileNotFoundError(errno.ENOENT, "None"), r"a file or folder is not there .*who else uses"),
        (FileExistsError(errno.EEXIST, "There"), r"another file than expected is there .*who else uses"),
        (OSError("7 requested and 3 written"), r"the disk refuses \(7 requested and 3 written\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_refusal_says_where_what_and_what_to_do(error: Exception, said: str) -> None:
    with (
        pytest.raises(StorageError, match=rf"^here/it: {said}") as found,
        refusals(StorageError, "here/it", "It is whole."),
    ):
        raise error
    assert found.value.__cause__ is error


def test_a_function_says_its_folder() -> None:
    @refusing(DatasetError, kept="Nothing was changed.")
    def change(folder: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = r"^data/set: the disk is full \(.*\)\. Nothing was changed\. Make room, then do it again\.$"
    for where in (Path("data/set"), SimpleNamespace(folder="data/set")):
        with pytest.raises(DatasetError, match=said):
            change(where)
    with pytest.raises(DatasetError, match=said):
        change(folder="data/set")


def test_a_library_that_hides_what_was_refused_is_one_that_gave_up() -> None:
    class ExternalError(Exception):
        pass

    @refusing(DatasetError, also=(ExternalError,))
    def encode(folder: str) -> None:
        raise ExternalError("avcodec_open2")

    said = r"^data/set: a library gave up \(avcodec_open2\)\. See whether there is enough memory and disk"
    with pytest.raises(DatasetError, match=said):
        encode("data/set")


def test_an_error_of_ours_stays_what_it_is() -> None:
    with pytest.raises(DatasetError, match=r"^as it is$"), refusals(StorageError, "here"):
        raise DatasetError("as it is")


def test_a_block_that_does_more_than_write_turns_refusals_alone() -> None:
    """A time-out of a robot's line is an OSError too, and has nothing to do with the disk."""
    with pytest.raises(TimeoutError), refusals(StorageError, "run", sure=True):
        raise TimeoutError("no answer")
    with pytest.raises(StorageError), refusals(StorageError, "run", sure=True):
        raise OSError(errno.EROFS, "Read-only file system")
    assert not is_refusal(FileNotFoundError(errno.ENOENT, "None"))
