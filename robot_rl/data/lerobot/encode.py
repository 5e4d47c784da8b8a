"""Pictures, one at a time, into video files and PNG bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError

Array = NDArray[Any]

_ENCODERS = {"h264": "libx264", "av1": "libsvtav1"}
_CRF = {"h264": 23, "av1": 30}
_PRESETS = {"h264": "veryfast", "av1": "12"}


@dataclass(frozen=True, kw_only=True)
class VideoCodec:
    """Options of video encoding; always yuv420p, which every decoder reads."""

    name: Literal["h264", "av1"] = "h264"
    crf: int | None = None
    """Quality, lower is better; None: 23 for h264, LeRobot's 30 for av1."""
    preset: str | None = None
    """Trades speed against size; None: veryfast for h264, LeRobot's 12 for av1."""
    gop: int = 2
    """Pictures from one keyframe to the next: 2 as in LeRobot, for random access."""
    threads: int = 1
    """Of the encoder; 0: the encoder chooses."""

    def __post_init__(self) -> None:
        if self.name not in _ENCODERS:
            raise DatasetError(f"codec: got {self.name!r}, allowed: {', '.join(_ENCODERS)}")
        if _ENCODERS[self.name] not in av.codecs_available:
            raise DatasetError(
                f"codec {self.name!r}: this PyAV has no {_ENCODERS[self.name]}. "
                "Install PyAV's own wheel (`pip install av`), or use images=png."
            )

    def options(self) -> dict[str, str]:
        crf = _CRF[self.name] if self.crf is None else self.crf
        common = {"crf": str(crf), "g": str(self.gop), "preset": self.preset or _PRESETS[self.name]}
        if self.name == "h264":
            # Without B-frames packets lie in the order of the pictures: files can be joined as they are.
            return {**common, "bf": "0", "threads": str(self.threads)}
        return {**common, "svtav1-params": f"fast-decode=0:lp={self.threads}"}

    def info(self, shape: tuple[int, ...], fps: float) -> dict[str, Any]:
        """Returns LeRobot's description of such a video."""
        options = self.options()
        return {
            "video.height": shape[0],
            "video.width": shape[1],
            "video.codec": self.name,
            "video.pix_fmt": "yuv420p",
            "video.fps": int(fps),
            "video.channels": 3,
            "has_audio": False,
            "video.g": self.gop,
            "video.crf": int(options["crf"]),
            "video.preset": int(options["preset"]) if self.name == "av1" else options["preset"],
            "video.fast_decode": 0,
            "video.video_backend": "pyav",
            "video.extra_options": {},
            "is_depth_map": False,
        }


class VideoFile:
    """A video that is being written."""

    def __init__(self, path: Path, shape: Sequence[int], fps: float, codec: VideoCodec) -> None:
        if codec.name == "av1":
            os.environ.setdefault("SVT_LOG", "0")  # else it prints a greeting for every file
        self.frames = 0
        self.bytes = 0
        self._path = path
        self._rate = Fraction(fps).limit_denominator(1_000_000)
        self._container = av.open(str(path), "w", format="mp4")
        stream = self._container.add_stream(_ENCODERS[codec.name], rate=self._rate, options=codec.options())
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = shape[:2]
        stream.pix_fmt, stream.time_base = "yuv420p", 1 / self._rate
        self._stream = stream

    def add(self, picture: Array) -> None:
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame.pts, frame.time_base = self.frames, 1 / self._rate
        self._mux(self._stream.encode(frame))
        self.frames += 1

    def finish(self) -> None:
        """Closes the file and counts its frames: a picture lost in the encoder would shift the rest.

        Raises:
            DatasetError: the file holds another number of pictures than were added.
        """
        self._mux(self._stream.encode(None))
        self._container.close()
        held = frames_in(self._path)
        if held != self.frames:
            raise DatasetError(
                f"{self._path}: the encoder kept {held} of {self.frames} pictures; nothing was saved. "
                "Use images=png, or another codec."
            )

    def abandon(self) -> None:
        with contextlib.suppress(OSError, av.error.FFmpegError):  # a full disk refuses the index too
            self._container.close()

    def _mux(self, packets: Sequence[Any]) -> None:
        self._container.mux(packets)
        self.bytes += sum(packet.size for packet in packets)


def frames_in(path: Path) -> int:
    """Returns the number of frames in the header of a video file."""
    container = av.open(str(path))
    with contextlib.closing(container):
        return container.streams.video[0].frames


class PngEncoder:
    """Pictures as PNG bytes, without loss."""

    def __init__(self, shape: Sequence[int]) -> None:
        codec = av.CodecContext.create("png", "w")
        assert isinstance(codec, av.VideoCodecContext)
        codec.height, codec.width = shape[:2]
        codec.pix_fmt, codec.time_base = "rgb24", Fraction(1, 1)
        # A third smaller than FFmpeg's default, which predicts no pixel from others, at the same cost.
        codec.options = {"pred": "mixed", "compression_level": "1"}
        self._codec = codec

    def __call__(self, picture: Array) -> bytes:
        """Returns the bytes of a picture (h, w, 3) uint8."""
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        return b"".join(bytes(packet) for packet in self._codec.encode(frame))


class ArrayFile:
    """A .npy file that grows by rows; its header has room for their number."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        self.rows = 0
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._write_header()

    def add(self, values: Array) -> None:
        """Appends rows (n, ...)."""
        np.ascontiguousarray(values, self._dtype).tofile(self._file)
        self.rows += len(values)

    def finish(self) -> None:
        """Completes the header and closes the file."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.flush()  # `tofile` writes past the buffer
