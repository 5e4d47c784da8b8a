"""An unfinished dataset: its episodes are on the disk batch by batch, and it gets its place when complete.

    .collecting-NAME/settings.json       settings of the episodes: a run with others is refused
    .collecting-NAME/lock                held by the process that collects
    .collecting-NAME/episodes/           a dataset: episodes within the limits, in the order of their seeds
    .collecting-NAME/begun/000000.json   facts about the episodes of a batch; written after them, so a batch
                                         counts when this file exists
    .collecting-NAME/whole/              the new dataset while it is copied; then it becomes NAME

A batch that does not count is played again, with the same seeds and so the same episodes. Episodes of it that
are on the disk are not written twice, so the dataset equals that of an uninterrupted collection.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.files import listed, make_folder, read_json, sync_folder, write_json
from robot_rl.core.lock import HeldError, ProcessLock
from robot_rl.core.refusal import refusals, refusing
from robot_rl.data.keep import Facts

if TYPE_CHECKING:
    from robot_rl.data.episode import Episode
    from robot_rl.data.lerobot.writer import DatasetWriter

COLLECTED = "meta/collected.json"
"""Of a dataset: the actor, the refused episodes, and the settings."""
_SETTINGS, _LOCK, _BEGUN, _EPISODES, _WHOLE = "settings.json", "lock", "begun", "episodes", "whole"


def unfinished(out: Path) -> Path:
    """Returns the folder of the episodes until the dataset is complete.

    Raises:
        ConfigError: the dataset has no name from which to make one.
    """
    if out.name in ("", ".."):
        out = Path(os.path.abspath(out))
    if not out.name:
        raise ConfigError(
            f"out: got {str(out)!r}, allowed: a folder that has a name, such as demos/pick_cube. Its "
            "episodes are kept next to it until it is whole."
        )
    return out.with_name(f".collecting-{out.name}")


def check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if episodes of the dataset `out` were begun with other settings.

    Args: settings: name -> JSON value; those that one side lacks are not compared.
    """
    folder = unfinished(out)
    if not _is_begun(folder):
        return
    begun = read_json(folder / _SETTINGS, DatasetError, _how_to_restart(folder))
    names = [name for name, value in settings.items() if begun.get(name, value) != value]
    if names:
        got, wanted = (_spelled({name: of[name] for name in names}) for of in (settings, begun))
        raise ConfigError(
            f"collect: got {got}, but the episodes in {folder} were begun with {wanted}. Give these to go "
            f"on with them, or give another out=. {_how_to_restart(folder)}"
        )


def is_published(out: Path, settings: Mapping[str, Any]) -> bool:
    """Returns whether a dataset of these settings is in its place, and its unfinished folder still exists."""
    if not (unfinished(out) / _SETTINGS).is_file() or not (out / COLLECTED).is_file():
        return False
    return read_json(out / COLLECTED, DatasetError, _how_to_restart(out)).get("settings") == settings


