"""The process that holds one arm: `python -m robot_rl.real.drivers.host --station X --folder F`.

    supervisor <--ArmState, Answer-- F/driver.sock  <- states     -- driver --> arm
               --Command, Plan, Control-->          -- commands   ->
    policy     <--Frame------------- F/sensors.sock <- frames     --

The arm is held and stopped by the host itself when its supervisor is gone, when the driver raises
anything, and when the host is asked to end. F/driver.sock appears when the arm is connected.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.core.errors import DeviceError, RobotRLError
from robot_rl.core.registry import resolve
from robot_rl.hal.arm import ArmState
from robot_rl.hal.device import Fence
from robot_rl.real.claim import Claim
from robot_rl.real.drivers.driver import Driver
from robot_rl.real.drivers.feed import SensorFeed
from robot_rl.real.drivers.gate import Gate
from robot_rl.real.link import Link, Listener
from robot_rl.real.messages import Answer, Command, Control, MessageError, Operation, Plan
from robot_rl.real.station import StationConfig, load_station

logger = logging.getLogger(__name__)

DRIVER_SOCKET = "driver.sock"
SENSORS_SOCKET = "sensors.sock"
LINGER_S = 30.0
"""How long a host without a supervisor keeps the connection to the arm."""
EXIT_NO_ARM = 3
_TICK_S = 0.05
"""Longest sleep of the loop: how late the watchdogs may be."""
_WAIT_S = 0.2
_MAX_COSTS = 100_000


class Host:
    """One driver and its supervisor; `run` is the loop, everything else happens within it."""

    def __init__(
        self,
        driver: Driver,
        station: StationConfig,
        folder: Path,
        *,
        linger_s: float = LINGER_S,
        fence: Fence | None = None,
    ) -> None:
        """Takes a driver that is not connected yet, and the fence of its hardware, if it has one."""
        self._driver, self._station, self._folder, self._linger_s = driver, station, folder, linger_s
        self.gate = Gate(station, fence)
        self.fault = ""
        """Why the host stopped the arm; lifted by a person's `clear` only."""
        self.cycle_ns: deque[int] = deque(maxlen=_MAX_COSTS)
        """Newest costs of a cycle, from waking up to sleeping again."""
        self._offset_rad = np.asarray(station.joint_offset_rad or [0.0] * len(station.joints))
        self._grip = np.sort((station.gripper.closed, station.gripper.open))
        self._silence_ns = round(1e9 * station.supervisor.hold_after_s)
        self._wake = _Wake()
        self._closing = threading.Event()
        self._arm_errors: deque[str] = deque()
        self._worker = ThreadPoolExecutor(1, "orders")
        self._orders: deque[tuple[Operation, Control | None, Future[None]]] = deque()
        self._link: Link | None = None
        self._alone_since_ns = 0
        self._live = False
        self._sent_ns: int | None = None
        self._refusing = False
        self._seen: ArmState | None = None

    # The loop

    def run(self) -> None:
        """Connects and serves, until `close` or until nobody wanted the arm for `linger_s`.

        Raises:
            DeviceError: the arm cannot be connected.
        """
        try:
            self._driver.connect()
            self._check_joints()
            feed = SensorFeed(self._driver.frames, self._folder / SENSORS_SOCKET, self._note_error)
            watch = threading.Thread(target=self._watch_arm, name="arm states", daemon=True)
            with contextlib.closing(feed), contextlib.closing(Listener(self._folder / DRIVER_SOCKET)) as door:
                watch.start()
                gc.collect()
                gc.freeze()
                self._alone_since_ns = time.monotonic_ns()
                try:
                    while not self._closing.is_set() and not self._is_forgotten():
                        self._cycle(door)
                finally:
                    self._shut_down(watch)
        finally:
            self._driver.close()

    def close(self) -> None:
        """Makes `run` stop the arm and return; from any thread or signal handler."""
        self._closing.set()
        self._wake.set()

    def _cycle(self, door: Listener) -> None:
        ends = [self._wake, door] if self._link is None else [self._wake, door, self._link]
        select.select(ends, [], [], _TICK_S)
        began_ns = time.perf_counter_ns()
        self._wake.drain()
        self._meet(door)
        self._obey()
        self._finish_orders()
        self._report()
        self._watch_silence()
        self.cycle_ns.append(time.perf_counter_ns() - began_ns)

    def _meet(self, door: Listener) -> None:
        """Takes one supervisor; another one is turned away while it lives."""
        link = door.accept()
        if link is None:
            return
        if self._link is not None:
            link.send(
                Answer(operation="start", done=False, message=f"{self._at()} has a supervisor already.")
            )
            link.close()
            return
        self._link, self._seen = link, None
        self.gate.restart()

    def _obey(self) -> None:
        if self._link is None:
            return
        newest: Command | None = None
        try:
            messages = self._link.receive()
        except MessageError as error:
            logger.error("%s: %s", self._at(), error)
            messages = []
        for message in messages:
            match message:
                case Command():
                    newest = message
                case Plan():
                    self._pass(message)
                case Control():
                    newest = None  # what came before an order is overtaken by it
                    self._control(message)
                case _:
                    self._fail(f"the supervisor sent a {type(message).__name__}, which a driver does not get")
        if newest is not None and not self._link.closed:
            self._pass(newest)
        if self._link.closed:
            self._link, self._alone_since_ns = None, time.monotonic_ns()
            self._stop("the supervisor is gone")

    def _report(self) -> None:
        """Sends the newest state, once; the arm's own stop ends its obedience at once."""
        while self._arm_errors:
            self._fail(self._arm_errors.popleft())
        state = self._newest()
        if state is not None and state.stop_reason and self._live:
            self._live, self._sent_ns = False, None
            self._try("hold", self._driver.hold)
        if state is None or state is self._seen or self._link is None:
            return
        self._seen = state
        self._link.send(
            replace(
                state,
                position_rad=state.position_rad + self._offset_rad,
                stop_reason=self.fault or state.stop_reason,
            )
        )

    def _newest(self) -> ArmState | None:
        try:
            state = self._driver.read()
        except Exception as error:
            self._fail(f"read: {error}")
            state = None
        if state is None and self.fault:  # the reason has to reach the supervisor all the same
            nowhere = np.full(len(self._station.joints), np.nan)
            state = ArmState(position_rad=nowhere, velocity_rad_s=nowhere, stamp_ns=0)
        return state

    def _watch_silence(self) -> None:
        """Holds an arm whose commands have ceased: its supervisor hangs, or all of them are refused."""
        if self._sent_ns is not None and time.monotonic_ns() - self._sent_ns > self._silence_ns:
            self._sent_ns = None
            logger.warning("%s: no command for %g s, holding", self._at(), 1e-9 * self._silence_ns)
            self._try("hold", self._driver.hold)

    def _is_forgotten(self) -> bool:
        alone_ns = time.monotonic_ns() - self._alone_since_ns
        return self._link is None and alone_ns > 1e9 * self._linger_s

    # Commands

    def _pass(self, message: Command | Plan) -> None:
        if not self._live:
            self.gate.refused += 1
            return
        reason = self.gate.refuses(message, time.monotonic_ns())
        if reason:
            if not self._refusing:
                logger.error("%s: refused: %s", self._at(), reason)
            self._refusing = True
            return
        self._refusing = False
        if isinstance(message, Command):
            self._sent_ns = time.monotonic_ns()
            gripper = float(np.clip(message.gripper, *self._grip))
            target_rad = message.target_rad - self._offset_rad
            self._try("send", self._driver.send, replace(message, target_rad=target_rad, gripper=gripper))
        else:
            self._sent_ns = None  # the arm follows it by itself, and rests at its end
            grippers = np.clip(message.gripper, *self._grip)
            targets_rad = message.targets_rad - self._offset_rad
            self._try(
                "send", self._driver.send_plan, replace(message, targets_rad=targets_rad, gripper=grippers)
            )

    # Orders

    def _control(self, control: Control) -> None:
        match control.operation:
            case "hold" | "pause":
                self._sent_ns = None
                done = self._try("hold", self._driver.hold)
                self._answer(control, "" if done else self.fault)
            case "stop" | "estop":
                self._stop(f"{control.operation} by {control.by or 'the supervisor'}", control)
            case "start" | "reset" if overtaken := self.gate.overtaken(control.token):
                self._answer(control, overtaken)
            case "start" if self.fault:
                self._answer(control, f"{self.fault}. A person clears it first.")
            case "start":
                self._order("start", control, self._driver.start)
            case "clear" if not control.by.strip():
                self._answer(
                    control, f"clear: got by={control.by!r}, need the name of who looked at the arm."
                )
            case "clear":
                self._order("clear", control, self._driver.clear, control.by)
            case "reset" if self._station.real:
                self._answer(
                    control, f"{self._at()}: a real scene is put back by a person, not by a program."
                )
            case "reset":
                self._order("reset", control, self._driver.reset, control.seed)
            case "home":
                self._answer(control, "a driver does not home; the supervisor moves the arm there.")

    def _stop(self, reason: str, control: Control | None = None) -> None:
        """Holds at once; the controllers are taken away as soon as orders before this one are done."""
        self._live, self._sent_ns = False, None
        logger.info("%s: stopping: %s", self._at(), reason)
        self._try("hold", self._driver.hold)
        self._order("stop", control, self._driver.stop, reason)

    def _order(
        self, operation: Operation, control: Control | None, action: Callable[..., None], *values: Any
    ) -> None:
        future = self._worker.submit(action, *values)
        future.add_done_callback(lambda _: self._wake.set())
        self._orders.append((operation, control, future))

    def _finish_orders(self) -> None:
        while self._orders and self._orders[0][2].done():
            operation, control, future = self._orders.popleft()
            error = future.exception()
            if error is not None and operation == "stop":
                self._fail(f"stop: {error}", can_stop=False)
            elif error is not None and not isinstance(error, DeviceError):
                self._fail(f"{operation}: {error!r}")
            elif error is not None and operation == "start":
                self._stop(f"start: {error}")  # half of it may have been done
            elif error is None and operation == "clear":
                logger.warning("%s: %r cleared by %s", self._at(), self.fault, control and control.by)
                self.fault, self._seen = "", None
            elif error is None and operation == "start":
                # Whoever stopped while this was under way has the last word.
                self._live = not self.fault and not any(later[0] == "stop" for later in self._orders)
            if control is not None:
                self._answer(control, "" if error is None else str(error))

    def _answer(self, control: Control, refusal: str) -> None:
        if self._link is not None:
            self._link.send(Answer(operation=control.operation, done=not refusal, message=refusal))

    # Faults

    def _try(self, what: str, action: Callable[..., object], *values: Any) -> bool:
        """Calls the driver; whatever a vendor's library throws ends in a stop."""
        try:
            action(*values)
        except Exception as error:
            self._fail(f"{what}: {error}")
            return False
        return True

    def _fail(self, reason: str, *, can_stop: bool = True) -> None:
        logger.error("%s: %s", self._at(), reason)
        if self.fault:
            return
        self.fault, self._seen = f"{self._at()}: {reason}", None
        if can_stop:
            self._stop(reason)
        self._wake.set()

    def _note_error(self, reason: str) -> None:
        """Takes an error of another thread to the loop."""
        self._arm_errors.append(reason)
        self._wake.set()

    def _watch_arm(self) -> None:
        while not self._closing.is_set():
            try:
                if self._driver.wait(_WAIT_S):
                    self._wake.set()
            except Exception as error:
                self._note_error(f"wait: {error}")
                self._closing.wait(_WAIT_S)

    def _shut_down(self, watch: threading.Thread) -> None:
        self._closing.set()
        self._stop("the driver host ends")
        self._worker.shutdown()
        self._finish_orders()
        self._report()
        watch.join()
        if self._link is not None:
            self._link.close()
        costs = np.array(self.cycle_ns or [0]) * 1e-3
        p50, p99 = np.percentile(costs, [50, 99])
        logger.info(
            "%s: %d cycles, p50 %.0f us, p99 %.0f us, max %.0f us; %d commands refused",
            *(self._at(), len(costs), p50, p99, costs.max(), self.gate.refused),
        )

    def _check_joints(self) -> None:
        if self._driver.joint_names != self._station.joints:
            raise DeviceError(
                f"{self._at()}: the arm has joints {list(self._driver.joint_names)}, the station file says "
                f"{list(self._station.joints)}. Correct `joints` or `driver` there."
            )

    def _at(self) -> str:
        return f"driver of {self._station.name}"


