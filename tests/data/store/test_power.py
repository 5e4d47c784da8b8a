"""What is acknowledged is on the disk with everything that it depends on; a full disk is said as one."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.store import upgrade as store_upgrade
from robot_rl.data.store.check import repair
from robot_rl.data.store.layout import read_store_json, write_store_json
from robot_rl.data.store.seal import SealOptions, seal
from robot_rl.data.store.writer import StoreWriter

FORMAT_1 = Path(__file__).parents[1] / "format_1"


def test_every_folder_above_a_store_is_synced(bench: Any, synced: list[str]) -> None:
    """A store whose name is not on the disk is gone after a power cut, with all that it holds."""
    bench.folder = bench.folder / "of/a/run"
    bench.writer()
    folders = [bench.folder / "journal", bench.folder / "meta", bench.folder, *bench.folder.parents[:4]]
    assert {str(folder) for folder in folders} - {str(bench.folder / "journal")} <= set(synced)


def test_opening_again_syncs_what_the_first_opening_may_have_failed_to(bench: Any, synced: list[str]) -> None:
    bench.writer().close()
    synced.clear()
    bench.writer()
    assert {str(bench.folder / "meta"), str(bench.folder)} <= set(synced)


def test_repairing_again_syncs_what_the_first_repair_may_have_failed_to(
    bench: Any, synced: list[str]
) -> None:
    with bench.writer() as writer:
        bench.episode(writer, 0, 3)
    synced.clear()
    assert repair(bench.folder) == ()
    assert {str(bench.folder / "journal"), str(bench.folder / "journal/000001.log")} <= set(synced)


def test_store_json_is_the_old_one_or_the_new_one(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.writer().close()
    before = read_store_json(bench.folder)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_store_json(bench.folder, before | {"lost": [{}]})
    assert read_store_json(bench.folder) == before
    assert [path.name for path in (bench.folder / "meta").iterdir()] == ["store.json"]


def test_a_full_disk_is_no_fault_of_the_episodes_that_were_to_be_sealed(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench.writer() as writer:
        for episode in range(2):
            bench.episode(writer, episode, 3)
    tried: list[Any] = []

    def full(files: Any) -> None:
        tried.append(files)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("robot_rl.data.lerobot.batch.publish", full)
        said = rf"^{bench.folder}: the disk is full .* then do it again\.$"
        with pytest.raises(DatasetError, match=said):
            seal(bench.folder, SealOptions(images="png"))
    assert len(tried) == 1
    done = seal(bench.folder, SealOptions(images="png"))
    assert (done.episodes, done.refused) == (2, ())


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), MemoryError()], ids=["EIO", "memory"]
)
def test_a_store_that_cannot_be_opened_says_where_and_what_to_do(
    bench: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr("robot_rl.data.store.writer.recover", refuse)
    said = rf"^{bench.folder}: (the disk|there is not enough memory) .*, then do it again\.$"
    with pytest.raises(DatasetError, match=said):
        bench.writer()
    monkeypatch.undo()
    bench.writer()  # the lock is free


def test_an_upgraded_dataset_and_its_original_have_their_names_on_the_disk(
    tmp_path: Path, synced: list[str]
) -> None:
    folder = tmp_path / "demos"
    shutil.copytree(FORMAT_1, folder)
    source = Dataset(folder)
    StoreWriter(folder, source.meta, source.features, flush_s=1e6).close()
    assert (tmp_path / "demos.format-1").is_dir()
    assert synced.count(str(tmp_path)) >= 2  # after the exchange, and after the original has its name
    assert np.array_equal(Dataset(folder).read(0).action, Dataset(FORMAT_1).read(0).action)


def test_an_upgrade_that_failed_at_the_last_is_synced_by_the_next_attempt(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "demos"
    shutil.copytree(FORMAT_1, folder)
    calls: list[Path] = []

    def refuse_the_last(path: Path) -> None:
        calls.append(path)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(store_upgrade, "sync_folder", refuse_the_last)
        with pytest.raises(DatasetError, match=r"The original is whole\."):
            store_upgrade.upgrade(folder)
    assert calls == [tmp_path]
    synced.clear()
    assert store_upgrade.upgrade(folder) is None
    assert synced == [str(tmp_path)]
