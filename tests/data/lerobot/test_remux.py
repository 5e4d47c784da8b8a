"""Stretches of videos are copied packet by packet: the same pictures, whatever lies around them."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.decode import Decoders
from robot_rl.data.lerobot.encode import frames_in
from robot_rl.data.lerobot.remux import Stretch, copy_stretches

FPS = 20
B_FRAMES = {"bf": "2", "sc_threshold": "0", "x264-params": "b-adapt=0:open-gop=0"}


def video(path: Path, frames: int, **options: str) -> Path:
    """A video whose picture t is grey, 20 + 5 t, with a key frame at every sixth picture."""
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream(
            "libx264", rate=FPS, options={"g": "6", "sc_threshold": "0", **options}
        )
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.time_base = Fraction(1, FPS)
        for t in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 20 + 5 * t, np.uint8), format="rgb24")
            frame.pts = t
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def levels(path: Path, first: int, count: int) -> list[int]:
    """Returns which pictures of `video` these frames are."""
    numbers = np.arange(first, first + count)
    shown = Decoders("pyav", 4).frames(path, numbers, FPS, None, str)
    return [round((float(picture.mean()) - 20) / 5) for picture in shown]


def copied(tmp_path: Path, *wanted: tuple[Path, int, int], **options: Any) -> list[tuple[Path, int]]:
    def target(number: int) -> Path:
        return tmp_path / f"new/{number}.mp4"

    stretches = [Stretch(path=path, first=first, frames=frames) for path, first, frames in wanted]
    settings: dict[str, Any] = {"fps": FPS, "limit": 1e9, **options}
    places = copy_stretches(stretches, target, **settings)
    return [(target(number), first) for number, first in places]


@pytest.mark.parametrize("options", [{"bf": "0"}, B_FRAMES])
@pytest.mark.parametrize(
    ("first", "count", "lead"), [(6, 6, 0), (8, 5, 2), (0, 3, 0), (17, 3, 5), (0, 20, 0)]
)
def test_a_stretch_begins_at_the_key_frame_before_it(
    tmp_path: Path, options: dict[str, str], first: int, count: int, lead: int
) -> None:
    """Key frames are 0, 6, 12 and 18; a stretch from 17 has the pictures 12 to 16 ahead of it."""
    path = video(tmp_path / "v.mp4", 20, **options)
    ((new, at),) = copied(tmp_path, (path, first, count))
    assert at == lead
    assert levels(new, at, count) == list(range(first, first + count))
    # With B-frames up to two pictures more are needed to show the last one.
    assert lead + count <= frames_in(new) <= lead + count + (2 if options is B_FRAMES else 0)


def test_stretches_share_a_file_in_their_order(tmp_path: Path) -> None:
    one, two = video(tmp_path / "1.mp4", 20, bf="0"), video(tmp_path / "2.mp4", 9, bf="0")
    wanted = ((one, 13, 4), (two, 0, 5), (two, 5, 4), (one, 2, 3))
    places = copied(tmp_path, *wanted)
    # 12 is the key frame before 13: 1 + 4; all of the second, in one piece; 0 to 4 for 2 to 4.
    assert places == [(places[0][0], at) for at in (1, 5, 10, 16)]
    assert frames_in(places[0][0]) == 5 + 9 + 5
    for (path, at), (_, first, count) in zip(places, wanted, strict=True):
        assert levels(path, at, count) == list(range(first, first + count))


def test_whole_files_are_copied_as_they_are(tmp_path: Path) -> None:
    one, two = video(tmp_path / "1.mp4", 8), video(tmp_path / "2.mp4", 9)
    places = copied(tmp_path, (one, 0, 8), (two, 0, 9), apart=True)
    assert [path.read_bytes() for path, _ in places] == [one.read_bytes(), two.read_bytes()]


def test_a_file_stops_at_its_size(tmp_path: Path) -> None:
    one, two = video(tmp_path / "1.mp4", 8), video(tmp_path / "2.mp4", 9)
    places = copied(tmp_path, (one, 0, 8), (two, 0, 9), limit=100)  # less than both together
    assert [path.name for path, _ in places] == ["0.mp4", "1.mp4"]


def test_a_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    path = video(tmp_path / "v.mp4", 8)
    with pytest.raises(DatasetError, match=r"v\.mp4: has 8 frames, meta/ says .* in frames 4 to 8\. Copy"):
        copied(tmp_path, (path, 4, 5))
