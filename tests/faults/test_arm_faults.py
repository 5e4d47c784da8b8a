"""A sample of the arm campaign, and its judge; `make test-faults` runs all of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from robot_rl.hal.safety import SafetyLimits

FOLDER = Path(__file__).parent
LIMITS = SafetyLimits(
    position_low_rad=(-1.0, -1.0),
    position_high_rad=(1.0, 1.0),
    velocity_rad_s=(2.0, 2.0),
    acceleration_rad_s2=(10.0, 10.0),
    effort_n_m=(5.0, 5.0),
)
"""Rate: (2 + 10 x 0.1) rad/s, so 0.15 rad in a control step of 50 ms."""


@pytest.fixture(name="judge")
def provide_judge(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("arm_judge")


def log_of(judge, commanded, position=None):
    """A log of one joint's commands, 10 ms apart; the other one rests."""
    commanded = np.stack([commanded, np.zeros(len(commanded))], axis=1)
    position = commanded if position is None else np.stack([position, np.zeros(len(position))], axis=1)
    return judge.ArmLog(
        stamp_ns=10_000_000 * np.arange(len(commanded)),
        commanded_rad=commanded,
        position_rad=position,
        velocity_rad_s=np.gradient(position, 0.01, axis=0),
    )


@pytest.mark.parametrize(
    ("commanded", "found"),
    [
        ([0.0, 0.14, 0.14, 0.14, 0.14, 0.14, 0.28], []),
        ([0.0, 0.10, 0.20], ["joint 0: target changed by 0.200 rad within 40 ms, allowed 0.151"]),
        ([0.0, 0.0, -0.16], ["joint 0: target changed by 0.160 rad within 40 ms, allowed 0.151"]),
        ([0.99, 1.0, 1.01, 1.01], ["joint 0: target 1.01 rad is outside of its limits"]),
        ([0.0, np.nan, np.nan], ["joint 0: target nan rad is outside of its limits"] * 2),
    ],
)
def test_commands_beyond_limits_are_counted(judge, commanded, found):
    got = judge.beyond_limits(log_of(judge, commanded), LIMITS)
    assert [text.partition(": ")[2] for text in got] == found


def test_what_somebody_else_commanded_is_no_command_of_ours(judge):
    log = log_of(judge, [0.0, 0.3, 0.1, 0.3, 0.1])  # the rival holds the arm at 0.3
    assert len(judge.beyond_limits(log, LIMITS)) == 4
    assert judge.beyond_limits(log.without([np.array([0.3, 0.0])]), LIMITS) == []


def test_a_stop_is_measured_from_the_fault_to_rest(judge):
    # 1 rad/s until 0.5 s; the fault was at 0.3 s.
    position = 0.01 * np.minimum(np.arange(100), 50)
    log = log_of(judge, position, position)
    stop = judge.stop_of(log, LIMITS, 300_000_000, 900_000_000)
    assert stop.way_rad == pytest.approx([0.2, 0.0])
    assert stop.rest_s == pytest.approx(0.21)  # the velocity is a difference over two cycles
    assert np.isnan(judge.stop_of(log, LIMITS, 300_000_000, 400_000_000).rest_s)
    with pytest.raises(AssertionError, match="the arm's log has 0 cycles between the fault and its end"):
        judge.stop_of(log, LIMITS, 2_000_000_000, 3_000_000_000)


def test_a_step_that_is_not_what_was_appended_is_damage(judge, tmp_path):
    from robot_rl.data.episode import Feature
    from robot_rl.data.episodes import EpisodesMeta
    from robot_rl.data.store.writer import StoreWriter

    names = tuple(f"joint{i}" for i in range(1, 8))
    meta = EpisodesMeta(
        task="Sway", robot="panda", control_hz=20.0, instruction="", state_names=names, action_names=names
    )
    with StoreWriter(tmp_path / "store", meta, {"state": Feature("float32", (7,))}) as writer:
        for step in range(5):
            action = judge.action_of(step) if step != 3 else judge.action_of(4)
            writer.append(obs={"state": np.zeros(7, np.float32)}, action=action, reward=float(step))
    assert judge.steps_in(tmp_path / "store") == 5
    (damage,) = judge.damage_of(tmp_path / "store")
    assert damage.startswith("episode 0, step 3: holds [")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["policy_killed", "supervisor_killed", "arm_frozen"])
def test_a_fault_once(fault) -> None:
    """Those that no busy machine disturbs; `make test-faults` has them all, twenty times."""
    pytest.importorskip("cyclonedds")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "arm_campaign.py"), "--repeats", "1", "--fault", fault, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["repeats"] == 1, done.stderr
    assert (row["failures"], row["beyond_limits"], row["steps_lost"]) == ([], 0, 0), done.stderr
    assert row["steps"] > 5
    assert row["commands"] > 5
    assert not row["way_rad"] > row["bound_rad"]
