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
        assert f"{part} of sealed datasets: {wanted}" in said


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
