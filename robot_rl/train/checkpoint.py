"""Checkpoints: everything that influences learning, as safetensors and JSON; no pickle.

A state is a nest of dicts, lists, tuples, tensors, arrays, numbers, strings and None. A folder
holds `state.json` (the nest, with a reference where an array belongs), `tensors.safetensors` and
`arrays.safetensors`. It is written under a temporary name, flushed to the disk and renamed;
only then does `latest` name it. A kill at any moment leaves the last good checkpoint in place.

A full disk stops the run with a `CheckpointError`, after older checkpoints were given up for a
second try; any other refusal stops it at once. Going on unsaved would spend robot time that the next
failure loses, and an exact resume costs nothing but the command that the message names.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as arrays_io
from safetensors import torch as tensors_io

from robot_rl.core.errors import CheckpointError
from robot_rl.core.files import (
    listed,
    make_folder,
    read_json,
    replace_file,
    sync_folder,
    with_checksum,
    write_synced,
)
from robot_rl.core.refusal import NO_SPACE, refusal, refusals

Array = NDArray[Any]

FORMAT = 1
"""Raised when a checkpoint of the old form can no longer be read."""

_FILES = ("tensors.safetensors", "arrays.safetensors")
_KEYS = frozenset({"$tensor", "$array", "$tuple", "$items"})


class CheckpointStore:
    """The checkpoints of one run: the newest `keep` of them, and which is the last good one."""

    def __init__(self, folder: Path, *, keep: int = 2, command: str = "train") -> None:
        """Args: command: the `robot-rl` command that resumes the run, for messages."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._folder = folder
        self._keep = keep
        self._command = command

    def save(self, state: Mapping[str, Any], name: str) -> Path:
        """Writes `state` as `<folder>/<serial>-<name>` and makes it the latest.

        Raises:
            CheckpointError: the disk is full or refuses; the last good checkpoint is untouched.
        """
        try:
            make_folder(self._folder)
            try:
                path = self._write(state, name)
            except OSError as error:
                if error.errno not in NO_SPACE or not self._prune(keep=1):
                    raise
                path = self._write(state, name)
            self._prune(self._keep)
        except (OSError, MemoryError) as error:
            at = f"{self._folder}: cannot write checkpoint {name!r}"
            raise refusal(error, CheckpointError, at, self._kept()) from error
        return path

    def latest(self) -> Path | None:
        """Returns the folder of the last good checkpoint, or None.

        Raises:
            CheckpointError: `latest` is not what was written: the name, and on a second line its checksum.
        """
        pointer = self._folder / "latest"
        if not pointer.exists():
            return None
        name, *checksum = pointer.read_bytes().strip().split(b"\n")
        if (checksum and checksum != [_checksum(name)]) or not (self._folder / os.fsdecode(name)).is_dir():
            raise CheckpointError(f"{pointer}: damaged: it names no checkpoint that is here. {_OTHER}")
        return self._folder / os.fsdecode(name)

    def load(self) -> dict[str, Any] | None:
        """Returns the state of the last good checkpoint, or None if there is none yet.

        Raises:
            CheckpointError: it cannot be read.
        """
        with refusals(CheckpointError, self._folder, _OTHER):
            path = self.latest()
            return None if path is None else read_state(path)

    def _write(self, state: Mapping[str, Any], name: str) -> Path:
        found = self._found()
        serial = int(found[-1].name.split("-")[0]) + 1 if found else 0
        final = self._folder / f"{serial:06d}-{name}"  # never the name of one that is there
        temporary = self._folder / f".writing-{final.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            write_state(state, temporary)
            temporary.rename(final)
            sync_folder(self._folder)
            named = final.name.encode()
            replace_file(self._folder / "latest", b"%b\n%b\n" % (named, _checksum(named)))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _prune(self, keep: int) -> bool:
        """Removes all but the newest `keep` checkpoints; returns whether it removed any."""
        latest = self.latest()
        others = [path for path in self._found() if path != latest]
        surplus = [path for path in listed(self._folder, ".writing-*") if path.is_dir()]
        surplus += others[: max(0, len(others) - (keep - 1))]
        for path in surplus:
            shutil.rmtree(path, ignore_errors=True)
        return bool(surplus)

    def _found(self) -> list[Path]:
        """Returns the finished checkpoints, oldest first."""
        return [path for path in listed(self._folder, "[0-9]*-*") if path.is_dir()]

    def _kept(self) -> str:
        """Returns from where a run that cannot save can be resumed."""
        latest = self.latest()
        kept = f"The last good checkpoint is {latest}" if latest else "There is no earlier checkpoint"
        return f"{kept}; `robot-rl {self._command} resume={self._folder.parent}` goes on from there."


