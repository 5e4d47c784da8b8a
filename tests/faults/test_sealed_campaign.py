"""A sample of the campaign on sealed datasets; `make test-faults` runs all of it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from robot_rl.core.errors import DatasetError


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = Path(__file__).parent
    monkeypatch.syspath_prepend(str(folder))  # as for a program that lies there
    spec = importlib.util.spec_from_file_location("sealed_campaign", folder / "sealed_campaign.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sealed_campaign", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_no_damage_is_read_in_silence(campaign: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--flips", "9", "--cuts", "6"]) == 0
    said = capsys.readouterr().out
    for part in ("9 flips", "6 cuts"):
        wanted = "0 read wrongly, 0 edited wrongly, 0 tracebacks, 0 called sound"
        assert f"{part} of datasets: {wanted}" in said


def test_the_campaign_notices_a_wrong_value(campaign: ModuleType) -> None:
    """A judge that cannot say no proves nothing."""
    truth = {"opened": 1, "episode 0": b"12"}
    assert campaign.judge(truth, truth) == ("equal", "")
    assert campaign.judge({**truth, "episode 0": b"13"}, truth) == ("read wrongly", "episode 0")
    assert campaign.judge({"opened": 1}, truth)[0] == "read wrongly"
    assert campaign.judge({**truth, "episode 0": DatasetError("changed")}, truth)[0] == "told"
    told_and_wrong = {"opened": DatasetError("changed"), "episode 0": b"13"}
    assert campaign.judge(told_and_wrong, truth) == ("read wrongly", "episode 0")
    assert campaign.judge({"opened": "TRACEBACK KeyError: 'fps'"}, truth)[0] == "tracebacks"


class MadeUp:
    """Stands for a template: a command is named by the edit, and makes one file, `a`."""

    def words(self, edit: str, folder: Path, out: Path) -> list[str]:
        return [edit, str(folder if edit == "tasks" else out)]

    def made(self, edit: str) -> dict[str, bytes]:
        return {"a": b"12", "b": b"3"} if edit == "tasks" else {"a": b"12"}


@pytest.mark.parametrize(
    ("edit", "written", "ended", "verified", "judged"),
    [
        ("filter", {"a": b"12"}, "done", "done", "equal"),
        ("filter", {"a": b"13"}, "done", "done", "edited wrongly"),
        ("filter", {}, "done", "done", "edited wrongly"),
        ("filter", {"a": b"12", "c": b""}, "done", "done", "edited wrongly"),
        ("filter", {}, "told", "done", "told"),
        ("filter", {"a": b"12"}, "told", "done", "edited wrongly"),  # it refused, and half of it is there
        ("filter", {}, "tracebacks", "done", "tracebacks"),
        ("tasks", {"a": b"12", "b": b"3"}, "done", "done", "equal"),
        ("tasks", {"a": b"12"}, "done", "told", "told"),  # b, which is damaged, is left and named still
        ("tasks", {"a": b"12"}, "done", "done", "edited wrongly"),  # it is left and called sound
        ("tasks", {"a": b"13"}, "done", "told", "edited wrongly"),
    ],
)
def test_the_campaign_notices_what_a_command_wrote_wrongly(
    campaign: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: str,
    written: dict[str, bytes],
    ended: str,
    verified: str,
    judged: str,
) -> None:
    def command(action: str, folder: str) -> tuple[str, str]:
        if action == "verify":
            return verified, ""
        for name, content in written.items():
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        return ended, ""

    monkeypatch.setattr(campaign, "command", command)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "b").write_bytes(b"4")
    assert campaign.edited(edit, MadeUp(), damaged, "b")[0] == judged


def test_json_is_the_same_if_it_says_the_same(campaign: ModuleType) -> None:
    assert campaign.is_same("a.json", b'{"a": 1}', b'{"a":\t1}')
    assert not campaign.is_same("a.json", b'{"a": 1}', b'{"a": 2}')
    assert not campaign.is_same("a.json", b'{"a": 1}', b'{"a": 1')
    assert not campaign.is_same("a.json", b'{"a": 1}', None)
    assert not campaign.is_same("a.jsonl", b'{"a": 1}', b'{"a":\t1}')
