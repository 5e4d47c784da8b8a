"""A deployment from run folder to report, on an arm in the test; one slow test with the real processes."""

import itertools
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.bench.trials import command_line
from robot_rl.cli.main import main
from robot_rl.config import dump
from robot_rl.core.errors import CheckpointError, ConfigError, DeviceError, LeaseError, SafetyStopError
from robot_rl.core.registry import resolve
from robot_rl.data.episode import SOURCES
from robot_rl.data.normalize import Normaliser
from robot_rl.data.store.reader import open_source
from robot_rl.hal.device import LeaseLike
from robot_rl.hal.leased import EnvDevice, LeasedEnv
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.real.claim import device_of
from robot_rl.real.inventory import enter
from robot_rl.real.station import STATIONS, StationConfig, load_station
from robot_rl.rollout.envs import make_env
from robot_rl.sched.leases import HeldLease, LeaseStore
from robot_rl.sched.preemption import Preemption
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.assemble import policy_meta
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy import run as deployment
from robot_rl.train.deploy.config import DeployConfig, NeedsConfig
from robot_rl.train.deploy.fit import in_scene_of
from robot_rl.train.deploy.journal import Journal
from robot_rl.train.deploy.run import deploy
from tests.runs import patient_station

ENV = EnvConfig(task="pick_cube", horizon_s=0.5, num_threads=1)
SMALL: dict[str, Any] = {
    "flow": ChunkPolicyConfig(horizon=6, width=16, depth=1, time_dim=8),
    "gaussian": GaussianPolicyConfig(horizon=6, width=16, depth=1),
}


PARKED = ["pause", "park", "pause", "close", "close"]
"""The last orders to an arm that is well, which is its own trackers too."""


