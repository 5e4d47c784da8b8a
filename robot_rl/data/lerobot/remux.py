"""Copies parts of videos into new files, packet by packet, without decoding or encoding.

A stretch of frames is cut at the last key frame at or before its first frame, so up to one group of pictures
before it stays in the new file, ahead of the first frame of the episode.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.decode import open_video
from robot_rl.data.lerobot.encode import frames_in

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Successive frames of one file."""

    path: Path
    first: int
    frames: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The packets of one file that are copied."""

    path: Path
    begin: int
    """First packet, in the order of the file."""
    end: int
    lead: int
    """Frames that are copied before the first one of the stretch."""
    bytes: int
    pts: int
    """Of the first frame that is copied."""
    is_whole: bool

    @property
    def frames(self) -> int:
        return self.end - self.begin


def copy_stretches(
    stretches: Sequence[Stretch],
    target: Callable[[int], Path],
    *,
    fps: float,
    limit: float,
    apart: bool = False,
) -> list[tuple[int, int]]:
    """Copies frames into as few files as their sizes allow.

    Args:
        stretches: are copied in this order.
        target: number of a new file -> its path.
        fps: of all videos.
        limit: largest new file, in bytes; one piece may be larger.
        apart: each old file becomes one new file.

    Returns:
        For every stretch the number of its new file, and its first frame there.

    Raises:
        DatasetError: a file is missing, shorter than the stretch, or not readable.
    """
    places: list[tuple[int, int]] = []
    group: list[Piece] = []
    number, kind = -1, None
    for run in _runs(stretches):
        begin, end = run[0], run[-1]
        piece = _piece(begin.path, begin.first, end.first + end.frames)
        its = _header(piece.path)
        size = sum(one.bytes for one in group) + piece.bytes
        if number < 0 or apart or size > limit or its != kind:
            _write(group, number, target, fps)
            group, number, kind = [], number + 1, its
        before = sum(one.frames for one in group) + piece.lead
        places += [(number, before + one.first - begin.first) for one in run]
        group.append(piece)
    _write(group, number, target, fps)
    return places


def _header(path: Path) -> Any:
    """Returns the properties that two video files must share to be joined."""
    with open_video(path) as container:
        codec = container.streams.video[0].codec_context
        return (codec.name, codec.width, codec.height, codec.extradata)


def _join(pieces: Sequence[Piece], target: Path, fps: float) -> None:
    """Writes the packets of several files, one file after the other, into a new one.

    Raises:
        DatasetError: the new file does not hold as many frames as there are packets.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    frames = 0
    with av.open(str(target), "w", format="mp4") as joined:
        stream: Any = None
        for piece in pieces:
            with open_video(piece.path) as source:
                video = source.streams.video[0]
                if stream is None:
                    stream = joined.add_stream_from_template(video, opaque=True)
                    stream.time_base = video.time_base
                shift = round(frames / fps / video.time_base) - (piece.pts if piece.begin else 0)
                for packet in itertools.islice(_packets(source), piece.begin, piece.end):
                    packet.dts = None if packet.dts is None else packet.dts + shift
                    packet.pts += shift
                    packet.stream = stream
                    joined.mux(packet)
            frames += piece.frames
    held = frames_in(target)
    if held != frames:
        raise DatasetError(
            f"{target.name}: {held} of {frames} frames arrived when {pieces[0].path} and others were joined; "
            "nothing was changed. Please report this with the files."
        )


def _write(group: Sequence[Piece], number: int, target: Callable[[int], Path], fps: float) -> None:
    if len(group) == 1 and group[0].is_whole:
        path = target(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(group[0].path, path)
    elif group:
        _join(group, target(number), fps)


def _runs(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Yields stretches that follow each other in one file together."""
    run: list[Stretch] = []
    for one in stretches:
        if run and (one.path != run[-1].path or one.first != run[-1].first + run[-1].frames):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _packets(container: Any) -> Iterator[Any]:
    return (p for p in container.demux(container.streams.video[0]) if p.size and p.pts is not None)


def _piece(path: Path, first: int, after: int) -> Piece:
    """Returns the fewest packets that hold the frames from `first` to before `after`."""
    with open_video(path) as container:
        found = [(packet.pts, packet.is_keyframe, packet.size) for packet in _packets(container)]
    pts, is_key, sizes = np.array(found, np.int64).reshape(-1, 3).T
    total = len(found)
    if after > total or not total:
        raise DatasetError(
            f"{path}: has {total} frames, meta/ says that an episode lies in frames {first} to {after - 1}. "
            "Copy the file again, or leave its episodes out."
        )
    shown = np.empty(total, np.int64)  # a packet's place among the pictures: B-frames lie in another order
    shown[np.argsort(pts, kind="stable")] = np.arange(total)
    begin = _cut_before(shown, is_key.astype(bool), first)
    end = _cut_after(shown, begin, after)
    return Piece(
        path=path,
        begin=begin,
        end=end,
        lead=first - begin,
        bytes=int(sizes[begin:end].sum()),
        pts=int(pts[begin:end].min()),
        is_whole=begin == 0 and end == total,
    )


def _cut_before(shown: Array, is_key: Array, first: int) -> int:
    """Returns the last packet from which decoding can begin and show frame `first` and all after it."""
    earliest = np.minimum.accumulate(shown[::-1])[::-1]
    usable = is_key & (earliest == shown) & (shown <= first) & (shown == np.arange(len(shown)))
    return int(np.flatnonzero(usable)[-1]) if usable.any() else 0


def _cut_after(shown: Array, begin: int, after: int) -> int:
    """Returns the packet before which decoding can stop and has shown all frames before `after`."""
    latest = np.maximum.accumulate(shown[begin:])
    closed = latest == begin + np.arange(len(latest))
    ends = begin + 1 + np.flatnonzero(closed & (latest >= after - 1))
    return int(ends[0])
