"""What of a dataset would be lost if its episodes were recorded anew, as robot_rl records them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from robot_rl.data.lerobot.copying import ENTRIES, PLACED, PLACES, episode_rows
from robot_rl.data.lerobot.damage import spans
from robot_rl.data.lerobot.foreign import foreign_files, to_drop
from robot_rl.data.lerobot.index import columns_of
from robot_rl.data.lerobot.layout import INFO
from robot_rl.data.lerobot.reader import Dataset

CLOCK = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_EPISODE = (*PLACED, "device")
_OURS = ("action", "base_action", "source", "policy_version", "stamp_ns")
_ENDS = ("next.reward", "next.done", "next.terminated", "next.truncated", "next.success")


def is_recorded(name: str) -> bool:
    """Returns whether robot_rl records such a column of its own, and knows its value where it is missing."""
    return name in (*_OURS, *_ENDS) or name.startswith("camera_stamp_ns.")


def losses(dataset: Dataset, episodes: Sequence[int]) -> dict[str, str]:
    """Returns name -> what it is, of everything in these episodes that an `Episode` has no place for."""
    found: dict[str, str] = {}
    index = dataset.index
    files = [index.files[number] for number in np.unique(index.file[list(episodes)])]
    columns = dict.fromkeys([*index.features, *(name for file in files for name in columns_of(index, file))])
    kept = {*CLOCK, *dataset.names.values()}
    for name in columns:
        if name not in kept and not is_recorded(name):
            found[name] = f"column {name!r}"
    for name in episode_rows(index).column_names:
        if name not in _EPISODE and not name.startswith(PLACES):
            found[name] = f"column {name!r} of meta/episodes"
    found |= {name: f"file {name}" for name in to_drop(index, foreign_files(index))}
    found |= {name: f"entry {name!r} of {INFO}" for name in index.info if name not in ENTRIES}
    if len(index.info.get("splits") or ()) > 1:
        found["splits"] = f"the splits of {INFO}"
    several = [e for e in episodes if _num_tasks(dataset, e) > 1]
    if several:
        which = spans(index.episode[several].tolist())
        found["task_index"] = f"all instructions but the first of episodes {which} ('task_index')"
    return found


def _num_tasks(dataset: Dataset, episode: int) -> int:
    rows = dataset.rows(episode)
    return len(np.unique(rows["task_index"])) if "task_index" in rows else 1


def refused(found: dict[str, str], drop: Collection[str], why: str, at: str) -> str | None:
    """Returns what to say of losses that nobody asked for; None where there are none."""
    lost = [name for name in found if name not in drop]
    if not lost:
        return None
    return (
        f"{at}: {why}, which has no place for {', '.join(found[name] for name in lost)}. Leave images= and "
        f"codec= out where they are given, or say what may be lost: drop={','.join([*drop, *lost])}"
    )
