from contextlib import closing
from fractions import Fraction

import av
import numpy as np
import pytest

from robot_rl.core.errors import RenderError
from robot_rl.telemetry import video


def film(num_frames: int, height: int, width: int) -> np.ndarray:
    """Grey frames that get brighter, the left half red."""
    frames = np.empty((num_frames, height, width, 3), np.uint8)
    frames[:] = np.linspace(40, 200, num_frames).astype(np.uint8)[:, None, None, None]
    frames[:, :, : width // 2] = (200, 20, 20)
    return frames


def decode(path) -> tuple[np.ndarray, Fraction, str]:
    with closing(av.open(str(path))) as container:
        stream = container.streams.video[0]
        images = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        rate = stream.average_rate
        assert rate is not None
        return np.stack(images), Fraction(rate.numerator, rate.denominator), stream.codec_context.name


def test_a_film_comes_back_with_its_size_rate_and_colours(tmp_path):
    frames = film(12, 48, 64)
    path = video.write_video(tmp_path / "videos" / "episode.mp4", frames, fps=20)
    images, rate, codec = decode(path)
    assert images.shape == (12, 48, 64, 3)
    assert rate == 20
    assert codec == ("h264" if video.find_codec() != "mpeg4" else "mpeg4")
    # Lossy, and chroma is halved: away from the edge between the halves colours are near.
    error = np.abs(images[:, :, :24].astype(int) - frames[:, :, :24]).mean()
    assert error < 12
    assert sorted(path.parent.iterdir()) == [path]


def test_odd_sides_become_even(tmp_path):
    images, _, _ = decode(video.write_video(tmp_path / "odd.mp4", film(3, 33, 47), fps=12.5))
    assert images.shape[1:3] == (34, 48)


def test_without_h264_another_codec_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "CODECS", ("no_such_codec", "mpeg4"))
    _, _, codec = decode(video.write_video(tmp_path / "old.mp4", film(3, 32, 32), fps=10))
    assert codec == "mpeg4"


def test_a_build_without_any_codec_says_so(monkeypatch):
    monkeypatch.setattr(video, "CODECS", ("no_such_codec",))
    with pytest.raises(RenderError, match="encodes none of no_such_codec; reinstall `av`"):
        video.find_codec()


@pytest.mark.parametrize(
    "frames",
    [np.zeros((4, 8, 8), np.uint8), np.zeros((4, 8, 8, 3)), np.zeros((0, 8, 8, 3), np.uint8)],
    ids=["grey", "float", "empty"],
)
def test_frames_of_another_kind_are_refused(tmp_path, frames):
    with pytest.raises(ValueError, match=r"frames must be uint8 \(T, h, w, 3\) with T >= 1, got"):
        video.write_video(tmp_path / "bad.mp4", frames, fps=10)


def test_a_film_needs_a_rate(tmp_path):
    with pytest.raises(ValueError, match="fps must be above 0, got 0"):
        video.write_video(tmp_path / "bad.mp4", film(1, 8, 8), fps=0)