@refusing(DatasetError, kept="The dataset is whole.")
def remove(out: Path) -> None:
    """Removes the unfinished folder of a dataset; if this is killed, `is_published` stays true."""
    sync_folder(out.parent)
    folder = unfinished(out)
    _clear(folder)
    for name in (_LOCK, _SETTINGS):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class UnfinishedCollection:
    """The episodes of a dataset until it is complete, locked by one process."""

    def __init__(
        self, out: Path, settings: Mapping[str, Any], *, images: Literal["png", "video"] = "png"
    ) -> None:
        """Begins a collection, or goes on with the one of the same settings.

        Raises:
            ConfigError: it was begun with other settings; see `check_settings`.
            DatasetError: it is damaged, or another process collects it.
        """
        self.out, self.folder = out, unfinished(out)
        self.batches: list[Facts] = []
        """Facts about all episodes that ended, by batch."""
        self.num_kept = 0
        """Number of episodes within the limits, of these batches."""
        self._images: Literal["png", "video"] = images
        self._is_whole = False
        self._writer: DatasetWriter | None = None
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        make_folder(self.folder)
        self._lock = _lock(self.folder)
        try:
            check_settings(out, settings)
            if not _is_begun(self.folder):
                _clear(self.folder)
                write_json(self.folder / _SETTINGS, settings, is_checked=True)
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> UnfinishedCollection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.kept())
        self.close()

    def kept(self) -> str:
        """Returns a sentence on what of the collection is on the disk."""
        if self._is_whole:
            return f"The dataset is whole: {self.out}"
        begun = sum(len(facts) for facts in self.batches)
        if not begun:
            return "Nothing was kept: no batch of episodes had ended."
        return (
            f"{self.num_kept:,} of the {begun:,} episodes that have ended are kept in {self.folder}; "
            "the same command goes on with them, also with other episodes=, attempts= and shares of keep."
        )

    def add(self, facts: Facts, episodes: Sequence[Episode]) -> None:
        """Writes a batch to the disk: `facts` of all its episodes, and the `episodes` within the limits."""
        if episodes:
            self._write(episodes)
        path = self._batch(len(self.batches))
        make_folder(path.parent)
        columns = {name: values.tolist() for name, values in vars(facts).items()}
        write_json(path, columns | {"kept": self.num_kept + len(episodes)}, is_checked=True)
        self.num_kept += len(episodes)
        self.batches.append(facts)

    def forget(self, first: int) -> None:
        """Forgets the batches from this one on, so that they are played again."""
        del self.batches[first:]
        self.num_kept = self._kept_until(first)

    def publish(self, chosen: Sequence[int], collected: Mapping[str, Any]) -> None:
        """Makes the dataset of the `chosen` kept episodes (ascending), with `collected` as `COLLECTED`."""
        from robot_rl.data.lerobot.checksums import record  # pyarrow
        from robot_rl.data.lerobot.edit import filter as copy_chosen
        from robot_rl.data.lerobot.reader import Dataset

        for path in listed(self.folder, f"*{_WHOLE}"):  # of an attempt that was cut short
            shutil.rmtree(path)
        whole = self.folder / _WHOLE
        copy_chosen(Dataset(self.folder / _EPISODES, backend="pyav"), whole, episodes=chosen)
        write_json(whole / COLLECTED, collected, is_checked=True)
        record(whole)
        if self.out.exists():
            raise DatasetError(f"{self.out}: exists by now: another process made it. Remove or rename it.")
        whole.rename(self.out)
        sync_folder(self.out.parent)
        self._is_whole = True

    def close(self) -> None:
        """Releases the lock; removes the folder if the dataset is in its place, or no batch counts."""
        if self._writer is not None:
            self._writer.close()
        try:
            if self._is_whole:
                remove(self.out)
            elif not _is_begun(self.folder):
                shutil.rmtree(self.folder, ignore_errors=True)
                for path in self._made[1:]:
                    with contextlib.suppress(OSError):  # another process uses it by now
                        path.rmdir()
        finally:
            self._lock.release()

    def _read(self) -> None:
        while (path := self._batch(len(self.batches))).exists():
            columns = read_json(path, DatasetError, _how_to_restart(self.folder))
            self.batches.append(
                Facts(
                    success=np.array(columns["success"], np.bool_),
                    steps=np.array(columns["steps"], np.int64),
                    roughness=np.array(columns["roughness"], np.float64),
                )
            )
        self.num_kept = self._kept_until(len(self.batches))

    def _kept_until(self, batch: int) -> int:
        if batch == 0:
            return 0
        return int(read_json(self._batch(batch - 1), DatasetError, _how_to_restart(self.folder))["kept"])

    def _write(self, episodes: Sequence[Episode]) -> None:
        """Adds episodes to those on the disk; some may be there after a kill."""
        from robot_rl.data.lerobot.writer import DatasetWriter  # pyarrow

        if self._writer is None:
            features, folder = episodes[0].features(), self.folder / _EPISODES
            self._writer = DatasetWriter(folder, episodes[0].meta, features, images=self._images)
        there = len(self._writer) - self.num_kept
        if there < 0:
            raise DatasetError(
                f"{self.folder}: {len(self._writer)} episodes are there, of {self.num_kept} that were kept. "
                f"{_how_to_restart(self.folder)}"
            )
        self._writer.write_all(episodes[there:])

    def _batch(self, number: int) -> Path:
        return self.folder / _BEGUN / f"{number:06d}.json"


@contextlib.contextmanager
def collecting(
    out: Path, settings: Mapping[str, Any], *, images: Literal["png", "video"] = "png"
) -> Generator[UnfinishedCollection]:
    """Opens an `UnfinishedCollection`; an error that ends the block gets a note on what is kept.

    Raises:
        DatasetError: the disk or the memory refused something.
    """
    with (
        refusals(DatasetError, out, sure=True),
        UnfinishedCollection(out, settings, images=images) as into,
        refusals(DatasetError, out, sure=True),  # this error gets the note on what is kept
    ):
        yield into


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings flat, with dots in their names, and with the values that JSON reads back."""
    found: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(settings)).items():
        inner = as_json(value) if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": of for key, of in inner.items()} if inner else {name: value}
    return found


def _spelled(settings: Mapping[str, Any]) -> str:
    """Returns settings as they are typed on a command line."""
    return ", ".join(f"{name}={json.dumps(value).strip(chr(34))}" for name, value in settings.items())


def _how_to_restart(folder: Path) -> str:
    return f"To begin again, remove them: rm -r {shlex.quote(str(folder))}"


def _lock(folder: Path) -> ProcessLock:
    try:
        return ProcessLock(folder / _LOCK, note="robot-rl collect")
    except HeldError as held:
        raise DatasetError(
            f"{folder}: {held} collects these episodes now. Wait for it, or give another out=."
        ) from held


def _is_begun(folder: Path) -> bool:
    return (folder / _SETTINGS).is_file() and bool(listed(folder / _BEGUN, "[0-9]*.json"))


def _clear(folder: Path) -> None:
    """Removes batches and episodes that do not count: batches before their episodes."""
    for path in listed(folder, "*"):
        if path.is_dir():
            shutil.rmtree(path)
