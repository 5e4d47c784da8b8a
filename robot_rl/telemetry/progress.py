"""Progress on stderr: a live bar in a terminal, a line every ten seconds in a log.

Nothing is written to stdout, whose last line is the command's JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from robot_rl.core.clock import Clock, MonotonicClock

LINE_INTERVAL_S = 10.0
RATE_WINDOW_S = 15.0
REFRESH_INTERVAL_S = 0.2
RUN_FOLDER = "run folder: "
"""Beginning of the line with the folder of a run; sweeps read it."""
_WIDE = 110
"""Columns of a terminal in which a bar and all numbers fit."""


class RateMeter:
    """Events per second over the last `RATE_WINDOW_S` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._points: deque[tuple[float, float]] = deque()

    def update(self, count: float) -> None:
        """Records the count so far; calls closer together than a refresh share one point."""
        now_s = self._clock.now_s()
        if len(self._points) > 1:
            (before_s, _), (last_s, _) = self._points[-2], self._points[-1]
            if now_s - last_s > RATE_WINDOW_S >= last_s - before_s:  # a wait between quicker counts
                self._points.clear()
        if len(self._points) > 1 and now_s - self._points[-2][0] < REFRESH_INTERVAL_S:
            self._points.pop()
        self._points.append((now_s, count))
        while now_s - self._points[0][0] > RATE_WINDOW_S and len(self._points) > 2:
            self._points.popleft()

    def per_s(self) -> float:
        """Returns the rate; 0 while it is unknown."""
        if len(self._points) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class _WorkClock:
    """A clock that stands still during pauses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.now_s()
        self.paused_s = 0.0

    def now_s(self) -> float:
        return self._clock.now_s() - self.paused_s

    @contextmanager
    def pause(self) -> Generator[None]:
        """Pauses the clock within a block."""
        began_s = self._clock.now_s()
        try:
            yield
        finally:
            self.paused_s += self._clock.now_s() - began_s

    def stretch(self) -> float:
        """Returns the ratio of all time to the time without pauses."""
        worked_s = self.now_s() - self._began_s
        return 1.0 + self.paused_s / worked_s if worked_s > 0 else 1.0


class PhaseProgress:
    """One phase of a run; `update` is cheap, since it shows something only every `interval_s`."""

    def __init__(
        self,
        name: str,
        total: int,
        unit: str,
        start: int,
        clock: Clock,
        show: Callable[[PhaseProgress], None] = lambda phase: None,
        *,
        interval_s: float = LINE_INTERVAL_S,
    ) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, start
        self._clock, self._show, self._interval_s = clock, show, interval_s
        self._shown_s = clock.now_s()
        self._success: float | None = None
        self._note = ""
        self._counts_updates = False
        self.starts_late = False
        """The rates start at the next update: until then the phase waits, as for a process that acts."""
        self._start(start)

    def update(
        self, done: int, *, updates: int | None = None, success: float | None = None, note: str | None = None
    ) -> None:
        """Records the progress.

        Args:
            done: units done, of `total`.
            updates: learner updates so far, if they are not the unit.
            success: share of solved episodes in the last evaluation.
            note: further text.
        """
        if self.starts_late:
            self._start(done)
            self.starts_late = False
        self.done = done
        self._rate.update(done)
        if updates is not None:
            self._counts_updates = True
            self._update_rate.update(updates)
        if success is not None:
            self._success = success
        if note is not None:
            self._note = note
        if self._clock.now_s() - self._shown_s >= self._interval_s:
            self.show()

    def _start(self, done: int) -> None:
        """Starts the clock of the rates."""
        self._work = _WorkClock(self._clock)
        self._rate, self._update_rate = RateMeter(self._work), RateMeter(self._work)
        self._rate.update(done)

    def show(self) -> None:
        """Shows the progress now."""
        self._show(self)
        self._shown_s = self._clock.now_s()

    def paused(self) -> AbstractContextManager[None]:
        """Returns a block that the rates ignore, for example an evaluation; the time left includes it."""
        return self._work.pause()

    def status(self, width: int | None = None) -> str:
        """Returns counts, rates, time left and the last success as one line.

        Args:
            width: columns of the line; what matters least is left out to fit. None: no limit.
        """
        rate = self._rate.per_s()
        left_s = max(0, self.total - self.done) / rate * self._work.stretch() if rate > 0 else None
        parts = {
            "count": f"{self.done:,}/{self.total:,} {self.unit}",
            "rate": f"{_quantity(rate)} {self.unit}/s",
            "updates": f"{_quantity(self._update_rate.per_s())} updates/s" if self._counts_updates else "",
            "left": "ETA -" if left_s is None else f"ETA {_duration(left_s)}",
            "success": "" if self._success is None else f"success {self._success:.0%}",
            "note": self._note,
        }
        for least in ("updates", "rate", "note", "count", "left"):
            line = "  ".join(filter(None, parts.values()))
            if width is None or len(line) <= width:
                break
            parts[least] = ""
        return "  ".join(filter(None, parts.values()))


class ProgressDisplay:
    """Shows the phases of a run; a context manager, so that an error leaves a clean terminal."""

    def __init__(self, *, console: Console | None = None, clock: Clock | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock or MonotonicClock()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._last_line = ""
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24 if self._console.width >= _WIDE else 10),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            refresh_per_second=4,
        )

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bars.stop()

    @contextmanager
    def phase(
        self, name: str, total: int, *, unit: str = "steps", start: int = 0
    ) -> Generator[PhaseProgress]:
        """Opens a phase of `total` units, of which `start` were done before (a resumed run)."""
        if self._live:
            task = self._bars.add_task(name, total=total, completed=start, status="")
            show, interval_s = partial(self._update_bar, task), REFRESH_INTERVAL_S
        else:
            task, show, interval_s = None, self._print_line, LINE_INTERVAL_S
        phase = PhaseProgress(name, total, unit, start, self._clock, show, interval_s=interval_s)
        try:
            yield phase
        finally:
            phase.show()
            if task is not None:
                self._bars.stop_task(task)

    def message(self, text: str) -> None:
        """Writes a line above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _update_bar(self, task: TaskID, phase: PhaseProgress) -> None:
        width = self._console.width
        named = max(len(one.description) for one in self._bars.tasks)  # the width of the column of names
        taken = named + (24 if width >= _WIDE else 10) + len(" 100 % ") + 2
        self._bars.update(task, completed=phase.done, status=phase.status(width - taken))

    def _print_line(self, phase: PhaseProgress) -> None:
        share = phase.done / phase.total if phase.total else 1.0
        line = f"{phase.name}  {share:4.0%}  {phase.status()}"
        if line != self._last_line:
            self.message(line)
        self._last_line = line


def _quantity(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _duration(seconds_s: float) -> str:
    """Returns 0:42, 12:05 or 3:04:09."""
    minutes, seconds = divmod(round(seconds_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
