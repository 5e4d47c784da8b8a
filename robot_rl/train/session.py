"""A run's session: its folder, leases, clocks, metrics, progress and checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from robot_rl.core.errors import CheckpointError, DeviceError
from robot_rl.core.refusal import refusals
from robot_rl.hal.device import DeviceSpec
from robot_rl.hal.leased import EnvDevice, LeasedEnv, open_under
from robot_rl.sched.leases import HeldLease, LeaseStore
from robot_rl.telemetry.metrics import MetricsWriter
from robot_rl.telemetry.progress import RUN_FOLDER, PhaseProgress, ProgressDisplay
from robot_rl.telemetry.timing import StageTimer
from robot_rl.train.checkpoint import CheckpointStore
from robot_rl.train.config import RunConfig
from robot_rl.train.devices import devices_of_training
from robot_rl.train.loop import Run, train
from robot_rl.train.schedule import Counters

T = TypeVar("T")
S = TypeVar("S", bound="RunSession")


class RunSession:
    """One run on this machine, from its folder; a context manager that leases what the run uses.

    Every phase leaves its result on the disk and is then noted as finished in a checkpoint, so a
    resumed run skips it. A phase cut short is redone from its last checkpoint: the loop's state,
    the place in metrics.jsonl, the clocks and the results so far are restored together.
    """

    def __init__(
        self,
        folder: Path,
        *,
        command: str,
        holder: str,
        devices: Sequence[tuple[DeviceSpec, int]],
        lease_wait_s: float,
        keep: int,
    ) -> None:
        """Opens nothing yet.

        Args:
            folder: the run folder.
            command: the `robot-rl` command that resumes the run.
            holder: name of the holder of the leases, for messages to others.
            devices: what the run uses, and how many slots of each.
            lease_wait_s: how long to wait for devices that others hold.
            keep: checkpoints that stay on the disk.
        """
        self.folder, self.command = folder, command
        self._holder, self._devices, self._lease_wait_s = holder, devices, lease_wait_s
        self.timer = StageTimer()
        self.display = ProgressDisplay()
        self.progress: PhaseProgress | None = None
        self.finished: list[str] = []
        self.results: dict[str, Any] = {}
        """Small facts for summary.json, by phase."""
        self.counters = Counters()
        self.leases: list[HeldLease] = []
        self.is_resumed = False
        """Whether the present phase was begun in an earlier life of the run."""
        self._store = CheckpointStore(folder / "checkpoints", keep=keep, command=command)
        self._loop: tuple[str, Mapping[str, Any]] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            held = LeaseStore().hold_all(self._devices, holder=self._holder, wait_s=self._lease_wait_s)
            self.leases = stack.enter_context(held)
            stack.enter_context(self.display)
            self.metrics = stack.enter_context(MetricsWriter(self.folder))
            self._restore()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def check_leases(self) -> None:
        """Passes while everything leased is held, and to be trusted.

        Raises:
            LeaseError: a lease is lost.
            DeviceError: a device gives no leases now, as a world model that somebody found wanting.
        """
        for lease in self.leases:
            lease.check()

    def open(self, device: EnvDevice) -> LeasedEnv:
        """Opens a device under the run's lease of it.

        Raises:
            DeviceError: the device is quarantined.
        """
        return open_under(self.leases, device)

    @property
    def elapsed_s(self) -> float:
        """Time the run has taken, over all its lives."""
        return float(self.timer.state_dict()["wall_s"])

    @contextmanager
    def phase(self, name: str, total: int, *, unit: str, start: int = 0) -> Generator[PhaseProgress]:
        """Shows a phase of `total` units."""
        with self.display.phase(name, total, unit=unit, start=start) as progress:
            self.progress = progress
            yield progress
            self.progress = None

    def paused(self) -> AbstractContextManager[None]:
        """Returns a context whose time is not part of the rates of the phase: an evaluation, a checkpoint."""
        return nullcontext() if self.progress is None else self.progress.paused()

    def write(self, phase: str, metrics: Mapping[str, Any], counters: Counters | None = None) -> None:
        """Appends a row to metrics.jsonl at the present counters, or at those given."""
        at = counters or self.counters
        self.metrics.write(at.env_steps, phase, metrics, updates=at.updates)

    def loop_state(self, phase: str) -> Mapping[str, Any] | None:
        """Returns where the loop of a phase was cut short, or None if it begins."""
        return self._loop[1] if self._loop is not None and self._loop[0] == phase else None

    def save(self, phase: str, run: Run) -> None:
        """Checkpoints a phase between two turns of its loop."""
        with self.timer.stage("checkpoint"), self.paused():
            self._store.save(self._state((phase, run.state_dict())), phase)

    def finish(self, phase: str) -> None:
        """Notes that a phase is over and its results are on the disk."""
        self.finished.append(phase)
        self._loop, self.is_resumed = None, False
        with self.timer.stage("checkpoint"):
            self._store.save(self._state(None), f"{phase}-done")

    def _state(self, loop: tuple[str, Mapping[str, Any]] | None) -> dict[str, Any]:
        return {
            "finished": list(self.finished),
            "results": self.results,
            "counters": self.counters.state_dict(),
            "timer": self.timer.state_dict(),
            "metrics": self.metrics.state_dict(),
            "phase": None if loop is None else loop[0],
            "loop": None if loop is None else loop[1],
        }

    def _restore(self) -> None:
        state = self._store.load()
        if state is None:
            self.metrics.load_state_dict({"rows": 0})
            return
        lacking = [name for name in self._state(None) if name not in state]
        if lacking:
            raise CheckpointError(
                f"{self.folder}: the newest checkpoint has no {', '.join(lacking)}: another version of "
                "robot_rl wrote it. Go on with that version, or begin a new run with the same settings."
            )
        self.finished, self.results = list(state["finished"]), dict(state["results"])
        self.counters.load_state_dict(state["counters"])
        self.timer.load_state_dict(state["timer"])
        self.metrics.load_state_dict(state["metrics"])
        self._loop = None if state["phase"] is None else (state["phase"], state["loop"])
        self.is_resumed = True


class Session(RunSession):
    """The session of `robot-rl train`."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(
            folder,
            command="train",
            holder=f"train {config.recipe} seed {config.seed}",
            devices=devices_of_training(config),
            lease_wait_s=config.lease_wait_s,
            keep=config.checkpoint.keep,
        )
        self.config = config


