"""Selects what of a dataset is read, and under which names: features, episodes and cameras.

It also finds all names that are not LeRobot's, and proposes one for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from robot_rl.core.errors import DatasetError, nearest
from robot_rl.data.lerobot.index import STATE, DatasetIndex, VideoSpans, columns_of

VIDEOS = "videos"
_IMAGES = "observation.images."
_STATE = re.compile(
    r"(observations?[./])?(states?|qpos|joint_positions?|joint_states?|proprio)", re.IGNORECASE
)
_ACTION = re.compile(r"(actions?|action[._]\w+|\w+[._]actions?|ctrl|commands?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Selects what is read of a dataset."""

    rename: Mapping[str, str]
    """Name in the files -> LeRobot's; also of the folder `videos`."""
    episodes: Sequence[int] | None = None
    """The only episodes that are read, counted from 0; None: all."""
    cameras: Sequence[str] | None = None
    """The only cameras that are read; None: all."""

    @property
    def rename_back(self) -> dict[str, str]:
        """Name of a column, as it is read -> its name in the files."""
        return {new: old for old, new in self.rename.items() if new != VIDEOS}

    def apply(self, index: DatasetIndex) -> DatasetIndex:
        """Returns the index of what is read.

        Raises:
            DatasetError: a name, an episode or a camera that the dataset does not have.
        """
        if self.rename:
            index = _renamed(index, self.rename)
        if self.cameras is not None:
            index = _with_cameras(index, self.cameras)
        if self.episodes is not None:
            for episode in self.episodes:
                if not 0 <= episode < len(index):
                    raise DatasetError(
                        f"{index.folder}: episodes: there is no {episode}, allowed 0 to {len(index) - 1}."
                    )
            index = index.kept(np.unique(np.asarray(self.episodes, np.int64)))
        return index


def odd_names(index: DatasetIndex) -> str | None:
    """Returns a message on names that are not LeRobot's, with a mapping that corrects all, or None."""
    found = [*_odd_numbers(index), *_odd_pictures(index), *_odd_folder(index)]
    if not found:
        return None
    lines = [f"  {old}: {why}" + (f"; taken for {new!r}?" if new else "") for old, new, why in found]
    mapping = ",".join(f"{old}:{new}" for old, new, _ in found if new)
    remedy = (
        f"Read it with rename={mapping}, or write it so: robot-rl replay rename {index.folder} "
        f"{mapping.replace(':', '=').replace(',', ' ')} out=NEW"
        if mapping
        else "Name them with rename=<name there>:<LeRobot's name>,..."
    )
    return "\n".join(
        [f"{index.folder}: names that are not LeRobot's, so they would not be read:", *lines, remedy]
    )


def _odd_numbers(index: DatasetIndex) -> list[tuple[str, str, str]]:
    """Returns old name, new name and the problem, of actions and states."""
    columns = _columns(index)
    found: list[tuple[str, str, str]] = []
    for name, pattern in (("action", _ACTION), (STATE, _STATE)):
        is_declared = name in index.features
        if is_declared and (not columns or name in columns):
            continue
        known = index.numeric if not is_declared else [c for c in columns if c not in index.features]
        like = [other for other in known if pattern.fullmatch(other)]
        what = f"there is no column {name!r}" + (", which meta/info.json declares" if is_declared else "")
        if like:
            found.append((min(like, key=len), name, what))
        elif name == "action" or is_declared:
            found.append(
                (name, "", f"{what}; there are {', '.join(map(repr, sorted(columns or index.features)))}")
            )
    return found


def _columns(index: DatasetIndex) -> list[str]:
    """Returns the columns of the first data file that is not damaged; none if all are."""
    for file in index.files:
        with suppress(DatasetError):  # reading its episodes reports the damage
            if columns := columns_of(index, file):
                return columns
    return []


def _odd_pictures(index: DatasetIndex) -> list[tuple[str, str, str]]:
    return [
        (name, _IMAGES + re.split(r"[./]", name)[-1], "pictures outside 'observation.images.'")
        for name in index.named("image", "video")
        if not name.startswith("observation.")
    ]


def _odd_folder(index: DatasetIndex) -> list[tuple[str, str, str]]:
    if not index.videos or (index.folder / VIDEOS).exists():
        return []
    if not all(
        files and files[0].startswith(f"{VIDEOS}/") for files in (v.files for v in index.videos.values())
    ):
        return []
    others = [p.name for p in sorted(index.folder.iterdir()) if p.is_dir() and "vid" in p.name.lower()]
    return [(others[0], VIDEOS, f"there is no folder {VIDEOS!r}")] if others else []


def _renamed(index: DatasetIndex, rename: Mapping[str, str]) -> DatasetIndex:
    columns = _columns(index)
    for old, new in rename.items():
        is_folder = new == VIDEOS and (index.folder / old).is_dir()
        if old not in index.features and old not in columns and not is_folder:
            known = [*dict.fromkeys([*index.features, *columns])]
            raise DatasetError(f"{index.folder}: rename: there is no {old!r}.{nearest(old, known)}")
        if new in index.features and new not in rename and (new in columns or new in index.videos):
            raise DatasetError(f"{index.folder}: rename: {new!r} is there already. Rename that one too.")
    features: dict[str, Any] = {}
    for name, feature in index.features.items():
        features[rename.get(name, name)] = feature
    if len(set(rename.values())) < len(rename):
        raise DatasetError(f"{index.folder}: rename: two names become one. Give every one its own.")
    folders = {new: old for old, new in rename.items() if new == VIDEOS}
    videos = {
        rename.get(name, name): replace(v, files=[_in_folder(file, folders) for file in v.files])
        for name, v in index.videos.items()
    }
    back = Reading(rename=rename).rename_back
    return replace(index, info={**index.info, "features": features}, videos=videos, renamed=back)


def _in_folder(file: str, folders: Mapping[str, str]) -> str:
    first, slash, rest = file.partition("/")
    return folders.get(first, first) + slash + rest


def _with_cameras(index: DatasetIndex, cameras: Sequence[str]) -> DatasetIndex:
    """Leaves all other cameras out; a camera is given by its key, its name, or the last part of the name."""
    there = index.named("image", "video")
    wanted: set[str] = set()
    for camera in cameras:
        short = camera.removesuffix(".rgb")
        found = [n for n in there if camera == n or n.removeprefix(_IMAGES) == short]
        if not found:
            known = [n.removeprefix(_IMAGES) for n in there]
            raise DatasetError(f"{index.folder}: cameras: there is no {camera!r}.{nearest(camera, known)}")
        wanted |= set(found)
    left_out = [name for name in there if name not in wanted]
    features = {name: feature for name, feature in index.features.items() if name not in left_out}
    videos: dict[str, VideoSpans] = {name: v for name, v in index.videos.items() if name in wanted}
    others = [file for name, v in index.videos.items() if name not in wanted for file in v.files]
    return replace(
        index,
        info={**index.info, "features": features},
        videos=videos,
        left_out=(*index.left_out, *left_out),
        files_left_out=(*index.files_left_out, *others),
    )
