"""Files and entries that nobody here knows: every edit keeps them, or names them; compact deletes none."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robot_rl.cli import replay
from robot_rl.core.errors import DatasetError
from robot_rl.data.collecting import COLLECTED
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot import foreign
from robot_rl.data.lerobot.amend import rename_tasks
from robot_rl.data.lerobot.checksums import Checksums, ReplacedFiles, record
from robot_rl.data.lerobot.compact import compact
from robot_rl.data.lerobot.damage import check
from robot_rl.data.lerobot.edit import filter as filter_episodes
from robot_rl.data.lerobot.edit import merge, split
from robot_rl.data.lerobot.foreign import foreign_files
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.upgrade import upgrade
from robot_rl.data.lerobot.writer import DatasetWriter, record_checksums
from tests.data.lerobot.shapes import RENAME, change, odd, ours, plain, version_21

Made = Callable[..., Episode]

HIDDEN = (".gitattributes", "meta/.schema")
BELOW = (
    "data/notes.txt",
    "data/chunk-000/notes.txt",
    "videos/README.md",
    "videos/observation.images.front/chunk-000/crop.json",
    "final/why.txt",
    "arrays/front.depth/unit.txt",
    "meta/episodes/chunk-000/notes.txt",
    "journal/diary.txt",
)
GONE = "videos/observation.images.gone"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Path:
    """Four episodes without pictures; not to be changed."""
    return ours(tmp_path_factory.mktemp("bare") / "set", made, cameras=())


@pytest.fixture
def folder(bare: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bare, tmp_path / "set"))


def put(folder: Path, *names: str) -> Path:
    """Adds files that hold their own name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def absent(folder: Path, names: tuple[str, ...]) -> list[str]:
    return [n for n in names if not (folder / n).is_file() or (folder / n).read_text() != n]


def entries(folder: Path, **changes: Any) -> Path:
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    record(folder)
    return folder


def test_every_edit_keeps_hidden_files_and_those_below_our_folders(folder: Path, tmp_path: Path) -> None:
    put(folder, *HIDDEN, *BELOW)
    first, second = split(Dataset(folder), {tmp_path / "first": [0, 2], tmp_path / "second": [1, 3]})
    merged = merge([Dataset(first), Dataset(second)], tmp_path / "merged")
    for new in (first, second, filter_episodes(Dataset(folder), tmp_path / "filtered", episodes=[1]), merged):
        assert absent(new, HIDDEN + BELOW) == []
        assert check(new, thorough=True) == []
    episode = Dataset(merged).read(0)
    with DatasetWriter(merged, episode.meta, episode.features()) as writer:  # removes what a kill left
        writer.write(episode)
    assert absent(merged, HIDDEN + BELOW) == []
    compact(merged)
    assert absent(merged, HIDDEN + BELOW) == []
    assert check(merged, thorough=True) == []
    assert len(Dataset(merged)) == 5


def test_upgrade_and_rename_keep_them_too(tmp_path: Path, made: Made) -> None:
    folder = put(odd(tmp_path / "odd", made), ".gitattributes", "data/notes.txt", "video/README.md")
    new = merge([Dataset(folder, rename=RENAME)], tmp_path / "renamed")
    assert absent(new, (".gitattributes", "data/notes.txt", "video/README.md")) == []
    # The videos are below `videos` now, and not below `video` once more.
    assert [path.name for path in (new / "video").rglob("*") if path.is_file()] == ["README.md"]
    old = tmp_path / "odd-even"
    put(old, *HIDDEN, *(gone := tuple(f"videos/chunk-000/gone/episode_{n:06d}.mp4" for n in (5, 8))))
    new = upgrade(old, tmp_path / "upgraded")
    assert absent(new, HIDDEN) == []
    # Episodes 5 to 8 are 0 to 3 there, also in the names of a camera that meta/info.json does not declare.
    kept = sorted((new / "videos/chunk-000/gone").iterdir())
    assert [path.name for path in kept] == ["episode_000000.mp4", "episode_000003.mp4"]
    assert tuple(path.read_text() for path in kept) == gone


