"""The result of a deployment: successes, latencies, figures, films."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robot_rl.core.errors import StorageError
from robot_rl.core.files import replace_file, write_json
from robot_rl.core.refusal import refusing
from robot_rl.hal.leased import LeasedEnv
from robot_rl.hal.vector import Array
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.train.deploy.config import DeployConfig
from robot_rl.train.deploy.env import Timing
from robot_rl.train.deploy.measured import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILMED = 2
"""Episodes on film."""
_HEIGHT, _WIDTH = 360, 480
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome:
    """One episode."""

    seed: int
    success: bool
    steps: int
    limited: int
    """Control steps in which safety changed what was asked."""


@dataclass(kw_only=True)
class Journal:
    """Collects results while the arm moves, and writes `deploy.json` however the deployment ends."""

    folder: Path
    config: DeployConfig
    task: str
    real: bool
    instruction: str | None = None
    """The words that the policy gets; None if none."""
    episodes: list[EpisodeOutcome] = field(default_factory=lambda: list[EpisodeOutcome]())
    timing: list[Timing] = field(default_factory=lambda: list[Timing]())
    tracked: list[tuple[Array, Array]] = field(default_factory=lambda: list[tuple[Array, Array]]())
    """Of the first episode: joint positions asked for, and measured a control step later; (n,) each."""
    execution: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """How chunks were executed: rtc, planning_ms, late_chunks, held_steps."""
    preempted: list[str] = field(default_factory=lambda: list[str]())
    """Who took the arm in the middle of an episode, each time; that episode began again later."""
    waited_s: list[float] = field(default_factory=lambda: list[float]())
    """How long each lease of the arm was waited for."""
    ended: str = "interrupted"
    """`complete`, `interrupted`, or the error that ended it."""

    def latency_table(self) -> dict[str, dict[str, float]]:
        """Returns quantiles in ms: of the whole way, of acting, and of the ages of state and pictures."""
        columns = {name: f"{name}_s" for name in ("latency", "act", "state_age", "picture_age")}
        table: dict[str, dict[str, float]] = {}
        for name, column in columns.items():
            values = 1e3 * np.array([getattr(timing, column) for timing in self.timing])
            values = values[np.isfinite(values)]
            if len(values):
                found = np.quantile(values, list(_QUANTILES.values()))
                table[name] = dict(zip(_QUANTILES, np.round(found, 3).tolist(), strict=True))
        return table

    def to_json(self) -> dict[str, Any]:
        solved, total = sum(episode.success for episode in self.episodes), len(self.episodes)
        return {
            "task": self.task,
            "instruction": self.instruction,
            "station": self.config.station,
            "real": self.real,
            "run": self.config.run,
            "which": self.config.which,
            "success": solved / total if total else None,
            "ci": list(wilson_interval(solved, total)),
            "episodes": total,
            "mean_steps": float(np.mean([episode.steps for episode in self.episodes])) if total else None,
            "control_steps": len(self.timing),
            "late_steps": sum(timing.late for timing in self.timing),
            "limited_steps": sum(episode.limited for episode in self.episodes),
            "latency_ms": self.latency_table(),
            **self.execution,
            "preempted": self.preempted,
            "waited_s": [round(seconds, 3) for seconds in self.waited_s],
            "ended": self.ended,
            "folder": str(self.folder),
        }

    @refusing(StorageError, kept="What the arm did is in experience/.")
    def write(self) -> None:
        """Writes deploy.json and, if anything moved, its figure."""
        report = self.to_json() | {"config": asdict(self.config)}
        report["by_episode"] = [asdict(episode) for episode in self.episodes]
        write_json(self.folder / "deploy.json", report, is_checked=True)
        if self.timing:
            from robot_rl.telemetry.figures import render  # matplotlib: only when the arm rests

            figure = render(self._draw, height_in=4.6)
            replace_file(self.folder / "deploy.svg", figure)

    def _draw(self, figure: Figure) -> None:
        times, joints = figure.subplots(1, 2)
        latency = [1e3 * timing.latency_s for timing in self.timing if np.isfinite(timing.latency_s)]
        times.hist(latency, bins=40)
        times.set_title("from measurement to command")
        times.set_xlabel("ms")
        times.set_ylabel("control steps")
        if self.tracked:
            asked, measured = (np.array(rows) for rows in zip(*self.tracked, strict=True))
            for joint in range(asked.shape[1]):
                line = joints.plot(asked[:, joint], linewidth=0.9, linestyle=(0, (3, 2)))[0]
                joints.plot(measured[:, joint], color=line.get_color(), linewidth=1.4)
            joints.set_title("joints in rad: asked (dashed), measured a step later")
            joints.set_xlabel("control step of the first episode")


def film(path: Path, env: LeasedEnv, moments: list[Measured]) -> None:
    """Draws an episode from what was measured, and writes it as mp4.

    Raises:
        RenderError: this machine cannot draw.
    """
    from robot_rl.sim.cameras import Camera
    from robot_rl.telemetry.video import write_video

    backend, camera = env.mirror.env.backend, env.mirror.camera
    renderer = backend.renderer([Camera(name=camera, height=_HEIGHT, width=_WIDTH)])
    try:
        pictures: list[Array] = []
        for measured in moments:
            env.show(measured)
            pictures.append(renderer.render_batch(np.zeros(1, int), camera)[0])
        write_video(path, np.stack(pictures), env.control_hz)
    finally:
        renderer.close()
