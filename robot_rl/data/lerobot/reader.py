"""Reads a LeRobotDataset, version 3 or 2.1, ours or LeRobot's, one episode or frame at a time.

Opening reads `meta/` alone. Rows are read when an episode is read; pictures stay compressed until they are
indexed. Columns that LeRobot's own data lacks get these values: reward 0, success False, the last step
truncated (unless `next.done` marks it, which counts as terminated), base_action = action, source `demo`,
stamps = timestamp.
E episodes, T control steps of one, n frames.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.names import APART
from robot_rl.core.refusal import refusing
from robot_rl.data.episode import Episode, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.facts import DatasetFacts
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.damage import NO_LOOK, Problem, check
from robot_rl.data.lerobot.decode import Backend, Decoders, decode_pictures
from robot_rl.data.lerobot.index import STATE, DatasetIndex, VideoSpans, picture_shape, read_stats
from robot_rl.data.lerobot.layout import CAMERA_STAMP, OWN, camera, feature_name
from robot_rl.data.lerobot.opening import open_index
from robot_rl.data.lerobot.own_files import OwnFiles
from robot_rl.data.lerobot.selection import Reading, odd_names
from robot_rl.data.lerobot.stats import PictureStats, aggregate, of_columns
from robot_rl.data.lerobot.tables import Tables, flat_names, memory_dtype, read_rows, row_problems
from robot_rl.data.lerobot.v21 import read_episode_stats

Array = NDArray[Any]

_PICTURES = ("image", "video")


class Dataset:
    """A dataset on the disk, an `EpisodeSource`. Several threads may read it."""

    @refusing(DatasetError)
    def __init__(
        self,
        folder: str | Path,
        *,
        backend: Backend = "pyav",
        on_damage: Literal["raise", "skip"] = "raise",
        episodes: Sequence[int] | None = None,
        cameras: Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        open_files: int = 128,
        cached_bytes: int = 1 << 30,
    ) -> None:
        """Opens a dataset.

        Args:
            folder: holds `meta/` and `data/`.
            backend: decoder of videos: PyAV, or torchcodec where it is installed.
            on_damage: `skip` checks every file now and leaves damaged episodes out, see `skipped`;
                `raise` refuses them when they are read.
            episodes: the only ones that are read and checked, counted from 0; None: all.
            cameras: the only ones that are read; None: all.
            rename: name in the files -> LeRobot's name: `{"actions": "action"}`.
            open_files: most videos that are open at a time.
            cached_bytes: memory for compressed pictures of parquet columns.

        Raises:
            DatasetError: no dataset, another version, damaged metadata, or names that are not LeRobot's.
        """
        self.folder = Path(folder)
        self.skipped: list[Problem] = []
        """Problems that `on_damage='skip'` found; episodes with a fatal one were left out."""
        self._on_damage = on_damage
        self._known: dict[Path, Any] = {}
        self._decoders = Decoders(backend, open_files)
        self.reading = Reading(rename=rename or {}, episodes=episodes, cameras=cameras)
        """Selects what is read, and under which names."""
        self._sums = Checksums(self.folder)
        self._tables = Tables(self.folder, cached_bytes, self._sums, renamed=self.reading.rename_back)
        self._columns: dict[str, Array] | None = None
        self._load()

    # --- EpisodeSource -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.index)

    def lengths(self) -> NDArray[np.int64]:
        return self.index.lengths

    @refusing(DatasetError)
    def refresh(self) -> None:
        path = self.folder / "meta/info.json"
        if path.is_file() and _stamp(path) != self._stamp:
            self._tables.close()
            self._decoders.close()
            self._load()

    @refusing(DatasetError)
    def read(self, episode: int) -> Episode:
        """Returns an episode; raises `DatasetError` for rows that are missing, not finite or out of order."""
        if not 0 <= episode < len(self):
            raise DatasetError(f"{self.folder}: episode {episode} is unknown, allowed 0 to {len(self) - 1}.")
        rows = self.rows(episode)
        steps = int(self.index.lengths[episode])
        columns = {key: name for name, key in self._keys.items() if name in rows}
        first = int(rows["index"][0]) if "index" in rows and steps else 0
        obs: dict[str, Any] = {}
        for key, feature in self.features.items():
            if feature.is_picture:
                obs[key] = _StepFrames(self, key, episode, steps)
            elif key in columns:
                obs[key] = rows[columns[key]].reshape(steps, *feature.shape)
            else:
                obs[key] = self._own_files.steps(key, episode, first)
        last = np.zeros(steps, bool)
        last[-1:] = True
        done = rows["next.done"].astype(bool) if "next.done" in rows else np.zeros(steps, bool)
        terminated = rows.get("next.terminated", done).astype(bool)
        action = rows["action"]
        return Episode(
            meta=self._meta_of(self.index.instructions[episode]),
            obs=obs,
            final_obs=self._own_files.final(episode),
            action=action,
            base_action=rows.get("base_action", action).reshape(action.shape),  # one element is stored flat
            reward=rows.get("next.reward", np.zeros(steps, np.float32)).astype(np.float32),
            terminated=terminated,
            truncated=rows.get("next.truncated", last & ~terminated).astype(bool),
            success=rows.get("next.success", np.zeros(steps, bool)).astype(bool),
            source=rows.get("source", np.zeros(steps)).astype(np.uint8),
            policy_version=rows.get("policy_version", np.zeros(steps)).astype(np.int64),
            stamp_ns=self._stamps(rows),
            picture_stamp_ns={
                key: rows[name].astype(np.int64)
                for name, key in ((f"{CAMERA_STAMP}{camera(key)}", key) for key in self.cameras)
                if name in rows
            },
            device=str(self.index.columns.get("device", [""] * len(self))[episode] or ""),
        )

    # --- the rest ------------------------------------------------------------------------------

    @property
    def backend(self) -> Backend:
        return self._decoders.backend

    def keep(self, episodes: Array) -> None:
        """Keeps these episodes alone, by the dataset's numbers (`episode_index`)."""
        kept = np.flatnonzero(np.isin(self.index.episode, episodes))
        if len(kept) < len(self):
            self._use(self.index.kept(kept))

    @property
    def own(self) -> dict[str, Any]:
        """The content of meta/robot_rl.json; empty for a dataset of others."""
        return self._own_files.own

    @property
    def names(self) -> dict[str, str]:
        """Our key -> LeRobot's name of the observations that can be read."""
        return {key: name for key, name in self._names.items() if key in self.features}

    @property
    def info(self) -> dict[str, Any]:
        return self.index.info

    @property
    def episode_starts(self) -> Array:
        """First row of every episode in `columns`, (E,)."""
        return self.episode_ends - self.index.lengths

    @property
    def episode_ends(self) -> Array:
        """Row after the last of every episode in `columns`, (E,)."""
        return np.cumsum(self.index.lengths)

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(key for key, feature in self.features.items() if feature.is_picture)

    @property
    def instructions(self) -> tuple[str, ...]:
        """Every instruction of the dataset, in the order of their numbers."""
        return tuple(self.index.tasks[number] for number in sorted(self.index.tasks))

    @property
    def columns(self) -> dict[str, Array]:
        """Numbers of all episodes, our key -> (rows, ...); read once, then kept."""
        if self._columns is None:
            parts = [self.rows(episode) for episode in range(len(self))]
            names = parts[0] if parts else ()
            self._columns = {
                self._keys.get(name, name): np.concatenate([p[name] for p in parts]) for name in names
            }
        return self._columns

    @functools.cached_property
    def stats(self) -> dict[str, dict[str, Array]]:
        """The content of meta/stats.json by our keys; of version 2.1, joined from its episodes'."""
        recorded: Mapping[str, Mapping[str, Any]] = read_stats(self.folder, self._sums)
        if not recorded:
            recorded = aggregate(list(read_episode_stats(self.folder, self._sums).values()))
        read_as = {old: new for new, old in self.index.renamed.items()}
        named = {read_as.get(name, name): values for name, values in recorded.items()}
        return {
            self._keys.get(name, name): {k: np.atleast_1d(np.asarray(v)) for k, v in values.items()}
            for name, values in named.items()
            if name not in self.index.left_out
        }

    def frames(self, camera: str, episode: int, steps: Sequence[int] | Array) -> Array:
        """Returns the pictures that control steps of an episode saw, in this order, (n, h, w, 3) uint8.

        Args: camera: observation key, such as `front.rgb`; episode: 0 to E - 1.
        """
        if not len(steps):
            return np.empty((0, *self.features[camera].shape), np.uint8)
        return self.frames_of(camera, np.full(len(steps), episode), np.asarray(steps, np.int64))

    def frames_of(self, camera: str, episodes: Array, steps: Array, out: Array | None = None) -> Array:
        """Returns pictures (n, h, w, 3) uint8 of episodes that lie in one file, in one pass.

        Args: episodes: of each picture, (n,); steps: of each picture, (n,); out: is written, if given.
        """
        name, spans = self._names[camera], self.spans(camera)
        number = int(spans.file[episodes[0]])
        if out is None:
            out = np.empty((len(steps), *self.features[camera].shape), np.uint8)
        if name in self.index.videos:
            self._sums.require(spans.files[number])
            numbers = spans.first[episodes] + steps

            def where(frame: int) -> str:
                at = int(np.flatnonzero(numbers == frame)[0])
                return f"episode {self.index.episode[episodes[at]]}, step {steps[at]}, frame {frame}"

            return self._decoders.frames(
                self.folder / spans.files[number], numbers, self.index.fps, out, where
            )
        content: list[bytes] = []
        for episode, step in zip(episodes.tolist(), steps.tolist(), strict=True):
            content.append(self._encoded(name, episode)[step].as_py())
        at = f"{self.folder / self.index.files[number]}: {name}, picture"
        return decode_pictures(content, at, out)

    def spans(self, camera: str) -> VideoSpans:
        """Returns the places of a camera's pictures: in its videos, or in rows of the data files."""
        at, videos = self.index, self.index.videos.get(self._names[camera])
        return videos or VideoSpans(files=at.files, file=at.file, first=at.first)

    def facts(
        self,
        episodes: Sequence[int] | None = None,
        resize: tuple[int, int] | None = None,
        *,
        decode: bool = True,
    ) -> DatasetFacts:
        """Returns sizes, names and statistics for a policy.

        Args:
            episodes: of the statistics; None: all.
            resize: height and width that pictures will have; None: unchanged.
            decode: False leaves out the statistics of pictures, which have to be decoded for them.
        """
        chosen = range(len(self)) if episodes is None else list(episodes)
        starts, ends = self.episode_starts, self.episode_ends
        rows = np.concatenate([np.arange(starts[e], ends[e]) for e in chosen])
        floats = {
            key: self.columns[key][rows]
            for key in ("action", *self.features)
            if key in self.columns and np.issubdtype(self.columns[key].dtype, np.floating)
        }
        stats = of_columns(floats)
        for key in self.cameras if decode else ():
            sampled = PictureStats()
            for picture in self._sampled(key, chosen):
                sampled.add(picture)
            stats[key] = sampled.result()
        features = {
            key: Feature("uint8", (*resize, 3)) if resize and feature.is_picture else feature
            for key, feature in self.features.items()
        }
        return DatasetFacts(meta=self.meta, features=features, stats=stats, instructions=self.instructions)

    def rows(self, episode: int) -> dict[str, Array]:
        """Returns the checked numbers of an episode, LeRobot's name -> (T, ...).

        Raises:
            DatasetError: the first problem.
        """
        if self._columns is not None:
            span = self._span(episode)
            return {
                name: self._columns[self._keys.get(name, name)][span]
                for name in self.index.numeric
                if self._keys.get(name, name) in self._columns
            }
        rows = read_rows(self._tables, self.index, episode)
        for kind, problem in row_problems(self.index, episode, rows):
            raise DatasetError(
                f"{self.folder}: episode {self.index.episode[episode]}: {kind}: {problem}. Record it "
                "again, or drop it (on_damage=skip)."
            )
        return rows

    def _encoded(self, name: str, episode: int) -> Any:
        """Returns the PNG or JPEG bytes of an episode's pictures, an Arrow array (T,)."""
        at = self.index
        file = at.files[at.file[episode]]
        column = self._tables.rows(file, int(at.first[episode]), int(at.lengths[episode]), [name])[name]
        return pa.chunked_array([chunk.field("bytes") for chunk in column.chunks])

    def _load(self) -> None:
        self._stamp = _stamp(self.folder / "meta/info.json")
        self._sums.reload()
        index = self.reading.apply(open_index(self.folder, self._known, self._sums))
        if not (self.folder / OWN).is_file() and (problem := odd_names(index)):
            raise DatasetError(problem)
        self._use(self._without_damaged(index) if self._on_damage == "skip" else index)

    def _use(self, index: DatasetIndex) -> None:
        """Prepares to read the episodes of an index."""
        self.index = index
        """Metadata and place of every episode."""
        self._columns = None
        self.__dict__.pop("stats", None)
        self._own_files = OwnFiles(index, self._tables)
        named = self._own_files.names
        fixed = next((old for old in self.reading.rename if old in named), None)
        if fixed is not None:
            raise DatasetError(
                f"{self.folder}: rename: {fixed!r} cannot get another name: robot_rl recorded this dataset, "
                "and its depth, final observations and types go by the names it has, which are LeRobot's. "
                "Leave it out; a policy that wants other cameras maps them: options.rename={front: camera1}"
            )
        shown = [name for name in index.features if name.startswith("observation.") or name in APART]
        self._keys = {name: named.get(name, key_of(name)) for name in shown}
        self._names = {key: name for name, key in self._keys.items()}
        self.features = self._features()
        self.meta = self._meta_of(index.instructions[0] if len(index) else "")

    def _without_damaged(self, index: DatasetIndex) -> DatasetIndex:
        self.skipped = check(self.folder, index)
        whole = next((problem for problem in self.skipped if problem.kind in NO_LOOK), None)
        if whole is not None:  # nothing else was checked
            raise DatasetError(f"on_damage=skip leaves out episodes, and this concerns all: {whole.message}")
        damaged = [p.episode for p in self.skipped if p.is_fatal and p.episode is not None]
        return index.kept(np.flatnonzero(~np.isin(index.episode, damaged)))

    def _features(self) -> dict[str, Feature]:
        """Returns the observations that can be read, without depth that LeRobot packs into video."""
        left_out = self.index.left_out
        found = self._own_files.features()
        recorded = {key: f for key, f in found.items() if feature_name(key, f) not in left_out}
        features: dict[str, Feature] = {}
        for name, key in self._keys.items():
            feature = self.index.features[name]
            shape = tuple(feature["shape"])
            if feature["dtype"] in _PICTURES:
                if not (feature.get("info") or {}).get("is_depth_map"):
                    features[key] = Feature("uint8", picture_shape(feature))
            elif name in self.index.numeric:
                features[key] = recorded.get(key, Feature(memory_dtype(name, feature["dtype"]), shape))
        return {**features, **{key: f for key, f in recorded.items() if key not in features}}

    def _meta_of(self, instruction: str) -> EpisodesMeta:
        def names(feature: str, short: str) -> tuple[str, ...]:
            entry = self.index.features.get(feature, {"shape": (0,)})
            flat, width = flat_names(entry), int(np.prod(entry["shape"]))
            return flat if len(flat) == width else tuple(f"{short}_{i}" for i in range(width))

        return EpisodesMeta(
            task=self._own_files.own.get("task", ""),
            robot=self.index.info.get("robot_type") or "",
            control_hz=self.index.fps,
            instruction=instruction,
            state_names=names(STATE, "state"),
            action_names=names("action", "action"),
        )

    def _span(self, episode: int) -> slice:
        end = int(self.index.lengths[: episode + 1].sum())
        return slice(end - int(self.index.lengths[episode]), end)

    def _stamps(self, rows: Mapping[str, Array]) -> Array:
        if "stamp_ns" in rows:
            return rows["stamp_ns"].astype(np.int64)
        steps = np.arange(len(rows["action"])) / self.index.fps
        return np.rint(1e9 * rows.get("timestamp", steps).astype(np.float64)).astype(np.int64)

    def _sampled(self, camera: str, episodes: Sequence[int]) -> Iterator[Array]:
        """Yields up to 96 pictures, evenly spread over these episodes."""
        lengths = self.index.lengths[list(episodes)]
        ends = np.cumsum(lengths)
        picked = np.unique(np.linspace(0, ends[-1] - 1, 96).astype(int))
        which = np.searchsorted(ends, picked, side="right")
        for number in np.unique(which).tolist():
            steps = picked[which == number] - (ends[number] - lengths[number])
            yield from self.frames(camera, episodes[number], steps)


class _StepFrames:
    """The pictures of one camera in one episode, decoded when they are indexed."""

    def __init__(self, dataset: Dataset, camera: str, episode: int, steps: int) -> None:
        self._dataset, self._camera, self._episode, self._steps = dataset, camera, episode, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, (int, np.integer)):
            return self[[step]][0]
        wanted = np.arange(self._steps)[step]
        return self._dataset.frames(self._camera, self._episode, wanted)


def key_of(name: str) -> str:
    """Returns our key of LeRobot's name: `observation.images.front` becomes `front.rgb`."""
    for prefix in ("observation.images.", "observation.image."):
        if name.startswith(prefix):
            return f"{name.removeprefix(prefix)}.rgb"
    return "image.rgb" if name == "observation.image" else name.removeprefix("observation.")


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat() if path.is_file() else None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else (0, 0, 0)
