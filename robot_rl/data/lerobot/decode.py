"""Decodes pictures from video files, by frame number, and from PNG or JPEG bytes.

PyAV and torchcodec give the same pixels. PyAV is the default: it needs no FFmpeg of the system, loads without
torch, and is as fast in the way it is used here. A request is sorted, and each group of pictures in it is
decoded once. n frames, h x w pixels.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import av
import av.error
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.index import first_line

Array = NDArray[Any]
Backend = Literal["pyav", "torchcodec"]


class FrameError(Exception):
    """A frame that is absent or damaged; `Decoders` adds file and episode."""

    def __init__(self, number: int, *, absent: bool = False) -> None:
        super().__init__(f"frame {number}")
        self.number, self.absent = number, absent


class Decoder(Protocol):
    """An open video file."""

    def frames(self, numbers: Array) -> Iterator[Array]:
        """Yields (h, w, 3) uint8 for ascending frame numbers; each is valid until the next.

        Raises:
            FrameError: a frame is absent, or its packets are damaged.
        """
        ...

    def close(self) -> None: ...


class Decoders:
    """Open video files, the least recently used closed first; one lock for each file."""

    def __init__(self, backend: Backend = "pyav", capacity: int = 128) -> None:
        """Args: backend: which decoder; capacity: open files, a few MB each."""
        if backend not in ("pyav", "torchcodec"):
            raise DatasetError(f"video backend: got {backend!r}, allowed: 'pyav', 'torchcodec'.")
        self.backend: Backend = backend
        self._capacity = capacity
        self._open: OrderedDict[Path, tuple[Decoder, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def frames(
        self,
        path: Path,
        numbers: Sequence[int] | Array,
        fps: float,
        out: Array | None = None,
        where: Callable[[int], str] = "frame {}".format,
    ) -> Array:
        """Returns frames of a file in the order of `numbers`, (n, h, w, 3) uint8.

        Args:
            path: of the file.
            numbers: of the frames, (n,).
            fps: of the dataset.
            out: is written, if given: a picture is copied once.
            where: describes a frame for the message if it is damaged.

        Raises:
            DatasetError: no such file, no readable video, damage, or an absent frame.
        """
        numbers = np.asarray(numbers, np.int64)
        if not len(numbers):
            return np.empty((0, 0, 0, 3), np.uint8)
        order = np.argsort(numbers, kind="stable")
        wanted, first = np.unique(numbers[order], return_index=True)
        decoder, lock = self._get(path, fps)
        try:
            with lock:
                for places, frame in zip(np.split(order, first[1:]), decoder.frames(wanted), strict=True):
                    if out is None:
                        out = np.empty((len(numbers), *frame.shape), np.uint8)
                    if frame.shape != out.shape[1:]:
                        raise DatasetError(other_size(path, frame.shape, out.shape[1:]))
                    for place in places.tolist():
                        out[place] = frame
        except FrameError as error:
            say = no_frame if error.absent else undecodable
            raise DatasetError(say(path, where(error.number))) from error
        assert out is not None
        return out

    def close(self) -> None:
        with self._lock:
            for decoder, _ in self._open.values():
                decoder.close()
            self._open.clear()

    def _get(self, path: Path, fps: float) -> tuple[Decoder, threading.Lock]:
        with self._lock:
            if self._process != os.getpid():  # forked: the positions in these files belong to the parent
                self._open, self._process = OrderedDict(), os.getpid()
            entry = self._open.pop(path, None)
            if entry is None:
                opened = PyavDecoder if self.backend == "pyav" else TorchcodecDecoder
                entry = (opened(path, fps), threading.Lock())
            self._open[path] = entry
            if len(self._open) > self._capacity:
                self._open.popitem(last=False)  # closed with its last reference: a thread may be reading
            return entry


class PyavDecoder:
    """A video file read by PyAV: no other library, no FFmpeg of the system."""

    def __init__(self, path: Path, fps: float) -> None:
        self._container: Any = open_video(path)
        self._stream: Any = self._container.streams.video[0]
        self._stream.thread_type = "NONE"  # frame threads would decode ahead of every seek,
        self._stream.codec_context.thread_count = 1  # and dav1d takes as many as it may
        self._fps = fps
        self._tick_s = float(self._stream.time_base)
        self._start = self._stream.start_time or 0
        self._to_rgb = VideoReformatter()  # kept: making one costs as much as a small frame
        self._decoded: Any = iter(())
        self._at: int | None = None
        self._key = 0  # the last key frame
        self._group = 1  # longest known distance of key frames

    def frames(self, numbers: Array) -> Iterator[Array]:
        for number in numbers.tolist():
            try:
                rgb = self._to_rgb.reformat(self._reach(number), format="rgb24")
            except av.error.FFmpegError as error:
                self._at = None  # the next frame begins with a seek
                raise FrameError(number) from error
            plane: Any = rgb.planes[0]
            lines = np.frombuffer(plane, np.uint8).reshape(rgb.height, plane.line_size)
            yield lines[:, : rgb.width * 3].reshape(rgb.height, rgb.width, 3)

    def close(self) -> None:
        self._container.close()

    def _reach(self, number: int) -> Any:
        """Returns one frame: goes on decoding within a group of pictures, else seeks to its key frame."""
        # The distance between the target of a seek and its result shows the length of a group.
        goes_on = self._at is not None and self._at < number < max(self._key + self._group, self._at + 2)
        if not goes_on:
            self._seek(number)
        for frame in self._decoded:
            at = round((frame.pts - self._start) * self._tick_s * self._fps)
            if frame.key_frame or self._at is None:
                self._key = at
            self._at = at
            if at == number:
                self._group = max(self._group, number - self._key + 1)
                return frame
            if at > number:
                break
        self._at = None
        raise FrameError(number, absent=True)

    def _seek(self, number: int) -> None:
        self._container.seek(
            self._start + round(number / self._fps / self._tick_s), stream=self._stream, backward=True
        )
        self._decoded, self._at = self._container.decode(self._stream), None


class TorchcodecDecoder:
    """A video file read by torchcodec, which needs the system's FFmpeg libraries."""

    def __init__(self, path: Path, fps: float) -> None:
        try:
            from torchcodec.decoders import VideoDecoder
        except (ImportError, RuntimeError, OSError) as error:
            raise DatasetError(
                "video backend 'torchcodec' does not load: install the package torchcodec and the FFmpeg "
                f"libraries of the system (apt install ffmpeg), or use 'pyav'. ({first_line(error)})"
            ) from error
        if not path.is_file():
            open_video(path)
        try:
            self._decoder: Any = VideoDecoder(
                str(path), seek_mode="approximate", dimension_order="NHWC", num_ffmpeg_threads=1
            )
        except (RuntimeError, ValueError) as error:
            raise DatasetError(unreadable(path, error)) from error

    def frames(self, numbers: Array) -> Iterator[Array]:
        total = self._decoder.metadata.num_frames
        if total is not None and len(numbers) and numbers[-1] >= total:
            raise FrameError(int(numbers[numbers >= total][0]), absent=True)
        try:
            decoded = self._decoder.get_frames_at(indices=numbers.tolist()).data.numpy()
        except (RuntimeError, IndexError) as error:
            raise FrameError(self._first_damaged(numbers)) from error
        yield from decoded

    def close(self) -> None:
        del self._decoder

    def _first_damaged(self, numbers: Array) -> int:
        """Returns the frame that fails: torchcodec does not name it."""
        for number in numbers.tolist():
            try:
                self._decoder.get_frames_at(indices=[number])
            except (RuntimeError, IndexError):
                return number
        return int(numbers[0])


