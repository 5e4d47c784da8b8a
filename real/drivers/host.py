"""The process that holds one arm: `python -m robot_rl.real.drivers.host --station X --folder F`.

    supervisor <--ArmState, Answer-- F/driver.sock  <- states     -- driver --> arm
               --Command, Plan, Control-->          -- commands   ->
    policy     <--Frame------------- F/sensors.sock <- frames     --

The host itself holds and stops the arm when its supervisor is gone or silent, when the driver raises
anything, and when the host has to end. It repeats a hold until the arm is seen at rest, and a stop until
it is done. F/driver.sock appears when the arm is connected.

    alone  --link--> idle --start--> live --stop--> idle
                      ^               |--no Command or Beat for hold_after_s--> held, until the next
                      |               v                for stop_after_s, or the link closed: fault
                      '--clear--- stopped with a fault <--any error
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from robot_rl.real.drivers.orders import Order, Orders
from robot_rl.real.drivers.rest import Holding
from robot_rl.real.link import Link, Listener
from robot_rl.real.messages import Answer, Beat, Command, Control, MessageError, Plan
from robot_rl.real.station import StationConfig, load_station
from robot_rl.real.supervisor.pace import WATCHER_PRIORITY, take_priority
from robot_rl.real.writer import process_log

logger = logging.getLogger(__name__)

DRIVER_SOCKET = "driver.sock"
SENSORS_SOCKET = "sensors.sock"
LINGER_S = 30.0
"""A host without a supervisor keeps the connection to the arm for this long."""
EXIT_NO_ARM = 3
EXIT_HUNG = 4
STUBBORN_S = 60.0
"""A host without a supervisor lives this much longer while it cannot take the arm's controller away."""
_TICK_S = 0.05
"""Longest sleep of the loop: how late the watchdogs may be."""
_WAIT_S = 0.2
_MAX_COSTS = 100_000
_STOP_AGAIN_NS = 500_000_000
"""From a stop that failed to the next."""
_SAME_ERROR_S = 10.0
"""Time between two log lines of an error that repeats itself."""
_MAX_ERRORS = 32
_END_S = 5.0
"""Longest time for the last stop: two calls of a controller manager that does not answer."""
_REST_S = 1.0
"""Longest wait for rest at the end."""
_JOIN_S = 1.0
"""Longest wait for a thread that may hang, at the end."""
_CLOSE_S = 2.0
"""Longest wait for a driver that may hang, at the end."""
_LAST_S = 9.5
"""Longest time from the request to end to the end, even if something hangs; the parent waits for 10 s."""