class _Wake:
    """Ends a select from another thread or a signal handler."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the loop is woken already
            os.write(self._write, b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def fileno(self) -> int:
        return self._read

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)


def open_driver(station: StationConfig) -> Driver:
    """Returns the station's driver, not connected yet."""
    return resolve("driver", station.driver, at="station.driver")(station)


def main(argv: list[str] | None = None) -> int:
    """Runs a host until SIGTERM, SIGINT, or until it is forgotten."""
    parser = argparse.ArgumentParser(prog="python -m robot_rl.real.drivers.host", description=__doc__)
    parser.add_argument("--station", required=True, help="name of a shipped station, or a YAML file")
    parser.add_argument("--folder", required=True, type=Path, help="where the sockets are made")
    parser.add_argument("--linger", type=float, default=LINGER_S, help="seconds to live without a supervisor")
    parser.add_argument("--token", type=int, default=0, help="fencing token of the lease; 0 by hand")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        station = load_station(given.station)
        with Claim(station) as claim:  # before anything reaches the arm, and until it is let go
            fence = claim.fence(given.token)
            host = Host(open_driver(station), station, given.folder, linger_s=given.linger, fence=fence)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: host.close())
            host.run()
    except RobotRLError as error:
        logger.error("%s", error)
        return EXIT_NO_ARM
    return 0


if __name__ == "__main__":
    sys.exit(main())
