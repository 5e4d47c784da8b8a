"""A source on a leased device: it waits in line, gives way to a larger priority, and frees what it held."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.hal.device import DeviceSpec
from robot_rl.rollout.booked import BookedSource
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.sources import EpisodeLog, Source
from robot_rl.sched import held
from robot_rl.sched.leases import HeldLease, LeaseStore
from robot_rl.train.loop import Hook, train
from robot_rl.train.schedule import Counters, Every
from tests.rollout.test_revival import Listed, run_of
from tests.train.test_loop import step

pytestmark = pytest.mark.usefixtures("whole_runs")
ARM, OTHER = DeviceSpec(name="arm-one", kind="robot"), DeviceSpec(name="arm-two", kind="robot")


class Arm:
    """A source that notes which lease it acts under, and whether it still has it when it ends."""

    def __init__(self, held: HeldLease, notes: list[str]) -> None:
        self.held, self.notes, self.episodes = held, notes, EpisodeLog(1)
        self.is_ahead, self.is_broken = False, False
        notes.append(f"begins on {held.device}")

    def collect(self, published: Any) -> Any:
        if self.is_broken:
            raise ActorError("the gripper is loose.")
        return step(1)

    def close(self) -> None:
        (lease,) = LeaseStore().active(self.held.device)
        self.notes.append("parks under its lease" if lease.token == self.held.token else "parks too late")


class Booked:
    def __init__(self, *specs: DeviceSpec, **how: Any) -> None:
        self.notes, self.arms = list[str](), list[Arm]()
        self.source = BookedSource(specs, self.begin, holder="run", wait_s=0.01, say=self.notes.append, **how)

    def begin(self, held: HeldLease) -> Source:
        self.arms.append(Arm(held, self.notes))
        return cast(Source, self.arms[-1])

    def collect(self) -> Any:
        return self.source.collect(cast(Any, None))

    def until(self, done: Callable[[], Any]) -> Any:
        until_s = time.monotonic() + 20.0
        while not (found := done()):
            assert time.monotonic() < until_s, self.notes
        return found


def test_it_takes_the_first_device_that_is_free_and_gives_it_back() -> None:
    booked = Booked(ARM, OTHER)
    with LeaseStore().hold(ARM, holder="another"):
        booked.until(booked.collect)
        assert [lease.holder for lease in LeaseStore().active("arm-two")] == ["run"]
    booked.source.close()
    assert not LeaseStore().active()
    assert booked.notes == ["begins on arm-two", "parks under its lease"]


def test_while_it_waits_it_has_nothing_and_a_run_that_ends_gives_its_place_up() -> None:
    booked = Booked(ARM)
    with LeaseStore().hold(ARM, holder="another"):
        for _ in range(20):
            assert booked.collect() is None
        assert len(LeaseStore().waiting()) == 1
        booked.source.close()
    booked.until(lambda: not LeaseStore().active() and not LeaseStore().waiting())
    assert not booked.arms


def test_a_run_that_ends_while_it_waits_gives_its_place_up_at_once_and_asks_nobody() -> None:
    booked, store = Booked(ARM, priority=1, preempt_s=600.0), LeaseStore()
    lease = store.acquire(ARM, holder="another", preemptible=True)
    assert booked.collect() is None
    booked.until(lambda: store.preemption(lease) is not None)
    booked.source.close()
    assert not store.waiting()
    assert store.preemption(lease) is None
    assert [one.holder for one in store.active()] == ["another"]
    assert booked.collect() is None  # that its wait was given up is no error


def test_it_parks_for_a_larger_priority_and_goes_on_afterwards() -> None:
    booked = Booked(ARM)
    booked.until(booked.collect)
    store = LeaseStore()
    found = list[int]()

    def collects_until_given_up() -> bool:
        booked.collect()
        return not any(lease.holder == "run" for lease in store.active())

    def rival() -> None:
        with LeaseStore().hold(ARM, holder="rival", priority=1, wait_s=20.0, preempt_s=15.0) as held:
            found.append(held.token)
            time.sleep(0.5)

    thread = threading.Thread(target=rival)
    thread.start()
    booked.until(collects_until_given_up)
    booked.until(booked.collect)
    thread.join()
    assert [arm.held.token for arm in booked.arms] == [found[0] - 1, found[0] + 1]
    assert booked.notes == [
        "begins on arm-one",
        "arm-one is given up: 'rival' goes first. Waits for it",
        "parks under its lease",
        "begins on arm-one",
    ]
    assert len(booked.source.waited_s) == 2
    booked.source.close()


def test_an_equal_priority_waits_until_it_ends() -> None:
    booked = Booked(ARM, priority=1)
    booked.until(booked.collect)
    with pytest.raises(Exception, match="arm-one"):
        LeaseStore().acquire(ARM, holder="rival", priority=1, wait_s=0.5, preempt_s=0.2)
    assert booked.collect() is not None
    booked.source.close()


def test_a_source_that_cannot_go_on_frees_its_device() -> None:
    booked = Booked(ARM)
    booked.until(booked.collect)
    booked.arms[0].is_broken = True
    with pytest.raises(ActorError, match="the gripper is loose"):
        booked.collect()
    booked.until(lambda: not LeaseStore().active())


def test_it_gives_way_while_the_learner_does_something_else() -> None:
    booked = Booked(ARM)
    booked.until(booked.collect)
    with LeaseStore().hold(ARM, holder="rival", priority=1, wait_s=20.0, preempt_s=15.0) as held:
        assert held.token > booked.arms[0].held.token  # an evaluation, say: nobody collects
    assert booked.notes[-1] == "parks under its lease"
    booked.until(booked.collect)
    booked.source.close()


def test_a_source_that_has_spent_its_budget_frees_its_device_while_others_collect() -> None:
    booked, other = Booked(ARM), Listed(10**6)
    freed = list[bool]()
    run = run_of(cast(Any, booked.source), other, budget=3)
    run.pacer.finished = lambda at: len(freed) > 0 or at.of_source(1) > 10**6
    run.pacer.budgets = [3, 10**6]

    def look(at: Counters) -> None:
        if at.of_source(0) == 3 and not LeaseStore().active():
            freed.append(True)

    run.pacer.hooks = [Hook("look", Every(1), lambda at: at.env_steps, look)]
    train(run)
    assert run.counters.of_source(0) == 3
    assert booked.notes == ["begins on arm-one", "parks under its lease"]


def error_of(booked: Booked) -> str:
    """Returns what a collection is refused with; empty if it is not."""
    try:
        booked.collect()
    except DeviceError as error:
        return str(error)
    return ""


def test_a_device_that_was_stopped_is_an_error_that_says_why() -> None:
    LeaseStore().stop("arm-one", "The emergency stop is pressed.", "somebody")
    booked = Booked(ARM)

    assert "The emergency stop is pressed" in booked.until(lambda: error_of(booked))


def test_a_device_that_is_trusted_no_longer_is_given_up_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "_TRUST_S", 0.0)
    reasons = list[str]()
    booked = Booked(replace(ARM, refusal=lambda: "".join(reasons)))
    booked.until(booked.collect)
    reasons.append("device arm-one: it was wrong.")

    assert "it was wrong" in booked.until(lambda: error_of(booked))  # nobody gives it to the source again
    assert booked.notes == [
        "begins on arm-one",
        "arm-one is given up: device arm-one: it was wrong. Waits for it",
        "parks under its lease",
    ]