def write_state(state: Mapping[str, Any], folder: Path) -> None:
    """Writes a state into a new folder and flushes it to the disk."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, Array] = {}
    tree = _pack(dict(state), "", tensors, arrays)
    blobs = dict(zip(_FILES, (tensors_io.save(tensors), arrays_io.save(arrays)), strict=True))
    folder.mkdir(parents=True)
    for file, blob in blobs.items():
        write_synced(folder / file, blob)
    files = {file: {"bytes": len(blob), "crc32": zlib.crc32(blob)} for file, blob in blobs.items()}
    head = {"format": FORMAT, "files": files, "state": tree}
    write_synced(folder / "state.json", json.dumps(with_checksum(head)).encode())
    sync_folder(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """Reads what `write_state` wrote.

    Raises:
        CheckpointError: a file is missing, cut short, altered, or of another format.
    """
    head = read_json(folder / "state.json", CheckpointError, _OTHER)
    with refusals(CheckpointError, folder, _OTHER):
        blobs = {file: (folder / file).read_bytes() for file in _FILES}
    if head.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: checkpoint format {head.get('format')!r}, this version reads {FORMAT}. "
            "Resume with the version of robot_rl that the run's config names."
        )
    for file, blob in blobs.items():
        if head.get("files", {}).get(file) != {"bytes": len(blob), "crc32": zlib.crc32(blob)}:
            raise CheckpointError(
                f"{folder / file}: {len(blob)} bytes that do not match state.json: damaged. {_OTHER}"
            )
    try:
        tensors = tensors_io.load(blobs[_FILES[0]])
        arrays = arrays_io.load(blobs[_FILES[1]])
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: not a readable checkpoint: {error}. {_OTHER}") from error
    try:
        return _unpack(head["state"], tensors, arrays)
    except (KeyError, TypeError, ValueError) as error:  # written before there was a checksum
        raise CheckpointError(f"{folder}: damaged: state.json lacks {error!r}. {_OTHER}") from error


_OTHER = (
    "To resume from another checkpoint, write the name of its folder in `checkpoints/`, and nothing else, "
    "into `checkpoints/latest`."
)


def _checksum(name: bytes) -> bytes:
    return b"%08x" % zlib.crc32(name)


def _pack(node: Any, at: str, tensors: dict[str, torch.Tensor], arrays: dict[str, Array]) -> Any:
    """Returns the JSON form of a node, with its arrays put aside under their path."""
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, torch.Tensor):
        tensors[at] = node.detach().cpu().contiguous().clone()
        return {"$tensor": at}
    if isinstance(node, np.ndarray | np.generic):
        array = np.asarray(node)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"checkpoint{at}: cannot save an array of {array.dtype}; use numbers or lists")
        arrays[at] = np.array(array, order="C")
        return {"$array": at}
    if isinstance(node, Mapping):
        items = [(key, _pack(value, f"{at}/{key}", tensors, arrays)) for key, value in node.items()]
        if all(type(key) is str for key, _ in items) and not _KEYS & {key for key, _ in items}:
            return dict(items)
        return {"$items": [[key, value] for key, value in items]}
    if isinstance(node, list | tuple):
        packed = [_pack(value, f"{at}/{i}", tensors, arrays) for i, value in enumerate(node)]
        return {"$tuple": packed} if isinstance(node, tuple) else packed
    raise TypeError(f"checkpoint{at}: cannot save a {type(node).__name__}; use tensors, arrays, numbers, str")


def _unpack(node: Any, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, Array]) -> Any:
    if isinstance(node, list):
        return [_unpack(value, tensors, arrays) for value in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((key, value),) = node.items()
        if key == "$tensor":
            return tensors[value]
        if key == "$array":
            return arrays[value]
        if key == "$tuple":
            return tuple(_unpack(item, tensors, arrays) for item in value)
        if key == "$items":
            return {name: _unpack(item, tensors, arrays) for name, item in value}
    return {key: _unpack(value, tensors, arrays) for key, value in node.items()}
