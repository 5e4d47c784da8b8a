"""Writes a dataset of version 2.1 as version 3: files are copied, no video is encoded again."""

from __future__ import annotations

from pathlib import Path

from robot_rl.core.errors import DatasetError
from robot_rl.core.refusal import refusing
from robot_rl.data.lerobot.copying import Part, copy_episodes
from robot_rl.data.lerobot.edit import new_folder, refuse_inside
from robot_rl.data.lerobot.foreign import say_left_out
from robot_rl.data.lerobot.opening import open_index
from robot_rl.data.lerobot.reader import Dataset


@refusing(DatasetError, kept="The original is whole.")
def upgrade(given: str | Path | Dataset, out: str | Path) -> Path:
    """Writes a dataset of version 2.1 as version 3, one data and video file for each episode; returns `out`.

    Episodes and rows get new numbers from 0. Statistics of numbers are computed again (version 2.1 has no
    quantiles); those of pictures are kept. An open dataset is written as it is read, with its names.

    Raises:
        DatasetError: not version 2.1, `out` exists, or damage.
    """
    index = given.index if isinstance(given, Dataset) else open_index(Path(given))
    if index.info["codebase_version"] != "v2.1":
        raise DatasetError(
            f"{index.folder}: codebase_version {index.info['codebase_version']!r}, allowed: 'v2.1'. "
            "It needs no upgrade."
        )
    refuse_inside(out, index.folder)
    with new_folder(Path(out)) as new:
        copy_episodes([Part(index=index, episodes=range(len(index)))], new, apart=True, keep_texts=True)
    say_left_out(index)
    return Path(out)
