"""Videos whose packets are damaged end in one message, whoever reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.damage import Problem, check, lines, spans
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
    lost, total = lost_frames(damaged / VIDEO)
    assert (lost.tolist(), total) == ([4], 9)
    assert lost_frames(damaged / VIDEO.replace("001", "002"))[0].tolist() == []


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


def test_check_counts_the_frames_and_names_the_episodes(damaged: Path) -> None:
    seen: list[tuple[int, int]] = []
    problems = check(damaged, thorough=True, on_video=lambda done, total: seen.append((done, total)))
    assert [(p.kind, p.episode) for p in problems] == [("damaged-video", 1)]
    assert "file-001.mp4: 1 of 9 frames cannot be decoded (frame 4)" in problems[0].message
    assert lines(problems)[0].startswith("episode 1: ")
    assert seen == [(i + 1, 6) for i in range(6)]
    assert check(damaged) == []  # decodes nothing


def test_a_flipped_byte_of_our_parquet_is_found_and_named(
    png_dataset: Path, copied: Callable[[Path], Path]
) -> None:
    folder = copied(png_dataset)
    assert check(folder, thorough=True) == []
    for name, kind, episode in (
        ("data/chunk-000/file-001.parquet", "unreadable-rows", 1),
        ("final/chunk-000/file-002.parquet", "unreadable-rows", 2),
        ("meta/episodes/chunk-000/file-000.parquet", "damaged-metadata", None),
        ("meta/tasks.parquet", "damaged-metadata", None),
    ):
        content = np.fromfile(folder / name, np.uint8)
        group = pq.ParquetFile(folder / name).metadata.row_group(0)
        column = group.column(group.num_columns - 1)  # in data/ and final/ pictures, PNG
        at = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1
        content[at] ^= 1
        content.tofile(folder / name)
        problems = check(folder, thorough=True)
        assert [(p.kind, p.episode) for p in problems] == [(kind, episode)], name
        assert name in problems[0].message
        assert "does not match its checksum: bytes of the file have changed" in problems[0].message
        content[at] ^= 1
        content.tofile(folder / name)


def test_what_several_episodes_share_is_one_line() -> None:
    problems = [
        Problem(kind="not-finite", message=f"demos: episode {n}: NaN. Drop it.", episode=n) for n in (0, 1, 4)
    ]
    problems += [
        Problem(kind="wrong-fps", message=f"file-{n}.mp4: episode {n}: the video has 30 fps", episode=n)
        for n in range(8)
    ]
    problems += [Problem(kind="short-video", message="a.mp4: cut", episode=n) for n in (2, 3)]
    problems += [
        Problem(kind="missing-video", message=f"file-00{n}.mp4: this video file is missing.", episode=n)
        for n in (1, 2, 5)
    ]
    assert lines(problems) == [
        "demos: episodes 0-1,4: NaN. Drop it.",
        "file-0.mp4: episodes 0-7: the video has 30 fps",
        "episodes 2-3: a.mp4: cut",
        "episodes 1-2,5: file-001.mp4: this video file is missing. So are 2 more.",
    ]
    assert spans([]) == ""
