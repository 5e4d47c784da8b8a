"""A source that is lost is begun again, unless a person has to look at its device; the others go on."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from robot_rl.core.errors import SafetyStopError
from robot_rl.hal.vector import Array
from robot_rl.rollout import revival
from robot_rl.rollout.process import ProcessSource
from robot_rl.rollout.revival import ActorError, LostActorError, Revival
from robot_rl.rollout.sources import Here, InlineSource
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.loop import Learner, Pacer, Run, train
from robot_rl.train.schedule import Counters, Ratio
from tests.rollout.test_process import build, build_falling, collect_until, offered
from tests.train.test_loop import step


class StoppedEnv(FakeEnv):
    """Somebody presses the emergency stop at its third step."""

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        if self._step[0] == 2:
            raise SafetyStopError("the emergency stop is pressed")
        return super().step_masked(actions, active)


class HangingEnv(FakeEnv):
    """Never returns from its third step."""

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        if self._step[0] == 2:
            threading.Event().wait()
        return super().step_masked(actions, active)


def build_stopped() -> InlineSource:
    return build(StoppedEnv(1))


def build_hanging() -> InlineSource:
    return build(HangingEnv(1))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets."""
    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr(revival, "time", SimpleNamespace(monotonic=lambda: clock.s))
    return clock


def test_each_loss_in_a_row_is_waited_out_longer(now: SimpleNamespace) -> None:
    kept, error = Revival(7), LostActorError("gone.")
    kept.well()
    waits = list[float]()
    for _ in range(7):
        kept.lost(error)
        waits.append(kept.wait_s)
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    now.s += 29.0
    assert kept.wait_s == 1.0
    with pytest.raises(LostActorError, match="gone"):
        kept.lost(error)
    kept.well()
    kept.lost(error)
    assert (kept.wait_s, kept.count) == (1.0, 8)


def test_what_never_collected_is_given_up_sooner() -> None:
    kept = Revival(10)
    for _ in range(4):
        kept.lost(LostActorError("gone."))
    with pytest.raises(LostActorError):
        kept.lost(LostActorError("gone."))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [None, 1])
def test_an_actor_that_was_killed_is_replaced_and_begins_a_new_episode(ahead: int | None) -> None:
    publisher, source = offered(0), ProcessSource(build, ahead=ahead, restarts=1)
    collect_until(source, publisher, 3)
    os.kill(cast(int, source.pid), signal.SIGKILL)
    (segment,) = collect_until(source, publisher, 1)
    while not segment.begins:  # what the killed actor had sent ahead comes first
        assert source.revival.count == 0
        (segment,) = collect_until(source, publisher, 1)
    assert segment.obs["state"][0, 0] == 0
    assert not any(segment.begins for segment in collect_until(source, publisher, 20))
    assert source.revival.count == 1
    source.close()


LEARNER = """
import time
from robot_rl.rollout.process import ProcessSource
from tests.rollout.test_process import build, offered

if __name__ == "__main__":
    publisher, source = offered(0), ProcessSource(build, ahead=1)
    source.collect(publisher)
    print(source.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_an_actor_that_waits_for_its_turn_ends_with_a_learner_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "learner.py"
    script.write_text(LEARNER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as learner:
        assert learner.stdout is not None
        actor = int(learner.stdout.readline())
        learner.kill()
    until_s = time.monotonic() + 30.0
    while Path(f"/proc/{actor}").exists():
        assert time.monotonic() < until_s, "it waits for a turn that never comes"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [None, 0])
def test_an_actor_that_hangs_is_killed_and_replaced(ahead: int | None) -> None:
    publisher = offered(0)
    source = ProcessSource(build_hanging, ahead=ahead, restarts=1, silence_s=10.0)
    collect_until(source, publisher, 2)
    pid, began_s = source.pid, time.monotonic()
    collect_until(source, publisher, 2)
    assert source.pid != pid
    assert time.monotonic() - began_s >= 10.0
    source.close()


@pytest.mark.slow
def test_an_actor_that_nobody_asked_for_long_is_not_silent() -> None:
    publisher = offered(0)
    source = ProcessSource(build, ahead=0, holds_up=False, wait_s=0.0, silence_s=100.0)
    collect_until(source, publisher, 1)
    actor: Any = source._actor
    actor._heard_s -= 1000.0  # an evaluation took so long
    collect_until(source, publisher, 1)
    assert source._actor is actor
    source.close()


@pytest.mark.slow
def test_a_device_that_failed_is_opened_again_and_one_that_stopped_is_not() -> None:
    falling = ProcessSource(build_falling, restarts=1)
    collect_until(falling, offered(0), 6)  # three steps in each life
    assert falling.revival.count == 1
    falling.close()
    stopped = ProcessSource(build_stopped, restarts=5)
    with pytest.raises(ActorError, match="the emergency stop is pressed") as caught:
        collect_until(stopped, offered(0), 10)
    assert not isinstance(caught.value, LostActorError)
    assert stopped.revival.count == 0
    stopped.close()


class Listed(Here):
    """A source that collects as many segments as it was given, and is lost then."""

    def __init__(self, number: int) -> None:
        self.left = number

    def collect(self, published: Any) -> Any:
        if not self.left:
            raise ActorError("it is gone.")
        self.left -= 1
        return step(1)


def run_of(*sources: Listed, budget: int) -> Run:
    kept = SimpleNamespace(add=lambda segment: None)
    learner = Learner(cast(Any, None), cast(Any, None), Ratio(0.0), offered(0))
    budgets = [budget] * len(sources)

    def finished(at: Counters) -> bool:
        return all(at.of_source(i) >= budget for i in range(len(sources)))

    pacer = Pacer(finished=finished, budgets=budgets)
    return Run([learner], pacer, lambda _: nullcontext(), cast(Any, sources), cast(Any, kept))


def test_a_run_goes_on_without_a_lost_source_and_ends_with_its_error_when_the_others_are_done() -> None:
    run = run_of(Listed(2), Listed(50), budget=6)
    with pytest.raises(ActorError, match="it is gone"):
        train(run)
    assert run.counters.by_source == [2, 6], "the others spend their budgets first"


def test_a_run_whose_sources_are_all_lost_ends_at_once() -> None:
    run = run_of(Listed(1), Listed(2), budget=6)
    with pytest.raises(ActorError):
        train(run)
    assert run.counters.by_source == [1, 2]


def test_a_source_that_is_lost_after_its_budget_is_not_missed() -> None:
    run = run_of(Listed(6), Listed(6), budget=6)
    train(run)
    assert run.counters.by_source == [6, 6]
