"""Acting in a process of its own, so that an arm moves in real time while the learner learns.

    learner process                        actor process (spawned)
    collect() <----- steps ------------- [thread] <- SimSource <- env, policy, person
    collect() -----> weights, version, checksum ----> handle -> the next act

The actor never waits for the learner: a thread of its own sends the steps, and weights lie in shared
memory, where the newest replace those before. Their checksum tells a half-written copy from a whole one;
then the actor goes on with what it has and looks again at the next act.

Steps travel pickled through a pipe. Its two ends belong to this process and the child it spawned, which
run the same code for the same user, and nobody else can open it: pickle is refused where bytes come from
elsewhere, and here they cannot.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from robot_rl.core.errors import DeviceError
from robot_rl.data.transitions import StepBatch
from robot_rl.train.sources import EpisodeLog, PolicyHandle, SimSource, checksum

Build = Callable[[], SimSource]
"""Makes the source inside of the actor; it is pickled, so a function of a module, or a `partial` of one."""

_HEAD = struct.Struct("<qIqq")
"""Version, checksum, learner's version, bytes of the weights."""

_MOST_WAITING = 6000
"""Control steps that may wait to be sent: five minutes at 20 Hz."""

_EXIT_S = 10.0
"""How long an actor may take to bring its arm to rest and leave."""


class ActorError(DeviceError):
    """The process that moves the arm has failed or gone."""


@dataclass
class _Failure:
    """The last message of an actor that failed."""

    error: str