@pytest.mark.parametrize("name", [f"{GONE}/chunk-000/file-000.mp4", "arrays/force/chunk-000/file-000.npy"])
def test_a_camera_that_is_not_declared_is_refused_until_it_is_dropped(
    name: str, folder: Path, tmp_path: Path
) -> None:
    what = "/".join(name.split("/")[:2])
    put(folder, name)
    said = rf"{what}: meta/ does not list this, so its episodes are unknown.*drop={what}$"
    with pytest.raises(DatasetError, match=said):
        filter_episodes(Dataset(folder), tmp_path / "out", episodes=[1])
    with pytest.raises(DatasetError, match=rf"which has no place for file {what}.*drop={what}$"):
        filter_episodes(Dataset(folder), tmp_path / "out", episodes=[1], images="png")
    assert not (tmp_path / "out").exists()
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[1], drop=[what])
    assert not (out / name).exists()
    assert check(out, thorough=True) == []


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        (f"{GONE}/chunk-000/file-000.mp4", ours),
        (f"{GONE}/chunk-000/file-000.mp4", plain),
        (f"{GONE}/chunk-000/file-007.mp4", ours),  # no commit has given this number yet
        (f"{GONE}/chunk-000/file-000.mp4.part", ours),
        ("data/chunk-000/file-003.parquet", plain),  # of ours it is what a kill left of a commit
        ("final/chunk-000/file-000.parquet", plain),
    ],
)
def test_compact_deletes_nothing_that_it_does_not_join(
    name: str, maker: Callable[[Path, Made], Path], tmp_path: Path, made: Made
) -> None:
    folder = put(maker(tmp_path / "set", made), name)
    with pytest.raises(DatasetError, match=r"meta/ does not list this.*Move it out of the dataset"):
        compact(folder)
    assert (folder / name).read_text() == name
    (folder / name).unlink()
    compact(folder)


def test_appending_deletes_no_file_of_a_camera_that_is_not_declared(folder: Path) -> None:
    """Files of others with numbers that no commit has given yet, and with a name that ends as ours do."""
    precious = tuple(f"videos/masks/chunk-000/file-{number:03d}.mp4" for number in range(6))
    precious += ("arrays/force/chunk-000/file-004.npy", "videos/masks/chunk-000/frame.part")
    torn = ("data/chunk-000/file-001.parquet", "final/chunk-000/file-001.parquet.part")
    put(folder, *precious, *torn)
    episode = Dataset(folder).read(0)
    with DatasetWriter(folder, episode.meta, episode.features()) as writer:
        assert absent(folder, torn) == [*torn]  # what a kill left is removed
        writer.write(episode)
    assert absent(folder, precious) == []
    assert len(Dataset(folder)) == 5


def test_compact_takes_no_place_of_a_link_with_files_of_others(folder: Path, tmp_path: Path) -> None:
    put(folder, "data/notes.txt")
    (folder / "data").rename(tmp_path / "big")
    (folder / "data").symlink_to(Path("../big"))
    with pytest.raises(DatasetError, match=r"data/notes.txt: this file is unknown, .*behind the link data"):
        compact(folder)
    assert (folder / "data").readlink() == Path("../big")
    (tmp_path / "big/notes.txt").unlink()
    compact(folder)
    assert len(Dataset(folder)) == 4


def test_links_to_what_was_not_fetched_are_kept_or_named(folder: Path, tmp_path: Path) -> None:
    """As git-annex and DataLad leave them; one to a folder, and one below a folder that is linked to."""
    (tmp_path / "big").mkdir()
    (folder / "more").symlink_to(Path("../big"))
    links = {"big.bin": ".git/annex/objects/x", "gone": "../gone", "more/y.bin": "../.git/annex/objects/y"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    compact(folder)
    rename_tasks(folder, {0: "touch the cube"})  # in hard links, flushed to the disk
    assert {name: str((folder / name).readlink()) for name in links} == links
    assert check(folder, thorough=True) == []
    drop = ["gone", "more/y.bin"]
    said = rf"{folder / 'big.bin'}: a link to .git/annex/objects/x, which is not there\. Fetch that file"
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("robot_rl.data.lerobot.copying._Copy")  # said before any episode is copied
        with pytest.raises(DatasetError, match=rf"{said} .*drop=big.bin$"):
            merge([Dataset(folder)], tmp_path / "out", drop=drop)
    assert not (tmp_path / "out").exists()
    assert len(Dataset(merge([Dataset(folder)], tmp_path / "out", drop=[*drop, "big.bin"]))) == 4
    before = (folder / "meta/checksums.json").read_bytes()
    with pytest.raises(DatasetError, match=rf"{said} .*or remove the link"):
        record_checksums(folder)
    assert (folder / "meta/checksums.json").read_bytes() == before


def test_many_files_of_others_are_copied_in_a_moment(folder: Path, tmp_path: Path) -> None:
    """Comparisons of names are counted: a list was searched for each of them, 1500 * 1500 / 2 times."""
    put(folder, *(f"masks/{number:05d}.png" for number in range(1500)))
    index, compared = Dataset(folder).index, [0]

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "foreign_files", lambda index: [Name(n) for n in foreign_files(index)])
        (tmp_path / "new").mkdir()
        moved = foreign.Moved(index=index, numbers={n: [n] for n in range(4)}, known=range(4))
        foreign.copy_foreign([moved], tmp_path / "new", ())
    assert len(list((tmp_path / "new/masks").iterdir())) == 1500
    assert compared[0] < 20 * 1500


