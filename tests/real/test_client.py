"""A client of the supervisor, and the processes it is launched with."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.real.client import ArmClient
from robot_rl.real.launch import StationProcesses
from robot_rl.real.link import Link, LinkError, Listener
from robot_rl.real.messages import Answer, Control, Message, Plan, Status


def status(stamp_ns: int, plan: int = -1) -> Status:
    return Status(
        stamp_ns=stamp_ns,
        state=None,
        phase="waiting",
        plan=plan,
        sent_rad=np.zeros(2),
        sent_gripper=0.0,
        limited=False,
    )


class Supervisor:
    """The other end: every 5 ms it says what `say` returns of what it heard."""

    def __init__(self, path: Path) -> None:
        self._listener = Listener(path)
        self._link: Link | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.say: Callable[[list[Message]], list[Message]] = lambda _: [status(time.monotonic_ns())]
        self.heard: list[Message] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.005):
            self._link = self._link or self._listener.accept()
            if self._link is not None:
                heard = self._link.receive()
                self.heard += heard
                for message in self.say(heard):
                    self._link.send(message)
        if self._link is not None:
            self._link.close()
        self._listener.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "s")
    yield supervisor
    supervisor.close()


@pytest.fixture
def client(supervisor: Supervisor, tmp_path: Path) -> Iterator[ArmClient]:
    with ArmClient(tmp_path / "s") as client:
        yield client


def test_a_status_is_waited_for(client: ArmClient) -> None:
    first = client.wait(timeout_s=10.0)
    later = client.wait(newer_than_ns=first.stamp_ns, timeout_s=10.0)
    assert later.stamp_ns > first.stamp_ns
    assert client.status.stamp_ns >= later.stamp_ns


def test_old_statuses_of_a_full_socket_are_not_taken_for_new(client: ArmClient) -> None:
    client.wait(timeout_s=10.0)
    asleep_s = 0.5
    time.sleep(asleep_s)  # 100 statuses came meanwhile
    assert time.monotonic_ns() - client.status.stamp_ns < 0.4e9


def test_a_silent_supervisor_is_reported(client: ArmClient, supervisor: Supervisor) -> None:
    supervisor.say = lambda _: []
    time.sleep(0.1)
    with pytest.raises(
        DeviceError, match=r"supervisor at .*/s says nothing new\. Look at its supervisor\.log"
    ):
        client.wait(time.monotonic_ns(), timeout_s=0.05)
    with pytest.raises(DeviceError, match="did not answer to home"):
        client.control("home", timeout_s=0.05)


def test_orders_are_done_or_refused(client: ArmClient, supervisor: Supervisor) -> None:
    def say(heard: list[Message]) -> list[Message]:
        answers = [
            Answer(operation=order.operation, done=order.by == "Ada", message="" if order.by else "no name")
            for order in heard
            if isinstance(order, Control)
        ]
        return [Answer(operation="stop", done=True), *answers, status(time.monotonic_ns())]

    supervisor.say = say
    assert client.control("clear", by="Ada").done
    with pytest.raises(DeviceError, match="clear: refused: no name"):
        client.control("clear")
    assert supervisor.heard == [Control(operation="clear", by="Ada"), Control(operation="clear", by="")]


def test_plans_arrive(client: ArmClient, supervisor: Supervisor) -> None:
    plan = Plan(number=3, start_ns=1, period_ns=2, targets_rad=np.ones((1, 2)), gripper=np.ones(1))
    client.send(plan)
    until_s = time.monotonic() + 10.0
    while not supervisor.heard and time.monotonic() < until_s:
        time.sleep(0.001)
    (heard,) = supervisor.heard
    assert isinstance(heard, Plan)
    assert heard.number == 3


def test_plans_and_orders_carry_the_token_of_the_lease(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.say = lambda heard: [
        Answer(operation="start", done=True) for order in heard if isinstance(order, Control)
    ]
    with ArmClient(tmp_path / "s", token=12) as client:
        client.control("start", timeout_s=10.0)
        client.send(Plan(number=3, start_ns=1, period_ns=2, targets_rad=np.ones((1, 2)), gripper=np.ones(1)))
        until_s = time.monotonic() + 10.0
        while len(supervisor.heard) < 2 and time.monotonic() < until_s:
            time.sleep(0.001)
    assert [getattr(message, "token", None) for message in supervisor.heard] == [12, 12]


def test_a_supervisor_that_is_gone_is_an_error(client: ArmClient, supervisor: Supervisor) -> None:
    client.wait(timeout_s=10.0)
    supervisor.close()
    for call in (lambda: client.wait(time.monotonic_ns()), lambda: client.control("stop")):
        with pytest.raises(DeviceError, match="is gone"):
            call()


def test_nobody_to_connect_to(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="nobody listens"):
        ArmClient(tmp_path / "s")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_status_after_an_answer_is_of_after_the_order(supervisor: Supervisor, client: ArmClient) -> None:
    # A client may be so quick that it reads between an answer and the status that follows it.
    before = client.status
    said: list[list[Message]] = [
        [Answer(operation="start", done=True)],
        [],
        [status(before.stamp_ns + 10**9, plan=7)],
    ]
    late = iter(said)
    asked = threading.Event()

    def say(heard: list[Message]) -> list[Message]:
        if any(isinstance(message, Control) for message in heard):
            asked.set()
        return next(late, []) if asked.is_set() else [status(time.monotonic_ns())]

    supervisor.say = say
    client.control("start")
    assert client.status.plan == 7


@pytest.mark.slow
def test_a_station_is_started_and_taken_down(tmp_path: Path) -> None:
    with StationProcesses("sim_in_process", tmp_path / "run", timeout_s=100.0) as processes:
        pids = (processes.driver_pid, processes.supervisor_pid)
        sockets = processes.sockets
        with processes.client() as client:
            client.control("reset", seed=3)
            client.control("start")
            assert client.status.phase == "running"
        assert all(is_alive(pid) for pid in pids)
        assert [os.getsid(pid) for pid in pids] == list(pids)  # Ctrl-C at the policy is not theirs
    assert not any(is_alive(pid) for pid in pids)
    assert not sockets.exists()
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"driver.log", "supervisor.log", "supervisor.json", "events.jsonl", "flight"} <= written


def test_no_process_is_started_for_a_station_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no station named 'nowhere'"):
        StationProcesses("nowhere", tmp_path).__enter__()
    assert not (tmp_path / "driver.log").exists()


@pytest.mark.slow
def test_a_station_that_does_not_start_says_why(tmp_path: Path) -> None:
    pytest.importorskip("scservo_sdk")
    ended = r"the driver of station so101 ended \(3\): .*LeRobot cannot connect so101_follower: .*the power"
    with pytest.raises(DeviceError, match=ended):
        StationProcesses("so101", tmp_path).__enter__()
