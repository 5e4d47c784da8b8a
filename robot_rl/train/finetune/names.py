"""What `policy=` may name; without torch, so that mistakes are found before torch is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

from robot_rl.core.errors import CheckpointError, ConfigError, nearest
from robot_rl.core.files import at_home
from robot_rl.policies.saved import HEAD, read_head

OWN = ("small_vla",)
PLAIN = ("act", "diffusion")
FLOWS = ("smolvla", "pi0", "pi05")
NAMES = (*OWN, *PLAIN, *FLOWS)
"""Policies that `policy=` makes; all else is a saved one."""


def saved_folder(policy: str, *, at: str = "policy") -> Path | None:
    """Returns the folder that `policy=` names: a saved policy's, or of a run that has one; `at` is its key.

    Raises:
        ConfigError: it is no name, no folder, and cannot be a model of the hub.
        CheckpointError: the folder holds no policy.
    """
    if policy in NAMES:
        return None
    path = Path(at_home(policy))
    for folder in (path, path / "policy", path / "policy" / "final"):
        if any((folder / file).is_file() for file in ("policy.json", "config.json")):
            return folder
    if path.is_dir():
        raise CheckpointError(
            f"{at}: {policy!r} holds no policy: neither policy.json (ours) nor config.json (LeRobot's). "
            "Give a run folder, its policy/, or a LeRobot checkpoint (its pretrained_model/)."
        )
    owner, slash, _ = policy.partition("/")
    local = policy.startswith((".", "~")) or owner == "runs" or Path(owner).is_dir()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", policy) and not local:
        return None
    if slash:
        raise ConfigError(
            f"{at}: no such folder: {policy!r}. Give a run folder, its policy/, or a LeRobot checkpoint; "
            "models of the hub are given as <owner>/<name>."
        )
    raise ConfigError(
        f"{at}: no policy and no folder named {policy!r}.{nearest(policy, NAMES)} "
        "Models of the hub are given as <owner>/<name>."
    )


def is_ours(policy: str, *, at: str = "policy") -> bool:
    """Returns whether `policy=` names one of ours, or the folder of a saved one, and none of LeRobot's."""
    folder = saved_folder(policy, at=at)
    return policy in OWN if folder is None else (folder / HEAD).is_file()


def kind_of(policy: str) -> str:
    """Returns the kind of the policy that `policy=` names; for a model of the hub, its name."""
    folder = saved_folder(policy)
    if folder is None:
        return Path(policy).name
    if is_ours(policy):
        return str(read_head(folder)["policy"]["kind"])
    return str(json.loads((folder / "config.json").read_text())["type"])
