"""Which episodes of a store are in its dataset already."""

from __future__ import annotations

import json
from pathlib import Path


def sealed_episodes(folder: Path) -> dict[int, int]:
    """Returns store episode -> episode of the dataset."""
    paths = sorted((folder / "meta/episodes").rglob("*.parquet"))
    if not paths or not (folder / "meta/info.json").is_file():
        return {}
    import pyarrow.parquet as pq  # only where there is a dataset: a recorder starts without it

    # meta/info.json is replaced last: an episode beyond its total was not sealed to the end.
    total = int(json.loads((folder / "meta/info.json").read_text())["total_episodes"])
    sealed: dict[int, int] = {}
    for path in paths:
        if "store_episode" in pq.read_schema(path).names:
            table = pq.read_table(path, columns=["episode_index", "store_episode"])
            index, episode = (table[name].to_pylist() for name in table.column_names)
            sealed |= {
                e: i for i, e in zip(index, episode, strict=True) if i < total and e is not None and e >= 0
            }
    return sealed
