"""The figures of the report, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from robot_rl.telemetry.runs import Curve, Floats, Outcome, RunRecord
from robot_rl.telemetry.settings import Setting, outcome_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1c2430", "#6b7480", "#e3e7ec"
BEFORE, AFTER = "#a3abb6", "#1f5fa8"
SEEDS = ("#1f5fa8", "#c2571a", "#2f7d4f", "#8a4a9e", "#a8873a", "#3c8c99")

WIDTH_IN = 8.6
MAX_POINTS = 300
"""Points of a curve; a longer one is drawn as the means of as many pieces."""

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "robot-rl",  # the same run gives the same bytes
}


def learning_curve(runs: Sequence[RunRecord]) -> str | None:
    """Draws success over control steps; None without evaluations.

    For one run the band is the interval of each evaluation; for several it goes from the worst to the best.
    """
    found = [run.evaluations() for run in runs]
    found = [(steps, outcomes) for steps, outcomes in found if len(steps) > 0]
    if not found:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if len(found) == 1:
            _binomial_band(axes, *found[0])
        else:
            _spread_band(axes, [(steps, np.array([o.share for o in outcomes])) for steps, outcomes in found])
        base = outcome_of(runs, "base")
        if base is not None:
            axes.axhline(base.share, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="base policy")
        _final_marker(axes, max(float(steps[-1]) for steps, _ in found), outcome_of(runs, "final"))
        _success_over_steps(axes)
        figure.legend(loc="outside upper left", ncols=4)

    return render(draw, height_in=3.3)


def return_curve(runs: Sequence[RunRecord]) -> str | None:
    """Draws the mean return of the evaluations over control steps; None without evaluations."""
    curves = [run.curve("eval/return") for run in runs if run.drawn("eval/return")]
    if not curves:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        if len(curves) == 1:
            axes.plot(curves[0].x, curves[0].y, color=AFTER, linewidth=2, marker="o", markersize=2.5)
        else:
            _spread_band(axes, [(curve.x, curve.y) for curve in curves])
            figure.legend(loc="outside upper left", ncols=4)
        axes.set_ylabel("return", fontsize=8)
        _step_axis(axes, curves[0].unit)

    return render(draw, height_in=3.3)


def learning_curves(settings: Sequence[Setting]) -> str | None:
    """Draws a curve for each setting, the mean of its seeds; None without evaluations."""
    found = [(setting, [run.evaluations() for run in setting.runs]) for setting in settings]
    if not any(len(steps) for _, curves in found for steps, _ in curves):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (setting, curves) in enumerate(found):
            known = [(x, np.array([o.share for o in outcomes])) for x, outcomes in curves if len(x)]
            if known:
                _setting_curve(axes, setting, known, SEEDS[number % len(SEEDS)])
        _success_over_steps(axes)
        figure.legend(loc="outside upper left", ncols=2)

    return render(draw, height_in=3.3 + 0.12 * len(found))


def before_after(runs: Sequence[RunRecord] | Sequence[Setting]) -> str | None:
    """Draws success before and after as bars with 95 % intervals; None if no run has both ends."""
    pairs = [(run.label, run.outcome("base"), run.outcome("final")) for run in runs]
    pairs = [(label, base, final) for label, base, final in pairs if base is not None or final is not None]
    if not pairs:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, (_, base, final) in enumerate(pairs):
            if base is not None:
                _bar(axes, place - 0.19, base, BEFORE, "before")
            if final is not None:
                _bar(axes, place + 0.19, final, AFTER, "after")
        axes.set_yticks(range(len(pairs)), [label for label, _, _ in pairs])
        axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
        axes.set_ylim(len(pairs) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        _percent_axis(axes.xaxis)
        axes.set_xlim(0, 1.12)

    return render(draw, height_in=0.7 + 0.75 * len(pairs))


def metric_grid(runs: Sequence[RunRecord], names: Sequence[str]) -> str | None:
    """Draws one small panel for each metric, one line for each run; None if there is nothing to draw."""
    names = [name for name in names if any(run.drawn(name) for run in runs)]
    if not names:
        return None
    columns = 3 if len(names) > 1 else 1
    num_rows = -(-len(names) // columns)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(num_rows, columns, squeeze=False)
        for axes, name in zip(grid.flat, names, strict=False):
            _metric_panel(axes, runs, name)
        for axes in list(grid.flat)[len(names) :]:
            axes.set_visible(False)
        if len(runs) > 1:
            handles, labels = grid.flat[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper left", ncols=len(SEEDS))

    return render(draw, height_in=2.6 if columns == 1 else 1.9 * num_rows + 0.2)


def stage_bars(seconds: Mapping[str, float]) -> str | None:
    """Draws seconds by stage as horizontal bars, longest on top; None if there is no time."""
    stages = sorted(((s, name) for name, s in seconds.items() if s > 0), reverse=True)
    total = sum(s for s, _ in stages)
    if not total:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        values = [s for s, _ in stages]
        colors = [BEFORE if name == "other" else AFTER for _, name in stages]
        axes.barh(range(len(stages)), values, color=colors, height=0.62)
        for place, value in enumerate(values):
            text = f" {_seconds(value)}  {percent(value / total, 0)}"
            axes.text(value, place, text, va="center", ha="left", fontsize=8, color=INK)
        axes.set_yticks(range(len(stages)), [name for _, name in stages])
        axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, max(values) * 1.16)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds of wall-clock")

    return render(draw, height_in=0.9 + 0.3 * len(stages))


def render(draw: Callable[[Figure], None], *, height_in: float) -> str:
    """Returns what `draw` puts into an empty figure, as SVG text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _binomial_band(axes: Axes, steps: Floats, outcomes: Sequence[Outcome]) -> None:
    low, high = np.array([outcome.interval for outcome in outcomes]).T
    axes.fill_between(steps, low, high, color=AFTER, alpha=0.16, linewidth=0, label="95 % interval")
    shares = [outcome.share for outcome in outcomes]
    axes.plot(steps, shares, color=AFTER, marker="o", markersize=2.5, label="success")


