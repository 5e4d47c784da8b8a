"""Plays a power cut over the notes of `storage_shim.c`: what was not synced is there, gone or torn.

A file's pages and its length are on the disk when an fsync of the file came back, its name when an fsync of
the folder did. Of all else each piece is kept or dropped at random. That is weaker than ext4 and XFS with
their usual options in two ways (an fsync of a file does not bring its name, names in different folders do
not wait for each other), and no weaker than POSIX; what depends on each other keeps its order, since both
write their metadata through a journal: a rename is whole or not at all, and none is kept without the
creation before it. After an fsync that failed, a later one does not bring the same pages, as on Linux.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

PAGE = 4096
SECTOR = 512
STYLES = ("nothing", "all", "names", "pages", "each", "each", "each")
"""What is kept of what was not synced: the last at random, piece by piece."""
SHORT = 255
_ENTRY = struct.Struct("<BBHHHiiqII")
_EXCHANGE = 2


class Op(IntEnum):
    """Calls, as in storage_shim.c."""

    OPEN = 1
    CLOSE = 2
    DUP = 3
    WRITE = 4
    TRUNCATE = 5
    SYNC = 6
    RENAME = 7
    UNLINK = 8
    LINK = 9
    MKDIR = 10
    RMDIR = 11
    MAP = 12
    CONTENT = 13
    ACK = 14
    ALLOC = 15


class Call(NamedTuple):
    """One entry of the notes."""

    op: Op
    failed: int
    fd: int
    aux: int
    offset: int
    ordinal: int
    """Among the calls that can fail, from 1; 0 for the others."""
    path: str
    other: str
    content: bytes


def read_notes(path: Path) -> list[Call]:
    """Reads what the shim wrote; an entry that a kill cut short is left out."""
    notes, at, calls = path.read_bytes(), 0, list[Call]()
    while at + _ENTRY.size <= len(notes):
        op, failed, name, other, _, fd, aux, offset, ordinal, num_bytes = _ENTRY.unpack_from(notes, at)
        at += _ENTRY.size
        if at + name + other + num_bytes > len(notes):
            break
        path_of, other_of = notes[at : at + name].decode(), notes[at + name : at + name + other].decode()
        at += name + other
        content = notes[at : at + num_bytes]
        at += num_bytes
        calls.append(Call(Op(op), failed, fd, aux, offset, ordinal, path_of, other_of, content))
    return calls


class File:
    """Pages and length, each with every state that the disk may have."""

    def __init__(self, content: bytes = b"") -> None:
        self.pages: dict[int, list[bytes]] = {
            at // PAGE: [content[at : at + PAGE].ljust(PAGE, b"\0")] for at in range(0, len(content), PAGE)
        }
        """Page -> its states since the last fsync, the present one last."""
        self.sizes = [len(content)]
        self._refused: set[int] = set()
        """Pages that an fsync has failed to bring: they pass for clean until they are written again."""

    def write(self, offset: int, content: bytes) -> None:
        for page in range(offset // PAGE, -(-(offset + len(content)) // PAGE)):
            begin = page * PAGE
            states = self.pages.setdefault(page, [bytes(PAGE)])
            first, last = max(offset, begin), min(offset + len(content), begin + PAGE)
            now = states[-1]
            states.append(
                now[: first - begin] + content[first - offset : last - offset] + now[last - begin :]
            )
            self._refused.discard(page)
        if content and offset + len(content) > self.sizes[-1]:
            self.sizes.append(offset + len(content))

    def truncate(self, size: int) -> None:
        for page, states in self.pages.items():
            keep = min(max(0, size - page * PAGE), PAGE)
            if keep < PAGE and any(states[-1][keep:]):
                states.append(states[-1][:keep].ljust(PAGE, b"\0"))
                self._refused.discard(page)
        self.sizes.append(size)

    def sync(self, *, fails: bool) -> None:
        if fails:
            self._refused |= {page for page, states in self.pages.items() if len(states) > 1}
            return
        for page, states in self.pages.items():
            if page not in self._refused:
                del states[:-1]
        del self.sizes[:-1]

    def content(self) -> bytes:
        """Returns what a reader sees now."""
        return self._joined({page: states[-1] for page, states in self.pages.items()}, self.sizes[-1])

    def after_cut(self, rng: random.Random, keep: str) -> bytes:
        """Returns what the disk has."""
        chosen = {page: _one(states, rng, keep) for page, states in self.pages.items()}
        if keep == "each" and rng.random() < 0.3:  # the page that was under way
            pending = [page for page, states in self.pages.items() if len(states) > 1]
            if pending:
                page, cut = rng.choice(pending), SECTOR * rng.randrange(PAGE // SECTOR)
                chosen[page] = self.pages[page][-1][:cut] + chosen[page][cut:]
        return self._joined(chosen, _one(self.sizes, rng, keep))

    @staticmethod
    def _joined(pages: dict[int, bytes], size: int) -> bytes:
        whole = bytearray(size)
        for page, content in pages.items():
            piece = content[: max(0, size - page * PAGE)]
            whole[page * PAGE : page * PAGE + len(piece)] = piece
        return bytes(whole)


class Folder:
    """Names: those that the disk has, and those there are."""

    def __init__(self) -> None:
        self.synced: dict[str, File | Folder] = {}
        self.now: dict[str, File | Folder] = {}


Node = File | Folder


@dataclass
class _Change:
    """Names that change together, not synced."""

    names: list[tuple[Folder, str, Node | None]]
    nodes: list[Node] = field(default_factory=list[Node])

    def apply(self, *, synced: bool) -> None:
        for folder, name, node in self.names:
            entries = folder.synced if synced else folder.now
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node

    def waits_for(self, other: _Change) -> bool:
        """Returns whether a disk that has this one has the other too: one name or one node in both."""
        mine = {(id(folder), name) for folder, name, _ in self.names}
        return bool(
            mine & {(id(folder), name) for folder, name, _ in other.names}
            or {id(node) for node in self.nodes} & {id(node) for node in other.nodes}
        )


class Disk:
    """What a folder holds while calls come in, and what a cut leaves of it."""

    def __init__(self, before: Path | None = None) -> None:
        """Begins with what a folder on the disk holds, all of it synced; empty if None."""
        self.root = Folder()
        self.acks: list[str] = []
        self._changes: list[_Change] = []
        self._open: dict[int, Node] = {}
        self._maps: dict[int, File] = {}
        if before is not None:
            _fill(self.root, before, {})

    def play(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._play(call)

    def _play(self, call: Call) -> None:
        if call.failed and not (call.op == Op.SYNC or (call.op == Op.WRITE and call.content)):
            return
        match call.op:
            case Op.OPEN:
                self._open[call.fd] = self._opened(call)
            case Op.CLOSE:
                self._open.pop(call.fd, None)
            case Op.DUP:
                self._open[call.aux] = self._open[call.fd]
            case Op.WRITE:
                self._file(call).write(call.offset, call.content)
            case Op.TRUNCATE:
                self._file(call).truncate(call.offset)
            case Op.MAP:
                self._maps[call.offset] = self._file(call)
            case Op.CONTENT:
                _rewrite(self._maps[call.offset], call.content)
            case Op.SYNC:
                self._sync(self._open[call.fd] if call.fd >= 0 else self._maps[call.offset], call.failed != 0)
            case Op.ACK:
                self.acks.append(call.content.decode())
            case Op.ALLOC:
                pass
            case _:
                self._rename(call)

    def _opened(self, call: Call) -> Node:
        folder, name = self._name(call.path)
        node = folder.now.get(name) if name else folder
        if node is None:
            node = File()
            self._change(_Change([(folder, name, node)], [node]))
        elif isinstance(node, File) and call.aux & os.O_TRUNC and node.sizes[-1]:
            node.truncate(0)
        return node

    def _rename(self, call: Call) -> None:
        """Plays everything that changes names."""
        folder, name = self._name(call.path)
        if call.op == Op.MKDIR:
            node = Folder()
            self._change(_Change([(folder, name, node)], [node]))
            return
        node = folder.now[name]
        if call.op in (Op.UNLINK, Op.RMDIR):
            self._change(_Change([(folder, name, None)], [node]))
            return
        to, new = self._name(call.other)
        there = to.now.get(new)
        if call.op == Op.LINK:
            names = [(to, new, node)]
        elif call.aux & _EXCHANGE:
            names = [(folder, name, there), (to, new, node)]
        else:
            names = [(folder, name, None), (to, new, node)]
        self._change(_Change([*names], [node, *([there] if there is not None else [])]))

    def _change(self, change: _Change) -> None:
        change.apply(synced=False)
        self._changes.append(change)

    def _sync(self, node: Node, fails: bool) -> None:
        if isinstance(node, File):
            node.sync(fails=fails)
        elif not fails:
            brought: list[_Change] = []
            for change in reversed(self._changes):  # with those that they wait for, which are earlier
                of_it = any(folder is node for folder, _, _ in change.names)
                if of_it or any(later.waits_for(change) for later in brought):
                    brought.append(change)
            for change in reversed(brought):
                change.apply(synced=True)
            self._changes = [c for c in self._changes if not any(c is other for other in brought)]

    def cut(self, rng: random.Random, folder: Path) -> None:
        """Writes what the disk has after a cut into a new folder; ends this disk."""
        style, likely = rng.choice(STYLES), rng.choice((0.2, 0.5, 0.8))
        dropped: list[_Change] = []
        for change in self._changes:
            keep = style in ("all", "names") or (style == "each" and rng.random() < likely)
            if keep and not any(change.waits_for(other) for other in dropped):
                change.apply(synced=True)
            else:
                dropped.append(change)
        _write(self.root, folder, rng, {"names": "nothing", "pages": "all"}.get(style, style), {})

    def differs_from(self, folder: Path) -> str:
        """Returns where a folder is not what was played: then a call went past the shim. Empty if nowhere."""
        return _difference(self.root, folder)

    def _file(self, call: Call) -> File:
        node = self._open[call.fd]
        assert isinstance(node, File)
        return node

    def _name(self, path: str) -> tuple[Folder, str]:
        """Returns folder and name of a path; no name for the root."""
        folder = self.root
        *above, name = path.split("/")
        if name == ".":
            return folder, ""
        for part in above:
            inner = folder.now[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name


def _rewrite(file: File, content: bytes) -> None:
    """Takes in what a file holds that was written through memory: the pages that are others now."""
    before = file.content()
    for at in range(0, len(content), PAGE):
        if before[at : at + PAGE] != content[at : at + PAGE]:
            file.write(at, content[at : at + PAGE])


def _one(states: Sequence[Any], rng: random.Random, keep: str) -> Any:
    return states[0] if keep == "nothing" else states[-1] if keep == "all" else rng.choice(states)


def _fill(node: Folder, folder: Path, done: dict[int, File]) -> None:
    """Takes in what a folder holds; a file with two names is one."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inner: Node = Folder()
            _fill(inner, path, done)
        else:
            number = path.stat().st_ino
            inner = done.setdefault(number, done.get(number) or File(path.read_bytes()))
        node.synced[path.name] = node.now[path.name] = inner


def _write(node: Folder, folder: Path, rng: random.Random, keep: str, done: dict[int, Path]) -> None:
    """Writes the names that were synced."""
    folder.mkdir(parents=True)
    for name, entry in node.synced.items():
        path = folder / name
        if isinstance(entry, Folder):
            _write(entry, path, rng, keep, done)
        elif id(entry) in done:
            os.link(done[id(entry)], path)
        else:
            path.write_bytes(entry.after_cut(rng, keep))
            done[id(entry)] = path


def _difference(node: Folder, folder: Path) -> str:
    there = {path.name: path for path in folder.iterdir()}
    for name in sorted(node.now.keys() | there.keys()):
        entry, path = node.now.get(name), there.get(name)
        if entry is None or path is None:
            return f"{folder / name}: {'not noted' if entry is None else 'noted, and not there'}"
        if isinstance(entry, Folder):
            found = _difference(entry, path)
        else:
            found = "" if entry.content() == path.read_bytes() else f"{path}: other content than was noted"
        if found:
            return found
    return ""