def test_what_a_kill_left_of_a_commit_is_no_file_of_others(folder: Path, tmp_path: Path) -> None:
    """Numbers from 1 on, and temporary names: the next writer removes them."""
    put(
        folder,
        "data/chunk-000/file-001.parquet",
        "data/chunk-000/file-001.npy.part",
        "meta/.writing-info.json",
    )
    assert foreign_files(Dataset(folder).index) == []
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[1])
    assert [path.name for path in (out / "data/chunk-000").iterdir()] == ["file-000.parquet"]


def test_an_edit_passes_over_a_commit_that_a_kill_cut_short(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its files have their names, meta/episodes too, and meta/info.json does not count it."""
    folder = ours(tmp_path / "set", made, depth=True)
    episode = Dataset(folder).read(0)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with (
        monkeypatch.context() as patch,
        DatasetWriter(folder, episode.meta, episode.features()) as writer,
    ):
        patch.setattr(ReplacedFiles, "replace", killed)
        patch.setattr(DatasetWriter, "_give_up", lambda *_: None)
        with pytest.raises(Killed):
            writer.write(episode)
    torn = sorted(path.relative_to(folder).parts[0] for path in folder.rglob("file-001.*"))
    assert torn == ["arrays", "data", "final", "meta", "meta", "videos", "videos"]
    assert foreign_files(Dataset(folder).index) == []
    assert len(Dataset(merge([Dataset(folder)], tmp_path / "out"))) == 4
    compact(folder)
    assert len(Dataset(folder)) == 4
    assert list(folder.rglob("file-001.*")) == []


def test_cameras_that_are_left_out_are_no_files_of_others(tmp_path: Path, made: Made) -> None:
    folder = ours(tmp_path / "set", made, depth=True)
    assert foreign_files(Dataset(folder, cameras=["wrist"], episodes=[1]).index) == []


def test_the_journal_of_a_recorder_is_no_file_of_others(folder: Path, tmp_path: Path) -> None:
    """Its lock is there before the store is; another folder of this name is somebody's."""
    put(folder, "journal/diary.txt")
    assert foreign_files(Dataset(folder).index) == ["journal/diary.txt"]
    put(folder, "journal/writer.lock")
    assert foreign_files(Dataset(folder).index) == []
    new = merge([Dataset(folder)], tmp_path / "new", images="png")
    put(new, "journal/writer.lock")
    record(new)
    put(new, "journal/000.log")
    (new / "journal/writer.lock").write_text("another process")
    assert check(new, thorough=True) == []


def test_what_is_of_the_old_dataset_alone_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bookkeeping of a download, and how the episodes were collected together."""
    put(folder, COLLECTED, ".cache/huggingface/download/x.metadata", ".git/HEAD")
    with caplog.at_level(logging.WARNING):
        out = merge([Dataset(folder)], tmp_path / "out")
    assert f"{folder}: of this dataset alone, not copied: {COLLECTED}, .git, .cache" in caplog.text
    assert not [name for name in (COLLECTED, ".git", ".cache") if (out / name).exists()]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        split(Dataset(folder), {tmp_path / "a": 0.5, tmp_path / "b": 0.5})
    assert caplog.text.count("not copied") == 1  # not for each part
    record(folder)
    put(folder, ".git/HEAD.lock")
    (folder / ".git/HEAD").write_text("another commit")
    assert check(folder, thorough=True) == []


def test_a_file_of_an_episode_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    put(folder, "masks/episode_000009.bin")
    with pytest.raises(DatasetError, match=r"episode_000009.bin: names episode 9, which meta/ does not list"):
        merge([Dataset(folder)], tmp_path / "out")
    (folder / "meta/marks.jsonl").write_text('{"episode_index": 1, "text": "a"}\n{"episode_index": 7}\n')
    with pytest.raises(DatasetError, match=r"marks.jsonl: names episode 7.*drop=meta/marks.jsonl"):
        merge([Dataset(folder)], tmp_path / "out", drop=["masks/episode_000009.bin"])
    drop = ["masks/episode_000009.bin", "meta/marks.jsonl"]
    assert len(Dataset(merge([Dataset(folder)], tmp_path / "out", drop=drop))) == 4


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_entries_of_a_file_of_one_episode_have_its_new_number(folder: Path, tmp_path: Path) -> None:
    """Of 2, 0, 0: episode 2 is 0 now, and 0 is 1 and 2; an entry of another episode is numbered as that."""
    (folder / "ann").mkdir()
    for name, number in (("episode_000002", 2), ("episode_000000", 0)):
        marks = [{"episode_index": number, "by": name}, {"episode_index": 2, "by": "another"}]
        (folder / f"ann/{name}.jsonl").write_text("".join(json.dumps(mark) + "\n" for mark in marks))
        pq.write_table(pa.table({"x": [7], "episode_index": [number]}), folder / f"ann/{name}.parquet")
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[2, 0, 0])
    for number, by, other in ((0, "episode_000002", 0), (1, "episode_000000", 0), (2, "episode_000000", 0)):
        assert lines_of(out / f"ann/episode_{number:06d}.jsonl") == [
            {"episode_index": number, "by": by},
            {"episode_index": other, "by": "another"},
        ]
        rows = pq.read_table(out / f"ann/episode_{number:06d}.parquet").to_pylist()
        assert rows == [{"x": 7, "episode_index": number}]


def test_a_line_ends_where_json_lines_end(folder: Path, tmp_path: Path) -> None:
    """U+2028 and U+0085 may stand in a text; they were taken for ends of a line, and the old numbers kept."""
    marks = [{"episode_index": number, "text": "a\u2028b\x85c"} for number in range(4)]
    text = "".join(json.dumps(mark, ensure_ascii=False) + "\n" for mark in marks)
    (folder / "meta/marks.jsonl").write_text(text)
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[3])
    assert lines_of(out / "meta/marks.jsonl") == [{"episode_index": 0, "text": "a\u2028b\x85c"}]


def test_numbers_that_stay_as_they_were_are_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "all.json").write_text(json.dumps([{"episode_index": n} for n in range(4)]))
    (folder / "mixed.jsonl").write_text('{"about": "all"}\n{"episode_index": 1}\n')
    (folder / "episode_000003.csv").write_text("episode_index,grade\n3,1\n")
    put(folder, "other.json")
    assert (merge([Dataset(folder)], tmp_path / "same") / "episode_000003.csv").is_file()
    assert caplog.text == ""  # every number is what it was
    out = filter_episodes(Dataset(folder), tmp_path / "out", episodes=[3])
    assert (out / "episode_000000.csv").read_text() == "episode_index,grade\n3,1\n"
    said = f"{folder}: episode_index of all.json, episode_000003.csv, mixed.jsonl has still the numbers that"
    assert [record.message.startswith(said) for record in caplog.records] == [True]
    caplog.clear()
    merge([Dataset(folder), Dataset(folder)], tmp_path / "twice")  # 4 to 7 of the second alone
    assert [record.message.startswith(said) for record in caplog.records] == [True]


def test_tables_that_cannot_be_joined_are_named(bare: Path, folder: Path, tmp_path: Path) -> None:
    one = Path(shutil.copytree(bare, tmp_path / "one"))
    for path, values in ((one, [1, 2]), (folder, ["a", "b"])):
        pq.write_table(pa.table({"episode_index": [0, 1], "x": values}), path / "ann.parquet")
    said = rf"{one}/ann.parquet and {folder}/ann.parquet differ \(.*int64 vs string.*drop=ann.parquet$"
    with pytest.raises(DatasetError, match=said):
        merge([Dataset(one), Dataset(folder)], tmp_path / "out")


# --- entries of meta/info.json, and statistics -----------------------------------------------------


def test_entries_of_every_source_are_kept(bare: Path, folder: Path, tmp_path: Path) -> None:
    one = Path(shutil.copytree(bare, tmp_path / "one"))
    entries(one, license="mit")
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    features["action"]["unit"] = "m"
    entries(folder, license="mit", site="Lyon", features=features)
    info = Dataset(merge([Dataset(one), Dataset(folder)], tmp_path / "out")).info
    assert (info["license"], info["site"], info["features"]["action"]["unit"]) == ("mit", "Lyon", "m")
    entries(folder, license="apache")
    with pytest.raises(DatasetError, match=r"license is 'apache', in another one 'mit'.*drop=license"):
        merge([Dataset(one), Dataset(folder)], tmp_path / "both")
    info = Dataset(merge([Dataset(one), Dataset(folder)], tmp_path / "both", drop=["license"])).info
    assert "license" not in info
    assert info["site"] == "Lyon"
    with pytest.raises(DatasetError, match=r"entry 'license' of meta/info.json, .*drop=license,site"):
        merge([Dataset(folder)], tmp_path / "anew", images="png")
    features["action"]["unit"] = "mm"
    one = entries(one, features=features, license="apache")
    with pytest.raises(DatasetError, match=r"'unit' of 'action' is 'm', in the first 'mm'"):
        merge([Dataset(one), Dataset(folder)], tmp_path / "units")


def test_splits_that_cannot_be_kept_are_named(folder: Path, tmp_path: Path) -> None:
    entries(folder, splits={"train": "0:3", "val": "3:4"})
    for edit in (
        lambda **options: merge([Dataset(folder), Dataset(folder)], tmp_path / "out", **options),
        lambda **options: filter_episodes(Dataset(folder), tmp_path / "out", episodes=[3, 0], **options),
    ):
        with pytest.raises(DatasetError, match=r"has several splits, .*Leave them out: drop=splits"):
            edit()
        new = edit(drop=["splits"])
        assert Dataset(new).info["splits"] == {"train": f"0:{len(Dataset(new))}"}
        shutil.rmtree(new)


def test_picture_statistics_of_the_whole_dataset_alone(
    tmp_path: Path, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    """They stand in meta/stats.json and not in meta/episodes; two such datasets have the mean of both."""
    folder, name = plain(tmp_path / "set", made), "observation.images.front"
    path = next((folder / "meta/episodes").rglob("*.parquet"))
    change(path, lambda t: t.drop_columns([n for n in t.column_names if n.startswith(f"stats/{name}/")]))
    stats = json.loads((folder / "meta/stats.json").read_text())
    same = dict.fromkeys(("min", "max", "mean", "std"), [[[0.25]]] * 3)
    (folder / "meta/stats.json").write_text(json.dumps(stats | {name: {**same, "count": [25]}}))
    two = Path(shutil.copytree(folder, tmp_path / "two"))
    same |= {"mean": [[[0.75]]] * 3}
    (two / "meta/stats.json").write_text(json.dumps(stats | {name: {**same, "count": [25]}}))

    def of(new: Path) -> dict[str, Any]:
        return json.loads((new / "meta/stats.json").read_text())

    assert of(merge([Dataset(folder)], tmp_path / "all"))[name]["mean"] == [[[0.25]]] * 3
    both = of(merge([Dataset(folder), Dataset(two)], tmp_path / "both"))[name]
    assert both["mean"] == [[[0.5]]] * 3
    assert both["count"] == [50]
    # Spread within each 0.25, means 0.25 from the common one: sqrt(0.25^2 + 0.25^2)
    np.testing.assert_allclose(np.ravel(both["std"]), 0.125**0.5, rtol=1e-12)
    assert caplog.text == ""
    assert name not in of(filter_episodes(Dataset(folder), tmp_path / "part", episodes=[2]))
    assert f"those of the chosen ones are unknown: {name}. `robot-rl replay stats`" in caplog.text


# --- checksums -------------------------------------------------------------------------------------

SMALL = (
    "README.md",
    "meta/modality.json",
    "masks/episode_000002.bin",
    "masks/chunk-000/file-000.png",
    ".hidden",
)


@pytest.mark.parametrize("name", SMALL)
def test_a_bit_of_a_file_of_others_is_noticed(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Appending and reading need no such file; verify, every copy and compact say that it has changed."""
    first = merge([Dataset(put(folder, *SMALL))], tmp_path / "first")
    episode = Dataset(first).read(0)
    with DatasetWriter(first, episode.meta, episode.features()) as writer:
        writer.write(episode)  # a commit keeps the checksums of files of others
    assert check(first, thorough=True) == []
    content = bytearray((first / name).read_bytes())
    content[len(content) // 2] ^= 1
    (first / name).write_bytes(content)
    said = rf"{first / name}: it does not match its checksum"
    assert replay.run(["verify", str(first)]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    for edit in (lambda: merge([Dataset(first)], tmp_path / "out"), lambda: compact(first)):
        with pytest.raises(DatasetError, match=said):
            edit()
    assert not (tmp_path / "out").exists()
    assert len(Dataset(first, on_damage="skip")) == 5
    assert replay.run(["checksum", str(first)]) == 0  # changed on purpose
    assert check(first, thorough=True) == []


@pytest.mark.parametrize("is_gone", [False, True], ids=["changed", "gone"])
def test_a_commit_reads_no_table_of_others(is_gone: bool, folder: Path, tmp_path: Path) -> None:
    """It lies in meta/ beside those that commits replace; what was recorded of it stays."""
    first = merge([Dataset(put(folder, "meta/notes.jsonl"))], tmp_path / "first")
    before = Checksums(first).recorded("meta/notes.jsonl")
    path = first / "meta/notes.jsonl"
    path.unlink() if is_gone else path.write_text("META/NOTES.JSONL")
    episode = Dataset(first).read(0)
    with DatasetWriter(first, episode.meta, episode.features()) as writer:
        writer.write(episode)
    assert before is not None
    assert Checksums(first).recorded("meta/notes.jsonl") == before
    said = "this file is missing" if is_gone else "does not match its checksum"
    for edit in (lambda: merge([Dataset(first)], tmp_path / "out"), lambda: compact(first)):
        with pytest.raises(DatasetError, match=rf"{path}: .*{said}"):
            edit()


@pytest.mark.parametrize("name", ["README.md", "meta/marks.jsonl"])
def test_a_file_of_others_that_is_gone_is_missed(name: str, folder: Path, tmp_path: Path) -> None:
    first = merge([Dataset(put(folder, name))], tmp_path / "first")
    (first / name).unlink()
    with pytest.raises(DatasetError, match=rf"{name}: this file is missing.*replay checksum"):
        merge([Dataset(first)], tmp_path / "out")
    record(first)  # removed on purpose
    assert len(Dataset(merge([Dataset(first)], tmp_path / "out"))) == 4


def test_checksums_of_files_of_others_have_one_themselves(folder: Path, tmp_path: Path) -> None:
    first = merge([Dataset(put(folder, "README.md"))], tmp_path / "first")
    path = first / "meta/checksums/others.json"
    before = path.read_bytes()
    for content in (before.replace(b"README", b"REBDME"), None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DatasetError, match=r"others.json: .*`robot-rl replay checksum"):
            merge([Dataset(first)], tmp_path / "out")
        assert ["meta/checksums/others.json" in p.message for p in check(first, thorough=True)] == [True]
        path.write_bytes(before)
    assert check(first, thorough=True) == []


def test_a_dataset_without_these_checksums_is_read_as_before(folder: Path, tmp_path: Path) -> None:
    """One of an earlier version: meta/checksums.json, and nothing of files of others."""
    assert Checksums(put(folder, *SMALL)).recorded("README.md") is None
    assert check(folder, thorough=True) == []
    (folder / "README.md").write_text("changed")
    out = merge([Dataset(folder)], tmp_path / "out")
    assert (out / "README.md").read_text() == "changed"


def test_files_of_others_in_version_21(tmp_path: Path, made: Made) -> None:
    folder = put(version_21(tmp_path / "set", made), ".gitattributes")
    assert ".gitattributes" in foreign_files(Dataset(folder).index)
    record(folder)
    (folder / "README.md").write_text("Recorded in Paris.")
    with pytest.raises(DatasetError, match=r"README.md: it does not match its checksum"):
        upgrade(folder, tmp_path / "new")
    record(folder)
    new = upgrade(folder, tmp_path / "new")
    assert (new / ".gitattributes").read_text() == ".gitattributes"
    assert pq.read_metadata(new / "meta/subtasks.parquet").num_rows == 3
