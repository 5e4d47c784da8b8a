"""A dataset that is not as it was written is refused: when it is read, copied, joined, and written to."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from robot_rl.cli import replay
from robot_rl.core.errors import DatasetError
from robot_rl.core.files import file_checksum
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot.checksums import Checksums, of_bytes, record
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.damage import check
from robot_rl.data.lerobot.edit import filter as filter_episodes
from robot_rl.data.lerobot.edit import merge, split
from robot_rl.data.lerobot.layout import INFO, OWN, STATS
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.writer import DatasetWriter
from tests.data.lerobot.shapes import version_21

Made = Callable[..., Episode]
Copied = Callable[[Path], Path]

CHANGED = "it does not match its checksum: bytes have changed since it was written"
TABLE = "data/chunk-000/file-001.parquet"
KINDS = (
    TABLE,
    "videos/observation.images.front/chunk-000/file-001.mp4",
    "final/chunk-000/file-001.parquet",
    "arrays/front.depth/chunk-000/file-001.npy",
    "meta/episodes/chunk-000/file-001.parquet",
    "meta/checksums/chunk-000/file-001.json",
    "meta/checksums.json",
    "meta/info.json",
    "meta/stats.json",
    "meta/tasks.parquet",
    "meta/robot_rl.json",
)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Path:
    """Three episodes with every kind of file; not to be changed."""
    folder = tmp_path_factory.mktemp("sealed") / "d"
    first = made(5, cameras=("front.rgb",), depth=True)
    with DatasetWriter(folder, first.meta, first.features()) as writer:
        for seed in range(3):
            writer.write(made(5, seed=seed, cameras=("front.rgb",), depth=True), store_episode=seed)
    return folder


@pytest.fixture
def folder(sealed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sealed, tmp_path / "d"))


def flip(path: Path, byte: int | None = None, bit: int = 1) -> None:
    """Turns one bit over, of a byte in the middle unless another is named."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if byte is None else byte] ^= bit
    path.write_bytes(content)


def everything(folder: Path) -> None:
    """Reads all that a dataset holds."""
    dataset = Dataset(folder)
    assert dataset.stats
    for number in range(len(dataset)):
        for values in dataset.read(number).obs.values():
            np.asarray(values[np.arange(5)])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", KINDS)