@dataclass(frozen=True, kw_only=True)
class VideoHeader:
    """The header of a video file."""

    codec: str
    frames: int
    fps: float
    height: int
    width: int


def read_header(path: Path) -> VideoHeader:
    """Returns codec, frames and rate of a file without decoding it; the packets are counted.

    Raises:
        DatasetError: no such file, no readable video, or a codec that this FFmpeg cannot decode.
    """
    with open_video(path) as container:
        stream = container.streams.video[0]
        packets = sum(packet.size > 0 for packet in container.demux(stream))
        return VideoHeader(
            codec=stream.codec_context.codec.canonical_name,
            frames=packets,
            fps=float(stream.average_rate or 0),
            height=stream.codec_context.height,
            width=stream.codec_context.width,
        )


def lost_frames(path: Path) -> tuple[Array, int]:
    """Decodes a whole file; returns the frames that cannot be decoded, and the number of all.

    Raises:
        DatasetError: as `read_header`.
    """
    expected: set[int] = set()
    decoded: set[int] = set()
    with open_video(path) as container:
        stream: Any = container.streams.video[0]
        stream.thread_type = "NONE"  # as in reading; a failure then concerns the present packet
        stream.codec_context.thread_count = 1
        try:
            for packet in container.demux(stream):
                if packet.size and not packet.is_discard:
                    expected.add(packet.pts)
                with contextlib.suppress(av.error.FFmpegError):  # the frame is absent then
                    decoded |= {frame.pts for frame in packet.decode()}
        except av.error.FFmpegError as error:  # the container itself
            raise DatasetError(unreadable(path, error)) from error
    order = np.array(sorted(expected), np.int64)
    return np.flatnonzero(~np.isin(order, list(decoded))), len(order)