class Host:
    """One driver and its supervisor; `run` is the loop, and calls everything else."""

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
        config = station.supervisor
        self._hold_ns, self._stop_ns = round(1e9 * config.hold_after_s), round(1e9 * config.stop_after_s)
        self._wake = _Wake()
        self._closing = threading.Event()
        self._arm_errors: deque[str] = deque()
        self._logged: dict[str, float] = {}  # errors and when they were logged
        self._orders = Orders(self._wake.set)
        self._holding = Holding(station.limits, lambda: self._try("hold", self._driver.hold))
        self._link: Link | None = None
        self._alone_since_ns = 0
        self._live = False
        self._is_ours = False  # from the order to start until a stop is done
        self._heard_ns = 0  # the last sign of life of a supervisor
        self._is_silent = self._refusing = False
        self._stop_again_ns: int | None = None  # a stop failed
        self._end_ns: int | None = None  # when the end began
        self._seen: ArmState | None = None
        self._state: ArmState | None = None
        self._num_clipped = 0

    # The loop

    def run(self, *, priority: int | None = None) -> None:
        """Connects and serves, until `close` or until there was no supervisor for `linger_s`.

        Once the arm is connected, the loop asks for the real-time `priority`.

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
                if priority is not None:
                    logger.info("%s: %s", self._at(), take_priority(priority))
                self._alone_since_ns = time.monotonic_ns()
                try:
                    self._serve(door)
                except BaseException:  # a vendor's library may end the process: the arm is stopped first
                    self.close()
                    self._serve(door)
                    raise
                finally:
                    self._shut_down(watch)
        finally:
            self._orders.close()
            _close_within(_CLOSE_S, self._driver)

    def close(self) -> None:
        """Makes `run` stop the arm and return; from any thread or signal handler."""
        self._closing.set()
        self._wake.set()

    def _serve(self, door: Listener) -> None:
        while not self._is_over():
            self._turn(door)

    def _turn(self, door: Listener) -> None:
        """Does one cycle: if a part of it fails, the arm is still held."""
        is_broken = False
        begun_ns = 0
        for step in (
            functools.partial(self._wait, door),
            functools.partial(self._accept, door),
            self._read_messages,
            self._finish_orders,
            self._report,
            self._keep_safe,
        ):
            try:
                step()
            except Exception as error:
                self._fail(f"the driver host failed: {error!r}")
                is_broken = True
            begun_ns = begun_ns or time.perf_counter_ns()
        self.cycle_ns.append(time.perf_counter_ns() - begun_ns)
        if is_broken:
            time.sleep(_TICK_S)  # the same may happen at once

    def _wait(self, door: Listener) -> None:
        """Waits for a message, a state, an answer, or a tick."""
        if self._link is not None and self._link.closed:
            self._lose_supervisor()
        ends = [self._wake, door] if self._link is None else [self._wake, door, self._link]
        select.select(ends, [], [], _TICK_S)
        self._wake.drain()

    def _keep_safe(self) -> None:
        """Holds an arm without commands; repeats a hold or a stop that had no effect."""
        now_ns = time.monotonic_ns()
        self._watch_silence(now_ns)
        self._holding.update(self._state, now_ns)
        self._stop_again(now_ns)

    def _accept(self, door: Listener) -> None:
        """Accepts one supervisor; refuses others while it lives."""
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

    def _read_messages(self) -> None:
        if self._link is None:
            return
        newest: Command | Plan | None = None
        try:
            messages = self._link.receive()
        except MessageError as error:
            logger.error("%s: %s", self._at(), error)
            messages = []
        for message in messages:
            match message:
                case Command() | Plan():
                    newest = message
                case Beat():
                    self._note_sign(message)
                case Control():
                    newest = None  # an order overtakes the commands before it
                    self._control(message)
                case _:
                    self._fail(f"the supervisor sent a {type(message).__name__}, which a driver does not get")
        if newest is not None and not self._link.closed:
            self._pass(newest)
        if self._link.closed:
            self._lose_supervisor()

    def _lose_supervisor(self) -> None:
        self._link, self._alone_since_ns = None, time.monotonic_ns()
        if self._is_ours:
            self._fail("the supervisor is gone")  # it had no time to stop the arm
        else:
            self._stop("the supervisor is gone")

    def _report(self) -> None:
        """Sends the newest state, once; after the arm's own stop no command passes any more."""
        while self._arm_errors:
            self._fail(self._arm_errors.popleft())
        state = self._newest()
        if state is not None and state.stop_reason and self._live:
            self._live = False
            self._holding.begin(time.monotonic_ns())
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
            state = self._state = self._driver.read()
        except Exception as error:
            self._fail(f"read: {error}")
            state = None
        if state is None and self.fault:  # the supervisor has to get the reason without a state, too
            nowhere = np.full(len(self._station.joints), np.nan)
            state = ArmState(position_rad=nowhere, velocity_rad_s=nowhere, stamp_ns=0)
        return state

    def _watch_silence(self, now_ns: int) -> None:
        """Holds, then stops an arm whose supervisor hangs, or whose commands are all refused."""
        silent_ns = now_ns - self._heard_ns
        if not self._live:
            return
        if silent_ns > self._stop_ns:
            self._fail(f"the supervisor is silent for {1e-9 * silent_ns:.2f} s")
        elif silent_ns > self._hold_ns and not self._is_silent:
            self._is_silent = True
            self._holding.begin(now_ns)
            logger.warning("%s: no sign of the supervisor for %.2f s, holding", self._at(), 1e-9 * silent_ns)

    def _note_sign(self, message: Command | Plan | Beat) -> None:
        now_ns = time.monotonic_ns()
        if self.gate.is_fresh(message, now_ns):
            self._heard_ns, self._is_silent = now_ns, False

    def _is_forgotten(self, now_ns: int) -> bool:
        """Whether there was no supervisor for long; an arm that is not stopped keeps the host longer."""
        linger_s = self._linger_s + (0.0 if self._stop_again_ns is None else STUBBORN_S)
        return self._link is None and now_ns - self._alone_since_ns > 1e9 * linger_s

    def _is_over(self) -> bool:
        """Whether to return: closed or forgotten, and the arm is stopped, or cannot be."""
        now_ns = time.monotonic_ns()
        if self._end_ns is None:
            if self._closing.is_set() or self._is_forgotten(now_ns):
                self._end_ns = now_ns
                self._stop("the driver host ends")
            return False
        is_stopped = self._orders.is_idle and self._stop_again_ns is None
        waited_s = 1e-9 * (now_ns - self._end_ns)
        return waited_s > _END_S or (is_stopped and (self._holding.is_done or waited_s > _REST_S))

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
        self._refusing = self._is_silent = False
        self._note_sign(message)
        self._holding.end()
        gripper = np.clip(message.gripper, *self._grip)
        self._num_clipped += bool((gripper != message.gripper).any())
        if isinstance(message, Command):
            target_rad = message.target_rad - self._offset_rad
            command = replace(message, target_rad=target_rad, gripper=float(gripper))
            self._try("send", self._driver.send, command)
        else:
            targets_rad = message.targets_rad - self._offset_rad
            plan = replace(message, targets_rad=targets_rad, gripper=gripper)
            self._try("send", self._driver.send_plan, plan)

    # Orders

    def _control(self, control: Control) -> None:
        match control.operation:
            case "hold" | "pause":
                done = self._holding.begin(time.monotonic_ns())
                self._answer(control, "" if done else self.fault)
            case "stop" | "estop":
                self._stop(f"{control.operation} by {control.by or 'the supervisor'}", control)
            case "start" | "reset" if overtaken := self.gate.overtaken(control.token):
                self._answer(control, overtaken)
            case "start" if self.fault:
                self._answer(control, f"{self.fault}. A person clears it first.")
            case "start" if self._end_ns is not None:
                self._answer(control, f"{self._at()} ends.")
            case "start":
                self._is_ours, self._stop_again_ns = True, None
                self._orders.add("start", control, self._driver.start)
            case "clear" if not control.by.strip():
                self._answer(
                    control, f"clear: got by={control.by!r}, need the name of who looked at the arm."
                )
            case "clear":
                self._orders.add("clear", control, functools.partial(self._driver.clear, control.by))
            case "reset" if self._station.real:
                self._answer(
                    control, f"{self._at()}: a real scene is put back by a person, not by a program."
                )
            case "reset":
                self._orders.add("reset", control, functools.partial(self._driver.reset, control.seed))
            case "home" | "park":
                self._answer(
                    control, f"a driver does not {control.operation}; the supervisor moves the arm there."
                )

    def _stop(self, reason: str, control: Control | None = None) -> None:
        """Holds at once; takes the controllers away after the orders before this one."""
        self._live = False
        self._holding.begin(time.monotonic_ns())
        self._orders.add("stop", control, functools.partial(self._driver.stop, reason))
        logger.info("%s: stopping: %s", self._at(), reason)

    def _stop_again(self, now_ns: int) -> None:
        """Repeats a stop that failed: a controller manager may answer later."""
        due_ns = self._stop_again_ns
        if due_ns is not None and now_ns >= due_ns and not self._orders.has("stop"):
            self._orders.add("stop", None, functools.partial(self._driver.stop, "the stop before failed"))

    def _finish_orders(self) -> None:
        while (order := self._orders.fetch()) is not None:
            error, control = order.error, order.control
            if order.is_late:
                if order.operation == "start":
                    self._stop("a start came back that had been given up")
                continue
            if error is None:
                self._note_done(order)
            elif order.operation == "stop":
                self._stop_again_ns = time.monotonic_ns() + _STOP_AGAIN_NS
                self._fail(f"stop: {error}", can_stop=False)
            elif order.is_given_up or not isinstance(error, DeviceError):
                self._fail(f"{order.operation}: {error if order.is_given_up else repr(error)}")
            elif order.operation == "start":
                self._stop(f"start: {error}")  # half of it may have been done
            if control is not None:
                self._answer(control, "" if error is None else str(error))

    def _note_done(self, order: Order) -> None:
        stops_later = self._orders.has("stop")
        match order.operation:
            case "stop":
                if self._stop_again_ns is not None:
                    logger.warning("%s: stopped at last", self._at())
                self._stop_again_ns = None
                self._is_ours = stops_later or self._orders.has("start")
            case "clear":
                logger.warning(
                    "%s: %r cleared by %s", self._at(), self.fault, order.control and order.control.by
                )
                self.fault, self._seen = "", None
            case "start":
                # A stop that came meanwhile wins.
                self._live = not self.fault and not stops_later and self._end_ns is None
                self._heard_ns, self._is_silent = time.monotonic_ns(), False
            case _:
                pass

    def _answer(self, control: Control, refusal: str) -> None:
        if self._link is not None:
            self._link.send(Answer(operation=control.operation, done=not refusal, message=refusal))

    # Faults

    def _try(self, what: str, action: Callable[..., object], *values: Any) -> bool:
        """Calls the driver; any error of a vendor's library ends in a stop."""
        try:
            action(*values)
        except Exception as error:
            self._fail(f"{what}: {error}")
            return False
        return True

    def _fail(self, reason: str, *, can_stop: bool = True) -> None:
        """Latches a fault and stops the arm; the first one counts until a person clears it."""
        if not self.fault:
            self.fault, self._seen = f"{self._at()}: {reason}", None
            if can_stop:
                self._stop(reason)
        self._log_error(reason)
        self._wake.set()

    def _log_error(self, error: str) -> None:
        """Logs an error; one that repeats itself only once in a while."""
        now_s = time.monotonic()
        if now_s - self._logged.get(error, -_SAME_ERROR_S) < _SAME_ERROR_S:
            return
        if len(self._logged) >= _MAX_ERRORS:
            self._logged.clear()
        self._logged[error] = now_s
        logger.error("%s: %s", self._at(), error)

    def _note_error(self, reason: str) -> None:
        """Hands an error of another thread to the loop."""
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
        if self._is_ours:
            logger.error("%s: the arm was not stopped: %s", self._at(), self.fault or "no answer to a stop")
        with contextlib.suppress(Exception):
            self._report()
        watch.join(_JOIN_S)
        if self._link is not None:
            self._link.close()
        costs = np.array(self.cycle_ns or [0]) * 1e-3
        p50, p99 = np.percentile(costs, [50, 99])
        logger.info(
            "%s: %d cycles, p50 %.0f us, p99 %.0f us, max %.0f us; %d commands refused, %d grippers limited",
            *(self._at(), len(costs), p50, p99, costs.max(), self.gate.refused, self._num_clipped),
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


def _close_within(seconds: float, driver: Driver) -> None:
    """Closes a driver; if it hangs or fails, only the end of the process closes it."""

    def run() -> None:
        try:
            driver.close()
        except Exception as error:  # must not hide why the host ends
            logger.error("the driver does not close: %r", error)

    thread = threading.Thread(target=run, name="closing", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        logger.error("the driver has not closed within %g s", seconds)


def open_driver(station: StationConfig) -> Driver:
    """Returns the station's driver, not connected yet."""
    return resolve("driver", station.driver, at="station.driver")(station)


def main(argv: list[str] | None = None) -> int:
    """Runs a host until SIGTERM, SIGINT, or until it had no supervisor for long."""
    parser = argparse.ArgumentParser(prog="python -m robot_rl.real.drivers.host", description=__doc__)
    parser.add_argument("--station", required=True, help="name of a shipped station, or a YAML file")
    parser.add_argument("--folder", required=True, type=Path, help="where the sockets are made")
    parser.add_argument("--linger", type=float, default=LINGER_S, help="seconds to live without a supervisor")
    parser.add_argument("--token", type=int, default=0, help="fencing token of the lease; 0 by hand")
    given = parser.parse_args(argv)
    with process_log():
        try:
            station = load_station(given.station)
            with Claim(station) as claim:  # from before the first contact with the arm until the end
                fence = claim.fence(given.token)
                host = Host(open_driver(station), station, given.folder, linger_s=given.linger, fence=fence)
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, lambda *_: _end(host))
                host.run(priority=WATCHER_PRIORITY)
        except RobotRLError as error:
            logger.error("%s", error)
            return EXIT_NO_ARM
        return 0


def _end(host: Host) -> None:
    """Ends the host, or the process if the host hangs: the arm then stays as it is, its servos stiff."""
    host.close()
    last = threading.Timer(_LAST_S, os._exit, (EXIT_HUNG,))
    last.daemon = True
    last.start()


if __name__ == "__main__":
    sys.exit(main())
