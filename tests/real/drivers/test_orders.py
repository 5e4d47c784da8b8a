"""Orders to a driver: in turn, one at a time, and no stop behind one that hangs."""

import threading
import time

import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.real.drivers.orders import Orders

TIMEOUT_S = 10.0


@pytest.fixture
def done():
    return threading.Semaphore(0)


@pytest.fixture
def orders(done):
    made = Orders(done.release, hung_s=0.05)
    yield made
    made.close()


def test_they_are_done_in_turn_and_fetched_one_by_one(orders, done):
    calls = []
    orders.add("start", None, lambda: calls.append("start"))
    orders.add("stop", None, lambda: calls.append("stop"))
    assert done.acquire(timeout=TIMEOUT_S)
    assert done.acquire(timeout=TIMEOUT_S)
    assert calls == ["start", "stop"]
    assert orders.fetch().operation == "start"
    assert orders.has("stop")  # done as well, and whoever starts has to know
    assert orders.fetch().operation == "stop"
    assert orders.fetch() is None
    assert orders.is_idle


@pytest.mark.parametrize("error", [DeviceError("no"), SystemExit(1), MemoryError()])
def test_what_an_order_raises_is_told_and_the_next_one_is_done(orders, done, error):
    def fail():
        raise error

    orders.add("start", None, fail)
    orders.add("clear", None, lambda: None)
    assert done.acquire(timeout=TIMEOUT_S)
    assert done.acquire(timeout=TIMEOUT_S)
    assert orders.fetch().error is error
    assert orders.fetch().error is None


def test_one_that_hangs_is_waited_for_unless_a_stop_waits_behind_it(orders, done):
    goes_on, calls = threading.Event(), []
    orders.add("clear", None, lambda: goes_on.wait(TIMEOUT_S))
    orders.add("start", None, lambda: calls.append("start"))
    time.sleep(0.1)
    assert orders.fetch() is None
    orders.add("stop", None, lambda: calls.append("stop"))
    given_up = orders.fetch()
    assert given_up.operation == "clear"
    assert given_up.is_given_up
    assert str(given_up.error).startswith("not done after 0.")
    assert done.acquire(timeout=TIMEOUT_S)
    assert done.acquire(timeout=TIMEOUT_S)
    assert calls == ["start", "stop"]
    goes_on.set()
    assert done.acquire(timeout=TIMEOUT_S)
    late = orders.fetch()
    assert late is given_up
    assert late.is_late
    assert late.error is None
    assert [orders.fetch().operation for _ in range(2)] == ["start", "stop"]
    assert orders.is_idle
