"""`robot-rl arm`: finds the newest supervisor, gives orders, tells what the arm does."""

import json
import threading
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.hal.arm import ArmState
from robot_rl.real.link import Link, Listener
from robot_rl.real.messages import Answer, Control, Status


class Supervisor:
    """Says the same again and again, and notes orders; refuses `home`."""

    def __init__(self, folder: Path) -> None:
        self._listener = Listener(folder / "supervisor.sock")
        self.orders: list[Control] = []
        self.unlogged = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        links: list[Link] = []
        while not self._ending.wait(0.005):
            new = self._listener.accept()
            links += [] if new is None else [new]
            for link in links:
                self._attend(link)
        for link in links:
            link.close()

    def _attend(self, link: Link) -> None:
        if not link.closed:
            for message in link.receive():
                assert isinstance(message, Control)
                self.orders.append(message)
                refused = message.operation == "home"
                link.send(
                    Answer(operation=message.operation, done=not refused, message="busy" if refused else "")
                )
            link.send(_status(self.unlogged))


def _status(unlogged: int) -> Status:
    now_ns = time.monotonic_ns()
    state = ArmState(stamp_ns=now_ns, position_rad=np.arange(3.0), velocity_rad_s=np.zeros(3), gripper=0.02)
    return Status(
        stamp_ns=now_ns,
        state=state,
        phase="stopped",
        plan=-1,
        sent_rad=np.zeros(3),
        sent_gripper=0.0,
        limited=False,
        reason="e-stop by ann",
        unlogged=unlogged,
    )


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Supervisor]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "robot-rl-dead").mkdir()
    (tmp_path / "robot-rl-dead" / "supervisor.sock").touch()  # of one that was killed
    (tmp_path / "robot-rl-live").mkdir()
    running = Supervisor(tmp_path / "robot-rl-live")
    yield running
    running.close()


def test_status_tells_phase_reason_and_joints(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["arm", "status", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["stopped: e-stop by ann", "joints 0.000, 1.000, 2.000 rad, gripper 0.0200"]
    facts = json.loads(lines[-1])
    assert (facts["phase"], facts["position_rad"]) == ("stopped", [0.0, 1.0, 2.0])
    assert supervisor.orders == []


def test_a_full_disk_is_told(supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor.unlogged = 7
    assert main(["arm", "status", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "7 entries of its log could not be written: look at the disk of its run folder"
    assert json.loads(lines[-1])["unlogged"] == 7


def test_orders_are_given_and_refusals_told(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["arm", "clear", "by=ann"]) == 0
    assert main(["arm", "estop"]) == 0
    assert [(order.operation, order.by) for order in supervisor.orders] == [("clear", "ann"), ("estop", "")]
    assert main(["arm", "home"]) == 2
    assert "home: refused: busy" in capsys.readouterr().err


def test_words_as_people_type_them(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder at home, of a name with umlauts, brackets and signs; and a person of several names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "robot-rl-live").rename(tmp_path / "T\xfcr (2), a=b")
    assert main(["arm", "clear", "by=J\xf6rg, (Labor) a=b", "--folder=~/T\xfcr (2), a=b"]) == 0
    assert [order.by for order in supervisor.orders] == ["J\xf6rg, (Labor) a=b"]


def test_without_a_supervisor_it_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["arm", "stop"]) == 2
    assert f"no supervisor runs at {tmp_path}/robot-rl-*" in capsys.readouterr().err
