"""Checksums of a dataset's files: a file that has changed since it was written is refused.

    meta/checksums.json             of the files that a commit replaces (info, stats, tasks, robot_rl), and
                                    of other tables in meta/
    meta/checksums/CHUNK/FILE.json  of all files with that number: data, videos, meta/episodes ...
    meta/checksums/others.json      of files of others: descriptions, annotations, masks

Pages of parquet have checksums too, but the footer of the file has none: a flipped bit in it can change the
values of sound pages. A commit writes its numbered files and their checksums, then meta/checksums.json with
the old and the new checksums of the replaced files, then those files: a kill leaves each old or new. Files of
others are recorded when a dataset is copied or joined, and by `replay checksum`; a file that is added later
has no checksum until then. All three kinds of file hold a checksum of themselves. Datasets of others have no
checksums and are read as they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import TEMPORARY, file_checksum, is_dangling, listed, make_folder, replace_file
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.store.layout import STORE_JSON, is_store

MAIN = "meta/checksums.json"
_FOLDER = "meta/checksums"
_OTHERS = f"{_FOLDER}/others.json"
FETCHED = (".git", ".cache")
"""Folders of programs that download datasets: they describe the downloaded files."""
_FOLDERS = "|".join(
    kind.removesuffix("/*/*").replace("*", "[^/]*") for kind in (*lay.NUMBERED, f"{_FOLDER}/*/*")
)
_OF_KIND = re.compile(rf"(?:{_FOLDERS})/[^/]*/[^/]*")
_NUMBER = re.compile(rf"(?:{_FOLDERS})/chunk-(\d+)/file-(\d+)(?:\.[^/]*)?")
_REPLACED = (lay.OWN, lay.TASKS, lay.STATS, lay.INFO)
_TRIES = 20

Checksum = tuple[int, int]
"""Bytes of a file, and their CRC-32."""


class Checksums:
    """Compares the files of one dataset with their recorded checksums."""

    def __init__(self, folder: Path) -> None:
        """Reads the checksums; a dataset of others has none. Raises `DatasetError` if they are damaged."""
        self.folder = folder
        self._sound: dict[str, tuple[tuple[int, int, int], bool]] = {}
        self.reload()

    @property
    def exist(self) -> bool:
        return self._first_file is not None

    def reload(self) -> None:
        """Reads the checksums again, after a writer may have gone on."""
        content = _unpacked(self.folder, MAIN) if (self.folder / MAIN).is_file() else {}
        self._first_file: int | None = content.get("first_file")
        self._replaced: dict[str, list[Checksum]] = _files(content)
        self._numbered: dict[str, dict[str, list[Checksum]]] = {}
        self._has_others: bool = content.get("others", False)
        self._others: dict[str, list[Checksum]] | None = None

    def read(self, name: str) -> bytes:
        """Returns a file that commits replace.

        Raises:
            DatasetError: it is neither what the last commit wrote nor what was there before.
        """
        path = self.folder / name
        content = path.read_bytes()
        for _ in range(_TRIES):  # a writer may be committing
            allowed = self._replaced.get(name)
            if allowed is None or of_bytes(content) in allowed:
                return content
            self.reload()
            before, content = content, path.read_bytes()
            if (content, self._replaced.get(name)) == (before, allowed):
                break
        raise DatasetError(_changed(self.folder, path))

    def json(self, name: str) -> dict[str, Any]:
        """Returns a JSON file as `read` does; raises `DatasetError` if it has changed, or is no object."""
        path, raw = self.folder / name, self.read(name)
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
            raise DatasetError(f"{path}: no JSON ({error}). Restore the file from a copy.") from error
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise DatasetError(f"{path}: holds a {kind}, allowed: a JSON object. Restore the file.")
        return content

    def require(self, name: str) -> bool:
        """Refuses a file that has changed; it is read once, and again if its time or size differ.

        Returns:
            Whether a checksum of the whole file was recorded; else its pages may still have checksums.

        Raises:
            DatasetError: it has changed, or its checksum should have been recorded and was not.
        """
        path = f"{self.folder}/{name}"  # a Path costs as much time as reading a small file
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            return False  # reading it raises
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        sound = self._sound.get(name)
        if sound is not None and sound[0] == stamp:
            return sound[1]
        recorded = self.recorded(name)
        if recorded is not None and file_checksum(path) not in recorded:
            raise DatasetError(_changed(self.folder, self.folder / name))
        self._sound[name] = (stamp, recorded is not None)
        return recorded is not None

    def recorded(self, name: str) -> list[Checksum] | None:
        """Returns the allowed checksums of a file; None if none was recorded.

        Raises:
            DatasetError: the checksums of its number, or of files of others, are missing or damaged.
        """
        if self._first_file is None or name in self._replaced:
            return self._replaced.get(name)
        number = number_of(name)
        if number is None:
            return self._of_others().get(name)
        if number < self._first_file:
            return None
        of = lay.place(lay.CHECKSUMS, number)
        if of not in self._numbered:
            try:
                self._numbered[of] = _files(_unpacked(self.folder, of))
            except FileNotFoundError:
                self._numbered[of] = {}
        if name not in self._numbered[of]:
            raise DatasetError(
                f"{self.folder / of}: the checksum of {name} is missing. {_remedy(self.folder)}"
            )
        return self._numbered[of][name]

    def require_all_others(self) -> None:
        """Raises `DatasetError` if a file of others is missing; names the first."""
        for name in (*self._replaced, *self._of_others()):
            if name not in _REPLACED and number_of(name) is None and not (self.folder / name).is_file():
                raise DatasetError(f"{self.folder / name}: this file is missing. {_remedy(self.folder)}")

    def problems(
        self, last_file: int, wanted: Callable[[str], bool] = lambda name: True, *, others: bool = True
    ) -> Iterator[tuple[str, str]]:
        """Reads every file; yields name and message of those that have changed or are missing.

        Args:
            last_file: number of the last committed file; a kill may leave files with higher numbers.
            wanted: whether a file is compared.
            others: also compares files of others, which no reading needs.
        """
        if not self.exist:
            return
        names = dict.fromkeys((*self._replaced, *numbered_files(self.folder)))
        if others:
            try:
                names |= dict.fromkeys(self._of_others())
            except DatasetError as error:
                yield _OTHERS, str(error)
        for path in listed(self.folder / _FOLDER, "*/*.json"):
            try:
                names |= dict.fromkeys(_files(_unpacked(self.folder, str(path.relative_to(self.folder)))))
            except DatasetError as error:
                yield str(path.relative_to(self.folder)), str(error)
        for name in names:
            number = number_of(name)
            if (number is not None and number > last_file) or not wanted(name):
                continue
            path = self.folder / name
            try:
                recorded = self.recorded(name)
            except DatasetError as error:
                yield name, str(error)
                continue
            if recorded is None:
                continue
            if not path.is_file():
                yield name, f"{path}: this file is missing. {_remedy(self.folder)}"
            elif file_checksum(path) not in recorded:
                yield name, _changed(self.folder, path)

    def renew(self, new: Path) -> None:
        """Writes the checksums of a copy made of hard links: files that were replaced in it get new ones.

        Raises:
            DatasetError: the checksums of such a file are damaged.
        """
        if self._first_file is None:
            return
        main = {name: sums for name, sums in self._replaced.items() if (new / name).is_file()}
        groups: set[str] = set()
        for name in [*_unnumbered(new), *numbered_files(new)]:
            old, number = self.folder / name, number_of(name)
            if old.is_file() and old.samefile(new / name):
                continue
            if number is None:
                main[name] = [file_checksum(new / name)]
            elif number >= self._first_file:
                self.recorded(name)  # reads the checksums of its number
                of = lay.place(lay.CHECKSUMS, number)
                self._numbered[of][name] = [file_checksum(new / name)]
                groups.add(of)
        for of in groups:
            replace_file(new / of, _packed({"files": self._numbered[of]}))
        replace_file(new / MAIN, _main(self._first_file, main, self._has_others))

    def _of_others(self) -> dict[str, list[Checksum]]:
        if self._others is None:
            if self._has_others and not (self.folder / _OTHERS).is_file():
                raise DatasetError(f"{self.folder / _OTHERS}: this file is missing. {_remedy(self.folder)}")
            self._others = _files(_unpacked(self.folder, _OTHERS)) if self._has_others else {}
        return self._others


class ReplacedFiles:
    """The files that commits replace, and their checksums."""

    def __init__(self, folder: Path, first_file: int = 0) -> None:
        """Args: first_file: number of the first file whose checksums are recorded."""
        self._folder = folder
        self._first_file = first_file
        self._present: dict[str, Checksum] = {}
        self._of_others: dict[str, list[Checksum]] = {}  # of tables in meta/ that no commit reads
        self._has_others = False

    @classmethod
    def found(cls, sums: Checksums, next_file: int) -> ReplacedFiles:
        """Returns those of a dataset; raises `DatasetError` if one has changed.

        Args: next_file: number of the next file; without checksums so far it is the first one with them.
        """
        files = cls(sums.folder, next_file if sums._first_file is None else sums._first_file)
        names = [name for name in _REPLACED if (sums.folder / name).is_file()]
        files._present = {name: of_bytes(sums.read(name)) for name in names}
        files._of_others = {name: of for name, of in sums._replaced.items() if name not in _REPLACED}
        files._has_others = sums._has_others
        return files

    def replace(self, contents: Mapping[str, bytes]) -> None:
        """Replaces files, each in one step, in this order; a kill leaves the rest unchanged."""
        after = {name: of_bytes(content) for name, content in contents.items()}
        names = dict.fromkeys((*self._present, *after))
        both = {name: [s[name] for s in (self._present, after) if name in s] for name in names}
        replace_file(self._folder / MAIN, _main(self._first_file, self._of_others | both, self._has_others))
        for name, content in contents.items():
            replace_file(self._folder / name, content)
            self._present[name] = after[name]


def record(folder: Path) -> int:
    """Computes the checksums of all files of a dataset again; returns their number."""
    (folder / MAIN).unlink(missing_ok=True)  # without it the other files of checksums do not count
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)
    names = [*dict.fromkeys((*_unnumbered(folder), *numbered_files(folder, every=True)))]
    groups: dict[int | None, dict[str, list[Checksum]]] = {None: {}}
    for name in names:
        groups.setdefault(number_of(name), {})[name] = [file_checksum(folder / name)]
    for number, files in groups.items():
        if number is not None:
            path = folder / lay.place(lay.CHECKSUMS, number)
            make_folder(path.parent)
            replace_file(path, _packed({"files": files}))
    others = {name: [file_checksum(folder / name)] for name in _others(folder, names)}
    if others:
        make_folder(folder / _FOLDER)
        replace_file(folder / _OTHERS, _packed({"files": others}))
    replace_file(folder / MAIN, _main(0, groups[None], bool(others)))
    return len(names) + len(others)


def of_files(parts: Iterable[tuple[str, Path]]) -> bytes:
    """Returns the content of meta/checksums/CHUNK/FILE.json for files: (name, present path)."""
    return _packed({"files": {name: [file_checksum(path)] for name, path in parts}})


def numbered_files(folder: Path, *, every: bool = False) -> list[str]:
    """Returns the files with numbers, and with `every` all other files in their folders."""
    paths = [path for kind in lay.NUMBERED for path in listed(folder, kind) if path.is_file()]
    names = [str(path.relative_to(folder)) for path in paths if not path.name.endswith(lay.TEMPORARY)]
    return [name for name in names if every or number_of(name) is not None]


def _unnumbered(folder: Path) -> list[str]:
    """Returns the metadata files without numbers: those that commits replace, and tables of others."""
    others = [path for kind in ("*.parquet", "*.jsonl") for path in listed(folder / "meta", kind)]
    names = dict.fromkeys((*_REPLACED, *(f"meta/{path.name}" for path in others)))
    return [name for name in names if (folder / name).is_file()]


def _others(folder: Path, known: Iterable[str]) -> list[str]:
    """Returns all other files, but those that a program still writes to, and links to missing files."""
    left_out, folders = {*known, MAIN, STORE_JSON}, other_folders(folder)
    names = [name for name in files_below(folder) if name not in left_out and not is_below(name, folders)]
    return [name for name in names if not is_temporary(name) and not is_dangling(folder / name)]


def refuse_dangling(folder: Path, names: Iterable[str], remedy: str) -> None:
    """Raises `DatasetError` for the first of these files that is a link to a missing file.

    Args: remedy: what to do other than to fetch it, given its name as {name}.
    """
    for path in (folder / name for name in names):
        if is_dangling(path):
            raise DatasetError(
                f"{path}: a link to {path.readlink()}, which is not there. Fetch that file (git annex get), "
                + remedy.format(name=path.relative_to(folder).as_posix())
            )


def other_folders(folder: Path) -> tuple[str, ...]:
    """Returns folders whose files do not belong to the dataset: of checksums, a download, a recorder."""
    is_recorded_into = is_store(folder) or (folder / "journal/writer.lock").is_file()
    return (_FOLDER, *FETCHED, *(["journal"] if is_recorded_into else []))


def files_below(folder: Path) -> list[str]:
    """Returns the files below a folder and below folders that it links to, and links to missing files."""
    found = listed(folder)
    links = [path for path in found if path.is_symlink() and path.is_dir()]
    paths = [*found, *(path for link in links for path in listed(link))]
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file() or is_dangling(path)]


def is_below(name: str, folders: Iterable[str]) -> bool:
    """Returns whether a file is one of these files, or lies in one of these folders."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def is_temporary(name: str) -> bool:
    """Returns whether this is an incomplete file that a kill of robot_rl left."""
    place, _, file = name.rpartition("/")
    return (place == "meta" and file.startswith(TEMPORARY)) or (
        file.endswith(lay.TEMPORARY) and _OF_KIND.fullmatch(name) is not None
    )


