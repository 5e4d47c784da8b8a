"""The supervisor: the only way from a policy to an arm. `cycle` is the specification.

    waiting --first state--> paused --start--> running <--plan / no plan--> holding
                              ^  ^---home (homing)                           |
                              '--clear, by a person-- stopped <--any fault, from any phase

n arm joints. Everything is monotonic time; nothing here waits.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from robot_rl.core.clock import Clock, MonotonicClock
from robot_rl.core.errors import DeviceError, LeaseError
from robot_rl.hal.device import Fence
from robot_rl.hal.safety import Stop
from robot_rl.real.drivers.rest import STILL_SHARE
from robot_rl.real.link import Link
from robot_rl.real.messages import (
    DRIVER_GONE,
    Answer,
    ArmState,
    Beat,
    Command,
    Control,
    Message,
    MessageError,
    Operation,
    Phase,
    Plan,
    Status,
    encode,
)
from robot_rl.real.station import StationConfig
from robot_rl.real.supervisor.clients import Client, Clients
from robot_rl.real.supervisor.limiter import Limiter
from robot_rl.real.supervisor.log import Log
from robot_rl.real.supervisor.orders import DriverOrders, Order
from robot_rl.real.supervisor.pieces import Pieces
from robot_rl.real.supervisor.plan import Aim, plan_error
from robot_rl.real.supervisor.watchdog import Watchdog

logger = logging.getLogger(__name__)

_KNOWN_NS = 50_000_000
"""An arm that was measured before that may be elsewhere by now: it goes on with the piece that it has."""
_BRAKE_NS = 1_000_000_000
"""Longest time from a stop to taking the controllers away; the ramp itself is shorter."""


class Supervisor:
    """Watches one arm and moves it; see the module for its phases."""

    def __init__(
        self,
        station: StationConfig,
        driver: Link,
        clients: Clients,
        log: Log,
        *,
        clock: Clock | None = None,
        token: int = 0,
    ) -> None:
        """Takes both links; `token` is that of the arm's lease, 0 without one."""
        self._station, self._driver, self._clients, self._log = station, driver, clients, log
        self._clock = clock or MonotonicClock()
        self._fence, self._overtaken = Fence(f"station {station.name}", newest=token), 0
        config = station.supervisor
        self._hold_ns, self._stop_ns = round(1e9 * config.hold_after_s), round(1e9 * config.stop_after_s)
        self._streams = station.ros2 is None or station.ros2.command != "trajectory"
        self._limiter = Limiter(station, self._clock)
        self._watchdog = Watchdog(station, self._limiter.envelope, self._limiter.box)
        self._aim = Aim(station, streams=self._streams)
        self._pieces = Pieces(station)  # of plans, for an arm that follows them by itself
        self._rests_rad = {"home": np.asarray(station.home_rad), "park": np.asarray(station.safe_rad)}
        self._still_rad_s = STILL_SHARE * np.asarray(station.limits.velocity_rad_s)
        self._orders = DriverOrders(driver, self._still_rad_s)
        self.phase: Phase = "waiting"
        self.stopped: Stop | None = None
        """The latched stop."""
        self._reason = ""
        self._state: ArmState | None = None
        self._asked_rad = self._sent_rad = np.full(len(station.joints), np.nan)
        self._limited = False
        self._live = False  # the driver listens to commands
        self._brake_until_ns: int | None = None  # stopped, but not yet at rest
        self._is_given_up = self._is_dumped = False  # stopped: the driver has the order to stop; recorded
        self._homing_for: Client | None = None
        self._homing: Operation = "home"
        self._last_plan, self._number = -1, 0
        self._covered_ns = 0  # end of the newest plan
        log.begin(self._now_ns(), token)

    def cycle(self) -> None:
        """Does one period: receives, watches, moves, reports."""
        now_ns = self._now_ns()
        self._receive_from_driver(now_ns)
        for client, message in self._clients.receive():
            self._handle(client, message, now_ns)
        self._watch(now_ns)
        self._move(now_ns)
        self._report(now_ns)

    @property
    def is_released(self) -> bool:
        """Whether the arm was stopped and its controllers were taken away."""
        return self._is_given_up and self._orders.pending is None

    def stop(self, reason: str, by: str = "supervisor", *, can_brake: bool = True) -> None:
        """Latches a stop; the first one counts until a person clears it.

        It acts first and records then; called again, it repeats what failed before.

        Args:
            reason: for people.
            by: the person or program that decided it.
            can_brake: whether to come to rest on a ramp before the driver takes over. Otherwise the driver
                stops the arm at once, as where the arm's motion is unknown.
        """
        now_ns, is_first = self._now_ns(), self.stopped is None
        if self.stopped is None:
            self.stopped = Stop(by, reason, self._clock.now_s())
            self.phase, self._reason = "stopped", reason if by in reason else f"{reason} (by the {by})"
        order = self._orders.take() if is_first else None
        if not self._is_given_up and not (can_brake and self._brake(now_ns)):
            self._release(now_ns)
        if is_first:
            self._abandon(order, self._reason)
            self._log.event(now_ns, "stop", by=by, reason=reason)
        if self._is_given_up and not self._is_dumped:
            self._is_dumped = True
            self._log.dump(now_ns, self.stopped.reason)

    def close(self) -> None:
        """Ends the links and the log; the driver then stops an arm that is not stopped yet."""
        with ExitStack() as rest:
            rest.callback(self._log.close)
            rest.callback(self._clients.close)
            self._log.event(self._now_ns(), "end", phase=self.phase)
            self._driver.close()

    # Receive

    def _receive_from_driver(self, now_ns: int) -> None:
        try:
            messages = self._driver.receive()
        except MessageError as error:
            messages = []
            self.stop(str(error), can_brake=False)
        if self._driver.closed:
            self.stop(DRIVER_GONE, by="driver watchdog", can_brake=False)
        for message in messages:
            match message:
                case ArmState():
                    self._state = message
                    self._watchdog.note(message)
                case Answer():
                    self._driver_answered(message, now_ns)
                case Control(operation="stop" | "estop", by=by):
                    self.stop(f"{message.operation} by {by}", by or "driver", can_brake=False)
                case Control(operation="pause" | "hold"):
                    self._pause(f"{message.operation} by {message.by}", now_ns)
                case _:
                    self.stop(f"the driver sent a {type(message).__name__}", can_brake=False)
        self._attend_order(now_ns)
        if self.phase == "waiting" and self._state is not None:
            self.phase = "paused"
            self._rebase(self._state)

    def _handle(self, client: Client, message: Message, now_ns: int) -> None:
        match message:
            case Plan():
                self._take_plan(client, message, now_ns)
            case Control(operation="stop" | "estop"):
                self.stop(
                    f"{message.operation} by {message.by or client.name}",
                    message.by or client.name,
                    can_brake=message.operation == "stop",
                )
                self._answer(client, message.operation)
            case Control(operation="pause" | "hold"):
                self._pause(f"{message.operation} by {message.by or client.name}", now_ns)
                self._answer(client, message.operation)
            case Control(operation="clear"):
                self._clear(client, message, now_ns)
            case Control():
                refusal = self._refusal(client, message)
                if refusal:
                    self._answer(client, message.operation, refusal)
                else:
                    self._begin(client, message, now_ns)
            case _:
                logger.error("%s sent a %s; it is ignored", client.name, type(message).__name__)

    def _take_plan(self, client: Client, plan: Plan, now_ns: int) -> None:
        if self.phase not in ("running", "holding") or client is not self._clients.commander:
            return
        if plan.number <= self._last_plan:
            return
        overtaken = self._overtaken_by(plan.token)
        if overtaken:
            if plan.token != self._overtaken:  # logged once, not with every plan
                self._overtaken = plan.token
                self._log.event(now_ns, "refused", plan=plan.number, reason=overtaken)
            return
        wrong = plan_error(plan, len(self._station.joints), now_ns + self._stop_ns, now_ns)
        if wrong:
            self.stop(f"plan {plan.number}: {wrong}", by=client.name)
            return
        assert self._state is not None
        self._last_plan = plan.number
        end_ns = plan.start_ns + len(plan.gripper) * plan.period_ns
        # A long plan must not hide a policy that hangs for longer than a policy may be silent.
        self._covered_ns = min(max(now_ns, end_ns), now_ns + self._stop_ns)
        grippers = self._limiter.clamp_gripper(plan.gripper)
        self._limited |= bool((grippers != plan.gripper).any())
        plan = replace(plan, gripper=grippers)
        if self._streams:
            self._aim.follow(plan)
        else:
            self._orders.let_go()
            self._pieces.follow(plan)
        if self.phase == "holding":
            self.phase, self._reason = "running", ""
            self._log.event(now_ns, "running", plan=plan.number)

    # Orders of people and programs

    def _refusal(self, client: Client, control: Control) -> str:
        """Returns why a start, home or reset is not done."""
        # A person without a lease may send an arm home or park it if no policy commands it.
        if control.token or control.operation not in self._rests_rad:
            overtaken = self._overtaken_by(control.token)
            if overtaken:
                return overtaken
        if self.stopped is not None:
            return f"stopped: {self._reason}. Somebody looks at the arm, then clears with a name (by=<name>)."
        if self._state is None:
            return "no joint state has come yet. Look at the driver's log."
        if self._orders.pending is not None or self.phase == "homing":
            return "the arm is busy with an order before this one. Wait for its answer, or pause."
        if control.operation == "reset" and self._station.real:
            return (
                f"station {self._station.name} is real: its scene is put back by a person, not by a program."
            )
        if control.operation != "start" and self.phase != "paused":
            return f"the arm is {self.phase}. Pause first."
        outside = self._limiter.outside_rad(self._state.position_rad)
        if control.operation != "reset" and outside > self._limiter.lead_rad:
            return f"a joint is {outside:.3f} rad outside of its limits. Bring it back by hand."
        outside_box = self._watchdog.box_reason(self._state.position_rad)
        if control.operation != "reset" and outside_box:
            return f"{outside_box}. Bring it back by hand."
        other = self._clients.take_command(client)
        return f"{other} commands this arm. One policy at a time; others may watch." if other else ""

    def _overtaken_by(self, token: int) -> str:
        """Returns why the arm must not move under a fencing token, or an empty text."""
        try:
            self._fence.check(token)
        except LeaseError as error:
            return str(error)
        return ""

    def _begin(self, client: Client, control: Control, now_ns: int) -> None:
        if control.operation == "reset":
            self._orders.give(control, client, now_ns)
        elif self._live:
            self._go(control.operation, client, now_ns)
        else:
            by, token = control.by or client.name, self._fence.newest
            start = Control(operation="start", by=by, token=token)
            self._orders.give(start, client, now_ns, then=control.operation)

    def _go(self, operation: Operation, client: Client | None, now_ns: int) -> None:
        """Lets plans through, or moves home or to the parking pose; the driver is started."""
        if operation in self._rests_rad:
            self.phase, self._homing_for, self._homing = "homing", client, operation
            self._aim.home(self._rests_rad[operation], self._sent_rad, now_ns)
            if not self._streams:
                self._orders.let_go()
                self._pieces.home(self._aim.ahead)
        elif self.phase == "paused":
            self.phase, self._last_plan, self._covered_ns = "running", -1, now_ns
            self._answer(client, "start")
        else:
            self._answer(client, "start")
        self._log.event(now_ns, operation, by=client.name if client else "")

    def _pause(self, reason: str, now_ns: int) -> None:
        if self.phase in ("running", "holding", "homing"):
            self._rest(now_ns)
            self.phase, self._reason = "paused", ""
            self._abandon(None, reason)
            self._log.event(now_ns, "pause", reason=reason)

    def _clear(self, client: Client, control: Control, now_ns: int) -> None:
        refusal = ""
        if not control.by.strip():
            refusal = f"clear: got by={control.by!r}, need the name of who looked at the arm."
        elif self._driver.closed:
            refusal = f"{DRIVER_GONE}. Start driver and supervisor again."
        elif self.stopped is not None and not self.is_released:
            refusal = "the arm is still stopping. Try again."
        if refusal or self.stopped is None:
            self._answer(client, "clear", refusal)
        else:
            self._orders.give(control, client, now_ns)

    def _attend_order(self, now_ns: int) -> None:
        """Goes on with the order under way; stops the arm if the driver does not answer it."""
        order = self._orders.attend(self._state, now_ns)
        if order is None:
            return
        if not order.refusal and self._state is not None:
            self._settled(order, self._state, now_ns)
            return
        if order.is_unanswered:
            self.stop(order.refusal, can_brake=False)
        self._refused(order, now_ns)

    def _driver_answered(self, answer: Answer, now_ns: int) -> None:
        known = self._orders.refusal
        order = self._orders.take_answer(answer, now_ns)
        if self._orders.refusal not in ("", known):
            self._log.event(now_ns, "refused", operation="stop", reason=self._orders.refusal)
        if order is not None and order.refusal:
            self._refused(order, now_ns)
        elif order is not None:
            self._answer(order.client, order.asked)

    def _refused(self, order: Order, now_ns: int) -> None:
        self._answer(order.client, order.asked, order.refusal)
        event = "no answer" if order.is_unanswered else "refused"
        self._log.event(now_ns, event, operation=order.control.operation, reason=order.refusal)

    def _settled(self, order: Order, state: ArmState, now_ns: int) -> None:
        """Goes on after the driver carried out an order and the arm measured again."""
        if order.control.operation == "clear":
            self._watchdog.restart()
            self._watchdog.note(state)
            reason = self._watchdog.arm_reason(state, now_ns)
            if reason:
                self._answer(order.client, "clear", f"still {reason}")
                return
            self._limiter.envelope.clear(order.control.by)
            self.stopped, self.phase, self._reason = None, "paused", ""
            self._is_given_up = self._is_dumped = False
        self._rebase(state)
        if order.control.operation == "start":
            self._live = True
            self._go(order.asked, order.client, now_ns)
        else:
            self._answer(order.client, order.asked)
            self._log.event(now_ns, order.asked, by=order.control.by, seed=order.control.seed)

    def _abandon(self, order: Order | None, reason: str) -> None:
        """Answers the clients that wait for an order, or for the way home, that it will not be done."""
        if order is not None:
            self._answer(order.client, order.asked, reason)
        if self._homing_for is not None:
            self._answer(self._homing_for, self._homing, reason)
        self._homing_for = None

    def _answer(self, client: Client | None, operation: Operation, refusal: str = "") -> None:
        if client is not None:
            client.answer(Answer(operation=operation, done=not refusal, message=refusal))

    # Watch

    def _watch(self, now_ns: int) -> None:
        """Stops the arm on any fault, holds it if the policy is silent."""
        state = self._state
        if state is None or (self.stopped is not None and self._brake_until_ns is None):
            return
        reason = self._watchdog.arm_reason(state, now_ns)
        if not reason and self._live and not self._is_resetting():
            reason = self._watchdog.motion_reason(state) or self._watchdog.box_reason(state.position_rad)
            # Where the box holds the arm back, it follows the sent target, which never leads too far.
            goal_rad = state.position_rad if self._limiter.is_boxed else self._asked_rad
            reason = reason or self._watchdog.tracking_reason(goal_rad, state, now_ns)
            reason = reason or self._orders.attend_hold(state, now_ns)
        if reason:
            self.stop(reason, by="arm watchdog", can_brake=False)
        elif self.phase in ("running", "holding"):
            self._watch_policy(now_ns)

    def _watch_policy(self, now_ns: int) -> None:
        is_gone = self._clients.commander is None
        if is_gone:
            self._covered_ns = min(self._covered_ns, now_ns)
        silent_ns = now_ns - self._covered_ns
        if silent_ns > self._stop_ns:
            what = "the policy is gone" if is_gone else "the policy is silent"
            self.stop(f"{what}: no plan for {1e-9 * silent_ns:.2f} s", by="heartbeat watchdog")
        elif self.phase == "running" and (is_gone or silent_ns > self._hold_ns):
            self._rest(now_ns)
            self.phase = "holding"
            self._reason = "the policy is gone" if is_gone else f"no plan for {1e-9 * silent_ns:.2f} s"
            self._log.event(now_ns, "hold", reason=self._reason)

    # Move

    def _move(self, now_ns: int) -> None:
        """Sends the present target, or the piece of a plan that is due, as far as safety allows."""
        if not self._live:
            return
        state = self._state
        if state is None or self._is_resetting():
            self._driver.send(Beat(stamp_ns=now_ns))
            return
        try:
            if self._streams:
                self._send_target(state, now_ns)
            else:
                self._send_piece(state, now_ns)
        except DeviceError as error:
            self.stop(str(error), can_brake=False)
            return
        if self.phase == "homing" and self._is_at_rest(state, now_ns):
            self._end_homing(now_ns)
        elif self._brake_until_ns is not None and (
            self._is_at_rest(state, now_ns) or now_ns > self._brake_until_ns
        ):
            self.stop(self._reason, can_brake=False)

    def _send_target(self, state: ArmState, now_ns: int) -> None:
        self._asked_rad = self._limiter.clamp(self._aim.at(now_ns))
        self._sent_rad, limited = self._limiter.filter(self._asked_rad, state)
        self._limited |= limited
        self._number += 1
        self._driver.send(
            Command(
                number=self._number,
                stamp_ns=now_ns,
                target_rad=self._sent_rad,
                gripper=self._aim.gripper,
                token=self._fence.newest,
            )
        )

    def _send_piece(self, state: ArmState, now_ns: int) -> None:
        if self._orders.is_holding:
            self._aim.rest(state.position_rad)  # its place of rest is not known yet
        here, speed = self._aim.motion(now_ns)
        is_seen = now_ns - state.stamp_ns <= _KNOWN_NS
        piece = self._pieces.due(now_ns, here, speed) if is_seen else None
        if piece is not None:
            allowed, limited = self._limiter.filter_plan(piece, here)
            self._limited |= limited
            self._aim.follow(allowed)
            there = state.position_at(now_ns)
            is_boxed = self._limiter.is_boxed
            sent = self._pieces.caught_up(allowed, here, there, state.velocity_rad_s)
            sent, _ = self._limiter.filter_plan(sent, there)
            self._limiter.is_boxed |= is_boxed
            self._number += 1
            self._driver.send(replace(sent, number=self._number, token=self._fence.newest))
        self._asked_rad = self._sent_rad = self._limiter.clamp(self._aim.at(now_ns))
        self._driver.send(Beat(stamp_ns=now_ns))

    def _end_homing(self, now_ns: int) -> None:
        self.phase = "paused"
        refusal = ""
        if self._limiter.is_boxed:
            refusal = "the way there leads out of the box of the tool. Ask again, or bring it nearer by hand."
            self._rest(now_ns)
        self._answer(self._homing_for, self._homing, refusal)
        self._homing_for = None

    def _rest(self, now_ns: int) -> None:
        """Comes to rest and stays there; plans are forgotten."""
        if self._streams:
            self._aim.brake(self._sent_rad, now_ns)
        elif self._state is not None:
            self._orders.hold(now_ns)
            self._pieces.drop()
            self._aim.rest(self._state.position_rad)
            self._limiter.is_boxed = False

    def _brake(self, now_ns: int) -> bool:
        """Begins the ramp of a stop, unless it has begun; returns whether there is one."""
        if self._brake_until_ns is None and self._live and self._streams:
            try:
                self._aim.brake(self._sent_rad, now_ns)
            except DeviceError:
                return False  # no way to rest within the limits: the driver stops the arm at once
            self._brake_until_ns = now_ns + _BRAKE_NS
        return self._brake_until_ns is not None

    def _release(self, now_ns: int) -> None:
        """Ends a stop: the driver holds the arm and takes its controllers away."""
        assert self.stopped is not None
        if not self._driver.closed:
            self._orders.give(Control(operation="stop", by=self.stopped.by), None, now_ns)
        self._brake_until_ns, self._live, self._is_given_up = None, False, True
        self._pieces.drop()
        self._limiter.envelope.trip(self.stopped.reason, self.stopped.by)

    def _rebase(self, state: ArmState) -> None:
        """Starts again from where the arm is."""
        self._watchdog.restart()
        self._watchdog.note(state)
        self._asked_rad = self._sent_rad = state.position_rad
        self._limiter.rebase(state.position_rad)
        self._aim.rest(state.position_rad)

    def _is_resetting(self) -> bool:
        order = self._orders.pending
        return order is not None and order.control.operation == "reset"

    def _is_at_rest(self, state: ArmState, now_ns: int) -> bool:
        is_done = self._aim.is_done(now_ns) if self._streams else self._pieces.is_done(now_ns)
        return is_done and bool((np.abs(state.velocity_rad_s) < self._still_rad_s).all())

    # Report

    def _report(self, now_ns: int) -> None:
        refusal = self._orders.refusal
        status = Status(
            stamp_ns=now_ns,
            state=self._state,
            phase=self.phase,
            plan=self._aim.plan,
            sent_rad=self._sent_rad,
            sent_gripper=self._aim.gripper,
            limited=self._limited,
            reason=self._reason + (refusal and f"; the driver does not stop it: {refusal}"),
            unlogged=self._log.lost,
        )
        try:
            self._clients.send_status(encode(status))
        except Exception as error:  # not the arm's fault, but it must not go on unseen
            self.stop(f"the supervisor cannot say what it does: {error!r}", can_brake=False)
        self._log.moment(status, self._asked_rad, self._watchdog.age_s(now_ns))
        self._limited = False

    def _now_ns(self) -> int:
        return round(1e9 * self._clock.now_s())
