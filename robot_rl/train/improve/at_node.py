"""Acts on this machine's arm for a run on another one: the process of a job, begun by the agent of a fleet.

    python -m robot_rl.train.improve.at_node <folder of the job> <process of the agent>

The folder has the run's settings and base, the newest weights, and the spool of turns. What it has to say
goes to standard output, in lines of JSON: {"turn": 7}, {"says": "..."}, {"failed": "..."}.
It ends, with its arm at rest, on SIGTERM and when the agent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from robot_rl.config import read
from robot_rl.core.errors import RobotRLError
from robot_rl.core.lock import HeldError, ProcessLock
from robot_rl.rollout.process import Turn
from robot_rl.rollout.spool import Spool
from robot_rl.rollout.weights import Snapshot
from robot_rl.rollout.wire import decode_weights, encode_turn
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.acting import booked
from robot_rl.train.improve.stay import staying

if TYPE_CHECKING:
    from robot_rl.data.transitions import StepBatch


class WeightsFile:
    """The newest weights, in a file that the agent replaces; they are `Published` for the source."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, (-1, -1)
        self._newest: Snapshot | None = None

    @property
    def newest(self) -> Snapshot | None:
        found = self._path.stat()
        stamp = found.st_mtime_ns, found.st_ino
        if stamp != self._stamp:
            self._newest, self._stamp = decode_weights(self._path.read_bytes()), stamp
        return self._newest


def main(folder: Path, agent: int) -> int:
    """Acts until SIGTERM, or until the agent is gone; returns the exit code."""
    over = threading.Event()
    say = _voice(over)
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    job = json.loads((folder / "source.json").read_text())

    def is_over() -> bool:
        return over.is_set() or os.getppid() != agent

    try:
        if _is_first(folder, is_over):
            _act(folder, job, is_over, say)
    except Exception as error:  # the run gets any error
        say(failed=str(error) if isinstance(error, RobotRLError) else repr(error))
        return 1
    return 0


def _is_first(folder: Path, is_over: Callable[[], bool]) -> bool:
    """Waits for the process before, which may still bring its arm to rest; False: it is over meanwhile."""
    while not is_over():
        try:
            ProcessLock(folder / "lock")  # until the end of this process
        except HeldError:
            time.sleep(0.1)
        else:
            return True
    return False


def _act(folder: Path, job: dict[str, Any], is_over: Callable[[], bool], say: Callable[..., None]) -> None:
    config = read(RunConfig, folder / "config.yaml")
    spool, weights = Spool(folder / "turns"), WeightsFile(folder / "weights")
    with ExitStack() as stack:
        stays = None
        if job["stays"] is not None:
            torch.set_num_threads(1)  # the arm's other processes need the processors
            device = f"arm of {socket.gethostname()}"
            stays = stack.enter_context(closing(staying(config, folder, job["stays"], device)))
        source = booked(config, folder, job["name"], holder=job["holder"], say=lambda text: say(says=text))
        stack.enter_context(closing(source))
        while not is_over():
            segment = source.collect(weights)
            if segment is None:
                continue
            if stays is not None:
                segment = stays(cast("StepBatch", segment))
            say(turn=spool.put(encode_turn(Turn(segment, source.episodes.drain()))))


def _voice(over: threading.Event) -> Callable[..., None]:
    """Returns what writes words to the agent; prints of other code go to the log from then on."""
    words = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**what: Any) -> None:
        try:
            print(json.dumps(what), file=words, flush=True)
        except BrokenPipeError:  # the agent is gone
            over.set()

    return say


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