def execute(session: S, phases: Mapping[str, Callable[[S], None]], conclude: Callable[[S], T]) -> T:
    """Runs the phases that are not finished yet, one after another, and concludes.

    Raises:
        CheckpointError: the disk or the memory refuses; the message says how to go on.
    """
    with saying_how_to_resume(session.folder, session.command), session:
        session.display.message(f"{RUN_FOLDER}{session.folder}")
        for name, phase in phases.items():
            if name not in session.finished:
                phase(session)
                session.finish(name)
        return conclude(session)


@contextmanager
def saying_how_to_resume(folder: Path, command: str) -> Generator[None]:
    """A context in which errors of Ctrl-C, disk and memory tell how to resume the run."""
    resume = f"robot-rl {command} resume={shlex.quote(str(folder))}"
    kept = f"Nothing that a checkpoint holds is lost; `{resume}` goes on from there."
    try:
        with refusals(CheckpointError, folder, kept, sure=True):
            yield
    except KeyboardInterrupt as interrupt:  # this run's folder, not the newest: others may have one too
        interrupt.add_note(f"Continue with: {resume}")
        raise


def learn(session: RunSession, loop: Run, phase: str, total: int, *, unit: str) -> None:
    """Runs a loop from where a checkpoint left it."""
    state = session.loop_state(phase)
    if state is not None:
        loop.load_state_dict(state)
    done = loop.counters.updates if unit == "updates" else loop.counters.env_steps
    if state is not None:
        session.display.message(f"{phase}: goes on from {unit} {done:,} of {total:,}")
    elif session.is_resumed:
        session.display.message(f"{phase}: begins at {unit} 0, no checkpoint of it was written yet")
    with session.phase(phase, total, unit=unit, start=done) as progress:
        progress.starts_late = bool(loop.sources)
        try:
            train(loop)
        except DeviceError as error:  # between two turns: nothing is half done
            session.save(phase, loop)
            raise DeviceError(
                f"{error} The run is saved: `robot-rl {session.command} resume={session.folder}` goes on."
            ) from error
        for source in loop.sources:
            source.rest()
