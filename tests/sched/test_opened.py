"""A device is opened under one slot of its own, waited for if asked, and given back whatever happens."""

import logging
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from robot_rl.core.errors import DeviceError, LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.hal.leased import EnvDevice
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.opened import opened
from robot_rl.testing.devices import FakeEnv

SPEC = DeviceSpec(name="sim1", kind="sim", slots=2)


class Env(FakeEnv):
    has_closed = False

    def close_extras(self, **kwargs: object) -> None:
        self.has_closed = True


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))


def test_one_slot_is_held_and_given_back() -> None:
    inner = Env(1)
    with opened(EnvDevice(SPEC, lambda _: inner), holder="a test") as env:
        env.reset(seed=0)
        (lease,) = LeaseStore().active("sim1")
        assert (lease.holder, len(lease.slot_ids)) == ("a test", 1)
    assert inner.has_closed
    assert LeaseStore().active("sim1") == []


class Parked(FakeEnv):
    """Notes who holds its device while it is parked."""

    def __init__(self, fails: Exception | None = None) -> None:
        super().__init__(1)
        self.fails = fails
        self.held_by: list[str] = []

    def park(self) -> None:
        self.held_by += [lease.holder for lease in LeaseStore().active("sim1")]
        if self.fails is not None:
            raise self.fails


@pytest.mark.parametrize("ends_by", [None, KeyboardInterrupt(), OSError("no space left")])
def test_it_is_parked_before_it_is_given_back(ends_by: BaseException | None) -> None:
    inner = Parked()
    with (
        nullcontext() if ends_by is None else pytest.raises(type(ends_by)),
        opened(EnvDevice(SPEC, lambda _: inner), holder="a test") as env,
    ):
        env.reset(seed=0)
        if ends_by is not None:
            raise ends_by
    assert inner.held_by == ["a test"]
    assert inner.closed
    assert LeaseStore().active("sim1") == []


def test_a_park_that_fails_is_logged_and_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    inner = Parked(fails=DeviceError("park: refused: a joint is outside of its limits."))
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(OSError, match="no space left"),
        opened(EnvDevice(SPEC, lambda _: inner), holder="a test"),
    ):
        raise OSError("no space left")
    assert "is not parked: park: refused: a joint is outside of its limits." in caplog.text
    assert inner.closed
    assert LeaseStore().active("sim1") == []


def test_it_is_given_back_where_the_env_cannot_be_made() -> None:
    def make(_: object) -> FakeEnv:
        raise RuntimeError("no display")

    with pytest.raises(RuntimeError, match="no display"), opened(EnvDevice(SPEC, make), holder="a test"):
        pass
    assert LeaseStore().active("sim1") == []


def test_others_are_named_or_waited_for() -> None:
    device = EnvDevice(SPEC, lambda _: Env(1))
    with LeaseStore().hold(SPEC, holder="somebody") as all_of_it:
        with pytest.raises(LeaseError, match=r"sim1: wanted 1 slot, 0 of 2 .*'somebody'"):
            opened(device, holder="a test").__enter__()
        threading.Timer(0.3, all_of_it.end).start()
        with opened(device, holder="a test", wait_s=20.0) as env:
            assert env.num_envs == 1
