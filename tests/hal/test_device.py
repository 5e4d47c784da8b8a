"""Device specs refuse nonsense in words, and a fence refuses whoever has been overtaken."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import ConfigError, DeviceError, LeaseError, SafetyStopError
from robot_rl.hal.device import DeviceSpec, Fence, LeaseLike
from robot_rl.hal.health import HealthMonitor
from robot_rl.hal.leased import EnvDevice, LeasedEnv, open_under
from robot_rl.hal.vector import Array
from robot_rl.testing.devices import FakeEnv


@dataclass(frozen=True)
class Ticket:
    device: str = "arm1"
    token: int = 1
    slot_ids: tuple[int, ...] = (0,)
    holder: str = "test"


def test_a_spec_becomes_json_in_a_fixed_order() -> None:
    spec = DeviceSpec(name="arm1", kind="robot", real=True, caps=frozenset({"render"}), control_hz=20.0)
    assert spec.to_json() == {
        "name": "arm1",
        "kind": "robot",
        "real": True,
        "caps": ["render"],
        "slots": 1,
        "control_hz": 20.0,
        "labels": {},
        "node": "localhost",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "my arm"}, "name must be one word"),
        ({"name": ""}, "name must be one word"),
        ({"kind": "robt"}, r"kind: got 'robt'. Did you mean 'robot'\?"),
        ({"caps": frozenset({"rendr"})}, r"caps: got 'rendr'. Did you mean 'render'\?"),
        ({"slots": 0}, "slots: got 0, allowed: 1 or more"),
        ({"control_hz": 0.0}, "control_hz: got 0.0, allowed: above 0, or None"),
        ({"kind": "sim", "real": True}, "real is for kind 'robot', got kind 'sim'"),
        (
            {"real": True, "caps": frozenset({"set_state"})},
            "got set_state, but matter cannot be put into a state",
        ),
    ],
)
def test_a_spec_refuses_what_cannot_be(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"name": "arm1", "kind": "robot", **change}
    with pytest.raises(ConfigError, match=message):
        DeviceSpec(**given)


def test_a_fence_names_both_tokens() -> None:
    fence = Fence("arm1")
    fence.check(3)
    fence.check(3)  # the same holder again
    with pytest.raises(
        LeaseError, match="command under fencing token 2 refused, token 3 has been seen since"
    ):
        fence.check(2)


def test_slots_are_fenced_one_by_one() -> None:
    # Slots 0 and 1 go to tokens 4 and 5; both holders act. Token 6 takes slot 0: 4 is out, 5 is not.
    fence = Fence("gpu0", slots=2)
    fence.check(4, (0,))
    fence.check(5, (1,))
    fence.check(4, (0,))
    fence.check(6, (0,))
    fence.check(5, (1,))
    with pytest.raises(LeaseError, match="fencing token 4 refused, token 6"):
        fence.check(4, (0,))


def test_a_refused_token_leaves_no_trace() -> None:
    # Slot 1 was never touched by the refused token 5, so token 4 may still have it.
    fence = Fence("gpu0", slots=2)
    fence.check(6, (0,))
    with pytest.raises(LeaseError):
        fence.check(5, (0, 1))
    fence.check(4, (1,))


@pytest.mark.parametrize(
    ("lease", "message"),
    [
        (Ticket(device="arm2"), "device arm1: got a lease of 'arm2'"),
        (Ticket(slot_ids=(1,)), r"the lease is of slots \(1,\), the device has 0 to 0"),
        (Ticket(slot_ids=()), r"the lease is of slots \(\)"),
    ],
)
def test_only_leases_of_this_device_are_admitted(lease: Ticket, message: str) -> None:
    with pytest.raises(LeaseError, match=message):
        Fence("arm1").admit(lease)


def test_an_overtaken_env_refuses_every_command_and_still_shows_its_state() -> None:
    fence, inner = Fence("arm1"), FakeEnv(1)
    env = LeasedEnv(inner, fence, Ticket(token=1), HealthMonitor("arm1"))
    env.reset(seed=0)
    env.step(np.zeros((1, 2), np.float32))
    fence.check(2)
    commands = (
        lambda: env.reset(seed=0),
        lambda: env.step(np.zeros((1, 2), np.float32)),
        lambda: env.step_chunk(np.zeros((1, 3, 2), np.float32), 2),
        lambda: env.set_state(env.get_state()),
        lambda: env.load_state_dict(env.state_dict()),
    )
    for command in commands:
        with pytest.raises(LeaseError, match="token 1 refused, token 2"):
            command()
    assert env.get_state()[0, 0] == 1  # one step was taken
    assert env.task == "count"


def test_a_chunk_stops_at_the_step_where_the_lease_is_overtaken() -> None:
    fence, inner = Fence("arm1"), FakeEnv(1)
    env = LeasedEnv(inner, fence, Ticket(token=1), HealthMonitor("arm1"))
    env.reset(seed=0)
    taken = inner.step_masked

    def overtake_after_two(actions: Array, active: Array | None):
        if inner.get_state()[0, 0] == 1:
            fence.check(2)  # somebody else opens the device during the second step
        return taken(actions, active)

    inner.step_masked = overtake_after_two
    with pytest.raises(LeaseError, match="token 1 refused"):
        env.step_chunk(np.zeros((1, 5, 2), np.float32), 5)
    assert inner.get_state()[0, 0] == 2


# Devices that are made of an env


class Arm(FakeEnv):
    """Fails as it is told, and says what became of it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.said: list[str] = []
        self.fails: DeviceError | None = None

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        if self.fails is not None:
            raise self.fails
        return super().step_masked(actions, active)

    def park(self) -> None:
        self.said.append("park")

    def safe_stop(self) -> None:
        self.said.append("safe_stop")

    def close_extras(self, **kwargs: Any) -> None:
        self.said.append("close")


