"""What one more process that acts costs, against a new interpreter that imports the same."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from robot_rl.rollout import process
from robot_rl.rollout.process import ProcessSource
from tests.rollout.test_process import build, collect_until, offered

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'")]


def begun() -> tuple[float, float]:
    """Returns the seconds of the processor and the MB of its own that an actor took to its first steps."""
    source = ProcessSource(build, period_s=0.01)
    collect_until(source, offered(0), 3)
    folder = Path(f"/proc/{source.pid}")
    ticks = folder.joinpath("stat").read_text().rpartition(")")[2].split()[11:13]
    lines = folder.joinpath("smaps_rollup").read_text().splitlines()
    (own,) = (int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    source.close()
    return sum(map(int, ticks)) / 100.0, own / 1024


def test_an_actor_costs_a_fraction_of_an_interpreter(
    monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    begun()  # the server
    found: dict[str, list[tuple[float, float]]] = {"forked": [], "new interpreter": []}
    for _ in range(2):
        found["forked"].append(begun())
        with monkeypatch.context() as patch:
            patch.setattr(process, "_context", lambda build: multiprocessing.get_context("spawn"))
            found["new interpreter"].append(begun())
    record_property("seconds and MB", found)
    for measure in (0, 1):
        ours, theirs = (max(one[measure] for one in found[name]) for name in ("forked", "new interpreter"))
        assert ours < 0.3 * theirs, found
