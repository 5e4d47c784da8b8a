"""Which episodes of a store are in its dataset already."""

from __future__ import annotations

import json
from pathlib import Path

from robot_rl.core.files import listed


def sealed_episodes(folder: Path) -> dict[int, list[int]]:
    """Returns store episode -> episodes of the dataset: one for each of its parts, in order."""
    paths = listed(folder / "meta/episodes", "*/*.parquet")
    if not paths or not (folder / "meta/info.json").is_file():
        return {}
    import pyarrow.parquet as pq  # only where there is a dataset: a recorder starts without it

    # meta/info.json is replaced last: an episode beyond its total was not sealed to the end.
    total = int(json.loads((folder / "meta/info.json").read_text())["total_episodes"])
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
