"""The judge of the arm campaign, its shim, and a sample of it; `make test-faults` runs all of it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
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
    assert [wrong.what for wrong in got] == found


@pytest.mark.parametrize(
    ("commanded", "position", "found"),
    [
        # 2 rad/s for 50 ms are 0.1 rad.
        ([0.0, 0.03, 0.06, 0.09], [0.0, 0.0, 0.01, 0.03], []),
        (
            [0.0, 0.06, 0.12],
            [0.0, 0.0, 0.01],
            ["joint 0: target changed by 0.120 rad within 40 ms, allowed 0.101"],
        ),
        # A stop where the arm is, and on from there: what was before the stop does not count any more.
        ([0.5, 0.5, 0.2, 0.29], [0.1, 0.15, 0.2, 0.2], []),
        # Held where the arm was a cycle before, as by a switch between two cycles.
        ([0.5, 0.5, 0.15], [0.1, 0.15, 0.2], []),
        ([0.0, 1.01], [0.0, 0.0], ["joint 0: target 1.01 rad is outside of its limits"]),
    ],
)
def test_targets_that_an_arm_makes_by_itself_are_as_slow_as_its_joints(judge, commanded, position, found):
    got = judge.beyond_motion(log_of(judge, commanded, position), LIMITS)
    assert [wrong.what for wrong in got] == found


def test_an_arm_that_has_speeds_at_once_leads_its_servos_by_them(judge):
    """0.1 s x 2 rad/s, which may end at once, come to the 0.1 rad that it may turn in 50 ms."""
    got = judge.beyond_motion(log_of(judge, [0.5, 0.79], [0.3, 0.31]), LIMITS, leads=True)
    assert not got
    (wrong,) = judge.beyond_motion(log_of(judge, [0.5, 0.81], [0.3, 0.31]), LIMITS, leads=True)
    assert wrong.what == "joint 0: target changed by 0.310 rad within 40 ms, allowed 0.301"


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        # 10 rad/s2 for 50 ms are 0.5 rad/s.
        ([0.1, 0.3, 0.6], []),
        ([0.1, 0.7], ["joint 0: speed changed by 0.600 rad/s within 40 ms, allowed 0.501"]),
        ([1.9, 2.0, 2.1], ["joint 0: 2.1 rad/s, allowed 2"]),
        ([0.1, np.nan], ["joint 0: nan rad/s, allowed 2"]),
        ([1.5, 0.0, 0.0, 0.4], []),  # a stop comes at once, and after it all begins at rest
        ([1.5, 0.0, 0.0, 0.6], ["joint 0: speed changed by 0.600 rad/s within 40 ms, allowed 0.501"]),
        (
            [1.5, 1.5, 1.5, 1.5, 1.5, 0.9],
            ["joint 0: speed changed by 0.600 rad/s within 40 ms, allowed 0.501"],
        ),
    ],
)
def test_speeds_beyond_limits_are_counted(judge, speeds, found):
    both = np.stack([speeds, np.zeros(len(speeds))], axis=1)
    got = judge.beyond_speeds(10_000_000 * np.arange(len(speeds)), both, LIMITS)
    assert [wrong.what for wrong in got] == found


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        (
            {"position_rad": [0.1, 1.05]},
            [
                "point 1, joint 0: target 1.05 rad is outside of its limits",
                "joint 0: 9.500 rad/s from point to point, allowed 2.400",
            ],
        ),
        # 0.3 rad in 0.1 s; 2 rad/s and a tolerance of a fifth are allowed.
        ({"position_rad": [0.1, 0.4]}, ["joint 0: 3.000 rad/s from point to point, allowed 2.400"]),
        ({"velocity_rad_s": [2.5, 0.0]}, ["joint 0: 2.500 rad/s as it says, allowed 2.400"]),
        ({"velocity_rad_s": [1.0, 0.1]}, ["it does not end at rest: [0.1, 0.0]"]),
        ({"times_s": [0.1, 0.1]}, ["its times do not increase: [0.1, 0.1]"]),
        ({"times_s": [0.1, 1.11]}, ["it lasts 1.11 s, allowed 1 s"]),
        # A lookahead of 0.1 s and 0.1 s on the way: 0.2 s at 2.4 rad/s.
        ({"position_rad": [0.47, 0.47]}, []),
        ({"position_rad": [0.49, 0.49]}, ["joint 0: begins 0.490 rad from the arm, allowed 0.481"]),
    ],
)
def test_trajectories_beyond_limits_are_counted(judge, changed, found):
    """Of two points, 0.1 s apart; an arm at 0."""

    def of(name, usual):
        return np.stack([changed.get(name, usual), np.zeros(2)], axis=1)

    sent = judge.TrajectorySent(
        times_s=np.array(changed.get("times_s", [0.1, 0.2])),
        position_rad=of("position_rad", [0.1, 0.2]),
        velocity_rad_s=of("velocity_rad_s", [1.0, 0.0]),
    )
    got = judge.beyond_trajectory(0, sent, np.zeros(2), LIMITS, 1.0)
    assert [wrong.what for wrong in got] == [f"trajectory: {what}" for what in found]


def test_twists_and_poses_beyond_limits_are_counted(judge):
    assert judge.beyond_twist(0, np.array([1.0, -1.0, 0, 0, 0, 0.5])) == []
    assert len(judge.beyond_twist(0, np.array([1.1, 0, 0, 0, 0, 0]))) == 1
    assert len(judge.beyond_twist(0, np.array([np.nan, 0, 0, 0, 0, 0]))) == 1
    assert judge.beyond_pose(0, np.array([0.3, 0, 0.4, 0.6, 0, 0.8, 0])) == []
    assert len(judge.beyond_pose(0, np.array([0.3, 0, 0.4, 0.6, 0, 0.9, 0]))) == 1
    assert len(judge.beyond_pose(0, np.array([0.3, np.inf, 0.4, 1, 0, 0, 0]))) == 1


def test_bounds_follow_from_the_settings(monkeypatch):
    """A silent supervisor: noticed after 0.25 s, or 50 ms later; a busy machine: 50 ms more."""
    pytest.importorskip("cyclonedds")
    monkeypatch.syspath_prepend(str(FOLDER))
    campaign = importlib.import_module("arm_campaign")
    modes, faults = importlib.import_module("arm_modes"), importlib.import_module("arm_faults")

    def bounds(fault, mode):
        station = modes.station_of(mode, "x", 1, camera=False)
        way_rad, rest_s = campaign.bounds_of(faults.FAULTS[fault], mode, station)
        return float(way_rad[0]), rest_s

    # The first joint: 2.175 rad/s, and the servo's lag of 0.1 s. The slowest joint brakes 2.175 rad/s at
    # 7.5 rad/s2 (0.29 s) and 10 ms of jerk; to 2 % of the speed it is 3.912 lags.
    way_rad, rest_s = bounds("supervisor_stopped", "position")
    assert way_rad == pytest.approx(2.175 * (0.25 + 0.05 + 0.05 + 0.1))
    assert rest_s == pytest.approx(0.35 + 0.29 + 0.01 + 0.3912, abs=1e-3)
    # An arm whose driver is dead follows its piece of a plan for a second; half of a ramp of 0.1 s on top.
    way_rad, rest_s = bounds("driver_stopped", "trajectory")
    assert way_rad == pytest.approx(2.175 * (0.02 + 1.0 + 0.05 + 0.1 + 0.05))
    assert rest_s == pytest.approx(1.07 + 0.3 + 0.3912, abs=1e-3)
    # MoveIt Servo's time-out.
    assert bounds("driver_stopped", "twist")[0] == pytest.approx(2.175 * (0.02 + 0.1 + 0.05 + 0.15))


def test_the_quick_campaign_has_each_fault_once(monkeypatch):
    pytest.importorskip("cyclonedds")
    monkeypatch.syspath_prepend(str(FOLDER))
    campaign, faults = importlib.import_module("arm_campaign"), importlib.import_module("arm_faults")
    cells = [fault for names in campaign.QUICK.values() for fault in names]
    assert set(cells) == set(faults.FAULTS)
    for names in campaign.QUICK.values():
        assert {"supervisor_stopped", "supervisor_busy", "supervisor_loop"} & set(names)
    units = list(
        campaign.units_of([(mode, fault) for mode, names in campaign.QUICK.items() for fault in names])
    )
    assert sorted((mode, fault) for mode, names in units for fault in names) == sorted(
        (mode, fault) for mode, names in campaign.QUICK.items() for fault in names
    )
    for _, names in units:
        assert len({faults.FAULTS[name].kind for name in names}) == 1


WRITES = """
import os, sys, time
folder = sys.argv[1]
file = open(f"{folder}/bad", "ab", buffering=0)
print("ready", flush=True)
for word in sys.stdin:
    begun = time.monotonic()
    try:
        file.write(b"x")
        open(f"{folder}-other", "wb").write(b"x")
        said = "written"
        open(f"{folder}/new", "wb").close()
    except OSError as error:
        said = error.strerror
    print(said, time.monotonic() - begun > 0.2, flush=True)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="builds a library")
