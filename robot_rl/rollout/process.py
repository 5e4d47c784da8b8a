"""Acting in another process than the learner: an arm in real time, simulators on another core.

    learner process                        actor process
    collect() <----- steps, tally ------ [thread] <- any source <- env, policy, person
    collect() -----> SharedWeights -----------------> Inbox -> the next act
              -----> turns, where it may not run ahead

An arm never waits for the learner: a thread sends the steps. Simulators may be a few turns of
the loop ahead and wait then. Weights lie in shared memory, see `robot_rl.rollout.shared`.

An actor that died, fell silent, or whose device failed is begun again; episodes that it was in are cut. A
device that has stopped for safety is not: a person has to look at it. A simulated arm without its driver is.

On Linux actors are forked from a server process that has imported what they need and done nothing else: that
takes a tenth of the time and of the memory of a new interpreter.

Steps travel pickled through a pipe. Its two ends belong to this process and its actor, which run the same
code for the same user, and no other process can open it. Where bytes can come from elsewhere, this project
refuses pickle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from robot_rl.core.errors import DeviceError, DriverGoneError, SafetyStopError
from robot_rl.data.transitions import Segment
from robot_rl.rollout.revival import ActorError, LostActorError, Revival
from robot_rl.rollout.shared import Address, Inbox, opened
from robot_rl.rollout.sources import Elsewhere, Source, Tally
from robot_rl.rollout.weights import Published

Build = Callable[[], Source]
"""Makes the source inside of the actor; it is pickled, so a function of a module, or a `partial` of one."""

_MOST_WAITING = 6000
"""Turns that may wait to be sent: five minutes of an arm at 20 Hz."""

_LAG_S = 0.5
"""A learner that is so far behind what an arm has sent leaves updates out until it is not."""

_LOOK_S = 0.2
"""Period at which an actor that waits for its turn checks whether it should end."""

_EXIT_S = 10.0
"""How long an actor may take to bring its arm to rest and end."""


@dataclass
class _Failure:
    """The last message of an actor that failed."""

    error: str
    may_pass: bool = False
    """Whether another actor may do better: a device failed, and no person has to look at it first."""


@dataclass
class Turn:
    """What an actor sends: a segment, and what it adds to the figures of the episodes."""

    segment: Segment
    tally: Tally
    sent_s: float = field(default_factory=time.monotonic)
    """When, by the clock of the actor's machine."""


