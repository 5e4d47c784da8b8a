"""Files that survive a power cut: written whole, flushed to the disk, renamed into place.

Small files that a program reads back say whether they are what was written: an object of JSON ends with its
checksum, a text for people begins with one. A file without, of an earlier version, is read as it is.
"""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import zlib
from collections.abc import Generator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from robot_rl.core.errors import RobotRLError
from robot_rl.core.refusal import refusals

CHECKSUM = "checksum"
"""Last key of an object: the CRC-32 of all before it, as JSON without spaces."""

TEMPORARY = ".writing-"
"""Begins the names of files that are not complete."""

_BLOCK_BYTES = 1 << 20
_TEXT_CHECKSUM = "# crc32 "
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
_RENAME_EXCHANGE = 2  # of renameat2
_AT_FDCWD = -100  # paths are relative to the working folder


def is_yaml(name: str) -> bool:
    """Returns whether a robot or a station is given by its file, and not by a name that is known."""
    return name.endswith((".yaml", ".yml"))


def at_home(path: str) -> str:
    """Returns a path whose `~/` at the beginning is the home folder; shells leave it in `out=~/x`."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes | str) -> None:
    """Puts a file in the place of another, in one step: readers see the old content or the new, never half.

    Raises:
        OSError: the disk refused. The old file is in its place, or the new one, which a power cut may undo.
    """
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        publish_file(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # half a file takes room where there is none
            temporary.unlink(missing_ok=True)
        raise


def publish_file(temporary: Path, path: Path) -> None:
    """Gives a file that is complete its name, when the disk has all of it."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, content: Any, *, is_checked: bool = False) -> None:
    """Replaces a file of JSON in one step; see `replace_file`.

    Args: is_checked: whether `content`, an object, gets a checksum that `read_json` verifies.
    """
    replace_file(path, json_bytes(with_checksum(content) if is_checked else content))


def json_bytes(content: Any) -> bytes:
    """Returns what a file of JSON holds."""
    return (json.dumps(content, indent=2) + "\n").encode()


def read_json(path: Path, kind: type[RobotRLError], remedy: str) -> dict[str, Any]:
    """Returns the object in a file of JSON, without its checksum.

    Args:
        path: of the file.
        kind: of the error.
        remedy: sentences that end its message.

    Raises:
        RobotRLError: of `kind`: the file cannot be read, is no object of JSON, or not what was written.
    """
    content = _content(path, kind, remedy)
    try:
        return without_checksum(json.loads(content))
    except ValueError as error:
        raise kind(f"{path}: damaged: {error}. {remedy}") from error


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object that `without_checksum` can verify after it was written and read as JSON."""
    return {**content, CHECKSUM: _checksum(content)}


def without_checksum(content: Any) -> dict[str, Any]:
    """Returns an object without its checksum; one that has none, as it is.

    Raises:
        ValueError: it is no object, or the checksum is of another one.
    """
    if not isinstance(content, dict):
        raise ValueError(f"not an object but {type(content).__name__}")
    found: dict[str, Any] = content
    key = CHECKSUM if CHECKSUM in found else next(reversed(found), None)
    rest = {name: value for name, value in found.items() if name != key}
    is_right = key is not None and found[key] == _checksum(rest)
    if is_right != (key == CHECKSUM):  # it does not match, or it does under another name
        raise ValueError(
            f"it does not match its {CHECKSUM!r} (delete that entry if you changed the file on purpose)"
        )
    return rest if is_right else found


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, separators=(",", ":")).encode())


def file_checksum(path: Path | str) -> tuple[int, int]:
    """Returns the bytes of a file and their CRC-32; reads it piece by piece."""
    size = crc = 0
    with open(path, "rb", buffering=0) as file:
        block = memoryview(bytearray(min(os.fstat(file.fileno()).st_size + 1, _BLOCK_BYTES)))
        while count := file.readinto(block):
            size, crc = size + count, zlib.crc32(block[:count], crc)
    return size, crc


def with_checksum_line(text: str) -> str:
    """Returns a text of lines that begins with a checksum, as a comment of YAML."""
    note = "of the lines below; delete this line if you change them"
    return f"{_TEXT_CHECKSUM}{zlib.crc32(text.encode()):08x} {note}\n{text}"


def read_checked_text(path: Path, kind: type[RobotRLError], remedy: str) -> str:
    """Returns what `with_checksum_line` made, first line included, or a text without such a line.

    Raises:
        RobotRLError: of `kind`: it cannot be read, or is not what was written; `remedy` ends the message.
    """
    content = _content(path, kind, remedy)
    first, _, rest = content.partition(b"\n")
    is_checked = first.startswith(_TEXT_CHECKSUM.encode())
    if is_checked and first.split()[2:3] != [f"{zlib.crc32(rest):08x}".encode()]:
        raise kind(
            f"{path}: damaged: it does not match the checksum in its first line (delete that line if you "
            f"changed the file on purpose). {remedy}"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise kind(f"{path}: damaged: {error}. {remedy}") from error


def _content(path: Path, kind: type[RobotRLError], remedy: str) -> bytes:
    if not path.exists():
        raise kind(f"{path}: there is no such file. {remedy}")
    with refusals(kind, path, remedy):
        return path.read_bytes()


def temporary_of(path: Path) -> Path:
    """Returns the name under which `replace_file` writes; a kill may leave such a file."""
    return path.with_name(f"{TEMPORARY}{path.name}")


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def listed(folder: Path, pattern: str = "**") -> list[Path]:
    """Returns what is in a folder by a pattern such as `data/*/*.parquet`, sorted; `**` for all below it.

    `Path.glob` leaves a folder out that the disk refuses to list. What is not listed is taken for what is not
    there: not copied, not synced, its number given again.

    Raises:
        OSError: a folder cannot be listed; one that is not there is empty.
    """
    if pattern == "**":
        return sorted(path for below in _below(folder) for path in below)
    found = [folder]
    for part in pattern.split("/"):
        found = [path for above in found for path in _children(above) if fnmatchcase(path.name, part)]
    return sorted(found)


def _below(folder: Path) -> Generator[list[Path]]:
    children = _children(folder)
    yield children
    for path in children:
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)


def _children(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


def sync_tree(folder: Path) -> None:
    """Waits until the disk has everything in a folder; that the folder itself is there, its parent says."""
    for path in listed(folder):
        if path.is_dir():
            sync_folder(path)
        elif not is_dangling(path):  # the folder holds all of a link
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def is_dangling(path: Path) -> bool:
    """Returns whether this is a link without a target: a file of git-annex that was not fetched."""
    return path.is_symlink() and not path.exists()


def link_again(path: Path, target: Path) -> None:
    """Gives a file a second name; a symbolic link, also one to a folder, is made a second time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        target.symlink_to(path.readlink())
    else:
        os.link(path, target)


