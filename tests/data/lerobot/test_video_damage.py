"""Videos whose packets are damaged end in one message, whoever reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.decode import lost_frames
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.loader import ChunkLoader

VIDEO = "videos/observation.images.front/chunk-000/file-001.mp4"
SAID = (
    r"file-001\.mp4: episode 1, step (\d), frame \1 cannot be decoded: the video is damaged there\. "
    r"Copy it again, or leave the episode out: `robot-rl replay verify` says which are sound"
)


def flip(path: Path, packets: slice) -> None:
    """Inverts every byte of some packets inside mdat; the container stays as it is."""
    places: list[tuple[int | None, int]] = []
    with av.open(str(path)) as container:
        places += [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    content = np.fromfile(path, np.uint8)
    for begin, size in places[packets]:
        assert begin is not None
        assert content[:begin].tobytes().count(b"mdat") == 1
        content[begin : begin + size] ^= 0xFF
    content.tofile(path)


@pytest.fixture
def damaged(video_dataset: Path, copied: Callable[[Path], Path]) -> Path:
    """Frame 4 of episode 1 is damaged in the front camera."""
    folder = copied(video_dataset)
    flip(folder / VIDEO, slice(4, 5))
    return folder


def test_lost_frames_are_those_that_nobody_can_decode(damaged: Path) -> None:
    assert lost_frames(damaged / VIDEO).tolist() == [4]
    assert lost_frames(damaged / VIDEO.replace("001", "002")).tolist() == []


def test_frames_name_file_episode_and_frame(damaged: Path) -> None:
    dataset, whole = Dataset(damaged), Dataset(damaged)
    for _ in range(2):  # the second time finds the file open
        with pytest.raises(DatasetError, match=SAID) as raised:
            dataset.frames("front.rgb", 1, [3, 4])
        assert "step 4, frame 4" in str(raised.value)
    np.testing.assert_array_equal(dataset.frames("front.rgb", 1, [0]), whole.frames("front.rgb", 1, [0]))
    with pytest.raises(DatasetError, match=SAID):
        list(dataset.read(1).obs["front.rgb"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_says_the_same(damaged: Path, num_workers: int) -> None:
    loader = ChunkLoader(Dataset(damaged), horizon=2, batch=22, seed=0, num_workers=num_workers)
    with loader, pytest.raises(DatasetError, match=SAID):
        loader.sample()


@pytest.mark.slow  # loading torchcodec, and torch with it, takes seconds
def test_torchcodec_says_the_same(damaged: Path) -> None:
    either: Any = (ImportError, RuntimeError)  # the latter without FFmpeg's libraries
    pytest.importorskip("torchcodec", exc_type=either)
    dataset = Dataset(damaged, backend="torchcodec")
    with pytest.raises(DatasetError, match=SAID) as raised:
        dataset.frames("front.rgb", 1, [2, 3, 4])
    assert "step 4, frame 4" in str(raised.value)
    assert dataset.frames("front.rgb", 1, [0]).shape == (1, 48, 64, 3)
