"""Which episodes of a store are in its dataset already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import listed, read_json

_INFO = "meta/info.json"


def read_info(folder: Path) -> dict[str, Any] | None:
    """Returns what meta/info.json says of the dataset of a store; None where nothing was sealed.

    Raises:
        DatasetError: it is damaged.
    """
    path, remedy = folder / _INFO, "Restore it from a copy; the journal beside it is whole."
    if not path.is_file():
        return None
    info = read_json(path, DatasetError, remedy)
    if type(info.get("total_episodes")) is not int or not isinstance(info.get("features"), dict):
        raise DatasetError(f"{path}: damaged: it lacks total_episodes or features. {remedy}")
    return info


def sealed_episodes(folder: Path) -> dict[int, list[int]]:
    """Returns store episode -> episodes of the dataset: one for each of its parts, in order."""
    paths, info = listed(folder / "meta/episodes", "*/*.parquet"), read_info(folder)
    if not paths or info is None:
        return {}
    import pyarrow.parquet as pq  # only where there is a dataset: a recorder starts without it

    # meta/info.json is replaced last: an episode beyond its total was not sealed to the end.
    total = info["total_episodes"]
    sealed: dict[int, list[int]] = {}
    for path in paths:
        with pq.ParquetFile(path) as file:  # read_table takes three times as long
            if "store_episode" not in file.schema_arrow.names:
                continue
            table = file.read(["episode_index", "store_episode"])
        index, episode = (table[name].to_pylist() for name in table.column_names)
        for at, number in zip(index, episode, strict=True):
            if at < total and number is not None and number >= 0:
                sealed.setdefault(number, []).append(at)
    return sealed
