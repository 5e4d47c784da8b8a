"""The episodes of a store that are in its dataset already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_INFO = "meta/info.json"


def read_info(folder: Path) -> dict[str, Any] | None:
    """Returns meta/info.json of the dataset of a store, None where nothing was sealed.

    Raises:
        DatasetError: it is damaged, or it is missing and data/ is there.
    """
    if not (folder / _INFO).is_file() and not (folder / "data").is_dir():
        return None
    from robot_rl.data.lerobot import index  # only where there is a dataset: a recorder starts without it

    return index.read_info(folder)


def sealed_episodes(folder: Path) -> dict[int, list[int]]:
    """Returns store episode -> episodes of the dataset, one for each of its parts, in order."""
    if (info := read_info(folder)) is None:
        return {}
    from robot_rl.data.lerobot.checksums import Checksums
    from robot_rl.data.lerobot.index import episode_tables

    sealed: dict[int, list[int]] = {}
    wanted = ("episode_index", "store_episode").__contains__
    for table in episode_tables(folder, Checksums(folder), wanted):
        if "store_episode" not in table.column_names:
            continue
        index, episode = (table[name].to_pylist() for name in ("episode_index", "store_episode"))
        for at, number in zip(index, episode, strict=True):
            # meta/info.json is replaced last: an episode beyond its total was not sealed to the end.
            if at < info["total_episodes"] and number is not None and number >= 0:
                sealed.setdefault(number, []).append(at)
    return sealed
