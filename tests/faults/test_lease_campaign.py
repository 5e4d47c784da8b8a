"""A sample of the lease races, and their judge; `make test-faults` runs all of them."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
needs_cc = pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="the clock is preloaded, and built by cc"
)


@pytest.fixture(name="campaign")
def provide_campaign(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("lease_campaign")


def races(*words: str, **environment: str) -> dict[str, float]:
    """Runs the campaign as the program that it is, and returns its numbers."""
    command = [sys.executable, str(FOLDER / "lease_campaign.py"), "--json", *words]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict[str, float], count: int) -> None:
    assert found["races"] >= count
    assert found["steps"] > 0
    assert found["off by an hour"] > 0  # the contenders saw the steps
    wrong = ("double holders", "priority inversions", "lost waiters")
    assert {name: found[name] for name in wrong} == dict.fromkeys(wrong, 0)


@needs_cc
def test_steps_of_the_wall_clock_decide_no_race(campaign, tmp_path: Path) -> None:
    clock = campaign.WallClock(tmp_path)  # else the program starts itself again, with one
    few = ("--races", "6", "--devices", "1", "--contenders", "3", "--seed", "1")
    check(races(*few, **clock.environment), 6)


@needs_cc
@pytest.mark.slow
def test_steps_of_the_wall_clock_decide_none_of_many_races() -> None:
    check(races("--races", "400", "--seed", "2"), 400)


def test_the_judge_counts_what_went_wrong(campaign) -> None:
    """Contender 2 is the most urgent, then 0 before 1 by arrival: 2, 0, 1 is right, and two races."""

    def round_of(*order: int, alone: tuple[bool, ...] = (True, True, True), holder: bool = True):
        granted = [
            campaign.Granted(contender=contender, at_ns=at, alone=alone[at], shift_h=at - 1)
            for at, contender in enumerate(order)
        ]
        asked = [(0, 0), (2, 5), (1, 0)]
        return campaign.judge(campaign.Round(asked=asked, granted=granted[::-1], holder_alone=holder))

    names = ("races", "double holders", "priority inversions", "lost waiters", "off by an hour")

    def counts(found) -> list[int]:
        return [found[name] for name in names]

    assert counts(round_of(2, 0, 1)) == [2, 0, 0, 0, 2]
    assert counts(round_of(0, 2, 1)) == [2, 0, 1, 0, 2]  # 0 overtook 2; then all was right again
    assert counts(round_of(2, 1, 0)) == [2, 0, 1, 0, 2]
    assert counts(round_of(2, 0)) == [2, 0, 0, 1, 1]
    assert counts(round_of(2, 0, 1, alone=(True, False, True))) == [2, 1, 0, 0, 2]
    assert counts(round_of(2, 0, 1, holder=False)) == [2, 1, 0, 0, 2]


def test_the_witness_sees_a_second_holder(campaign, tmp_path: Path) -> None:
    one, other = campaign.Witness(tmp_path / "w"), campaign.Witness(tmp_path / "w")
    assert one.take()
    assert not other.take()
    one.drop()
    assert other.take()
