"""From a recording to a robot file, with the numbers and the figure that say whether to believe it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from robot_rl.core.files import replace_file, write_json
from robot_rl.core.registry import table
from robot_rl.sim.joint_log import JointLog
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.measured import LIKE, joints_of
from robot_rl.sim.robots.sysid import Fit, identify
from robot_rl.telemetry.figures import AFTER, BEFORE, INK, render
from robot_rl.telemetry.progress import ProgressDisplay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROLLOUTS = 400
"""About as many as a fit takes."""
_ROW_IN = 1.15


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What is fitted to which recording."""

    recording: str
    """The file of `robot-rl sysid record`, or its folder."""
    robot: str | None = None
    """Name or file of the model to begin with; the station's if None."""
    delay: bool = True
    """Whether to fit one delay, too."""
    out: str | None = None
    """Folder of the results; that of the recording if None."""


def fit(config: FitConfig, display: ProgressDisplay) -> dict[str, Any]:
    """Fits, and writes robot.yaml, fit.json and fit.svg; returns what fit.json has.

    Raises:
        RobotRLError: no recording, other joints, or the toolbox is missing.
    """
    path = Path(config.recording)
    path = path / "recording.npz" if path.is_dir() else path
    log = JointLog.load(path)
    name = config.robot or log.robot
    robot = load_robot(name)
    with display.phase("fit", _ROLLOUTS, unit="simulations") as progress:
        found = identify(
            log, robot, delay=config.delay, progress=lambda count: progress.update(min(count, _ROLLOUTS))
        )
    folder = path.parent if config.out is None else Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    like = name if name in table("robot") else str(Path(name).resolve())
    replace_file(folder / "robot.yaml", _robot_file(found, like, path))
    replace_file(
        folder / "fit.svg",
        render(lambda figure: _draw(figure, found, log), height_in=_ROW_IN * len(log.joints)),
    )
    before = joints_of(robot)
    report = {
        "robot": str(folder / "robot.yaml"),
        "like": like,
        "joints": list(log.joints),
        "seconds": round(log.seconds, 3),
        "measured": {key: list(values) for key, values in found.measured.given().items()},
        "model": {key: list(values) for key, values in before.given().items()},
        "delay_s": found.delay_s,
        "interval": {key: list(values) for key, values in found.interval.items()},
        "rmse_deg": list(found.rmse_deg),
        "rmse_before_deg": list(found.rmse_before_deg),
        "rmse_all_deg": mean_square(found.rmse_deg),
        "rmse_all_before_deg": mean_square(found.rmse_before_deg),
    }
    write_json(folder / "fit.json", report)
    return report


def mean_square(values: tuple[float, ...]) -> float:
    """Returns the root of the mean square of numbers that are such roots, of equally many each."""
    return float(np.sqrt(np.mean(np.square(values))))


def _robot_file(found: Fit, like: str, recording: Path) -> str:
    content = {LIKE: like, "measured": {key: _rounded(row) for key, row in found.measured.given().items()}}
    return (
        f"# Joints as measured: {recording.resolve()}\n"
        f"# Position error {mean_square(found.rmse_before_deg):.3f} deg before, "
        f"{mean_square(found.rmse_deg):.3f} deg with these; delay {1e3 * found.delay_s:.1f} ms.\n"
        + yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    )


def _rounded(row: tuple[float, ...]) -> list[float]:
    return [float(f"{value:.4g}") for value in row]


def _draw(figure: Figure, found: Fit, log: JointLog) -> None:
    grid: Any = figure.subplots(len(log.joints), 2, sharex=True, squeeze=False)
    measured = np.degrees(found.measured_rad)
    before, after = np.degrees(found.before_rad), np.degrees(found.after_rad)
    for joint, (name, (motion, error)) in enumerate(zip(log.joints, grid, strict=True)):
        for rows, color, width in ((measured, INK, 1.8), (before, BEFORE, 1.2), (after, AFTER, 1.0)):
            motion.plot(found.times_s, rows[:, joint], color=color, linewidth=width)
        for rows, color in ((before, BEFORE), (after, AFTER)):
            error.plot(found.times_s, (rows - measured)[:, joint], color=color, linewidth=1.0)
        motion.set_title(f"{name} in deg")
        rmse = f"{found.rmse_before_deg[joint]:.2f} deg before, {found.rmse_deg[joint]:.2f} deg with the fit"
        error.set_title(f"simulated - measured: {rmse}")
    labels = ("measured", "simulated before", "simulated with the fit")
    figure.legend(grid[0][0].lines[:3], labels, loc="outside upper center", ncols=3)
    for axes in grid[-1]:
        axes.set_xlabel("s")