class ProcessSource(Elsewhere):
    """A `Source` that runs another source in another process."""

    def __init__(
        self,
        build: Build,
        *,
        ahead: int | None = None,
        wait_s: float = 0.05,
        period_s: float = 0.0,
        restarts: int = 0,
        silence_s: float = 600.0,
        holds_up: bool = True,
    ) -> None:
        """Starts nothing yet: the actor begins with the first weights.

        Args:
            build: makes the source inside of the actor.
            ahead: turns of the loop that the actor may be ahead; 0: it acts when it is asked, and what it
                collects is what it would collect in this process. None: it never waits.
            wait_s: how long `collect` waits for what does not wait before it returns None.
            period_s: time between two turns; 0 where the env keeps time itself, or time does not matter.
            restarts: how many actors in a row may be lost before that is an error.
            silence_s: an actor that sends nothing for so long is lost.
            holds_up: whether `collect` waits for a turn of an actor that may be `ahead`; it does not where
                arms wait to be collected too.
        """
        super().__init__()
        self._build, self._ahead, self._wait_s, self._period_s = build, ahead, wait_s, period_s
        self._silence_s, self._holds_up = silence_s, holds_up and ahead is not None
        self._is_asked = False
        self.revival = Revival(restarts)
        self._actor: _Actor | None = None
        self._lag_s = 0.0

    @property
    def is_ahead(self) -> bool:
        is_late, actor = self._ahead is None and self._lag_s > _LAG_S, self._actor
        return is_late and actor is not None and actor.has_steps()

    def collect(self, published: Published) -> Segment | None:
        """Returns the next segment; None if a source that never waits has none within `wait_s`.

        Raises:
            ActorError: the actor failed, or too many were lost.
            WeightsError: nothing was published.
        """
        while True:
            try:
                turn = self._turn(published)
                break
            except LostActorError as error:
                self.close()
                self._begins = True
                self.revival.lost(error)
        if turn is None:
            return None
        self.revival.well()
        self._lag_s = time.monotonic() - turn.sent_s
        turn.segment.begins, self._begins = self._begins, False
        self.episodes.merge(turn.tally)
        return turn.segment

    def _turn(self, published: Published) -> Turn | None:
        """Returns the next turn of the actor, which begins if there is none and it may."""
        if self._actor is None:
            if not self.revival.is_due(None if self._holds_up else self._wait_s):
                return None
            self._actor = _Actor(self._build, self._period_s, self._ahead, published)
            self._is_asked = False
        self._actor.publish()
        if self._ahead is not None and not self._is_asked:
            self._actor.allow()  # the one that follows may act while the learner learns from this one
            self._is_asked = True
        turn = self._actor.receive(self._silence_s if self._holds_up else self._wait_s)
        if turn is None:
            self._check_silence(self._actor)
        else:
            self._is_asked = False
        return turn

    def _check_silence(self, actor: _Actor) -> None:
        """Ends an actor that has sent nothing for too long.

        Raises:
            LostActorError: it is such a one.
        """
        if actor.silent_s >= self._silence_s:
            pid = actor.pid
            actor.kill()
            raise LostActorError(
                f"actor: the process that acts (pid {pid}) sent nothing for {self._silence_s:g} s."
            )

    @property
    def pid(self) -> int | None:
        """Process of the actor; None before the first `collect`."""
        return None if self._actor is None else self._actor.pid

    def close(self) -> None:
        """Makes the actor finish its step, close the env and end."""
        if self._actor is not None:
            self._actor.close()
            self._actor = None


class _Actor:
    """The learner's end: a process, the pipe it sends steps through, the memory it reads weights from."""

    def __init__(self, build: Build, period_s: float, ahead: int | None, published: Published) -> None:
        self._weights = opened(published)
        context = _context(build)
        self._steps, theirs = context.Pipe(duplex=False)
        # No semaphores: they wait by the wall clock, which may be set back, and outlive who is killed.
        stop, self._stop = context.Pipe(duplex=False)
        turns, self._turns = (None, None) if ahead is None else context.Pipe(duplex=False)
        arguments = (build, period_s, turns, theirs, self._weights.address, stop)
        # Not a daemon: those are killed at exit, and an arm has to be brought to rest.
        self._process = context.Process(
            target=_act_here, args=(dict(os.environ), *arguments), name="robot-rl actor"
        )
        try:
            self._process.start()
        except BaseException:
            self._weights.close()
            raise
        theirs.close()  # so that the child's death ends the pipe
        stop.close()
        if turns is not None:
            turns.close()
        for _ in range(ahead or 0):
            self.allow()
        self._heard_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Time since the last turn, or since the actor was asked for one."""
        return time.monotonic() - self._heard_s

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def has_steps(self) -> bool:
        try:
            return self._steps.poll()
        except OSError:  # it is being closed
            return False

    def publish(self) -> None:
        self._weights.publish()

    def allow(self) -> None:
        """Lets the actor take one more turn."""
        assert self._turns is not None, "an actor that never waits takes no turns"
        with contextlib.suppress(OSError):  # it is gone: `receive` says so
            self._turns.send_bytes(b"")
        self._heard_s = time.monotonic()  # during an evaluation, say, nobody asked it

    def receive(self, wait_s: float) -> Turn | None:
        """Returns the next turn, or None after `wait_s`.

        Raises:
            LostActorError: the actor is gone, or its device failed.
            ActorError: the actor failed, as another one would.
        """
        try:
            if not self._steps.poll(wait_s):
                return None
            message = self._steps.recv()
        except (EOFError, OSError) as error:
            self._process.join(_EXIT_S)
            raise LostActorError(
                f"actor: the process that acts (pid {self.pid}) ended with exit code "
                f"{self._process.exitcode} and gave no reason. A station's supervisor brings an arm to rest."
            ) from error
        if isinstance(message, _Failure):
            raise (LostActorError if message.may_pass else ActorError)(f"actor: {message.error}")
        self._heard_s = time.monotonic()
        return message

    def kill(self) -> None:
        """Ends the actor at once; a station's supervisor brings an arm to rest."""
        self._process.kill()

    def close(self) -> None:
        self._stop.close()
        self._steps.close()
        if self._turns is not None:
            self._turns.close()
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._weights.close()


