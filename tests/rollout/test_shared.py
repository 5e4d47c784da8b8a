"""Weights in shared memory: whole or not at all, written once for all actors, taken without a copy."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from robot_rl.rollout import shared
from robot_rl.rollout.shared import Inbox, SharedWeights, opened
from robot_rl.rollout.weights import Publisher, Snapshot, Subscriber, WeightsError, load_weights
from tests.rollout.test_process import offered
from tests.rollout.test_sources import VersionPolicy, weights


@contextmanager
def ends(sender: Publisher, *, in_thread: bool = False) -> Generator[tuple[SharedWeights, Inbox]]:
    """Opens the memory at the learner's end and at an actor's."""
    there = SharedWeights(sender)
    inbox = Inbox(there.address, in_thread=in_thread)
    yield there, inbox
    inbox.close()
    there.close()


def test_weights_arrive_whole_or_not_at_all() -> None:
    sender, policy = offered(3), VersionPolicy()
    subscriber = Subscriber(policy)
    with ends(sender) as (there, inbox):
        assert subscriber.refresh(inbox) == 3
        sender.offer(4, lambda: weights(4.0))
        there.publish()
        # A byte of the newest slot is not what the header says: the learner is writing there again.
        view = shared._view(there._memory)
        slot = shared._HEAD.unpack_from(view)[2]
        at = shared._ALIGNED + slot * there.address.slot
        whole = view[at]
        view[at] ^= 0xFF
        assert subscriber.refresh(inbox) == 3
        assert policy.version.item() == 3.0
        view[at] = whole
        del view
        assert subscriber.refresh(inbox) == 4
        assert policy.version.item() == 4.0


def test_the_slot_that_is_read_is_not_the_one_that_is_written_next() -> None:
    sender = offered(0)
    with ends(sender) as (there, inbox):
        slots = list[int]()
        for version in range(1, 5):
            sender.offer(version, lambda version=version: weights(float(version)))
            there.publish()
            there.publish()  # nothing is new: nothing is written
            slots.append(shared._HEAD.unpack_from(shared._view(there._memory))[2])
            assert inbox.newest is not None
            assert inbox.newest.weights["version"].item() == version
        assert slots == [0, 1, 0, 1]


def test_all_actors_of_a_publisher_share_one_memory_that_the_last_one_frees() -> None:
    sender, other = offered(1), offered(2)
    first, second, apart = opened(sender), opened(sender), opened(other)
    assert first is second
    assert apart is not first
    name = first.address.name
    first.close()
    Inbox(second.address, in_thread=False).close()
    second.close()
    with pytest.raises(FileNotFoundError):
        Inbox(second.address, in_thread=False)
    again = opened(sender)
    assert again.address.name != name
    for one in (again, apart):
        one.close()
    with pytest.raises(WeightsError, match="none are published yet"):
        opened(Publisher())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_weights_of_every_kind_and_shape_arrive_as_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    given = {
        "matrix": torch.randn(3, 5, generator=generator).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "nothing": torch.zeros(0, 4, dtype=dtype),
        "strided": torch.randn(4, 6, generator=generator).T.to(dtype),
    }
    sender = Publisher()
    sender.offer(7, lambda: given)
    with ends(sender) as (_, inbox):
        newest = inbox.newest
        assert newest is not None
        assert newest.version == 7
        for name, value in given.items():
            assert torch.equal(newest.weights[name], value), name


def test_an_arm_gets_new_weights_in_the_background() -> None:
    sender = offered(0)
    with ends(sender, in_thread=True) as (there, inbox):
        sender.offer(1, lambda: weights(1.0))
        there.publish()
        until_s = time.monotonic() + 20.0
        while inbox.newest is None or inbox.newest.version != 1:
            assert time.monotonic() < until_s
            time.sleep(0.001)


def test_a_policy_takes_what_is_its_own_and_copies_what_others_have() -> None:
    policy = nn.Linear(2, 2)
    mine, theirs = torch.ones(2, 2), torch.zeros(2, 2)
    load_weights(policy, {"weight": mine}, take=True)
    assert policy.weight.data_ptr() == mine.data_ptr()
    load_weights(policy, {"weight": theirs})
    assert policy.weight.data_ptr() == mine.data_ptr()
    assert torch.equal(policy.weight, theirs)


def test_damage_that_nobody_compared_with_the_checksum_is_an_error() -> None:
    policy: Any = VersionPolicy()
    subscriber = Subscriber(policy)

    class Damaged:
        newest = Snapshot(1, 0, weights(1.0))

    with pytest.raises(WeightsError, match="version 1 and its checksum differ"):
        subscriber.refresh(Damaged())
