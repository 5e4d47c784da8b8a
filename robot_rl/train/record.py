"""A run's folder, the versions and the machine behind its numbers, and its report."""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
import shutil
import subprocess
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, Literal

from robot_rl import __version__
from robot_rl.config.compose import CONFIG_REMEDY, read
from robot_rl.config.used import renewed
from robot_rl.core.errors import ConfigError, RobotRLError
from robot_rl.core.files import make_folder, read_checked_text, replace_file
from robot_rl.core.machine import check_device, usable_cores
from robot_rl.train.config import RunConfig

_IDENTITY = "identity"
"""File with the run's random name, and the number of the folder that it was made in."""


def new_folder(out: str, name: str) -> Path:
    """Makes and returns `<out>/<date-time>-<name>`."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = Path(out) / f"{stamp}-{name}{suffix}"
        try:
            make_folder(folder, is_new=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"out: cannot make {str(folder)!r}: {error.strerror}. Give a folder that you may write to."
            ) from error
        return folder
    raise ConfigError(f"out: {out!r} holds a thousand runs of this second. Choose another folder.")


def identity_of(folder: Path) -> str:
    """Returns a run's random name, which it keeps over all its lives; a copy of its folder gets another one.

    What waits for a run on other machines is its own by that name: a copy must not take it. A folder that
    was moved to another disk counts as a copy.

    Raises:
        OSError: the disk refuses.
    """
    file, here = folder / _IDENTITY, str(folder.stat().st_ino)
    with contextlib.suppress(FileNotFoundError, ValueError):  # none yet, or a power cut took its content
        identity, made_in = file.read_text().split()
        if made_in == here:
            return identity
    identity = secrets.token_hex(4)
    replace_file(file, f"{identity} {here}\n")
    return identity


@contextmanager
def removed_if_refused(folder: Path) -> Generator[None]:
    """A block that begins a new run; one that is refused before it has done anything leaves no folder."""
    try:
        yield
    except (RobotRLError, KeyboardInterrupt) as error:
        early = ("config.yaml", _IDENTITY)
        found = [path for path in folder.rglob("*") if path.is_file() and path.name not in early]
        if not any(path.stat().st_size for path in found):  # metrics.jsonl was opened, no row was written
            shutil.rmtree(folder, ignore_errors=True)
            getattr(error, "__notes__", []).clear()  # how to resume it
        raise


def check_kind(folder: Path, kind: Literal["train", "finetune"], *, at: str) -> None:
    """Refuses the folder of a run that another command made; `at` begins the message.

    Raises:
        ConfigError: no run folder, or one of the other kind.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        name = "<recipe>" if kind == "train" else "finetune-<policy>"
        raise ConfigError(
            f"{at}: {str(folder)!r} is no run folder, it has no config.yaml. "
            f"Give one that `robot-rl {kind}` made, such as runs/<date-time>-{name}-seed<k>."
        )
    lines = read_checked_text(path, ConfigError, CONFIG_REMEDY).splitlines()
    is_finetuning = any(line.startswith("dataset:") for line in lines)
    if is_finetuning == (kind == "finetune"):
        return
    other = "finetune" if is_finetuning else "train"
    if at == "run":
        remedy = f"it was measured on held-out episodes of its dataset: see {folder / 'report.html'}"
    else:
        remedy = f"go on with it by `robot-rl {other} resume={folder}`"
    raise ConfigError(
        f"{at}: {str(folder)!r} is a run of `robot-rl {other}`, not of `robot-rl {kind}`; {remedy}."
    )


def load_config(folder: Path, *, at: str = "resume") -> RunConfig:
    """Returns the configuration a run was made with; `at` begins the message if there is none."""
    check_kind(folder, "train", at=at)
    return read(RunConfig, folder / "config.yaml", renewed=renewed)


def load_config_here(folder: Path, *, at: str) -> tuple[RunConfig, str]:
    """Returns the configuration of a run whose policy is to act here, and the device that it learned on.

    Where this machine lacks that device, the configuration says the CPU: what learned on a GPU acts anywhere.
    """
    device = ""

    def moved(settings: dict[str, Any]) -> dict[str, Any]:
        nonlocal device
        found = renewed(settings)
        device = str(found.get("device", "cpu"))
        try:
            check_device(device)
        except ConfigError:
            found["device"] = "cpu"
        return found

    check_kind(folder, "train", at=at)
    return read(RunConfig, folder / "config.yaml", renewed=moved), device


def write_report(folder: Path) -> Path:
    """Writes report.html of one run and returns its path."""
    from robot_rl.telemetry import report  # matplotlib: only when a run has ended

    return report.write_report([folder]).path


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of robot_rl, its commit where it is known, and of the packages behind a result."""
    own = {"robot_rl": __version__, **({"robot_rl_commit": found} if (found := commit()) else {})}
    return own | {name: version(name) for name in packages}


def commit() -> str | None:
    """Returns the commit that robot_rl is of, with `+changes` where files differ from it; None if unknown."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        return head and f"{head}+changes" if changes else head
    with contextlib.suppress(PackageNotFoundError, ValueError):
        facts = json.loads(distribution("robot-rl").read_text("direct_url.json") or "{}")
        return facts.get("vcs_info", {}).get("commit_id")
    return None


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine(device: str) -> dict[str, str]:
    """Returns what the numbers were made on."""
    learner = "cpu"
    if device.startswith("cuda"):
        import torch  # the rest of this module is read before a command that has been mistyped loads it

        learner = torch.cuda.get_device_name(device)
    return {
        "node": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(usable_cores()),
        "learner": learner,
        "python": platform.python_version(),
    }


def _processor() -> str:
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