def open_video(path: Path) -> Any:
    """Opens a file that holds video in a codec that can be decoded here."""
    if not path.is_file():
        raise DatasetError(
            f"{path}: this video file is missing. Copy it again (a partial download?), or drop its episodes "
            "(on_damage=skip)."
        )
    try:
        container = av.open(str(path))
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DatasetError(unreadable(path, error)) from error
    stream: Any = container.streams.video[0] if container.streams.video else None
    if stream is None or stream.codec_context is None:
        tag = _codec_tag(container)
        container.close()
        raise DatasetError(
            f"{path}: no decoder for its codec{tag}; this FFmpeg knows h264, hevc, av1, vp9 and others. "
            "Encode the video again, for example with `ffmpeg -c:v libx264`."
        )
    return container


def _codec_tag(container: Any) -> str:
    tags = [s.codec_tag for s in container.streams if hasattr(s, "codec_tag")]
    return f" {tags[0]!r}" if tags else ""


def no_frame(path: Path, where: str) -> str:
    """Returns the message for a frame that a video does not have."""
    return (
        f"{path}: {where} is not in this video: it is shorter than the parquet rows, has gaps or damage, or "
        "another rate than meta/info.json says. Record or copy the episode again, or drop it "
        "(on_damage=skip)."
    )


def other_size(at: object, got: Sequence[int], want: Sequence[int]) -> str:
    """Returns the message for a picture whose size differs from meta/info.json."""
    return (
        f"{at}: the picture is {got[1]}x{got[0]}, meta/info.json says {want[1]}x{want[0]}. Correct the shape "
        "there, or leave the episode out."
    )


def undecodable(path: Path, where: str) -> str:
    """Returns the message for a frame whose packets are damaged."""
    return (
        f"{path}: {where} cannot be decoded: the video is damaged there. Copy it again, or leave the episode "
        "out: `robot-rl replay verify` says which are sound, `robot-rl replay filter` writes those to a new "
        "dataset."
    )


def unreadable(path: Path, error: Exception) -> str:
    """Returns the message for a video that cannot be opened or decoded."""
    return (
        f"{path}: cannot be read as video ({first_line(error)}); its writer was killed, or the copy "
        "stopped early. Copy it again, or drop its episodes (on_damage=skip)."
    )


def decode_pictures(encoded: Sequence[bytes], at: str = "picture", out: Array | None = None) -> Array:
    """Returns PNG or JPEG pictures of one size, (n, h, w, 3) uint8.

    Raises:
        DatasetError: other bytes, or a picture whose size differs from `out`.
    """
    for row, content in enumerate(encoded):
        picture = _decode_picture(content, f"{at} {row}")
        if out is None:
            out = np.empty((len(encoded), *picture.shape), np.uint8)
        if picture.shape != out.shape[1:]:
            raise DatasetError(other_size(f"{at} {row}", picture.shape, out.shape[1:]))
        out[row] = picture
    return np.empty((0, 0, 0, 3), np.uint8) if out is None else out


_LOCAL = threading.local()


def _decode_picture(content: bytes, at: str) -> Array:
    name = "png" if content[:4] == b"\x89PNG" else "mjpeg" if content[:2] == b"\xff\xd8" else None
    if name is None:
        raise DatasetError(f"{at}: its first bytes are {content[:4]!r}, allowed: PNG or JPEG.")
    codec: Any = getattr(_LOCAL, name, None)
    if codec is None:
        codec = av.CodecContext.create(name, "r")
        setattr(_LOCAL, name, codec)
    packet = av.Packet(content)
    packet.is_keyframe = True  # else the decoder adds the picture to the one before it
    try:
        return codec.decode(packet)[0].to_ndarray(format="rgb24")
    except (av.error.FFmpegError, IndexError) as error:
        raise DatasetError(f"{at}: damaged {name} picture ({error}). Drop its episode.") from error
