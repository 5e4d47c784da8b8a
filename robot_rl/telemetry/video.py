"""Videos of episodes: mp4 that a browser plays."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import RenderError
from robot_rl.core.files import publish_file

CODECS = ("libx264", "libopenh264", "mpeg4")
"""In the order they are tried; the first two are h264, the last is in every build of FFmpeg."""

_OPTIONS = {"libx264": {"crf": "23", "preset": "veryfast"}, "mpeg4": {"qscale": "4"}}


def write_video(path: Path, frames: NDArray[np.uint8], fps: float) -> Path:
    """Writes frames (T, h, w, 3), uint8 RGB, as an mp4; an odd side is padded to an even one.

    The file appears when it is complete. Its folder is made if it does not exist.
    """
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or len(frames) == 0:
        raise ValueError(
            f"video: frames must be uint8 (T, h, w, 3) with T >= 1, got {frames.dtype} {frames.shape}"
        )
    if fps <= 0:
        raise ValueError(f"video: fps must be above 0, got {fps}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    odd = [(0, size % 2) for size in frames.shape[1:3]]  # chroma has half the resolution
    _encode(temporary, np.pad(frames, [(0, 0), *odd, (0, 0)], mode="edge"), fps, find_codec())
    publish_file(temporary, path)
    return path


def find_codec() -> str:
    """Returns the first codec of `CODECS` that this build of PyAV can encode."""
    from av import Codec
    from av.codec.codec import UnknownCodecError

    for name in CODECS:
        try:
            Codec(name, "w")
        except UnknownCodecError:
            continue
        return name
    raise RenderError(f"video: this build of PyAV encodes none of {', '.join(CODECS)}; reinstall `av`.")


def _encode(path: Path, frames: NDArray[np.uint8], fps: float, codec: str) -> None:
    import av

    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = _OPTIONS.get(codec, {})
        stream.codec_context.thread_count = 1  # the simulator and the learner need the other cores
        for image in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
