"""What tests of whole training runs share: a tiny run, what is left of one, and being killed."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import checkpoint

STATIONS = Path(checkpoint.__file__).parents[1] / "configs" / "stations"

TINY: dict[str, Any] = {
    "recipe": "tiny",
    "num_envs": 3,
    "n_exec": 4,
    "metrics_rows": 10,
    "env": {"task": "reach", "horizon_s": 0.7, "num_threads": 1},
    "demos": {"episodes": 4, "bias_m": 0.02},
    "policy": {"horizon": 8, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "bc": {"updates": 10, "batch": 16},
    "evaluate": {"episodes": 4, "num_envs": 4, "every_env_steps": 120, "quick_episodes": 4},
    "checkpoint": {"every_s": 0.0, "every_steps": 1},
    "video": {"episodes": 0, "failures": 0},
}
"""A flow that reaches: cloned in a blink, good for nothing."""

SMALL: dict[str, Any] = {
    "recipe": "small",
    "num_envs": 2,
    "n_exec": 4,
    "env": {"task": "reach", "horizon_s": 0.5, "num_threads": 1},
    "demos": {"episodes": 3},
    "policy": {"horizon": 8, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "bc": {"updates": 6, "batch": 8},
    "method": {
        "kind": "residual",
        "env_steps": 40,
        "batch": 8,
        "explore_steps": 10,
        "capacity": 1000,
        "algorithm": {"num_critics": 2, "width": 16, "depth": 1, "critic_warmup": 5},
    },
    "evaluate": {"episodes": 4, "num_envs": 2, "every_env_steps": 20, "quick_episodes": 2},
    "checkpoint": {"every_s": 0.0, "every_steps": 2},
    "video": {"episodes": 0, "failures": 0},
}
"""Every phase of a residual on such a flow."""

SMALL_FINETUNING: dict[str, Any] = {
    "size": "tiny",
    "horizon": 4,
    "picture": [24, 32],
    "heldout": 2,
    "updates": 6,
    "batch": 8,
    "stride": 2,
    "curve_points": 3,
    "metrics_rows": 6,
    "options": {"picture": [24, 32]},
    "act": {"lrs": [1e-3], "batches": [4]},
    "checkpoint": {"every_s": 0.0, "every_steps": 2},
}
"""Every phase of fine-tuning, with looks at the held-out error; ACT only where LeRobot is there."""


@contextmanager
def undisturbed(state: Path) -> Generator[None]:
    """Gives whole runs inside their own leases, and no report, which takes longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(state))
        for kind in ("phases", "finetune.run"):
            patch.setattr(f"robot_rl.train.{kind}.write_report", lambda folder: folder / "report.html")
        yield


class Killed(BaseException):
    """What a run gets here instead of SIGKILL; nothing catches it."""


@contextmanager
def killed_after(saves: int) -> Generator[None]:
    """Kills the run inside at the checkpoint after so many; outside, checkpoints are written as ever."""
    write, left = checkpoint.write_state, saves

    def write_until_killed(state: Any, folder: Path) -> None:
        nonlocal left
        write(state, folder)  # the checkpoint's files are there, its name is not: the worst moment
        left -= 1
        if left < 0:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_state", write_until_killed)
        with pytest.raises(Killed):
            yield


def folder_of(out: Path) -> Path:
    """Returns the folder of the one run in `out`."""
    (folder,) = (path.parent for path in out.glob("*/config.yaml"))
    return folder


def weights(folder: Path, which: str) -> bytes:
    """Returns the file of a policy's weights: `base` or `final`."""
    return (folder / "policy" / which / "policy.safetensors").read_bytes()


def rows_of(folder: Path) -> list[str]:
    """Returns the rows of metrics, without what the clock says."""
    rows = read_metrics(folder / "metrics.jsonl")
    return [repr({key: value for key, value in row.items() if key != "wall_s"}) for row in rows]


def patient_station(folder: Path, **more: Any) -> Path:
    """Returns the file of a station that a loaded test machine is not too late for."""
    settings = yaml.safe_load((STATIONS / "sim_in_process.yaml").read_text())
    settings["limits"]["max_observation_age_s"] = 2.0
    settings["supervisor"] |= {"max_state_age_s": 2.0, "stop_after_s": 10.0}
    path = folder / "patient.yaml"
    path.write_text(yaml.safe_dump({**settings, **more}))
    return path
