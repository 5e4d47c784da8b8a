"""Figures of a world model's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.worlds.calibration import LEVELS, Calibration, Played
from robot_rl.worlds.history import Array
from robot_rl.worlds.trust import TrustReport

_WIDTH, _HEIGHT, _DPI = 4.6, 3.6, 110


def draw_calibration(
    path: Path,
    title: str,
    rows: Sequence[Mapping[str, float]],
    calibration: Calibration,
    played: Sequence[Played],
) -> None:
    """Writes error by depth, coverage by depth, and error against disagreement with the gate."""
    figure = Figure(figsize=(3 * _WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    figure.suptitle(title)
    errors, covered, cloud = figure.subplots(1, 3)
    depth = [row["depth"] for row in rows]
    errors.plot(depth, [row["error"] for row in rows], "o-", label="model")
    errors.plot(
        depth, [row["error_of_copying"] for row in rows], "s--", color="0.6", label="the state stays as it is"
    )
    errors.set(xlabel="strides ahead", ylabel="error / change in a stride", xscale="log", yscale="log")
    errors.legend(frameon=False)
    _show_coverage(covered, rows)
    for found, colour in zip(played, ("C0", "C2", "C4", "C6", "C8"), strict=False):
        size = np.sqrt((found.error**2).mean(axis=1))
        some = np.random.default_rng(0).choice(len(size), min(400, len(size)), replace=False)
        cloud.plot(
            found.uncertainty[some], size[some], ".", ms=3, alpha=0.5, color=colour, label=f"{found.depth}"
        )
    for limit in calibration.gate[:1]:
        cloud.axvline(limit, color="0.3", linestyle=":", label="gate")
    cloud.set(xlabel="disagreement of the members", ylabel="error", xscale="log", yscale="log")
    cloud.legend(title="strides", fontsize=8, loc="lower right")
    figure.savefig(path)


def draw_coverage(path: Path, title: str, rows: Sequence[Mapping[str, float]], within: float) -> None:
    """Writes coverage by depth, and how far from its level it may be."""
    figure = Figure(figsize=(_WIDTH + 0.6, _HEIGHT), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    for level, colour in zip(LEVELS, ("C0", "C1"), strict=True):
        axes.axhspan(level - within, level + within, color=colour, alpha=0.12, lw=0)
    _show_coverage(axes, rows)
    axes.set_title(title, fontsize=9)
    figure.savefig(path)


def _show_coverage(axes: Axes, rows: Sequence[Mapping[str, float]]) -> None:
    depth = [row["depth"] for row in rows]
    for level, colour in zip(LEVELS, ("C0", "C1"), strict=True):
        axes.plot(depth, [row.get(f"coverage_{level:.0%}", np.nan) for row in rows], "o-", color=colour)
        axes.axhline(level, color=colour, linestyle=":", label=f"{level:.0%} interval")
    axes.set(xlabel="strides ahead", ylabel="errors inside, third split", xscale="log", ylim=(0.4, 1.0))
    axes.legend(frameon=False)


def draw_replays(path: Path, title: str, report: TrustReport, allowed: float) -> None:
    """Writes the shares of replayed real episodes that end otherwise in the model, and the allowed one."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    shares = (report.false_success, report.missed_success)
    for at, (share, number) in enumerate(zip(shares, report.replayed, strict=True)):
        if share is not None:
            low, high = wilson_interval(round(share * number), number)
            bars = np.clip([[share - low], [high - share]], 0, None)
            axes.errorbar([at], [share], yerr=bars, fmt="o", capsize=4, color=f"C{at}")
    axes.axhline(allowed, xmax=0.5, color="0.5", linestyle=":", label="allowed")
    names = [f"{report.replayed[0]} failures\nthat succeed", f"{report.replayed[1]} successes\nthat fail"]
    axes.set(xlim=(-0.5, 1.5), ylim=(0, 1), ylabel="share of replayed episodes")
    axes.set_xticks([0, 1], names)
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False)
    figure.savefig(path)


def draw_agreement(
    path: Path, title: str, rows: Sequence[Mapping[str, Any]], numbers: Mapping[str, float]
) -> None:
    """Writes imagined against real success, a mark for each policy, coloured by `kind`.

    Args: rows: `kind`, `imagined`, `real`, `episodes` (of the real success) of each policy.
    """
    figure = Figure(figsize=(_WIDTH + 0.6, _WIDTH), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], ":", color="0.6")
    for number, kind in enumerate(dict.fromkeys(str(row["kind"]) for row in rows)):
        mine = [row for row in rows if row["kind"] == kind]
        real = np.array([row["real"] for row in mine])
        spread = np.array([wilson_interval(round(r["real"] * r["episodes"]), r["episodes"]) for r in mine])
        low, high = real - spread[:, 0], spread[:, 1] - real
        imagined = [row["imagined"] for row in mine]
        bars = np.clip([low, high], 0, None)
        axes.errorbar(real, imagined, xerr=bars, fmt="o", ms=5, lw=0.8, color=f"C{number}", label=kind)
    shown = ", ".join(f"{name} {value:.2f}" for name, value in numbers.items())
    axes.set(xlabel="real success", ylabel="imagined success", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    axes.set_title(f"{title}\n{shown}", fontsize=9)
    axes.legend(frameon=False)
    figure.savefig(path)


def draw_curve(path: Path, title: str, rows: Sequence[Mapping[str, float]], wanted: float) -> None:
    """Writes the held-out error against the number of episodes that were learned from, and a wanted error."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    axes.plot([row["episodes"] for row in rows], [row["held_out_error"] for row in rows], "o-")
    axes.axhline(wanted, color="0.5", linestyle=":", label="wanted")
    axes.legend(frameon=False)
    axes.set(
        xlabel="episodes to learn from", ylabel="held-out error", xscale="log", yscale="log", title=title
    )
    figure.savefig(path)


def draw_strips(path: Path, strips: Array, depths: Sequence[int], stride: int) -> None:
    """Writes strips (h, w, 3) of real and predicted pictures, with what the columns are."""
    height, width = strips.shape[:2]
    columns = 1 + len(depths)
    figure = Figure(figsize=(1.4 * columns, 1.4 * columns * height / width + 0.4), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    axes.imshow(strips, interpolation="nearest")
    axes.axis("off")
    names = ["last real", *(f"{depth * stride} steps ahead" for depth in depths)]
    top = 1 - 0.2 / figure.get_figheight()
    for number, name in enumerate(names):
        figure.text((number + 0.5) / columns, top, name, ha="center", va="center")
    figure.savefig(path)


def draw_side_by_side(real: Array, imagined: Array) -> Array:
    """Returns films (T, h, w, 3) next to each other, the real one left; the shorter one stays at its end."""
    length = max(len(real), len(imagined))

    def stretched(film: Array) -> Array:
        return np.concatenate([film, np.repeat(film[-1:], length - len(film), axis=0)])

    return np.concatenate([stretched(real), stretched(imagined)], axis=2)
