"""Which episodes of a store are in its dataset already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robot_rl.core.files import listed

_INFO = "meta/info.json"


def read_info(folder: Path) -> dict[str, Any] | None:
    """Returns what meta/info.json says of the dataset of a store; None where nothing was sealed.

    Raises:
        DatasetError: it is damaged, or missing beside data.
    """
    if not (folder / _INFO).is_file() and not (folder / "data").is_dir():
        return None
    from robot_rl.data.lerobot import index  # only where there is a dataset: a recorder starts without it

    return index.read_info(folder)


def sealed_episodes(folder: Path) -> dict[int, list[int]]:
    """Returns store episode -> episodes of the dataset: one for each of its parts, in order."""
    paths, info = listed(folder / "meta/episodes", "*/*.parquet"), read_info(folder)
    if not paths or info is None:
        return {}
    from robot_rl.data.lerobot.checksums import Checksums
    from robot_rl.data.lerobot.index import read_table

    # meta/info.json is replaced last: an episode beyond its total was not sealed to the end.
    total, sums = info["total_episodes"], Checksums(folder)
    sealed: dict[int, list[int]] = {}
    for path in paths:
        sums.require(str(path.relative_to(folder)))
        table = read_table(path, ("episode_index", "store_episode").__contains__)
        if "store_episode" not in table.column_names:
            continue
        index, episode = (table[name].to_pylist() for name in ("episode_index", "store_episode"))
        for at, number in zip(index, episode, strict=True):
            if at < total and number is not None and number >= 0:
                sealed.setdefault(number, []).append(at)
    return sealed
