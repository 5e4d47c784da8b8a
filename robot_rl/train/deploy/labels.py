"""Labelled frames for a success classifier: from a folder of pictures, or from recorded episodes.

    <folder>/success/<episode>-<anything>.png      pictures of success; .jpg will do
    <folder>/failure/<episode>-<anything>.png      pictures of anything else

N frames, T control steps of an episode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.data.episode import Episode, EpisodeSource
from robot_rl.data.reading import ReadOptions
from robot_rl.data.store.reader import open_source
from robot_rl.train.deploy.classifier import Labelled
from robot_rl.train.earlier import experience_of

Array = NDArray[Any]

_PER_EPISODE = 40
"""Most failures kept of an episode; its frames resemble one another."""


def read_labelled(path: Path | str, camera: str, **read: Unpack[ReadOptions]) -> Labelled:
    """Returns the labelled frames of a folder, a store, a dataset, or a run folder's experience.

    Args:
        path: of the folder.
        camera: key of its pictures.
        read: what of a dataset is read.

    Raises:
        ConfigError: `read` of a folder of pictures.
        DatasetError: nothing of the kind is there, or it lacks the camera.
    """
    folder = Path(path)
    if (folder / "success").is_dir() and (folder / "failure").is_dir():
        if read:
            raise ConfigError(f"{next(iter(read))}: is of datasets, and {folder} is a folder of pictures.")
        return _of_pictures(folder, camera)
    if not folder.is_dir():
        raise DatasetError(f"data: no folder {str(folder)!r}.")
    return _of_episodes(open_source(experience_of(str(folder)), **read), folder, camera)


def _of_pictures(folder: Path, camera: str) -> Labelled:
    files = {name: sorted(_pictures(folder / name)) for name in ("failure", "success")}
    if not all(files.values()):
        raise DatasetError(
            f"data: {folder} has {len(files['success'])} pictures of success and {len(files['failure'])} of "
            "failure, allowed: at least one each, as .png or .jpg."
        )
    paths = [*files["failure"], *files["success"]]
    frames = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    odd = next((i for i, frame in enumerate(frames) if frame.shape != frames[0].shape), None)
    if odd is not None:
        raise DatasetError(
            f"data: {paths[odd]} is {frames[odd].shape}, {paths[0]} is {frames[0].shape}. One camera takes "
            "pictures of one size."
        )
    names, episode = np.unique([path.stem.split("-")[0] for path in paths], return_inverse=True)
    assert len(names)
    return Labelled(np.stack(frames), np.arange(len(paths)) >= len(files["failure"]), episode, camera)


def _pictures(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg")]


def _of_episodes(source: EpisodeSource, folder: Path, camera: str) -> Labelled:
    if camera not in source.features:
        cameras = [key for key, feature in source.features.items() if feature.is_picture]
        raise DatasetError(
            f"data: {folder} has no pictures {camera!r}, it has {', '.join(cameras) or 'no cameras'}. "
            "Record with a camera, such as `robot-rl collect cameras=[front]`."
        )
    frames: list[Array] = []
    success: list[bool] = []
    episodes: list[int] = []
    for number in range(len(source)):
        for frame, shows in _frames(source.read(number), camera):
            frames.append(frame)
            success.append(shows)
            episodes.append(number)
    if not frames:
        raise DatasetError(f"data: {folder} holds no steps.")
    return Labelled(np.stack(frames), np.array(success), np.array(episodes, np.int64), camera)


def _frames(episode: Episode, camera: str) -> list[tuple[Array, bool]]:
    """Returns what steps led to, and whether that was success; all successes, and failures evenly chosen."""
    pictures, last = episode.obs[camera], episode.final_obs.get(camera)
    ends = np.arange(1, len(episode) + (last is not None))  # frame t is what step t - 1 led to
    shows = episode.success[ends - 1]
    failures = ends[~shows]
    chosen = failures[np.linspace(0, len(failures) - 1, min(len(failures), _PER_EPISODE)).astype(int)]
    rows = np.sort(np.concatenate([chosen, ends[shows]]))
    return [
        (np.asarray(last if row == len(episode) else pictures[int(row)]), bool(episode.success[row - 1]))
        for row in rows
    ]
