"""Folders that change places: nothing of either is lost."""

from pathlib import Path

import pytest

from robot_rl.core import files


def two(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("new", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    return tmp_path / "new", tmp_path / "folder"


@pytest.mark.parametrize("flag", [2, 1 << 30], ids=["in one step", "EINVAL, as elsewhere"])
def test_an_exchange_keeps_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int) -> None:
    monkeypatch.setattr(files, "_RENAME_EXCHANGE", flag)
    new, folder = two(tmp_path)
    files.exchange_folder(new, folder)
    assert (folder / "content").read_text() == "new"
    assert (new / "content").read_text() == "folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]


def test_an_exchange_with_nothing_leaves_the_folder(tmp_path: Path) -> None:
    _, folder = two(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.exchange_folder(tmp_path / "none", folder)
    assert (folder / "content").read_text() == "folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]