STILL = np.zeros((1, 2), np.float32)


def test_what_an_env_fails_at_is_its_devices_health() -> None:
    arm, clock = Arm(), ManualClock()
    device = EnvDevice(DeviceSpec(name="arm1", kind="robot"), lambda _: arm, clock=clock)
    env = device.open(Ticket())
    env.reset(seed=0)
    arm.fails = DeviceError("no answer")
    for state in ("suspect", "suspect", "quarantined"):
        with pytest.raises(DeviceError, match="no answer"):
            env.step(STILL)
        assert device.health().state == state
    arm.fails = None
    with pytest.raises(DeviceError, match=r"quarantined 0.0 s ago after 'no answer'; it is tried again in"):
        env.step(STILL)
    with pytest.raises(DeviceError, match="quarantined"):
        device.open(Ticket(token=2))
    clock.advance(10.0)
    env.step(STILL)
    assert device.health().state == "recovering"


def test_a_stop_that_latched_needs_a_person() -> None:
    arm, clock = Arm(), ManualClock()
    device = EnvDevice(DeviceSpec(name="arm1", kind="robot"), lambda _: arm, clock=clock)
    env = device.open(Ticket())
    arm.fails = SafetyStopError("protective stop")
    with pytest.raises(SafetyStopError, match="protective stop"):
        env.step(STILL)
    arm.fails = None
    clock.advance(1e6)
    with pytest.raises(SafetyStopError, match="after 'protective stop'; look at it, then call recover"):
        env.reset(seed=0)
    device.monitor.recover("a test")
    env.reset(seed=0)


def test_everybody_stops_what_is_open() -> None:
    arms = [Arm(), Arm(), Arm()]
    made = iter(arms)
    device = EnvDevice(DeviceSpec(name="arm1", kind="robot", slots=2), lambda _: next(made))
    device.safe_stop()  # nothing is open
    device.monitor.recover("a test")
    device.open(Ticket(token=1, slot_ids=(0,)))
    device.open(Ticket(token=2, slot_ids=(1,)))
    device.open(Ticket(token=3, slot_ids=(0,)))  # takes the place of the first
    device.safe_stop()
    device.close()
    device.close()
    assert [arm.said for arm in arms] == [["close"], ["safe_stop", "close"], ["safe_stop", "close"]]


def closed_after(fails: DeviceError | None) -> list[str]:
    """Returns what an arm did when its env was closed, after three control steps whose last may fail."""
    arm = Arm()
    env = EnvDevice(DeviceSpec(name="arm1", kind="robot"), lambda _: arm).open(Ticket())
    env.reset(seed=0)
    for _ in range(2):
        env.step(STILL)
    arm.fails = fails
    with nullcontext() if fails is None else pytest.raises(type(fails)):
        env.step(STILL)
    env.close()
    env.close()
    return arm.said


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (None, ["park", "close"]),
        (DeviceError("somebody paused the arm"), ["close"]),
        (SafetyStopError("protective stop"), ["close"]),
    ],
)
def test_an_arm_that_is_well_is_parked_when_its_env_is_closed(fails: Any, said: list[str]) -> None:
    assert closed_after(fails) == said


def test_nobody_parks_what_another_lease_has() -> None:
    arms = [Arm(), Arm()]
    made = iter(arms)
    device = EnvDevice(DeviceSpec(name="arm1", kind="robot"), lambda _: next(made))
    old = device.open(Ticket(token=1))
    new = device.open(Ticket(token=2))
    old.close()
    new.close()
    assert [arm.said for arm in arms] == [["close"], ["park", "close"]]


def test_a_person_who_stops_an_arm_stops_its_device() -> None:
    stops: list[str] = []
    arm = Arm()
    device = EnvDevice(DeviceSpec(name="arm1", kind="robot"), lambda _: arm, on_stop=stops.append)
    env = device.open(Ticket())
    env.safe_stop()
    with pytest.raises(SafetyStopError, match="after 'safe_stop'; look at it"):
        env.reset(seed=0)
    env.close()
    assert (arm.said, stops) == (["safe_stop", "close"], ["safe_stop"])


def test_an_env_is_opened_under_the_lease_of_its_device() -> None:
    leases = [Ticket("cpu", 7), Ticket("arm1", 3)]
    seen: list[int] = []

    def make(lease: LeaseLike) -> FakeEnv:
        seen.append(lease.token)
        return FakeEnv(1)

    open_under(leases, EnvDevice(DeviceSpec(name="arm1", kind="robot"), make))
    assert seen == [3]
    with pytest.raises(LeaseError, match="device arm2: opened without a lease of it"):
        open_under(leases, EnvDevice(DeviceSpec(name="arm2", kind="robot"), make))


def test_what_the_contract_does_not_name_is_that_of_the_env_inside() -> None:
    env = EnvDevice(DeviceSpec(name="arm1", kind="robot"), lambda _: Arm()).open(Ticket())
    assert env.said == []
    assert not hasattr(env, "expert")
