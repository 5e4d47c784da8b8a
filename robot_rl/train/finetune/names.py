"""What `policy=` may name; without torch, so that a mistake is answered before it is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from robot_rl.core.errors import CheckpointError, ConfigError, nearest
from robot_rl.core.files import at_home

OWN = ("small_vla",)
PLAIN = ("act", "diffusion")
FLOWS = ("smolvla", "pi0", "pi05")
NAMES = (*OWN, *PLAIN, *FLOWS)
"""What `policy=` makes anew."""


def saved_folder(policy: str) -> Path | None:
    """Returns the folder that `policy=` names: a saved policy's, or of a run that has one.

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
            f"policy: {policy!r} holds no policy: neither policy.json (ours) nor config.json (LeRobot's). "
            "Give a run folder, its policy/, or a LeRobot checkpoint (its pretrained_model/)."
        )
    owner, slash, _ = policy.partition("/")
    local = policy.startswith((".", "~")) or owner == "runs" or Path(owner).is_dir()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", policy) and not local:
        return None
    if slash:
        raise ConfigError(
            f"policy: no such folder: {policy!r}. Give a run folder, its policy/, or a LeRobot checkpoint; "
            "models of the hub are given as <owner>/<name>."
        )
    raise ConfigError(
        f"policy: no policy and no folder named {policy!r}.{nearest(policy, NAMES)} "
        "Models of the hub are given as <owner>/<name>."
    )