def _spread_band(axes: Axes, curves: Sequence[tuple[Floats, Floats]]) -> None:
    """Draws mean and extremes over the common range, and each curve thinly."""
    grid, rows = _common(curves)
    for x, y in curves:
        axes.plot(x, y, color=AFTER, linewidth=0.8, alpha=0.35)
    if len(grid) == 0:
        return
    low, high = rows.min(axis=0), rows.max(axis=0)
    label = f"lowest to highest of {len(curves)} runs"
    axes.fill_between(grid, low, high, color=AFTER, alpha=0.16, linewidth=0, label=label)
    axes.plot(grid, rows.mean(axis=0), color=AFTER, linewidth=2, label="mean")


def _setting_curve(axes: Axes, setting: Setting, curves: Sequence[tuple[Floats, Floats]], color: str) -> None:
    """Draws the mean of a setting's seeds, single seeds thinly, and the final success."""
    grid, rows = _common(curves)
    if len(curves) > 1:
        for x, y in curves:
            axes.plot(x, y, color=color, linewidth=0.8, alpha=0.35)
    if len(grid):
        mean = rows.mean(axis=0)
        axes.plot(grid, mean, color=color, linewidth=2, marker="o", markersize=2.5, label=setting.label)
    final = setting.outcome("final")
    if final is not None:
        last = max(float(x[-1]) for x, _ in curves)
        axes.plot([last], [final.share], "D", color=color, markersize=5, clip_on=False, zorder=5)


def _common(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Returns the points (n,) that all curves cover, and the curves there (curves, n)."""
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= start) & (grid <= end)]
    return grid, np.array([np.interp(grid, x, y) for x, y in curves])


def _final_marker(axes: Axes, step: float, outcome: Outcome | None) -> None:
    """Marks the last evaluation, on held-out episodes, at the end of the curve."""
    if outcome is None:
        return
    axes.errorbar(
        [step],
        [outcome.share],
        _error_bar(outcome),
        fmt="D",
        color=SEEDS[1],
        markersize=5,
        capsize=3,
        linewidth=1.4,
        zorder=5,
        clip_on=False,
        label=f"final, {outcome.episodes:,} held-out episodes",
    )


def _bar(axes: Axes, place: float, outcome: Outcome, color: str, name: str) -> None:
    axes.barh(place, outcome.share, height=0.34, color=color)
    axes.errorbar(outcome.share, place, xerr=_error_bar(outcome), color=INK, capsize=3, linewidth=1)
    text, end = f"{percent(outcome.share)} {name}", outcome.interval[1] + 0.012
    axes.text(end, place, text, ha="left", va="center", fontsize=8.5, color=INK)


def _error_bar(outcome: Outcome) -> list[list[float]]:
    """Returns how far the interval reaches below and above the share."""
    low, high = outcome.interval
    return [[max(0.0, outcome.share - low)], [max(0.0, high - outcome.share)]]


def _metric_panel(axes: Axes, runs: Sequence[RunRecord], name: str) -> None:
    unit = "rows"
    settings = list(dict.fromkeys(run.setting for run in runs))
    shown: set[str] = set()
    for number, run in enumerate(runs):
        curve = run.curve(name)
        if len(curve.x) == 0:
            continue
        unit = curve.unit
        short = shorten(curve)
        # One colour for each setting; for each run if there is one setting.
        number, label = (
            (settings.index(run.setting), run.setting) if len(settings) > 1 else (number, run.label)
        )
        style: dict[str, Any] = {"label": "_" if label in shown else label, "linewidth": 1.2}
        shown.add(label)
        alone = np.isfinite(short.y).sum() == 1  # a line of one point is invisible
        axes.plot(short.x, short.y, color=SEEDS[number % len(SEEDS)], marker="o" if alone else "", **style)
    axes.set_title(name)
    _step_axis(axes, unit)


def shorten(curve: Curve) -> Curve:
    """Returns a curve of at most `MAX_POINTS` points, each the mean of a piece."""
    if len(curve.x) <= MAX_POINTS:
        return curve
    pieces = [part for part in np.array_split(np.arange(len(curve.x)), MAX_POINTS) if len(part)]
    x = np.array([curve.x[part].mean() for part in pieces])
    y = np.array([curve.y[part].mean() for part in pieces])
    return Curve(x, y, curve.unit)


def percent(share: float, digits: int = 1) -> str:
    """Returns 97.5 % for 0.975."""
    return f"{100 * share:.{digits}f} %"


def _percent_axis(axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    axis.set_major_locator(MultipleLocator(0.25))
    axis.set_major_formatter(FuncFormatter(lambda share, _: percent(share, 0)))
    axis.set_label_text("success", fontsize=8)


def _success_over_steps(axes: Axes) -> None:
    _percent_axis(axes.yaxis)
    axes.set_ylim(0, 1.02)
    _step_axis(axes, "control steps")


def _step_axis(axes: Axes, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(unit, fontsize=8)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))


def _thousands(value: float, _: Any) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"