def test_a_bit_of_any_file_is_noticed_and_nothing_is_made_of_it(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    everything(folder)
    flip(folder / name)
    before = content(folder)
    with pytest.raises(DatasetError, match=r"checksum.*`robot-rl replay verify .*says what is sound"):
        everything(folder)
    assert replay.run(["verify", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not found["sound"]
    assert f"{folder / name}" in found["problems"][0]
    with pytest.raises(DatasetError, match="checksum"):
        compact(folder)
    if name != "meta/stats.json":  # of no use to these: statistics are those of the episodes they keep
        out = tmp_path / "out"
        for edit in (
            lambda: merge([Dataset(folder)], out),
            lambda: filter_episodes(Dataset(folder), out, success=True),
            lambda: split(Dataset(folder), {out: [0, 1]}),
        ):
            with pytest.raises(DatasetError, match="checksum"):
                edit()
        assert not out.exists()
    assert content(folder) == before


def test_a_bit_of_a_page_is_noticed_in_data_of_others(video_dataset: Path, copied: Copied) -> None:
    """Without our checksums those of the pages are left; pages without any are read as they are."""
    others = copied(video_dataset)
    group = pq.ParquetFile(others / TABLE).metadata.row_group(0)
    column = group.column(pq.read_schema(others / TABLE).names.index("action"))
    at = column.dictionary_page_offset or column.data_page_offset
    flip(others / TABLE, at + column.total_compressed_size - 1)  # the last of its bytes: of a page
    with pytest.raises(DatasetError, match="a page does not match its checksum"):
        Dataset(others).read(1)
    with pytest.raises(DatasetError, match=r"a page does not match its checksum.*Nothing was changed"):
        compact(others)
    pq.write_table(pq.read_table(video_dataset / TABLE), others / TABLE)
    assert len(Dataset(others).read(1)) == 9
    assert check(others, thorough=True) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (OWN, lambda text: text[:40], r"meta/robot_rl.json: no JSON"),
        (OWN, lambda _: b"[1]", r"robot_rl.json: holds a list, allowed: a JSON object"),
        (OWN, lambda text: text.replace(b'"shape"', b'"shapf"'), r"makes no sense \(KeyError: 'shape'"),
        (OWN, lambda text: text.replace(b"float32", b"float33"), r"makes no sense \(TypeError"),
        (INFO, lambda text: text.replace(b'"fps": 20', b'"fps": 0'), r"fps is '0', allowed: a rate above 0"),
        (INFO, lambda text: text.replace(b'"so101"', b'"so\xf101"'), r"info.json: no JSON \('utf-8' codec"),
        (INFO, lambda text: text.replace(b"file_index", b"file_indey"), r"no sense \(KeyError: 'file_indey'"),
        (INFO, lambda text: text.replace(b'"shape"', b'"shapf"', 1), r"feature .* allowed: a dtype and a"),
        (STATS, lambda text: text[:-30], r"meta/stats.json: no JSON"),
        (STATS, lambda text: re.sub(rb"-?\d+\.\d+", b'"x"', text, count=1), r"stats.json: .* makes no sense"),
    ],
)
def test_small_files_that_make_no_sense_are_named(
    video_dataset: Path, copied: Copied, name: str, change: Any, said: str
) -> None:
    """Of data without checksums: never a traceback, never sound."""
    folder = copied(video_dataset)
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(change(before))
    assert (folder / name).read_bytes() != before
    with pytest.raises(DatasetError, match=said):
        assert Dataset(folder).stats
    (problem,) = check(folder)
    assert problem.is_fatal
    assert replay.run(["verify", str(folder)]) == 1


@pytest.mark.parametrize("images", ["video_dataset", "png_dataset"])
def test_pictures_of_another_size_than_declared(
    images: str, request: pytest.FixtureRequest, copied: Copied
) -> None:
    folder = copied(request.getfixturevalue(images))
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"]["observation.images.front"]["shape"] = [48, 32, 3]
    path.write_text(json.dumps(info))
    said = r"the picture is 64x48, meta/info.json says 32x48"
    with pytest.raises(DatasetError, match=said):
        Dataset(folder).read(0).obs["front.rgb"][0]
    problems = check(folder, thorough=True)
    assert [problem.episode for problem in problems] == [0, 1, 2]
    assert all("the picture is 64x48, meta/info.json says 32x48" in problem.message for problem in problems)


def test_a_count_that_changed_costs_no_episode(folder: Path, made: Made) -> None:
    """Of three episodes that seem to be one, the writer would remove two as those of a torn commit."""
    path = folder / "meta/info.json"
    path.write_text(path.read_text().replace('"total_episodes": 3', '"total_episodes": 1'))
    before = content(folder)
    episode = made(5, cameras=("front.rgb",), depth=True)
    with pytest.raises(DatasetError, match=rf"meta/info.json: {CHANGED}"):
        DatasetWriter(folder, episode.meta, episode.features())
    assert content(folder) == before


def test_a_reader_that_is_late_finds_what_a_writer_has_committed(folder: Path, made: Made) -> None:
    """It knows the checksums of before, and reads files of after."""
    late, dataset = Checksums(folder), Dataset(folder)
    episode = made(5, seed=3, cameras=("front.rgb",), depth=True, instruction="another")
    with DatasetWriter(folder, episode.meta, episode.features()) as writer:
        writer.write(episode)
        writer.write(episode)
    assert late.json("meta/info.json")["total_episodes"] == 5
    dataset.refresh()
    assert len(dataset.read(4)) == 5
    assert check(folder, thorough=True) == []


def test_missing_checksums_are_missed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "meta/checksums.json").unlink()
    everything(folder)  # as a dataset of others
    assert replay.run(["verify", str(folder)]) == 1
    assert (
        "checksums.json: this file is missing, so changes of the other files cannot be found"
        in capsys.readouterr().out
    )
    assert replay.run(["checksum", str(folder)]) == 0
    assert "checksums of 19 files recorded" in capsys.readouterr().out  # 4 and 5 of each episode
    assert replay.run(["verify", str(folder)]) == 0
    flip(folder / TABLE)
    with pytest.raises(DatasetError, match=CHANGED):
        Dataset(folder).read(1)