def make_run(folder: Path, kind: str = "flow", **fields: Any) -> Path:
    """Writes what `deploy` needs of a run folder: its config, with other fields, and an untrained policy."""
    config = replace(RunConfig(env=ENV, n_exec=2, policy=SMALL["flow"]), **fields)
    config = replace(config, evaluate=replace(config.evaluate, num_envs=1))
    env = make_env(config.env, 1, autoreset="disabled")
    rng = np.random.default_rng(0)
    state = rng.normal(size=(20, len(env.state_names))).astype(np.float32)
    actions = rng.uniform(-0.3, 0.3, (20, len(env.action_names))).astype(np.float32)
    policy = resolve("policy", kind)(
        fields.get("policy", SMALL[kind]),
        state_dim=len(env.state_names),
        action_dim=len(env.action_names),
        normaliser=Normaliser.fit({"state": state}, actions),
        generator=torch.Generator().manual_seed(0),
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    save_policy(folder / "policy" / "final", policy, meta=policy_meta(config, env))
    env.close()
    return folder


@pytest.fixture
def arm(station_env, monkeypatch: pytest.MonkeyPatch):
    """Puts an arm in the test in the place of driver and supervisor, and returns it."""
    env, fake, _ = station_env(config=ENV)

    def make(lease: LeaseLike) -> VectorEnv:
        assert lease.token > 0
        return env

    def device(station: StationConfig, *_: object) -> EnvDevice:
        return EnvDevice(device_of(station), make)

    monkeypatch.setattr(deployment, "station_device", device)
    return fake


def deployed(tmp_path: Path, **options: Any) -> Journal:
    run = tmp_path / "run"
    if not run.exists():
        make_run(run)
    given: dict[str, Any] = {"run": str(run), "station": "sim_in_process", "episodes": 2, "video": False}
    given |= {"out": str(tmp_path / "out"), **options}
    config = DeployConfig(**given)
    return deploy(config, ProgressDisplay(), None)


def test_a_deployment_is_played_recorded_and_reported(arm, tmp_path: Path) -> None:
    journal = deployed(tmp_path)
    report = json.loads((journal.folder / "deploy.json").read_text())
    assert report["ended"] == "complete"
    assert (report["episodes"], report["control_steps"]) == (2, 20)
    assert report["real"] is False
    assert 0 <= report["ci"][0] <= report["success"] <= report["ci"][1] <= 1
    assert set(report["latency_ms"]["latency"]) == {"p50", "p90", "p99", "max"}
    assert [row["seed"] for row in report["by_episode"]] == [2**31, 2**31 + 1]
    assert (journal.folder / "deploy.svg").read_text().startswith("<?xml")
    source = open_source(journal.folder / "experience")
    assert source.lengths().tolist() == [10, 10]
    episode = source.read(0)
    assert set(np.asarray(episode.source)) == {SOURCES.index("sim")}
    stamps = np.asarray(episode.stamp_ns)
    assert np.diff(stamps) == pytest.approx(50e6, abs=1e5)  # the arm's own time
    assert ("reset", 2**31) in arm.orders
    assert [order for order, _ in arm.orders][-5:] == PARKED
    assert max(len(plan.gripper) for plan in arm.plans) > 1  # the rest of the chunk goes along


def test_an_arm_that_is_taken_costs_no_folder(arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object, **__: object) -> None:
        raise LeaseError("arm1 is taken")

    monkeypatch.setattr(deployment.LeaseStore, "hold", taken)
    with pytest.raises(LeaseError):
        deployed(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_larger_priority_gets_the_arm_between_two_chunks(
    arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()

    def preemption(held: HeldLease) -> Preemption | None:
        is_wanted = held.token == tokens[0] and next(looks) >= 12  # in the second episode of ten steps
        return Preemption(by="urgent", left_s=5.0) if is_wanted else None

    tokens = list[int]()
    opening = EnvDevice.open

    def opened(device: EnvDevice, lease: HeldLease) -> LeasedEnv:
        tokens.append(lease.token)
        return opening(device, lease)

    monkeypatch.setattr(HeldLease, "preemption", property(preemption))
    monkeypatch.setattr(EnvDevice, "open", opened)
    journal = deployed(tmp_path, episodes=3)
    assert journal.ended == "complete"
    assert journal.preempted == ["urgent"]
    assert len(tokens) == 2
    assert tokens[1] > tokens[0]
    assert [episode.steps for episode in journal.episodes] == [10, 10, 10]
    assert [episode.seed - 2**31 for episode in journal.episodes] == [0, 1, 2]  # the cut one began again
    assert len(journal.timing) > 30  # what was cut was steps of the arm, too
    orders = [order for order, _ in arm.orders]
    assert orders.index("park") < orders.index("start", orders.index("park"))


def test_any_arm_that_has_what_is_needed_will_do(
    arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    with pytest.raises(DeviceError, match="no arm is known"):
        deployed(tmp_path, station="any")
    shipped = (STATIONS / "sim_in_process.yaml").read_text()
    for name in ("west", "east"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(shipped.replace("name: sim_in_process", f"name: {name}\nlabels: {{cell: {name}}}"))
        enter(str(path))

    def cell(**options: Any) -> str:
        return deployed(tmp_path, station="any", **options).folder.name.partition("deploy-")[2][:4]

    assert cell() == "west"
    east = NeedsConfig(labels={"cell": "east"})
    assert cell(needs=east) == "east"
    with LeaseStore().hold(device_of(load_station(str(tmp_path / "west.yaml"))), holder="another"):
        assert cell() == "east"
    with pytest.raises(DeviceError, match="its cell is west, not north"):
        cell(needs=NeedsConfig(labels={"cell": "north"}))
    with pytest.raises(ConfigError, match=r"needs: .* nothing without station=any"):
        deployed(tmp_path, needs=east)


def test_ctrl_c_leaves_the_arm_at_rest_and_keeps_what_was_done(
    arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    send, calls = arm.send, iter(range(100))

    def interrupted(plan: object) -> None:
        if next(calls) == 15:
            raise KeyboardInterrupt
        send(plan)

    monkeypatch.setattr(arm, "send", interrupted)
    words = [f"run={tmp_path / 'run'}", "station=sim_in_process", f"out={tmp_path / 'out'}", "video=false"]
    assert main(["deploy", *words]) == 130
    assert [order for order, _ in arm.orders][-5:] == PARKED
    (report,) = (tmp_path / "out").glob("*/deploy.json")
    assert json.loads(report.read_text())["ended"] == "interrupted"
    assert json.loads(report.read_text())["episodes"] == 1
    assert open_source(report.parent / "experience").lengths()[0] == 10
    assert f"robot-rl replay info {report.parent / 'experience'}" in capsys.readouterr().err


def test_a_stop_is_told_and_kept(arm, tmp_path: Path) -> None:
    arm.phase, arm.reason = "stopped", "e-stop by ann"
    with pytest.raises(SafetyStopError, match="e-stop by ann"):
        deployed(tmp_path)
    (report,) = (tmp_path / "out").glob("*/deploy.json")
    assert "e-stop by ann" in json.loads(report.read_text())["ended"]
    assert "park" not in {order for order, _ in arm.orders}


def test_real_time_chunking_where_planning_is_slow_or_asked_for(arm, tmp_path: Path) -> None:
    slow = deployed(tmp_path, delay_ms=60.0, episodes=1)
    assert slow.execution["rtc"] is True
    assert slow.execution["planning_ms"] >= 60.0
    assert deployed(tmp_path, rtc=False, delay_ms=60.0, episodes=1).execution["rtc"] is False


def test_rtc_of_a_policy_without_a_flow_is_refused(arm, tmp_path: Path) -> None:
    make_run(tmp_path / "run", "gaussian")
    with pytest.raises(ConfigError, match="rtc: real_time: GaussianPolicy shows no velocity field"):
        deployed(tmp_path, rtc=True)


def test_a_missing_policy_and_bad_settings_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no policy 'base' yet"):
        deployed(tmp_path, which="base")
    with pytest.raises(ConfigError, match="episodes: got 0, allowed: 1 to 10000"):
        DeployConfig(run="x", station="y", episodes=0)


def test_the_processes_of_a_station_load_the_scene_of_the_task(tmp_path: Path) -> None:
    plain = load_station("sim_in_process")
    assert deployment.file_of(plain, "sim_in_process", tmp_path) == "sim_in_process"
    station = in_scene_of(EnvConfig(task="open_drawer"), plain)
    file = deployment.file_of(station, "sim_in_process", tmp_path / "station")
    assert load_station(file) == station
    assert set(station.objects) == {"chest", "drawer"}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pick_cube", "open_drawer"])
def test_through_driver_and_supervisor(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", env=replace(ENV, task=task))
    words = [
        f"run={tmp_path / 'run'}",
        f"station={patient_station(tmp_path)}",
        f"out={tmp_path / 'out'}",
        "episodes=2",
    ]
    assert main(["deploy", *words, "video=false", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (result["episodes"], result["control_steps"], result["ended"]) == (2, 20, "complete")
    assert 0 < result["latency_ms"]["latency"]["p50"] < 2000


@pytest.mark.slow
def test_a_second_deployment_takes_the_arm_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    make_run(tmp_path / "run")
    words = [f"run={tmp_path / 'run'}", f"station={patient_station(tmp_path)}", "video=false", "--json"]
    patient = command_line("deploy", *words, f"out={tmp_path / 'patient'}", "episodes=20")
    with subprocess.Popen(patient, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as first:
        deadline_s = time.monotonic() + 60.0
        while not list(tmp_path.glob("patient/*/experience")) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        urgent = ["deploy", *words, f"out={tmp_path / 'urgent'}", "episodes=1", "priority=1", "preempt_s=20"]
        assert main(urgent) == 0
        assert first.stdout is not None
        told = json.loads(first.stdout.read().splitlines()[-1])
        assert first.wait() == 0
    taken = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert taken["episodes"] == 1
    assert 0 < taken["waited_s"][0] < 20.0
    assert told["episodes"] == 20
    assert told["preempted"] == ["deploy pick_cube"]
    theirs, ours = (
        open_source(next(tmp_path.glob(f"{name}/*/experience"))) for name in ("patient", "urgent")
    )
    stamps = np.concatenate([np.asarray(theirs.read(at).stamp_ns) for at in range(len(theirs.lengths()))])
    between = np.asarray(ours.read(0).stamp_ns)
    assert not ((stamps >= between[0]) & (stamps <= between[-1])).any()  # nobody drove it at the same time
