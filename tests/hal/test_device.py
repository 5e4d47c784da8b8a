"""Device specs refuse nonsense in words, and a fence refuses whoever has been overtaken."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, LeaseError
from robot_rl.hal.device import DeviceSpec, Fence, FencedEnv
from robot_rl.hal.fake import FakeEnv
from robot_rl.hal.vector import Array


@dataclass(frozen=True)
class Ticket:
    device: str = "arm1"
    token: int = 1
    slot_ids: tuple[int, ...] = (0,)


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
    env = FencedEnv(inner, fence, Ticket(token=1))
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
    env = FencedEnv(inner, fence, Ticket(token=1))
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