def test_a_disk_is_full_or_blocked_when_it_is_said_so(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    shim = importlib.import_module("arm_shim").Shim(tmp_path, shifts_clock=False)
    bad = tmp_path / "disk"
    bad.mkdir()
    with shim.around():
        script = tmp_path / "writes.py"
        script.write_text(WRITES)
        process = subprocess.Popen(
            [sys.executable, str(script), str(bad)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    with process:

        def ask():
            stdin.write("go\n")
            stdin.flush()

        assert stdout.readline() == "ready\n"
        ask()
        assert stdout.readline() == "written False\n"
        shim.set_disk("full", f"{bad}/")
        ask()
        assert stdout.readline() == "No space left on device False\n"
        shim.set_disk("full", f"{bad}/", process.pid + 1)  # somebody else's
        ask()
        assert stdout.readline() == "written False\n"
        shim.set_disk("blocked", f"{bad}/", process.pid)
        ask()
        time.sleep(0.3)
        shim.set_disk("well")
        assert stdout.readline() == "written True\n"
        shim.hang(process.pid, is_whole=True)
        ask()
        time.sleep(0.3)
        shim.unhang()
        stdin.close()
        assert stdout.readline() != ""
    assert process.returncode == 0


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


def test_a_target_where_the_arm_is_may_come_at_once(judge):
    """Somebody stopped the arm at 0.1 rad, and targets went on to 0.28."""
    sent = log_of(judge, np.array([0.1, 0.1, 0.19, 0.28, 0.1, 0.1, 0.27]))
    arm = log_of(judge, np.full(7, 0.1))
    assert [wrong.stamp_ns for wrong in judge.beyond_limits(sent, LIMITS)] == [30e6, 40e6, 60e6]
    assert [wrong.stamp_ns for wrong in judge.beyond_limits(sent, LIMITS, arm)] == [30e6, 60e6]


def test_only_a_machine_that_stood_still_excuses_a_repeat_that_failed(judge, monkeypatch):
    campaign = importlib.import_module("arm_campaign")
    whole = log_of(judge, np.zeros(100))
    gap = replace(whole, stamp_ns=whole.stamp_ns + 60_000_000 * (np.arange(100) >= 50))  # 70 ms at 0.5 s
    row = campaign.new_row("policy_killed", "position")
    row.repeats = 1
    assert not campaign.is_excused(row, whole, 0)
    assert not campaign.is_excused(row, None, 0)  # nobody knows
    assert not campaign.is_excused(row, gap, 600_000_000)
    assert not campaign.is_excused(row, gap, 0, 400_000_000)
    assert row.busy == 0
    assert campaign.is_excused(row, gap, 0)
    assert campaign.is_excused(row, gap, 0)
    assert not campaign.is_excused(row, gap, 0)  # more often than it has repeats
    assert row.busy == 2
    frozen = campaign.new_row("arm_frozen", "position")
    frozen.repeats = 1
    assert not campaign.is_excused(frozen, gap, 0)


def test_a_processor_that_stood_still_excuses_what_was_on_it(judge, monkeypatch, tmp_path):
    campaign = importlib.import_module("arm_campaign")
    whole = log_of(judge, np.zeros(100))
    (tmp_path / "0.still").write_text("")
    (tmp_path / "1.still").write_text("100000000 200000000\n500000000 590000000\n")
    monkeypatch.setenv("ROBOT_RL_FAULTS_STILL", str(tmp_path))
    row = campaign.new_row("rival_state", "velocity")
    row.repeats = 1
    assert not campaign.is_excused(row, whole, 200_000_000, 500_000_000)  # before and after
    assert campaign.is_excused(row, whole, 300_000_000, 501_000_000)
    assert campaign.is_excused(row, whole, 580_000_000)
    assert row.busy == 2


def test_a_watcher_notes_when_its_processor_stood_still(judge, tmp_path):
    standstill = importlib.import_module("standstill")
    cpu = min(os.sched_getaffinity(0))
    file = tmp_path / f"{cpu}.still"
    begun_ns = time.monotonic_ns()
    watcher = subprocess.Popen([sys.executable, str(FOLDER / "standstill.py"), str(cpu), str(file)])
    try:
        while not file.exists():
            if watcher.poll() is not None:
                pytest.skip("real-time priority is refused here")
            time.sleep(0.01)
        time.sleep(0.1)
        stopped_ns = time.monotonic_ns()
        watcher.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        watcher.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        assert not standstill.stood_still(tmp_path, 0, begun_ns)
        spans = [[int(word) for word in line.split()] for line in file.read_text().splitlines()]
        assert any(end - begin > 0.25e9 and begin < stopped_ns + 0.05e9 for begin, end in spans)
        assert standstill.stood_still(tmp_path, stopped_ns, time.monotonic_ns())
    finally:
        watcher.kill()
        watcher.wait()


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
@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("position", "policy_killed"),
        ("velocity", "supervisor_killed"),
        ("trajectory", "supervisor_stopped"),
        ("twist", "arm_frozen"),
        ("pose", "disk_full_stop"),
    ],
)
def test_a_fault_once(mode, fault) -> None:
    """Those that no busy machine disturbs; `make test-faults` has them all, ten times in each mode."""
    pytest.importorskip("cyclonedds")
    words = ["--repeats", "1", "--mode", mode, "--fault", fault, "--json"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "arm_campaign.py"), *words], capture_output=True, text=True, check=False
    )
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    if row["not_run"]:
        pytest.skip(row["not_run"])
    assert row["repeats"] == 1, done.stderr
    assert (row["failures"], row["beyond_limits"], row["steps_lost"]) == ([], 0, 0), done.stderr
    assert row["steps"] > 5
    assert row["commands"] > 5
    assert not row["way_rad"] > row["bound_rad"]
