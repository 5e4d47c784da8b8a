"""Reads our own files of a dataset: final observations, and arrays such as depth.

LeRobot's format has no place for them. Our format 1 has one file for the whole dataset, format 2 one for each
data file.
T control steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import listed
from robot_rl.data.episode import Feature
from robot_rl.data.lerobot.decode import decode_pictures
from robot_rl.data.lerobot.index import NOT_UNDERSTOOD, DatasetIndex, first_line, not_understood
from robot_rl.data.lerobot.layout import ARRAYS, FINAL, OWN, feature_name, file_number, place
from robot_rl.data.lerobot.tables import Tables, memory_dtype, numbers

Array = NDArray[Any]

_ONE_FILE = "final/observations.parquet"


class OwnFiles:
    """The files that only robot_rl writes; a dataset of others has none."""

    def __init__(self, index: DatasetIndex, tables: Tables) -> None:
        path = index.folder / OWN
        self.own: dict[str, Any] = index.sums.json(OWN) if path.is_file() else {}
        """meta/robot_rl.json"""
        self._index = index
        self._tables = tables
        self._observations: dict[str, Feature] | None = None
        try:
            named = self.own.get("features", {})
            self.names: Mapping[str, str] = {name: str(key) for name, key in named.items()}
            """LeRobot's name -> our key of the observations in its files."""
            if self.own.get("format", 1) > 1:
                self._observations = {
                    key: Feature(str(np.dtype(entry["dtype"])), tuple(map(int, entry["shape"])))
                    for key, entry in self.own["observations"].items()
                }
        except NOT_UNDERSTOOD as error:
            raise DatasetError(not_understood(path, error)) from error

    def features(self) -> dict[str, Feature]:
        """Returns the observations as they were recorded; for format 1, those that lie in arrays."""
        if self._observations is None:
            return {key: Feature(str(v.dtype), v.shape[1:]) for key, v in self._whole("steps").items()}
        return dict(self._observations)

    def arrays(self) -> list[str]:
        """Returns the observations of the present format that lie in arrays."""
        held = self._observations or {}
        return [key for key, f in held.items() if len(f.shape) > 1 and not f.is_picture]

    def final_row(self, episode: int) -> Any:
        """Returns the row of an episode in `final/` as a table, None if there is none."""
        if self._observations is None:
            return None
        file = self._file(FINAL, episode)
        return self._tables.rows(file, self._row(file, episode), 1, None)

    def steps(self, key: str, episode: int, first: int) -> Array:
        """Returns an array of an episode, mapped from its file, (T, ...).

        Args: episode: place in the index; first: its first row in the whole dataset, for format 1.
        """
        name, count = f"arrays/{key}.steps.npy", int(self._index.lengths[episode])
        if self._observations is not None:
            name, first = self._file(ARRAYS, episode, key=key), int(self._index.first[episode])
        path = self._index.folder / name
        if not path.is_file():
            raise DatasetError(f"{path}: this array is missing. Copy it again, or drop its episodes.")
        self._index.sums.require(name)
        found = load_array(path)[first : first + count]
        wanted = (count, *self._observations[key].shape) if self._observations else (count, *found.shape[1:])
        if found.shape != wanted:
            raise DatasetError(
                f"{path}: rows {first} to {first + count - 1} have shape {found.shape}, allowed {wanted}. "
                "Copy it again, or drop its episodes."
            )
        return found

    def final(self, episode: int) -> dict[str, Any]:
        """Returns the observation after the last step of an episode; empty if unknown."""
        number = int(self._index.episode[episode])
        if self._observations is None:
            return self._final_of_one_file(number)
        file = self._file(FINAL, episode)
        columns = {feature_name(key, feature): key for key, feature in self._observations.items()}
        row = self._tables.rows(file, self._row(file, episode), 1, list(columns))
        final: dict[str, Any] = {}
        for name, key in columns.items():
            feature = self._observations[key]
            if not row[name][0].is_valid:
                continue
            if feature.is_picture:
                final[key] = decode_pictures([row[name][0].as_py()["bytes"]])[0]
            else:
                flat = numbers(row[name], (-1,))[0]
                final[key] = flat.astype(memory_dtype(name, feature.dtype)).reshape(feature.shape)
        return final

    def _row(self, file: str, episode: int) -> int:
        """Returns the row of an episode in its file of `final/`: rows are in the order of episodes."""
        first = self._tables.rows(file, 0, 1, ["episode_index"])["episode_index"][0].as_py()
        return int(self._index.episode[episode]) - first

    def _file(self, template: str, episode: int, **names: str) -> str:
        """Returns our own file with the number of the data file of an episode."""
        data = Path(self._index.files[self._index.file[episode]])
        return place(template, file_number(data), **names)

    def _whole(self, part: str) -> dict[str, Array]:
        suffix = f".{part}.npy"
        paths = listed(self._index.folder / "arrays", f"*{suffix}")
        return {path.name.removesuffix(suffix): load_array(path) for path in paths}

    def _final_of_one_file(self, number: int) -> dict[str, Any]:
        final: dict[str, Any] = {key: values[number] for key, values in self._whole("final").items()}
        if (self._index.folder / _ONE_FILE).is_file():
            row = self._tables.rows(_ONE_FILE, number, 1, list(self.names))
            for name in row.column_names:
                feature = self._index.features[name]
                if feature["dtype"] == "image":
                    final[self.names[name]] = decode_pictures([row[name][0].as_py()["bytes"]])[0]
                else:
                    final[self.names[name]] = numbers(row[name], feature["shape"])[0]
        return final


def load_array(path: Path) -> Array:
    """Maps a .npy file; raises `DatasetError` if its header is damaged, or the file is too short."""
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError, SyntaxError) as error:
        raise DatasetError(
            f"{path}: no readable array ({first_line(error)}). Copy it again, or drop its episodes."
        ) from error
