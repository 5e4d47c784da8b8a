"""Every transition of the health states, at the second it happens."""

from typing import Any

import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.hal.health import HealthConfig, HealthMonitor

CONFIG = HealthConfig(
    quarantine_after=3,
    suspect_timeout_s=5.0,
    clear_after=2,
    quarantine_s=10.0,
    max_quarantine_s=25.0,
    recover_after=2,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def monitor(clock: ManualClock) -> HealthMonitor:
    return HealthMonitor("arm1", CONFIG, clock)


def quarantine(monitor: HealthMonitor) -> None:
    for _ in range(3):
        monitor.failure("late")


def test_a_device_begins_ok(monitor: HealthMonitor) -> None:
    health = monitor.health()
    assert (health.state, health.since_s, health.reason, health.usable) == ("ok", 100.0, "", True)


def test_one_failure_makes_it_suspect_and_two_successes_clear_it(
    monitor: HealthMonitor, clock: ManualClock
) -> None:
    clock.advance(1.0)
    monitor.failure("late by 40 ms")
    assert (monitor.health().state, monitor.health().since_s) == ("suspect", 101.0)
    assert monitor.health().reason == "late by 40 ms"
    assert monitor.health().usable
    monitor.success()
    assert monitor.health().state == "suspect"
    monitor.success()
    assert monitor.health().state == "ok"
    assert monitor.health().reason == ""


def test_a_failure_breaks_the_row_of_successes(monitor: HealthMonitor) -> None:
    # failure, success, failure, success: never two successes in a row, and two failures of three.
    for report in (lambda: monitor.failure("late"), monitor.success) * 2:
        report()
    assert monitor.health().state == "suspect"


def test_three_failures_take_it_out(monitor: HealthMonitor) -> None:
    quarantine(monitor)
    health = monitor.health()
    assert (health.state, health.usable, health.needs_person) == ("quarantined", False, False)
    assert health.counts == {"success": 0, "failure": 3, "quarantine": 1, "recovery": 0}


def test_it_may_not_stay_suspect_for_long(monitor: HealthMonitor, clock: ManualClock) -> None:
    monitor.failure("late")
    clock.advance(4.9)
    assert monitor.health().state == "suspect"
    clock.advance(0.1)
    assert monitor.health().state == "quarantined"


def test_after_ten_seconds_it_is_tried_and_two_successes_bring_it_back(
    monitor: HealthMonitor, clock: ManualClock
) -> None:
    quarantine(monitor)
    clock.advance(9.9)
    assert monitor.health().state == "quarantined"
    clock.advance(0.1)
    assert monitor.health().state == "recovering"
    assert not monitor.health().usable
    monitor.success()
    monitor.success()
    assert monitor.health().state == "ok"
    assert monitor.health().counts["recovery"] == 1


def test_a_relapse_doubles_the_wait_up_to_the_limit(monitor: HealthMonitor, clock: ManualClock) -> None:
    # 10 s, then 20, then min(40, 25) = 25, then 25 again.
    quarantine(monitor)
    for wait_s in (10.0, 20.0, 25.0, 25.0):
        clock.advance(wait_s - 0.1)
        assert monitor.health().state == "quarantined"
        clock.advance(0.1)
        assert monitor.health().state == "recovering"
        monitor.failure("still late")
        assert monitor.health().state == "quarantined"


def test_a_recovery_forgets_the_relapses(monitor: HealthMonitor, clock: ManualClock) -> None:
    quarantine(monitor)
    clock.advance(10.0)
    monitor.failure("relapse")
    clock.advance(20.0)
    monitor.success()
    monitor.success()
    quarantine(monitor)
    clock.advance(10.0)
    assert monitor.health().state == "recovering"


def test_only_a_person_ends_a_latched_stop(monitor: HealthMonitor, clock: ManualClock) -> None:
    monitor.stop("protective stop")
    clock.advance(1e6)
    health = monitor.health()
    assert (health.state, health.needs_person) == ("quarantined", True)
    with pytest.raises(ConfigError, match=r"arm1.recover: got by='  ', need the name"):
        monitor.recover("  ")
    monitor.recover("ada")
    assert (monitor.health().state, monitor.health().needs_person) == ("recovering", False)


def test_a_failure_in_quarantine_changes_nothing_but_the_count(monitor: HealthMonitor) -> None:
    quarantine(monitor)
    monitor.failure("again")
    assert monitor.health().counts["quarantine"] == 1
    assert monitor.health().counts["failure"] == 4


def test_a_command_in_quarantine_is_refused_in_words(monitor: HealthMonitor, clock: ManualClock) -> None:
    monitor.require_usable()
    quarantine(monitor)
    clock.advance(2.5)
    with pytest.raises(DeviceError, match=r"quarantined 2.5 s ago after 'late'; it is tried again in 7.5 s"):
        monitor.require_usable()
    monitor.stop("collision")
    with pytest.raises(DeviceError, match=r"after 'collision'; look at it, then call recover\(by="):
        monitor.require_usable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quarantine_after": 0}, "quarantine_after: got 0, allowed: 1 or more"),
        ({"clear_after": 0}, "clear_after: got 0"),
        ({"recover_after": -1}, "recover_after: got -1"),
        ({"suspect_timeout_s": 0.0}, "suspect_timeout_s: got 0.0, allowed: above 0"),
        ({"quarantine_s": -1.0}, "quarantine_s: got -1.0"),
        ({"quarantine_s": 400.0}, r"max_quarantine_s: got 300.0, allowed: quarantine_s \(400.0\) or more"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HealthConfig(**change)
