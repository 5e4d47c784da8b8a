"""Pictures of a bank: where its starts are, and what they look like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from robot_rl.core.errors import RenderError
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.bank_files import StartSet
from robot_rl.sim.cameras import Camera

Array = NDArray[Any]

COVERAGE, PICTURES, REJECTED = "coverage.png", "pictures.png", "rejected.png"
COLUMNS = 6
_HEIGHT, _WIDTH = 180, 240
_COLOURS = ("#3b6fb6", "#e08a1e", "#2f9e62", "#b6413b", "#7a5aa8")
_MOST = 2000
"""Points of each class that are drawn."""


def draw_coverage(sets: Mapping[str, StartSet], path: Path, title: str) -> None:
    """Writes a figure: the thing from its place, from above and the side, and the tool from the thing."""
    from matplotlib.figure import Figure

    panels = [
        ("thing from its place at the goal, from above", 0, 1, "x (m)", "y (m)"),
        ("thing from its place at the goal, from the side", (0, 1), 2, "sideways (m)", "z (m)"),
        ("tool from the thing", (3, 4), 5, "sideways (m)", "z (m)"),
    ]
    figure = Figure(figsize=(15.0, 5.2), layout="constrained", dpi=110)
    figure.suptitle(title)
    for axes, (name, across, up, x_label, y_label) in zip(figure.subplots(1, 3), panels, strict=True):
        for (label, found), colour in zip(sets.items(), _COLOURS, strict=False):
            coords = found.coords[:_MOST]
            x = coords[:, across] if isinstance(across, int) else np.hypot(*coords[:, across].T)
            axes.scatter(
                x, coords[:, up], s=5, alpha=0.5, color=colour, label=f"{label} ({len(found):,})", lw=0
            )
        axes.set(title=name, xlabel=x_label, ylabel=y_label)
        axes.axhline(0.0, color="0.7", lw=0.6, zorder=0)
        axes.axvline(0.0, color="0.7", lw=0.6, zorder=0)
        axes.set_aspect("equal", adjustable="datalim")
    figure.axes[0].legend(loc="best", fontsize=9, markerscale=2.5)
    figure.savefig(path)


def draw_pictures(backend: Backend, rows: Mapping[str, Array], path: Path, camera: str) -> bool:
    """Writes a grid of pictures, a line for each class of states (n, num_state); False if nothing can draw.

    Args:
        backend: of the task, with `COLUMNS` simulations; their states are overwritten.
        rows: class -> states, of which `COLUMNS` are shown, spread over all.
        path: of the PNG.
        camera: of the scene.
    """
    try:
        renderer = backend.renderer([Camera(name=camera, height=_HEIGHT, width=_WIDTH)])
    except RenderError:
        return False
    lines: list[Array] = []
    try:
        for name, states in rows.items():
            chosen = np.linspace(0, len(states) - 1, COLUMNS).astype(int)
            backend.write_states(np.arange(len(chosen)), states[chosen])
            backend.forward()
            found = renderer.render_batch(np.arange(COLUMNS), camera)
            lines += [_label(name), np.concatenate(list(found), axis=1)]
    except RenderError:
        return False
    finally:
        renderer.close()
    Image.fromarray(np.concatenate(lines)).save(path)
    return True


def _label(text: str) -> Array:
    """Returns a strip with a text in it."""
    from PIL import ImageDraw

    strip = Image.new("RGB", (COLUMNS * _WIDTH, 18), "white")
    ImageDraw.Draw(strip).text((6, 3), text, fill="black")
    return np.asarray(strip)