def of_bytes(content: bytes) -> Checksum:
    """Returns the checksum of the content of a file."""
    return len(content), zlib.crc32(content)


def number_of(name: str) -> int | None:
    """Returns the number of a file in a folder of files with numbers; None if it has none."""
    found = _NUMBER.fullmatch(name)
    return None if found is None else int(found[1]) * lay.FILES_PER_CHUNK + int(found[2])


def _main(first_file: int, files: Mapping[str, list[Checksum]], has_others: bool) -> bytes:
    return _packed({"first_file": first_file, "files": files} | ({"others": True} if has_others else {}))


def _packed(content: dict[str, Any]) -> bytes:
    return (json.dumps({"crc32": _crc_of(content), "of": content}, indent=1) + "\n").encode()


def _unpacked(folder: Path, name: str) -> dict[str, Any]:
    """Returns the content of a file of checksums; raises `DatasetError` if it has changed."""
    try:
        with open(f"{folder}/{name}", "rb") as file:
            found = json.loads(file.read())
        content: dict[str, Any] = found["of"]
        if found["crc32"] == _crc_of(content):
            return content
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # the error below
    raise DatasetError(
        f"{folder / name}: the checksums in it have changed since they were written. {_remedy(folder)}"
    )


def _files(content: Mapping[str, Any]) -> dict[str, list[Checksum]]:
    return {name: [(size, crc) for size, crc in sums] for name, sums in content.get("files", {}).items()}


def _crc_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _changed(folder: Path, path: Path) -> str:
    return (
        f"{path}: it does not match its checksum: bytes have changed since it was written. Copy it again. "
        f"{_remedy(folder)}"
    )


def _remedy(folder: Path) -> str:
    return (
        f"`robot-rl replay verify {folder}` says what is sound; if the dataset was changed on purpose, "
        f"`robot-rl replay checksum {folder}` accepts it as it is."
    )
