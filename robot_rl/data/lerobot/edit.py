"""Makes new datasets from existing episodes: merge, split, filter.

Datasets are copied with everything that they hold, and no video is encoded again (see `copying`). Episodes of
a journal or of another rate, datasets of different layouts, and all with `images` or `codec` are recorded
again, as robot_rl records: data that a recording has no place for is refused by name, unless `drop` lists it.
In both cases one episode is in memory at a time, and the new folder appears when it is complete.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypedDict, Unpack, cast

import numpy as np
from av.error import FFmpegError

from robot_rl.core.errors import DatasetError, nearest
from robot_rl.core.files import make_folder, sync_folder, sync_tree
from robot_rl.core.refusal import refusing
from robot_rl.data.episode import SOURCES, Episode, EpisodeSource, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.fit import feature_misfit, misfit
from robot_rl.data.lerobot.checksums import record
from robot_rl.data.lerobot.copying import ENTRIES, PLACED, PLACES, Part, copy_episodes, episode_rows
from robot_rl.data.lerobot.damage import spans
from robot_rl.data.lerobot.encode import VideoCodec
from robot_rl.data.lerobot.foreign import foreign_files, say_left_out, to_drop
from robot_rl.data.lerobot.index import columns_of
from robot_rl.data.lerobot.layout import CAMERA_STAMP, CLOCK, ENDS, FORMAT, INFO, OWN_COLUMNS, stored
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetWriter
from robot_rl.data.resample import Resampled
from robot_rl.data.store.reader import StoreReader


class PictureOptions(TypedDict, total=False):
    """Options of writing pictures; see `DatasetWriter`."""

    images: Literal["video", "png"]
    codec: Literal["h264", "av1"] | VideoCodec


class WriteOptions(PictureOptions, total=False):
    """Options of writing pictures, and data that may be lost."""

    drop: Sequence[str]
    """Columns, files and entries of meta/info.json to leave out."""


_STEPS = (
    "Actions of robot_rl's tasks say how far to move in one control step: at another rate they move the arm "
    "at another speed. Keep the two apart, or collect both at one rate."
)
Picked = Sequence[tuple[EpisodeSource, Sequence[int]]]
"""Sources, and the chosen episodes of each."""


def merge(
    sources: Sequence[EpisodeSource],
    out: str | Path,
    *,
    fps: float | None = None,
    **options: Unpack[WriteOptions],
) -> Path:
    """Writes the episodes of all sources into a new dataset, one source after the other.

    Args:
        sources: datasets and stores.
        out: the new folder.
        fps: new rate of sources with another one; rows are picked, see `robot_rl.data.resample`.

    Raises:
        DatasetError: another robot, rate, or other elements, named in the message; or `fps` is given and
            actions are steps of one control period.
    """
    if not sources:
        raise DatasetError("merge: got no source, allowed: one or more. Name the datasets to merge.")
    if fps is not None:
        sources = [_at_rate(source, fps) for source in sources]
    first = sources[0]
    for number, source in enumerate(sources[1:], start=1):
        check_alike(first, source, f"merge: source {number}")
    return _write(out, [(source, range(len(source))) for source in sources], "merge", options)


def _at_rate(source: EpisodeSource, fps: float) -> EpisodeSource:
    if source.meta.control_hz == fps:
        return source
    if source.meta.task:
        raise DatasetError(
            f"merge: fps: episodes of {source.meta.task} have {source.meta.control_hz:g} Hz. {_STEPS}"
        )
    return Resampled(source, fps)


def split(
    source: EpisodeSource,
    parts: Mapping[str | Path, Sequence[int] | float],
    **options: Unpack[WriteOptions],
) -> list[Path]:
    """Writes parts of a dataset into new datasets; returns their folders.

    Args:
        source: of the episodes.
        parts: folder -> its episodes, or its share of them. Shares take successive episodes: 0.8 and 0.2 of
            10 are the first 8 and the last 2.

    Raises:
        DatasetError: episodes that do not exist or are in two parts, or shares above 1 in all.
    """
    chosen = {Path(folder): part for folder, part in _chosen(len(source), parts).items()}
    _refuse_overlap(chosen)
    for folder in chosen:
        _require_new(folder)
    return [
        _write(folder, [(source, which)], "split", options, is_quiet=number > 0)  # one warning for all parts
        for number, (folder, which) in enumerate(chosen.items())
    ]


def filter(
    source: EpisodeSource,
    out: str | Path,
    *,
    success: bool | None = None,
    by: Sequence[str] | None = None,
    instruction: str | None = None,
    episodes: Sequence[int] | None = None,
    min_steps: int = 1,
    keep: Callable[[Episode], bool] | None = None,
    **options: Unpack[WriteOptions],
) -> Path:
    """Writes the episodes that pass every test into a new dataset.

    Args:
        source: of the episodes.
        out: the new folder.
        success: whether success was reached at any step.
        by: names of `SOURCES`; all steps of an episode must be of these.
        instruction: exactly one of the episode's instructions.
        episodes: the only ones that are tested.
        min_steps: shortest episode that is kept.
        keep: any other test.

    Raises:
        DatasetError: an unknown source, or no episode passed.
    """
    unknown = sorted(set(by or ()) - set(SOURCES))
    if unknown:
        raise DatasetError(f"filter: no source named {unknown[0]!r}.{nearest(unknown[0], SOURCES)}")
    actors = None if by is None else [SOURCES.index(name) for name in by]

    def passes(number: int) -> bool:
        episode = source.read(number)
        return (
            len(episode) >= min_steps
            and (success is None or bool(episode.success.any()) == success)
            and (actors is None or bool(np.isin(episode.source, actors).all()))
            and (instruction is None or instruction in _instructions(source, number, episode))
            and (keep is None or keep(episode))
        )

    which = _known(len(source), range(len(source)) if episodes is None else episodes, "filter")
    is_any = success is None and by is None and instruction is None and keep is None and min_steps <= 1
    kept = which if is_any else [number for number in _begun(source, which) if passes(number)]
    return _write(out, [(source, kept)], "filter", options)


@refusing(DatasetError, kept="What it is made of is whole.", also=(FFmpegError,))
def _write(
    out: str | Path, picked: Picked, at: str, options: WriteOptions, *, is_quiet: bool = False
) -> Path:
    """Copies episodes, or records them again where they cannot be copied; returns the new folder."""
    folder = Path(out)
    for source, _ in picked:
        recorded = source.source if isinstance(source, Resampled) else source
        if isinstance(recorded, Dataset | StoreReader):
            refuse_inside(folder, recorded.folder)
    drop = list(options.get("drop", ()))
    picked = [(source, _begun(source, which)) for source, which in picked]
    datasets = [in_dataset(source, which) for source, which in picked]
    whole = [found for found in datasets if found is not None]
    is_recorded = "images" in options or "codec" in options
    if not is_recorded and len(whole) == len(picked) and _have_one_layout(whole, drop, at):
        if drop:
            _refuse_unknown(drop, [name for found in whole for name in _droppable(*found)], at)
        with new_folder(folder) as temporary:
            copy_episodes([Part(index=d.index, episodes=which) for d, which in whole], temporary, drop=drop)
        _warn([dataset for dataset, _ in whole], is_quiet)
        return folder
    found: dict[str, str] = {}
    sealed: list[Dataset] = []
    for source, which in picked:
        recorded = source.source if isinstance(source, Resampled) else source
        held = in_dataset(recorded, which, partly=True)
        if held is not None:
            held[0].index.sums.require_all_others()
            found |= _losses(*held)
            sealed.append(held[0])
    _refuse_unknown(drop, list(found), at)
    lost = [name for name in found if name not in drop]
    if lost:
        raise DatasetError(
            f"{at}: the episodes are recorded again, as robot_rl records, which has no place for "
            f"{', '.join(found[name] for name in lost)}. Leave images= and codec= out where they are given, "
            f"or name what may be lost: drop={','.join([*drop, *lost])}"
        )
    _warn(sealed, is_quiet)
    first = picked[0][0]
    tasks = {source.meta.task for source, _ in picked}
    meta = dataclasses.replace(first.meta, task=first.meta.task if len(tasks) == 1 else "mixed")
    pictures = cast("PictureOptions", {key: value for key, value in options.items() if key != "drop"})
    episodes = (source.read(episode) for source, which in picked for episode in which)
    return write_new(folder, meta, first.features, episodes, **pictures)


def _warn(datasets: Sequence[Dataset], is_quiet: bool) -> None:
    """Warns of the files that no copy of some episodes has, unless it was done before."""
    for dataset in datasets if not is_quiet else ():
        say_left_out(dataset.index)


def refuse_inside(out: str | Path, folder: Path) -> None:
    """Raises `DatasetError` if `out` lies in a folder that is copied: it would be in all later copies."""
    if Path(out).resolve().is_relative_to(folder.resolve()):
        raise DatasetError(f"{out}: lies within {folder}, which is copied. Choose a folder outside of it.")


def _begun(source: EpisodeSource, which: Sequence[int]) -> list[int]:
    """Returns the episodes that have steps: a store in use may hold one without any."""
    lengths = source.lengths()
    return [episode for episode in which if lengths[episode]]


def _instructions(source: EpisodeSource, number: int, episode: Episode) -> set[str]:
    """Returns every instruction of an episode: rows of a dataset may have several."""
    found = in_dataset(source, [number])
    if found is None:
        return {episode.meta.instruction}
    dataset, (place,) = found
    tasks = dataset.rows(place).get("task_index", np.zeros(0, np.int64))
    return {episode.meta.instruction, *(dataset.index.tasks.get(n, "") for n in np.unique(tasks).tolist())}


def in_dataset(
    source: EpisodeSource, which: Sequence[int], *, partly: bool = False
) -> tuple[Dataset, list[int]] | None:
    """Returns the dataset that holds these episodes of a source, and their numbers there.

    Args: partly: returns the sealed ones; else None if one is not sealed.
    """
    if isinstance(source, Dataset):
        return source, list(which)
    if not isinstance(source, StoreReader) or source.dataset is None:
        return None
    places = [source.sealed(episode) for episode in which]
    sealed = [place for place in places if place is not None]
    return (source.dataset, sealed) if partly or len(sealed) == len(places) else None


def _have_one_layout(parts: Sequence[tuple[Dataset, list[int]]], drop: list[str], at: str) -> bool:
    """Returns whether rows of all parts fit into one table.

    Raises:
        DatasetError: some have columns that others lack, so that their values are unknown.
    """
    if any(dataset.own and dataset.own.get("format", 1) != FORMAT for dataset, _ in parts):
        return False
    first = parts[0][0]
    for dataset, _ in parts[1:]:
        features = [{n: f for n, f in d.index.features.items() if n not in drop} for d in (first, dataset)]
        for name in sorted(features[0].keys() ^ features[1].keys()):
            if not _is_recorded(name):
                has = first if name in features[0] else dataset
                raise DatasetError(
                    f"{at}: only {has.folder} has column {name!r}. Give it to all, or leave it out: "
                    f"drop={','.join([*drop, name])}"
                )
        same = [{n: (f["dtype"], tuple(f["shape"])) for n, f in of.items()} for of in features]
        if same[0] != same[1] or bool(first.own) != bool(dataset.own):
            return False
    return True


def _is_recorded(name: str) -> bool:
    """Returns whether robot_rl records this column, so that its value is known where it is missing."""
    ends = ("next.done", *(f"next.{end}" for end in ENDS))
    return name in (*OWN_COLUMNS, *ends) or name.startswith(CAMERA_STAMP)


def _losses(dataset: Dataset, episodes: Sequence[int]) -> dict[str, str]:
    """Returns name -> description of everything in these episodes that an `Episode` has no place for."""
    found: dict[str, str] = {}
    index = dataset.index
    files = [index.files[number] for number in np.unique(index.file[list(episodes)])]
    columns = dict.fromkeys([*index.features, *(name for file in files for name in columns_of(index, file))])
    kept = {*CLOCK, *dataset.names.values()}
    for name in columns:
        if name not in kept and not _is_recorded(name):
            found[name] = f"column {name!r}"
    for name in episode_rows(index).column_names:
        if name not in (*PLACED, "device") and not name.startswith(PLACES):
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


def _droppable(dataset: Dataset, episodes: Sequence[int]) -> list[str]:
    names = [name for name in dataset.index.features if name not in ("action", *CLOCK)]
    return [*names, *(name for name in _losses(dataset, episodes) if name not in CLOCK)]


def _refuse_unknown(drop: Sequence[str], known: Sequence[str], at: str) -> None:
    for name in drop:
        if name not in known:
            near = nearest(name, known) if known else ""
            raise DatasetError(f"{at}: drop: there is no {name!r} that could be left out.{near}")


@refusing(DatasetError, kept="What it is made of is whole.")
def write_new(
    out: str | Path,
    meta: EpisodesMeta,
    features: Mapping[str, Feature],
    episodes: Iterable[Episode],
    **options: Unpack[PictureOptions],
) -> Path:
    """Writes a dataset that appears when it is complete; returns its folder.

    Raises:
        DatasetError: the folder exists, or there are no episodes.
    """
    folder = Path(out)
    with new_folder(folder) as temporary:
        with DatasetWriter(temporary, meta, features, **options) as writer:
            count = writer.write_all(episodes)
        if not count:
            raise DatasetError(f"{folder}: no episode to write. Choose other episodes, or a weaker test.")
    return folder


def check_alike(one: EpisodeSource, two: EpisodeSource, at: str) -> None:
    """Raises `DatasetError` for episodes of another robot or rate, or with other elements."""
    remedy = "A policy of one is no policy of the other: keep them apart."
    problem = misfit(two.meta, one.meta, also=("robot",))
    if problem is None:
        first, second = stored(one.features), stored(two.features)
        problem = feature_misfit(second, first, sorted(first.keys() | second.keys()))
        remedy = "Merge datasets that were recorded with the same observations."
    elif problem.endswith(" Hz"):
        remedy = _STEPS if two.meta.task else f"Give all one rate: fps={one.meta.control_hz:g}"
    if problem is not None:
        raise DatasetError(f"{at} does not fit the first: {problem}. {remedy}")


def _chosen(total: int, parts: Mapping[str | Path, Sequence[int] | float]) -> dict[str | Path, Sequence[int]]:
    shares = {folder: part for folder, part in parts.items() if isinstance(part, (int, float))}
    if not shares:
        return {
            f: _known(total, part, "split") for f, part in parts.items() if not isinstance(part, (int, float))
        }
    if len(shares) != len(parts) or min(shares.values()) <= 0 or sum(shares.values()) > 1 + 1e-9:
        raise DatasetError(
            f"split: got {dict(parts)}, allowed: a list of episodes for every folder, or a share for every "
            "folder, each above 0 and together at most 1."
        )
    edges = np.rint(np.cumsum([0.0, *shares.values()]) * total).astype(int)
    return {folder: range(edges[i], edges[i + 1]) for i, folder in enumerate(shares)}


def _refuse_overlap(parts: Mapping[Path, Sequence[int]]) -> None:
    """Refuses parts that share episodes: held-out episodes must not be trained on."""
    for (one, first), (two, second) in itertools.combinations(parts.items(), 2):
        both = sorted(set(first) & set(second))
        if both:
            some = f"episode{'s' * (len(both) > 1)} {spans(both)}"
            raise DatasetError(f"split: {some} in {one} and in {two}. Give every episode to one part.")


def _known(total: int, episodes: Sequence[int], at: str) -> Sequence[int]:
    for episode in episodes:
        if not 0 <= episode < total:
            raise DatasetError(f"{at}: episode {episode} is unknown, allowed 0 to {total - 1}.")
    return episodes


def _require_new(folder: Path) -> None:
    if folder.exists():
        raise DatasetError(f"{folder}: exists already. Choose another folder, or remove it first.")


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """Gives a folder with a temporary name, which is flushed and becomes `folder` if the block succeeds."""
    _require_new(folder)
    temporary = folder.with_name(f".writing-{os.getpid()}-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        make_folder(temporary)
        yield temporary
        if (temporary / INFO).is_file():
            record(temporary)
        sync_tree(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
