"""What latched is leased to nobody until a person clears it, whatever process or restart lies between."""

import logging
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, LeaseError, SafetyStopError
from robot_rl.hal.device import DeviceSpec
from robot_rl.hal.leased import EnvDevice
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.opened import keeping_stops, opened
from robot_rl.testing.devices import FakeEnv

ARM = DeviceSpec(name="arm1", kind="robot", real=True, node="lab1")
OTHER = DeviceSpec(name="arm2", kind="robot", real=True, node="lab1")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    return tmp_path


class StopsAtTheThird(FakeEnv):
    """An arm whose supervisor latches at its third control step."""

    steps = 0

    def step_masked(self, actions, active):
        self.steps += 1
        if self.steps >= 3:
            raise SafetyStopError("arm1: protective stop.")
        return super().step_masked(actions, active)


def device(spec: DeviceSpec) -> EnvDevice:
    return EnvDevice(spec, lambda _: StopsAtTheThird(1), on_stop=keeping_stops(spec, "deploy pick_cube"))


def act(spec: DeviceSpec) -> None:
    with opened(device(spec), holder="deploy pick_cube") as env:
        env.reset(seed=0)
        for _ in range(5):
            env.step(np.zeros((1, len(env.action_names)), np.float32))


def test_a_stop_refuses_the_next_process_until_a_person_clears_it() -> None:
    with pytest.raises(SafetyStopError, match="protective stop"):
        act(ARM)
    for wait_s in (0.0, 60.0):  # nobody waits for a person
        began_s = time.monotonic()
        with pytest.raises(
            LeaseError,
            match=r"lease of arm1: it stopped at 20\d\d-.*'deploy pick_cube': arm1: protective stop\. Look "
            r"at it; then `robot-rl devices clear=arm1 by=<your name>`",
        ):
            LeaseStore().acquire(ARM, holder="another", wait_s=wait_s)
        assert time.monotonic() - began_s < 30.0
    LeaseStore().release(LeaseStore().acquire(OTHER, holder="another"))  # of another arm nothing is known
    with pytest.raises(ConfigError, match=r"clear=arm1: who looked at it\? Say by="):
        LeaseStore().clear("arm1", by=" ")
    with pytest.raises(ConfigError, match=r"clear=arm2: it has not stopped\. Stopped are: arm1"):
        LeaseStore().clear("arm2", by="ann")
    assert LeaseStore().clear("arm1", by="ann").reason == "arm1: protective stop."
    assert LeaseStore().stopped() == {}
    LeaseStore().release(LeaseStore().acquire(ARM, holder="another"))


def test_the_first_of_several_stops_is_told() -> None:
    store = LeaseStore()
    store.stop("arm1", "the gripper is hot.", "deploy")
    store.stop("arm1", "safe_stop", "deploy")
    assert store.stopped()["arm1"].reason == "the gripper is hot."


def test_a_simulated_arm_is_as_good_as_new() -> None:
    simulated = DeviceSpec(name="sim_arm", kind="robot", node="lab1")
    assert keeping_stops(simulated, "deploy") is None
    with pytest.raises(SafetyStopError):
        act(simulated)
    LeaseStore().release(LeaseStore().acquire(simulated, holder="another"))


def test_safe_stop_brakes_first_and_is_kept() -> None:
    order: list[str] = []

    class Braking(FakeEnv):
        def safe_stop(self) -> None:
            order.append("brake")

    arm = EnvDevice(ARM, lambda _: Braking(1), on_stop=lambda reason: order.append(reason))
    arm.open(LeaseStore().acquire(ARM, holder="deploy"))
    arm.safe_stop()
    arm.safe_stop()
    assert order == ["brake", "safe_stop", "brake"]
    arm.monitor.recover(by="ann")
    arm.safe_stop()
    assert order[3:] == ["brake", "safe_stop"]


def test_a_stop_that_cannot_be_noted_is_still_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("robot_rl.sched.leases.add_stop", full)
    with caplog.at_level(logging.ERROR), pytest.raises(SafetyStopError, match="protective stop"):
        act(ARM)
    assert "arm1: that it stopped could not be noted: " in caplog.text
    assert "disk is full" in caplog.text


def test_a_lease_file_of_before_has_no_stops(state: Path) -> None:
    LeaseStore().release(LeaseStore().acquire(ARM, holder="deploy"))
    with sqlite3.connect(state / "leases.db") as rows:
        rows.execute("DROP TABLE IF EXISTS stopped")
    assert LeaseStore().stopped() == {}
    LeaseStore().release(LeaseStore().acquire(ARM, holder="deploy"))
