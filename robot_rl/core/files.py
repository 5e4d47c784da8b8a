"""Files that survive a power cut: written whole, flushed to the disk, renamed into place."""

import ctypes
import os
import shutil
from pathlib import Path

_RENAME_EXCHANGE = 2  # of renameat2
_AT_FDCWD = -100  # paths begin where the process stands


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Waits until the disk has everything in a folder; that the folder itself is there, its parent says."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, so that they survive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def swap_folder(temporary: Path, folder: Path) -> None:
    """Puts a complete folder in the place of `folder`; a kill in between: see `restore_folder`.

    Raises:
        OSError: the disk refused; the older folder, if any, is in its place.
    """
    shutil.rmtree(_replace(temporary, folder), ignore_errors=True)


def exchange_folder(new: Path, folder: Path) -> None:
    """Lets two folders of one parent take each other's name; in one step, where the system can.

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
    else:
        _replace(new, folder).rename(new)


def restore_folder(folder: Path) -> None:
    """Mends what a kill inside `swap_folder` left: the older folder takes its place again."""
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