class _Outbox:
    """Sends steps from a thread, so that the arm never waits for the learner."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def put(self, turn: Turn) -> None:
        """Takes a turn to send.

        Raises:
            DeviceError: the learner has taken none for very long.
        """
        try:
            self._waiting.put_nowait(turn)
        except queue.Full:
            raise DeviceError(
                f"the learner has left {_MOST_WAITING} turns waiting. It hangs, or is far too slow: "
                "lower method.utd."
            ) from None

    def close(self, failure: _Failure | None = None) -> None:
        """Waits until all is sent, with the failure as the last message, or until the learner is gone."""
        for last in (failure, None) if failure else (None,):
            with contextlib.suppress(queue.Full):
                self._waiting.put(last, timeout=_EXIT_S)
        self._thread.join(_EXIT_S)

    def _run(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                self._pipe.send(message)
        except OSError:
            self.is_closed = True  # the learner closed its end, or died: the actor leaves
        self._pipe.close()


def _context(build: Build) -> Any:
    """Returns how a process is begun that calls `build`, whose module the first server has imported."""
    if sys.platform != "linux":  # elsewhere libraries of the system do not survive a fork
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    made: Any = build.func if isinstance(build, partial) else build
    context.set_forkserver_preload([made.__module__])
    return context


def _act_here(environment: dict[str, str], *arguments: Any) -> None:
    """Acts in the environment that the learner has now: the server's is of its beginning."""
    os.environ.clear()
    os.environ.update(environment)
    _act(*arguments)


def _act(
    build: Build,
    period_s: float,
    turns: Connection | None,
    pipe: Connection,
    weights: Address,
    stop: Connection,
) -> None:
    """Acts until the learner closes `stop` or is gone; once for each message of `turns`, if there is one."""
    parent = multiprocessing.parent_process()
    outbox, inbox = _Outbox(pipe), Inbox(weights, in_thread=turns is None)
    source: Source | None = None
    failure: _Failure | None = None

    def is_over() -> bool:
        return stop.poll() or outbox.is_closed or (parent is not None and not parent.is_alive())

    try:
        source = build()
        while inbox.newest is None and not is_over():
            time.sleep(0.01)
        due_s = time.monotonic()
        while not is_over():
            if turns is not None:
                if not turns.poll(_LOOK_S):
                    continue
                try:
                    turns.recv_bytes()
                except EOFError:  # the learner is gone
                    break
            segment = source.collect(inbox)
            if segment is not None:
                outbox.put(Turn(segment, source.episodes.drain()))
            if period_s:  # a late step is not made up for by a shorter one
                now_s = time.monotonic()
                due_s = max(due_s + period_s, now_s)
                time.sleep(due_s - now_s)
    except KeyboardInterrupt:
        failure = _Failure("interrupted from the keyboard")
    except Exception as error:  # the learner gets any error, and saves the run
        needs_person = isinstance(error, SafetyStopError) and not isinstance(error, DriverGoneError)
        may_pass = isinstance(error, DeviceError) and not needs_person
        failure = _Failure(f"{type(error).__name__}: {error}", may_pass)
    finally:
        try:
            if source is not None:
                source.close()
        finally:  # also if the device does not close: why it failed is known
            outbox.close(failure)
            inbox.close()
