"""Progress on stderr: a live bar in a terminal, a line every ten seconds in a log.

Nothing is ever written to stdout: the last line there belongs to the command's JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from robot_rl.core.clock import Clock, MonotonicClock

LINE_INTERVAL_S = 10.0
RATE_WINDOW_S = 15.0
REFRESH_INTERVAL_S = 0.2
RUN_FOLDER = "run folder: "
"""How the line begins that names the folder of a run; sweeps read it."""
_WIDE = 110
"""Columns of a terminal that has room for everything."""


class RateMeter:
    """Events per second over the last `RATE_WINDOW_S` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._points: deque[tuple[float, float]] = deque()

    def update(self, count: float) -> None:
        """Notes how many there have been until now; calls closer than a refresh share one point."""
        now_s = self._clock.now_s()
        if len(self._points) > 1 and now_s - self._points[-2][0] < REFRESH_INTERVAL_S:
            self._points.pop()
        self._points.append((now_s, count))
        while now_s - self._points[0][0] > RATE_WINDOW_S and len(self._points) > 2:
            self._points.popleft()

    def per_s(self) -> float:
        """Returns the rate, 0 as long as nothing is known."""
        if len(self._points) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class _WorkClock:
    """Seconds of another clock, without those of pauses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.now_s()
        self.paused_s = 0.0

    def now_s(self) -> float:
        return self._clock.now_s() - self.paused_s

    @contextmanager
    def pause(self) -> Generator[None]:
        """Lets the time of a block pass uncounted."""
        began_s = self._clock.now_s()
        try:
            yield
        finally:
            self.paused_s += self._clock.now_s() - began_s

    def stretch(self) -> float:
        """Returns the time that has passed, in units of that which was worked."""
        worked_s = self.now_s() - self._began_s
        return 1.0 + self.paused_s / worked_s if worked_s > 0 else 1.0


class PhaseProgress:
    """One phase of a run; `update` may be called as often as one likes."""

    def __init__(self, name: str, total: int, unit: str, start: int, clock: Clock) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, start
        self._success: float | None = None
        self._note = ""
        self._work = _WorkClock(clock)
        self._rate, self._update_rate = RateMeter(self._work), RateMeter(self._work)
        self._counts_updates = False
        self._rate.update(start)

    def update(
        self, done: int, *, updates: int | None = None, success: float | None = None, note: str | None = None
    ) -> None:
        """Notes where the phase stands.

        Args:
            done: units done, of `total`.
            updates: learner updates so far, where they are not the unit.
            success: share of solved episodes of the last evaluation.
            note: what else is to be known, in words.
        """
        self.done = done
        self._rate.update(done)
        if updates is not None:
            self._counts_updates = True
            self._update_rate.update(updates)
        if success is not None:
            self._success = success
        if note is not None:
            self._note = note

    def paused(self) -> AbstractContextManager[None]:
        """Returns a block that the rates leave out, such as an evaluation; more of them are expected."""
        return self._work.pause()

    def status(self, width: int | None = None) -> str:
        """Returns counts, rates, time left and the last success as one line, the least of them left out.

        Args:
            width: columns there are; None for as many as it takes.
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
    """Shows the phases of a run; use it as a context manager, so that a crash leaves a clean terminal."""

    def __init__(self, *, console: Console | None = None, clock: Clock | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock or MonotonicClock()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
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
        shown: PhaseProgress
        if self._live:
            shown = _Bar(name, total, unit, start, self._clock, self._bars)
        else:
            shown = _Lines(name, total, unit, start, self._clock, self._console)
        try:
            yield shown
        finally:
            shown.finish()

    def message(self, text: str) -> None:
        """Writes a line above the bars."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar(PhaseProgress):
    def __init__(self, name: str, total: int, unit: str, start: int, clock: Clock, bars: Progress) -> None:
        super().__init__(name, total, unit, start, clock)
        self._clock, self._bars = clock, bars
        self._shown_s = -REFRESH_INTERVAL_S
        self._task: TaskID = bars.add_task(name, total=total, completed=start, status="")

    def update(
        self, done: int, *, updates: int | None = None, success: float | None = None, note: str | None = None
    ) -> None:
        super().update(done, updates=updates, success=success, note=note)
        if self._clock.now_s() - self._shown_s >= REFRESH_INTERVAL_S:
            self._show()

    def finish(self) -> None:
        self._show()
        self._bars.stop_task(self._task)

    def _show(self) -> None:
        width = self._bars.console.width
        named = max(len(task.description) for task in self._bars.tasks)  # the column is as wide as its widest
        beside = named + (24 if width >= _WIDE else 10) + len(" 100 % ") + 2
        self._bars.update(self._task, completed=self.done, status=self.status(width - beside))
        self._shown_s = self._clock.now_s()


class _Lines(PhaseProgress):
    def __init__(self, name: str, total: int, unit: str, start: int, clock: Clock, console: Console) -> None:
        super().__init__(name, total, unit, start, clock)
        self._clock, self._console = clock, console
        self._shown_s = clock.now_s()
        self._shown = ""

    def update(
        self, done: int, *, updates: int | None = None, success: float | None = None, note: str | None = None
    ) -> None:
        super().update(done, updates=updates, success=success, note=note)
        if self._clock.now_s() - self._shown_s >= LINE_INTERVAL_S:
            self._show()

    def finish(self) -> None:
        self._show()

    def _show(self) -> None:
        share = self.done / self.total if self.total else 1.0
        line = f"{self.name}  {share:4.0%}  {self.status()}"
        if line != self._shown:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._shown, self._shown_s = line, self._clock.now_s()


def _quantity(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _duration(seconds_s: float) -> str:
    """Returns 0:42, 12:05 or 3:04:09."""
    minutes, seconds = divmod(round(seconds_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