def test_what_was_changed_on_purpose_is_taken(folder: Path) -> None:
    path = folder / "meta/info.json"
    path.write_text(path.read_text().replace('"robot_type": "panda"', '"robot_type": "viperx"'))
    with pytest.raises(DatasetError, match=CHANGED):
        Dataset(folder)
    assert replay.run(["checksum", str(folder)]) == 0
    assert Dataset(folder).meta.robot == "viperx"
    assert check(folder, thorough=True) == []


def test_an_earlier_dataset_gets_checksums_of_what_is_added(video_dataset: Path, copied: Copied) -> None:
    folder, episode = copied(video_dataset), Dataset(video_dataset).read(1)
    with DatasetWriter(folder, episode.meta, episode.features()) as writer:
        writer.write(episode)
    assert check(folder, thorough=True) == []
    assert Checksums(folder).recorded(TABLE) is None
    flip(folder / "data/chunk-000/file-003.parquet")
    dataset = Dataset(folder)
    assert len(dataset.read(1)) == 9
    with pytest.raises(DatasetError, match=CHANGED):
        dataset.read(3)


def test_a_missing_file_is_a_problem_of_its_episodes(folder: Path) -> None:
    (folder / "final/chunk-000/file-001.parquet").unlink()
    (problem,) = check(folder)
    assert (problem.kind, problem.episode) == ("changed-file", 1)
    assert "final/chunk-000/file-001.parquet: this file is missing" in problem.message


def test_damaged_episodes_are_left_out_on_request(folder: Path) -> None:
    flip(folder / "videos/observation.images.front/chunk-000/file-001.mp4")
    dataset = Dataset(folder, on_damage="skip")
    assert dataset.index.episode.tolist() == [0, 2]
    for number in range(2):
        assert dataset.read(number).obs["front.rgb"][4].shape == (32, 48, 3)
    assert [(p.kind, p.episode) for p in dataset.skipped] == [("changed-file", 1)]


def test_joined_files_have_checksums(folder: Path) -> None:
    compact(folder)
    everything(folder)
    sums = Checksums(folder)
    assert sorted(path.name for path in (folder / "meta/checksums").rglob("*.json")) == ["file-000.json"]
    for name in (TABLE.replace("001", "000"), "meta/episodes/chunk-000/file-000.parquet", INFO):
        assert sums.recorded(name) == [file_checksum(folder / name)]


def test_the_checksum_is_that_of_zip(tmp_path: Path) -> None:
    """The check value of CRC-32 in every catalogue: 0xCBF43926 of the nine digits."""
    (tmp_path / "digits").write_bytes(b"123456789")
    assert file_checksum(tmp_path / "digits") == of_bytes(b"123456789") == (9, 0xCBF43926)


def test_a_file_is_compared_once_until_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def counted(path: str) -> tuple[int, int]:
        compared.append(Path(path).name)
        return file_checksum(path)

    monkeypatch.setattr("robot_rl.data.lerobot.checksums.file_checksum", counted)
    sums = Checksums(folder)
    for _ in range(3):
        sums.require(TABLE)
    assert compared == ["file-001.parquet"]
    flip(folder / TABLE)
    with pytest.raises(DatasetError, match=CHANGED):
        sums.require(TABLE)


def test_one_changed_file_of_version_21_condemns_its_episode_alone(tmp_path: Path, made: Made) -> None:
    folder = version_21(tmp_path / "set", made)
    record(folder)
    path = folder / "data/chunk-000/episode_000007.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert [(problem.kind, problem.episode) for problem in check(folder)] == [("changed-file", 7)]
    assert Dataset(folder, on_damage="skip").index.episode.tolist() == [5, 6, 8]