class AsyncSource:
    """A `Source` whose env, acting policy and person live in another process."""

    def __init__(self, build: Build, *, wait_s: float = 0.05, period_s: float = 0.0) -> None:
        """Starts nothing yet: the actor begins with the first weights.

        Args:
            build: makes the source inside of the actor.
            wait_s: how long `collect` waits for a step before it returns None.
            period_s: time between two control steps, for simulators; 0 where the env keeps time itself.
        """
        self._build, self._wait_s, self._period_s = build, wait_s, period_s
        self._episodes = EpisodeLog(1)
        self._actor: _Actor | None = None
        self._begins = True

    @property
    def episodes(self) -> EpisodeLog:
        return self._episodes

    @property
    def nan_resets(self) -> int:
        return self._episodes.nan_resets

    @property
    def is_ahead(self) -> bool:
        return self._actor is not None and self._actor.has_steps()

    def collect(self, handle: PolicyHandle) -> StepBatch | None:
        """Returns the next control step that is complete, or None if none is within `wait_s`.

        Raises:
            ActorError: the actor failed or is gone.
            StalePolicyError: the step was made with weights older than the bound allows.
        """
        if self._actor is None:
            self._actor = _Actor(self._build, self._period_s, handle)
        self._actor.publish(handle)
        steps = self._actor.receive(self._wait_s)
        if steps is None:
            return None
        handle.check(steps.policy_version)
        steps.begins, self._begins = self._begins, False
        infos = {
            "success": steps.success if steps.success is not None else steps.terminated,
            "limited": 0 if steps.limited is None else steps.limited,
            "diverged": 0 if steps.diverged is None else steps.diverged,
        }
        self._episodes.add(steps.reward, steps.terminated | steps.truncated, infos)
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Returns the episodes' figures alone: an arm cannot be put back to where it was."""
        return {"episodes": self._episodes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the figures; the arm begins a new episode, and the one before is cut short there."""
        self._episodes.load_state_dict(state["episodes"])
        self._begins = True

    @property
    def pid(self) -> int | None:
        """Process of the actor; None before the first `collect`."""
        return None if self._actor is None else self._actor.pid

    def close(self) -> None:
        """Has the actor finish its step, close the env and leave."""
        if self._actor is not None:
            self._actor.close()
            self._actor = None


class _Actor:
    """The learner's end: a process, the pipe it sends steps through, the memory it reads weights from."""

    def __init__(self, build: Build, period_s: float, handle: PolicyHandle) -> None:
        self._weights = _Weights(handle)
        context = multiprocessing.get_context("spawn")
        self._steps, theirs = context.Pipe(duplex=False)
        self._stop = context.Event()
        arguments = (build, period_s, handle.max_staleness, theirs, self._weights.name, self._stop)
        # Not a daemon: those are killed at exit, and an arm has to be brought to rest.
        self._process = context.Process(target=_act, args=arguments, name="robot-rl actor")
        try:
            self._process.start()
        except BaseException:
            self._weights.close()
            raise
        theirs.close()  # so that the child's death ends the pipe

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def has_steps(self) -> bool:
        return self._steps.poll()

    def publish(self, handle: PolicyHandle) -> None:
        self._weights.publish(handle)

    def receive(self, wait_s: float) -> StepBatch | None:
        """Returns the next step, or None after `wait_s`."""
        try:
            if not self._steps.poll(wait_s):
                return None
            message = self._steps.recv()
        except (EOFError, OSError) as error:
            self._process.join(_EXIT_S)
            raise ActorError(
                f"actor: the process that moves the arm (pid {self.pid}) ended with exit code "
                f"{self._process.exitcode} and said nothing. A station's supervisor brings the arm to rest."
            ) from error
        if isinstance(message, _Failure):
            raise ActorError(f"actor: {message.error}")
        return message

    def close(self) -> None:
        self._stop.set()
        self._steps.close()
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._weights.close()


class _Weights:
    """The learner's end of the weights, in memory that both processes see."""

    def __init__(self, handle: PolicyHandle) -> None:
        _, _, weights = handle.snapshot()
        self._size = len(save(dict(weights)))  # shapes never change, so neither does the size
        self._memory = SharedMemory(create=True, size=_HEAD.size + self._size)
        self._sent = (-1, -1)
        self.publish(handle)

    @property
    def name(self) -> str:
        return self._memory.name

    def publish(self, handle: PolicyHandle) -> None:
        """Writes the newest weights, their checksum, and how far the learner is."""
        version, crc, weights = handle.snapshot()
        if (version, handle.learner) == self._sent:
            return
        view = _view(self._memory)
        if version != self._sent[0]:
            view[_HEAD.size : _HEAD.size + self._size] = save(dict(weights))
        _HEAD.pack_into(view, 0, version, crc, handle.learner, self._size)
        self._sent = (version, handle.learner)

    def close(self) -> None:
        self._memory.close()
        self._memory.unlink()


def _view(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "open until it is closed here"
    return memory.buf


class _Inbox:
    """The actor's end of the weights."""

    def __init__(self, name: str) -> None:
        self._memory = SharedMemory(name=name)
        self._version = -1

    def read_into(self, handle: PolicyHandle) -> bool:
        """Hands new weights to the handle; returns False, and leaves it, while they are being written."""
        view = _view(self._memory)
        version, crc, learner, size = _HEAD.unpack_from(view, 0)
        if version != self._version:
            try:
                weights: dict[str, Tensor] = load(bytes(view[_HEAD.size : _HEAD.size + size]))
            except SafetensorError:
                return False
            if checksum(weights) != crc:
                return False
            handle.take(version, crc, weights)
            self._version = version
        handle.hear(learner)
        return True

    def close(self) -> None:
        self._memory.close()


class _Outbox:
    """Sends steps from a thread, so that the arm never waits for the learner."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def put(self, steps: StepBatch) -> None:
        """Takes a step to send.

        Raises:
            ActorError: the learner has taken none for very long.
        """
        try:
            self._waiting.put_nowait(steps)
        except queue.Full:
            raise ActorError(
                f"the learner has left {_MOST_WAITING} control steps waiting. It hangs, or is far too slow: "
                "lower method.utd."
            ) from None

    def close(self, failure: _Failure | None = None) -> None:
        """Waits until all is sent, the failure at last, or the learner is gone."""
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


def _act(build: Build, period_s: float, max_staleness: int, pipe: Connection, memory: str, stop: Any) -> None:
    """Is the actor: steps the arm until the learner says stop, or is gone."""
    outbox, inbox = _Outbox(pipe), _Inbox(memory)
    handle = PolicyHandle(max_staleness=max_staleness)
    source: SimSource | None = None
    failure: _Failure | None = None
    try:
        source = build()
        while not inbox.read_into(handle):
            time.sleep(0.001)
        due_s = time.monotonic()
        while not (stop.is_set() or outbox.is_closed):
            outbox.put(source.collect(handle))
            inbox.read_into(handle)
            if period_s:  # a late step is not made up for by a hasty one
                now_s = time.monotonic()
                due_s = max(due_s + period_s, now_s)
                time.sleep(due_s - now_s)
    except KeyboardInterrupt:
        failure = _Failure("interrupted from the keyboard")
    except Exception as error:  # whatever it was, the learner is told, and saves the run
        failure = _Failure(f"{type(error).__name__}: {error}")
    finally:
        if source is not None:
            source.close()
        outbox.close(failure)
        inbox.close()