def make_folder(folder: Path, *, is_new: bool = False) -> None:
    """Makes a folder and those above it, so that they survive a power cut; one that is there is synced too.

    Raises:
        OSError: the disk refused, or `is_new` and it is there; none of them was made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing or [folder]):
            try:
                path.mkdir()
                made.append(path)
            except FileExistsError:
                if (is_new and path == folder) or not path.is_dir():
                    raise
        for path in missing or [folder]:  # its maker may have failed to sync it
            sync_folder(path.parent)
    except OSError:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # somebody uses it by now
                path.rmdir()
        raise


def swap_folder(temporary: Path, folder: Path) -> None:
    """Puts a complete folder, whose files are synced, in the place of `folder`.

    In one step where the system can; elsewhere, a kill in between: see `restore_folder`.

    Raises:
        OSError: the disk refused; the older folder, if any, is in its place, or else the new one.
    """
    sync_folder(temporary)
    if folder.exists():
        exchange_folder(temporary, folder)
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        _replace(temporary, folder)


def exchange_folder(new: Path, folder: Path) -> None:
    """Exchanges the names of two folders of one parent; in one step, where the system can.

    Where it cannot (not Linux, or a file system without it), a kill in between: see `restore_folder`.

    Raises:
        OSError: the disk refused; `folder` is what it was.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(new), os.fsencode(folder))
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE
    ):
        sync_folder(folder.parent)
        return
    refused = ctypes.get_errno() if hasattr(libc, "renameat2") else errno.ENOSYS
    if refused not in _NO_EXCHANGE:
        raise OSError(refused, os.strerror(refused), str(new), None, str(folder))
    _replace(new, folder).rename(new)


def restore_folder(folder: Path) -> None:
    """Puts the older folder back after a kill inside `swap_folder`."""
    previous = _previous(folder)
    if previous.exists() and not folder.exists():
        previous.rename(folder)


def _replace(temporary: Path, folder: Path) -> Path:
    """Puts a folder in the place of another; returns where the older one is, if there was any."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    try:
        temporary.rename(folder)
    except OSError:
        restore_folder(folder)
        raise
    sync_folder(folder.parent)
    return previous


def _previous(folder: Path) -> Path:
    return folder.with_name(f".previous-{folder.name}")
