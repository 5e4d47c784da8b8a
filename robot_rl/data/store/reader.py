"""Reads a store, also while it is written: its sealed episodes and those of the journal.

T steps of an episode, E episodes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.refusal import refusing
from robot_rl.data.episode import Array, Episode, EpisodeSource, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.finished import known_losses, missing_segments
from robot_rl.data.store.frames import JournalFrames, rows_of
from robot_rl.data.store.index import EpisodeIndex, JournalIndex
from robot_rl.data.store.journal import Problem, Record
from robot_rl.data.store.layout import is_store, read_layout
from robot_rl.data.store.lock import is_being_written
from robot_rl.data.store.sealed import read_info, sealed_episodes

if TYPE_CHECKING:
    from robot_rl.data.lerobot.reader import Dataset


logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """The place of an episode."""

    sealed: int | None
    """Number in the dataset; None: it is in the journal."""
    episode: int
    """Store episode; -1 if it was never in the journal."""
    part: int = 0
    """Number of the part, where missing steps split the episode."""


class StoreReader:
    """An `EpisodeSource` over a store. Numbers of episodes stay the same while it is open."""

    @refusing(DatasetError)
    def __init__(self, folder: str | Path, *, check_all: bool = False) -> None:
        """Makes an index from the headers of the journal and the meta files of the dataset.

        Args:
            check_all: also read every record and leave damaged ones out: their steps are missing, and a
                step without its picture sees the one before. Otherwise reading such an episode raises
                `DatasetError`. Either way, a warning names known damage.

        Raises:
            DatasetError: no store, or one of a later format.
        """
        self.folder = Path(folder)
        self.layout = read_layout(self.folder)
        self._is_tolerant = check_all
        self.index = JournalIndex(self.folder, check_all=check_all)
        self._missing = missing_segments(self.folder, self.index.torn)
        self.dataset: Dataset | None = None
        """The sealed part, None where nothing was sealed yet."""
        self._entries: list[_Entry] = []
        self._places: dict[tuple[int, int], int] = {}
        self._num_sealed = 0
        self._sealed: dict[int, list[int]] = {}
        self._take_in()
        self.meta: EpisodesMeta = self.layout.meta
        self.features: Mapping[str, Feature] = self.layout.features
        self._warn()

    def __len__(self) -> int:
        return len(self._entries)

    @refusing(DatasetError)
    def refresh(self) -> None:
        """Reads what a writer flushed or sealed since."""
        self.index.refresh()
        self._take_in()

    def lengths(self) -> NDArray[np.int64]:
        """Returns the steps of every episode, (E,)."""
        sealed = self.dataset.lengths() if self.dataset is not None else np.zeros(0, np.int64)
        found = [
            int(sealed[entry.sealed]) if entry.sealed is not None else sum(r.c for r in self._part(entry))
            for entry in self._entries
        ]
        return np.array(found, np.int64)

    @refusing(DatasetError)
    def read(self, episode: int) -> Episode:
        """Returns an episode; raises `DatasetError` if a record of it is damaged."""
        entry = self._entries[episode]
        if entry.sealed is not None:
            assert self.dataset is not None
            return self.dataset.read(entry.sealed)
        index, records = self.index.episodes[entry.episode], self._part(entry)
        columns = self._read_columns(records, list(self.layout.columns))
        is_last = records[-1] is index.steps[-1]
        words = self.words(episode)
        obs: dict[str, Any] = {}
        stamps: dict[str, Array] = {}
        final, final_pictures = self._final(index) if is_last else ({}, {})
        for key, feature in self.features.items():
            if not feature.is_picture:
                obs[key] = columns[f"obs.{key}"]
                continue
            pictures = self._pictures(index, key)
            rows = self._rows_of(index, key, columns[f"picture.{key}"], pictures)
            obs[key] = JournalFrames(self.index, pictures, rows, feature.shape)
            taken = np.array([record.c for record in pictures], np.int64)
            stamps[key] = taken[rows] if len(taken) else np.full(len(rows), -1)
            if final and pictures:
                last = self._rows_of(index, key, np.array([final_pictures[key]]), pictures)
                final[key] = JournalFrames(self.index, pictures, last, feature.shape)[0]
        return Episode(
            meta=_with_instruction(self.layout.meta, words["instruction"]),
            obs=obs,
            final_obs=final,
            picture_stamp_ns=stamps,
            device=words["device"],
            **{name: value for name, value in columns.items() if "." not in name},
        )

    def columns(self, names: Iterable[str], episodes: Iterable[int] | None = None) -> dict[str, Array]:
        """Returns numeric columns of journal episodes, one after the other, (sum of T, ...).

        Args:
            names: `obs.<key>`, `action`, `base_action`, `reward`, `terminated`, `truncated`,
                `success`, `source`, `policy_version` or `stamp_ns`.
            episodes: None: all. Sealed ones are read through `dataset`.
        """
        chosen = range(len(self)) if episodes is None else episodes
        records = [r for i in chosen if self._entries[i].sealed is None for r in self._part(self._entries[i])]
        return self._read_columns(records, list(names))

    def sealed(self, episode: int) -> int | None:
        """Returns the number of an episode in `dataset`, None while it is in the journal."""
        return self._entries[episode].sealed

    def store_episode(self, episode: int) -> int:
        """Returns the number that the writer gave an episode; -1 if it was never in the journal."""
        return self._entries[episode].episode

    def first_step(self, episode: int) -> int:
        """Returns the first step of an episode: not 0 where the steps before it are lost."""
        entry = self._entries[episode]
        return 0 if entry.sealed is not None else self._part(entry)[0].b

    def words(self, episode: int) -> dict[str, str]:
        """Returns instruction and device of a journal episode, without reading its steps.

        Where repair took out the record of them, those of the store.
        """
        index = self.index.episodes[self._entries[episode].episode]
        if index.begin is None:
            self._refuse_guesses(index, "its beginning, with instruction and device,")
            return {"instruction": self.layout.meta.instruction, "device": ""}
        return json.loads(self.index.payload(index.begin))

    def of_lane(self, lane: int) -> list[int]:
        """Returns the episodes of a lane that are in the journal, in the order in which they began."""
        mine = {number for number, episode in self.index.episodes.items() if episode.lane == lane}
        return [i for i, entry in enumerate(self._entries) if entry.sealed is None and entry.episode in mine]

    def problems(self) -> list[Problem]:
        """Returns what cannot be read or is missing, unless a repair noted it."""
        return [*self._missing, *self.index.problems, *self.index.gaps(self.lost())]

    def lost(self) -> list[Problem]:
        """Returns what earlier crashes and repairs have cost."""
        return known_losses(self.folder)

    # --- helpers -----------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Adds new episodes at the end, and notes those that moved into the dataset."""
        info = read_info(self.folder)
        total = 0 if info is None else info["total_episodes"]
        if total > self._num_sealed:
            from robot_rl.data.lerobot.reader import Dataset  # only where something is sealed

            if self.dataset is None:
                self.dataset = Dataset(self.folder)
            else:
                self.dataset.refresh()
            self._sealed = sealed_episodes(self.folder)
            parts = {
                at: (episode, part) for episode, ats in self._sealed.items() for part, at in enumerate(ats)
            }
            for at in range(self._num_sealed, total):
                key = parts.get(at, (-1, 0))
                entry = _Entry(at, *key)
                if key in self._places:
                    self._entries[self._places[key]] = entry
                else:
                    self._add(entry)
            self._num_sealed = total
        for episode in sorted(self.index.touched):
            for part in range(len(self.index.episodes[episode].parts())):
                if (episode, part) not in self._places:
                    self._add(_Entry(None, episode, part))
        self.index.touched.clear()
        done = self.index.episodes.keys() & self._sealed.keys()
        if done:
            self.index.drop(done - {entry.episode for entry in self._entries if entry.sealed is None})

    def _add(self, entry: _Entry) -> None:
        if entry.episode >= 0:
            self._places[entry.episode, entry.part] = len(self._entries)
        self._entries.append(entry)

    def _part(self, entry: _Entry) -> list[Record]:
        return self.index.episodes[entry.episode].parts()[entry.part]

    def _read_columns(self, records: list[Record], names: list[str]) -> dict[str, Array]:
        for name in names:
            if name not in self.layout.columns:
                raise DatasetError(
                    f"{self.folder}: no column {name!r}; there are {sorted(self.layout.columns)}."
                )
        steps = sum(record.c for record in records)
        out = {
            name: np.empty((steps, *feature.shape), feature.dtype)
            for name, feature in self.layout.columns.items()
            if name in names
        }
        at = 0
        for record in records:
            found = self.layout.unpack(self.index.payload(record), record.c)
            for name, values in out.items():
                values[at : at + record.c] = found[name]
            at += record.c
        return out

    def _final(self, index: EpisodeIndex) -> tuple[dict[str, Any], dict[str, int]]:
        if index.end is None or not index.end.c:
            return {}, {}
        obs, pictures = self.layout.unpack_final(self.index.payload(index.end))
        return dict(obs), pictures

    def _rows_of(
        self, index: EpisodeIndex, key: str, wanted: NDArray[np.int64], pictures: list[Record]
    ) -> NDArray[np.int64]:
        """Returns the rows of `pictures` that steps saw."""
        if not {record.b for record in pictures}.issuperset(wanted.tolist()):
            self._refuse_guesses(index, f"a picture of {key}")
        return rows_of(wanted, pictures)

    def _refuse_guesses(self, index: EpisodeIndex, lost: str) -> None:
        """Raises while damage is not repaired; after a repair the next best replaces what is lost."""
        if not self._is_tolerant and (self._missing or self.index.problems):
            raise DatasetError(
                f"{self.folder}: episode {index.episode}: {lost} is lost. `robot-rl replay repair` notes "
                "that; the rest of the episode can be read then."
            )

    def _warn(self) -> None:
        """Warns of damage; an unfinished write is none while a process writes."""
        live = bool(self.index.torn) and is_being_written(self.folder)
        found = [problem for problem in self.problems() if not (live and problem.kind == "torn")]
        if found:
            logger.warning(
                "store %s: %d problems, the first: %s `robot-rl replay verify %s` shows all.",
                self.folder,
                len(found),
                found[0],
                self.folder,
            )

    def _pictures(self, index: EpisodeIndex, key: str) -> list[Record]:
        camera = self.layout.cameras.index(key)
        return [record for record in index.pictures if record.d == camera]


def open_source(path: str | Path, **reading: Any) -> EpisodeSource:
    """Opens a store, or a LeRobotDataset (v3 or v2.1).

    Args:
        path: its folder.
        reading: options of `Dataset`: `episodes`, `cameras`, `on_damage`, `rename`.

    Raises:
        DatasetError: it is neither, or damaged, or a store with `reading` and episodes in its journal.
    """
    folder = Path(path)
    if is_store(folder):
        store = StoreReader(folder)
        if not reading:
            return store
        refuse_journal(store, reading)
    from robot_rl.data.lerobot.reader import Dataset  # only where it is needed

    return Dataset(folder, **reading)


def refuse_journal(store: StoreReader, words: Iterable[str]) -> None:
    """Refuses options of `Dataset` for a store with episodes in its journal; names the options."""
    if store.dataset is None or any(store.sealed(episode) is None for episode in range(len(store))):
        raise DatasetError(
            f"{store.folder}: {', '.join(words)} is for datasets, and episodes of this store are in its "
            f"journal. Seal them first: robot-rl replay seal {store.folder}"
        )


def _with_instruction(meta: EpisodesMeta, instruction: str) -> EpisodesMeta:
    return meta if meta.instruction == instruction else dataclasses.replace(meta, instruction=instruction)
