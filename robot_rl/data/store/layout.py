"""The layout of a store: columns of its steps, cameras, and meta/store.json.

T steps of one record, A action dim.
"""

from __future__ import annotations

import dataclasses
import io
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import read_json, write_json
from robot_rl.data.episode import Array, Feature, Starts
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.journal import FORMAT

PictureFormat = Literal["jpeg", "png"]

STORE_JSON = "meta/store.json"

_FIXED = {
    "reward": Feature("float32", ()),
    "terminated": Feature("bool", ()),
    "truncated": Feature("bool", ()),
    "success": Feature("bool", ()),
    "source": Feature("uint8", ()),
    "policy_version": Feature("int64", ()),
    "stamp_ns": Feature("int64", ()),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Meta and features of a store, and the columns made from them."""

    meta: EpisodesMeta
    features: Mapping[str, Feature]
    """Of the observation, pictures included."""
    starts: Starts | None = None
    """Where episodes begin in rows of a bank; None too in a store of a version that did not keep this."""
    columns: Mapping[str, Feature] = field(init=False)
    """Written for every step; the widest types first, so that all are aligned."""
    cameras: tuple[str, ...] = field(init=False)
    """Observation keys of the pictures; a picture names its camera by the index in this tuple."""

    def __post_init__(self) -> None:
        cameras = tuple(key for key, feature in self.features.items() if feature.is_picture)
        action = Feature("float32", (len(self.meta.action_names),))
        columns = {f"obs.{key}": f for key, f in self.features.items() if not f.is_picture}
        columns |= {f"picture.{camera}": Feature("int64", ()) for camera in cameras}
        columns |= {"action": action, "base_action": action, **_FIXED}
        width = {name: np.dtype(feature.dtype).itemsize for name, feature in columns.items()}
        ordered = {name: columns[name] for name in sorted(columns, key=lambda name: (-width[name], name))}
        object.__setattr__(self, "columns", ordered)
        object.__setattr__(self, "cameras", cameras)

    @property
    def step_bytes(self) -> int:
        return sum(_size(f) * np.dtype(f.dtype).itemsize for f in self.columns.values())

    def unpack(self, payload: bytes, steps: int) -> dict[str, Array]:
        """Returns the columns of a STEPS record, (T, ...) each, without copying."""
        found: dict[str, Array] = {}
        at = 0
        for name, feature in self.columns.items():
            values = np.frombuffer(payload, feature.dtype, steps * _size(feature), at)
            found[name] = values.reshape(steps, *feature.shape)
            at += values.nbytes
        return found

    def pack_final(self, obs: Mapping[str, Array], pictures: Mapping[str, int]) -> bytes:
        """Returns the payload of an END record: the columns of the final observation, one row."""
        values = {f"obs.{key}": value for key, value in obs.items()}
        values |= {f"picture.{key}": np.asarray(number) for key, number in pictures.items()}
        observed = self._observed().items()
        return b"".join(np.asarray(values[name], feature.dtype).tobytes() for name, feature in observed)

    def unpack_final(self, payload: bytes) -> tuple[dict[str, Array], dict[str, int]]:
        """Returns the observation and the numbers of the pictures that `pack_final` packed."""
        obs: dict[str, Array] = {}
        pictures: dict[str, int] = {}
        at = 0
        for name, feature in self._observed().items():
            kind, _, key = name.partition(".")
            value = np.frombuffer(payload, feature.dtype, _size(feature), at).reshape(feature.shape)
            at += value.nbytes
            if kind == "obs":
                obs[key] = value.copy()
            else:
                pictures[key] = int(value)
        return obs, pictures

    def pictures_in(self, payload: bytes, steps: int | None) -> set[int]:
        """Returns the pictures that a record refers to; `steps` is None for an END record."""
        if steps is None:
            return set(self.unpack_final(payload)[1].values()) if payload else set()
        columns = self.unpack(payload, steps)
        return {
            int(picture) for camera in self.cameras for picture in np.unique(columns[f"picture.{camera}"])
        }

    def _observed(self) -> dict[str, Feature]:
        return {name: f for name, f in self.columns.items() if name.startswith(("obs.", "picture."))}

    def to_json(self) -> dict[str, Any]:
        """Returns the content of store.json and of the head of every segment."""
        features = {key: [feature.dtype, list(feature.shape)] for key, feature in self.features.items()}
        content = {"format": FORMAT, "meta": dataclasses.asdict(self.meta), "features": features}
        return content if self.starts is None else content | {"starts": dataclasses.asdict(self.starts)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Layout:
        """Returns the layout of which `to_json` made the content."""
        meta: dict[str, Any] = dict(content["meta"])
        meta |= {key: tuple(meta[key]) for key in ("state_names", "action_names")}
        found: dict[str, Any] | None = content.get("starts")
        starts = None if found is None else Starts(classes=tuple(found["classes"]), bank=found["bank"])
        return cls(
            meta=EpisodesMeta(**meta),
            features={
                key: Feature(dtype, tuple(shape)) for key, (dtype, shape) in content["features"].items()
            },
            starts=starts,
        )


def _size(feature: Feature) -> int:
    return math.prod(feature.shape)


def is_store(folder: Path) -> bool:
    """Returns whether a folder holds a store; format 1 had no store.json."""
    return (folder / STORE_JSON).is_file()


def read_store_json(folder: Path) -> dict[str, Any]:
    """Reads meta/store.json.

    Raises:
        DatasetError: it is missing or damaged, or a later robot_rl wrote it.
    """
    path = folder / STORE_JSON
    if not path.exists():
        if (folder / "meta/info.json").is_file():
            raise DatasetError(
                f"{folder}: no {STORE_JSON} in it, so this is a dataset and no store: there is nothing "
                f"to seal or to repair. Use it as it is: `robot-rl replay info {folder}`, `robot-rl finetune "
                f"dataset={folder}`."
            )
        raise DatasetError(
            f"{folder}: no {STORE_JSON} in it, so it is no store. "
            "`robot-rl train` records one, in experience/ of its run folder."
        )
    content = read_json(path, DatasetError, _RESTORE)
    found = content.get("format")
    if type(found) is not int:
        raise DatasetError(f"{path}: damaged: format is {found!r}, not a number. {_RESTORE}")
    if found > FORMAT:
        raise DatasetError(
            f"{folder}: the store has format {found}, this robot_rl knows up to {FORMAT}. "
            "Open it with the version that wrote it, or a later one."
        )
    return content


_RESTORE = "`robot-rl replay repair` writes it again from the journal."


def read_layout(folder: Path) -> Layout:
    """Reads the layout in meta/store.json; raises `DatasetError` as `read_store_json`."""
    content = read_store_json(folder)
    try:
        return Layout.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # written before there was a checksum
        raise DatasetError(f"{folder / STORE_JSON}: damaged: {error!r}. {_RESTORE}") from error


def write_store_json(folder: Path, content: Mapping[str, Any]) -> None:
    """Replaces meta/store.json as a whole."""
    write_json(folder / STORE_JSON, content, is_checked=True)


_changing = threading.Lock()


def change_store_json(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replaces the content of meta/store.json by `change(content)`, one thread at a time.

    The caller holds the store's lock, so no other process writes.
    """
    with _changing:
        write_store_json(folder, change(read_store_json(folder)))


def encode_picture(pixels: Any, shape: tuple[int, ...], picture: PictureFormat, quality: int) -> bytes:
    """Returns a picture compressed; `pixels` is a buffer of (h, w, 3) bytes."""
    image = Image.frombuffer("RGB", (shape[1], shape[0]), pixels, "raw", "RGB", 0, 1)
    out = io.BytesIO()
    if picture == "png":
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def decode_picture(encoded: bytes) -> Array:
    """Returns (h, w, 3) uint8."""
    with Image.open(io.BytesIO(encoded)) as image:
        return np.array(image.convert("RGB"))


def check_picture_options(picture: str, quality: int) -> None:
    """Verifies format and quality of pictures."""
    formats = get_args(PictureFormat)
    if picture not in formats:
        raise ValueError(f"store: got picture format {picture!r}, allowed: {', '.join(formats)}")
    if not 1 <= quality <= 100:
        raise ValueError(f"store: got picture quality {quality}, allowed: 1 to 100")
