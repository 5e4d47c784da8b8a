"""What is done when another package is imported: once, and nobody's loader is lost."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from robot_rl.core.after_import import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that nobody has imported."""
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "__init__.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "later", raising=False)
    return "later"


def test_it_acts_once_when_the_package_is_complete(package: str) -> None:
    seen: list[bool] = []
    before = list(sys.meta_path)
    after_import(package, lambda: seen.append(sys.modules[package].ready))
    assert importlib.util.find_spec(package) is not None  # who only asks imports nothing
    assert seen == []
    found = importlib.import_module(package)
    assert seen == [True]
    assert sys.meta_path == before
    assert type(found.__loader__).__name__ == "SourceFileLoader"
    assert found.__spec__ is not None
    assert found.__spec__.loader is found.__loader__
    after_import(package, lambda: seen.append(False))
    assert seen == [True, False]


def test_a_package_that_is_not_there_stays_so(package: str) -> None:
    after_import("not_there", lambda: pytest.fail("acted"))
    with pytest.raises(ImportError):
        importlib.import_module("not_there")


@pytest.mark.parametrize("order", ["import robot_rl, gymnasium", "import gymnasium, robot_rl"])
def test_gymnasium_has_our_ids_whoever_comes_first(order: str) -> None:
    code = f"{order}\nassert 'robot_rl/PickCube-v0' in gymnasium.registry"
    subprocess.run([sys.executable, "-c", code], check=True)
