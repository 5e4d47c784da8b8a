"""The page of a fine-tuning run: held-out errors of policy and baselines, over time, steps and joints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robot_rl.telemetry import page
from robot_rl.telemetry.figures import AFTER, BEFORE, INK, SEEDS, percent, render
from robot_rl.telemetry.runs import Floats, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = (("policy", "policy", AFTER), ("act", "ACT", SEEDS[1]))
"""Phase of the rows, name on the page, colour."""
_BY_JOINTS = ("policy", "ACT", "ridge", "last action", "nearest neighbour")
"""Predictors in the tables by group of joints."""
_STEPS = 5
"""Places in a chunk that the table shows, with the first and the last."""


def is_finetuning(run: RunRecord) -> bool:
    """Returns whether `robot-rl finetune` made the run: its settings have a dataset and a policy."""
    return "heldout_error" in run.summary or {"dataset", "policy", "heldout"} <= set(run.config)


def title(runs: Sequence[RunRecord]) -> str:
    """Returns the title, the result and the key numbers."""
    run = runs[0]
    error, nearest = run.number("heldout_error"), run.number("nearest_neighbour_error")
    parts = [
        f'<p class="eyebrow">{page.escape(f"robot-rl finetune - {run.folder.name}")}</p>',
        f"<h1>{page.escape(str(run.config.get('policy', 'policy')))}</h1>",
        page.paragraph(_sentence(run, error, nearest), "lead"),
    ]
    verdict: Mapping[str, Any] = run.summary.get("verdict") or {}
    if verdict:
        parts.append(page.paragraph(verdict_text(run), "lead"))
    if error is not None:
        best = verdict.get("baseline", "")
        best_error = None if best == "nearest neighbour" else verdict.get("baseline_error")
        shown = (
            (str(best).capitalize(), best_error, "the best baseline"),
            ("Nearest neighbours", nearest, "baseline: no learning"),
            ("ACT", run.number("act_error"), "baseline: as much time"),
        )
        others = [(name, f"{value:.3f}", note) for name, value, note in shown if value is not None]
        parts.append(
            page.compared(("This policy", f"{error:.3f}", "held-out error, lower is better"), *others)
        )
    return "\n".join([*parts, page.tiles(_tiles(run))])


def verdict_text(run: RunRecord) -> str:
    """Returns the sentence that compares training with the baselines; empty before the end of a run."""
    text = str((run.summary.get("verdict") or {}).get("text", ""))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def errors(runs: Sequence[RunRecord], missing: list[str]) -> str:
    """Returns the curve of the held-out error."""
    svg = error_curve(runs[0])
    if svg is None:
        missing.append("held-out error over time: no rows with heldout/error")
        return ""
    caption = (
        "Mean absolute error of the chunk on the held-out episodes, in standard deviations of the training "
        "actions, over processor time of the training loop (on a GPU: wall-clock). Nothing was "
        "selected by this curve; the result is its last point."
    )
    return page.heading("Held-out error") + page.drawing(svg, "held-out error over time", caption)


def predictors(runs: Sequence[RunRecord], missing: list[str]) -> str:
    """Returns the errors of all predictors: with intervals, by place in the chunk and by motion."""
    found: Mapping[str, Any] = runs[0].summary.get("predictors") or {}
    if not found:
        missing.append("errors by predictor: summary.json has no predictors")
        return ""
    rows = error_rows(found, places=_STEPS)
    titles = {"predictor": "", "moving": "joints that move", "still": "other joints"}
    text = (
        "In standard deviations of the training actions. The interval is a bootstrap over the held-out "
        "episodes; with few episodes it is too narrow. A joint moves if its range within a training episode "
        "is at least a tenth of the largest range of all joints, in the dataset's units."
    )
    return "".join(
        [
            page.heading("Errors by predictor"),
            page.table([titles.get(key, key) for key in rows[0]], [list(row.values()) for row in rows]),
            page.paragraph(text, "note"),
        ]
    )


def error_rows(found: Mapping[str, Any], *, places: int, style: str = ".4f") -> list[dict[str, str]]:
    """Returns a row for every predictor, the best first.

    Args:
        found: predictor -> its errors in summary.json.
        places: number of places in the chunk, with the first and the last.
        style: format of numbers.
    """
    length = len(next(iter(found.values()))["by_step"])
    shown = sorted({round(place) for place in np.linspace(0, length - 1, places)})
    return [
        {
            "predictor": name,
            "all": _number(one["normalised"], style),
            "95 % interval": _interval(one["interval"], style),
            **{f"action {place + 1}": _number(one["by_step"][place], style) for place in shown},
            "moving": _number(one["moving"], style),
            "still": _number(one["still"], style),
        }
        for name, one in sorted(found.items(), key=lambda item: item[1]["normalised"])
    ]


def joints(runs: Sequence[RunRecord], missing: list[str]) -> str:
    """Returns the errors of the policy and of some baselines by group of joints."""
    summary = runs[0].summary
    groups: Mapping[str, Any] = summary.get("groups") or {}
    units: Mapping[str, Any] = summary.get("units") or {}
    if not groups:
        missing.append("errors by joints: summary.json has no groups")
        return ""
    names = [name for name in _BY_JOINTS if name in groups]
    found: Mapping[str, Any] = summary.get("predictors") or {}
    totals = {
        "policy": summary.get("heldout_error"),
        "nearest neighbour": summary.get("nearest_neighbour_error"),
        "ACT": summary.get("act_error"),
        **{name: one["normalised"] for name, one in found.items()},
    }
    rows = [["all joints", *[_number(totals.get(name)) for name in names]]]
    rows += [[group, *[_number(groups[n].get(group)) for n in names]] for group in groups[names[0]]]
    in_units = [[group, *[_number(units[n].get(group)) for n in names]] for group in units.get(names[0], {})]
    return "".join(
        [
            page.heading("Errors by joints"),
            page.paragraph("In standard deviations of the training actions.", "note"),
            page.table(["", *names], rows),
            page.paragraph("In the dataset's units.", "note"),
            page.table(["", *names], in_units),
        ]
    )


def baselines(runs: Sequence[RunRecord], missing: list[str]) -> str:
    """Returns the tuned values of the baselines, and the cost of the comparison."""
    summary = runs[0].summary
    neighbours = (summary.get("nearest_neighbour") or {}).get("neighbours")
    learners = [
        ["policy", _number(summary.get("heldout_error")), *_cost(summary, "")],
        ["ACT", _number(summary.get("act_error")), *_cost(summary, "act_")],
        [
            f"nearest neighbours, tuned ({neighbours})",
            _number(summary.get("nearest_neighbour_error")),
            "-",
            "-",
            "-",
        ],
        ["nearest neighbour, single", _number(summary.get("single_neighbour_error")), "-", "-", "-"],
    ]
    clock = "processor time of its loop" if _on_cpu(runs[0]) else "time of its loop"
    parts = [
        page.heading("The comparison"),
        page.table(
            ["", "held-out error", "parameters", "updates", clock], [row for row in learners if row[1] != "-"]
        ),
    ]
    if summary.get("act_error") is not None:
        text = "ACT's smallest backbone, a ResNet-18 of 11 million parameters, sets its size."
        parts.append(page.paragraph(text, "note"))
    neighbour, act = summary.get("nearest_neighbour"), summary.get("act")
    if isinstance(neighbour, Mapping):
        manner = "as offsets from the state" if neighbour.get("relative") else "as they are"
        text = (
            f"Nearest neighbours: the mean of {neighbour.get('neighbours')}, their chunks taken {manner}, "
            f"pictures weighted by {neighbour.get('picture_weight')}; tuned by leaving out one training "
            "episode at a time. The row below it is the best choice with one neighbour."
        )
        parts.append(page.paragraph(text, "note"))
    if isinstance(act, Mapping):
        tried = [
            [f"{t['lr']:g}", str(t["batch"]), str(t["updates"]), f"{t['error']:.3f}"] for t in act["tried"]
        ]
        parts += [
            page.paragraph("Short trials of ACT on validation episodes among the training ones:", "note"),
            page.table(["learning rate", "batch", "updates", "error"], tried),
        ]
    elif act:
        parts.append(page.paragraph(f"No ACT: {act}.", "note"))
    return "".join(parts)


def error_curve(run: RunRecord) -> str | None:
    """Draws the held-out error over the minutes of each learner; None without a point."""
    curves = [(name, color, *_curve(run, phase)) for phase, name, color in _CURVES]
    curves = [curve for curve in curves if len(curve[2])]
    if not curves:
        return None
    flat = _flat(run)
    in_seconds = max(minutes[-1] for *_, minutes, _ in curves) < 2

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, color, minutes, error in curves:
            time = 60 * minutes if in_seconds else minutes
            axes.plot(time, error, color=color, marker="o", markersize=3, label=name)
            _end(axes, time[-1], error[-1], color)
        if flat is not None:
            axes.axhline(flat, color=BEFORE, linestyle=(0, (4, 3)), label=f"nearest neighbour {flat:.3f}")
        tops = [error.max() for *_, error in curves]
        axes.set_ylim(0, 1.08 * max([*tops, flat or 0.0]))
        axes.set_xlabel(f"{'seconds' if in_seconds else 'minutes'} of the training loop", fontsize=8)
        axes.set_ylabel("held-out error", fontsize=8)
        figure.legend(loc="outside upper left", ncols=4)

    return render(draw, height_in=3.3)


def _end(axes: Axes, x: float, y: float, color: str) -> None:
    axes.annotate(
        f"{y:.3f}", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8, color=color or INK
    )


def _curve(run: RunRecord, phase: str) -> tuple[Floats, Floats]:
    """Returns minutes and errors of a learner."""
    rows = [row for row in run.rows if row["phase"] == phase and "heldout/error" in row]
    points = [(row.get("heldout/minutes"), row["heldout/error"]) for row in rows]
    known = [(x, y) for x, y in points if x is not None and y is not None]
    return np.array([x for x, _ in known], float), np.array([y for _, y in known], float)


def _flat(run: RunRecord) -> float | None:
    """Returns the error of the nearest neighbours, which is constant over time."""
    if (error := run.number("nearest_neighbour_error")) is not None:
        return error
    found = [row.get("heldout/error") for row in run.rows if row["phase"] == "neighbour"]
    return found[-1] if found else None


def _sentence(run: RunRecord, error: float | None, nearest: float | None) -> str:
    if error is None:
        return "This run has not ended: there is no held-out error yet."
    episodes = run.summary.get("heldout_episodes") or []
    text = f"Held-out error {error:.3f} on {len(episodes)} episodes that were not used for training"
    others = (("nearest neighbours", nearest), ("LeRobot's ACT", run.number("act_error")))
    compared = [
        f"{percent(abs(1 - error / other))} {'below' if error < other else 'above'} {name} ({other:.3f})"
        for name, other in others
        if other
    ]
    return f"{text}: {' and '.join(compared)}." if compared else f"{text}."


def duration(minutes: float | None) -> str:
    """Returns `45 s` or `12.3 min`."""
    if minutes is None:
        return "-"
    return f"{60 * minutes:.0f} s" if minutes < 2 else f"{minutes:.1f} min"


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    chunks = run.number("chunks")
    return [
        ("Dataset", Path(str(run.config.get("dataset", "-"))).name),
        ("Robot", str(run.summary.get("robot") or run.config.get("robot") or "-")),
        ("Learned from", _episodes(run.summary.get("train_episodes"))),
        ("Held out", _episodes(run.summary.get("heldout_episodes"))),
        ("Chunks measured", f"{chunks:,.0f}" if chunks else "-"),
        ("Time in all", duration(run.number("minutes"))),
    ]


def _episodes(numbers: Sequence[int] | None) -> str:
    """Returns `0-15 (16)`."""
    return f"{numbers[0]}-{numbers[-1]} ({len(numbers)})" if numbers else "-"


def _on_cpu(run: RunRecord) -> bool:
    return str(run.config.get("device", "cpu")) == "cpu"


def _cost(summary: Mapping[str, Any], prefix: str) -> list[str]:
    minutes = summary.get(f"{prefix}minutes" if prefix else "policy_minutes")
    return [
        _number(summary.get(f"{prefix}parameters"), ",.0f"),
        _number(summary.get(f"{prefix}updates"), ",.0f"),
        duration(minutes),
    ]


def _interval(interval: Sequence[float] | None, style: str) -> str:
    return "-" if interval is None else " to ".join(format(end, style) for end in interval)


def _number(value: Any, style: str = ".4f") -> str:
    return "-" if value is None else format(value, style)
