"""Finds saved policies and reads their policy.json; without torch, so that a mistake is reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robot_rl.core.errors import CheckpointError
from robot_rl.core.files import at_home, read_json

WEIGHTS, HEAD = "policy.safetensors", "policy.json"
NEEDS = f"A policy is {HEAD} and {WEIGHTS}: copy both again, or take an earlier checkpoint."


def policy_folder(given: str, *, at: str = "policy") -> Path:
    """Returns where a policy is saved.

    Args:
        given: a run folder, whose final policy is meant, or the folder of a saved policy.
        at: begins the message.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(at_home(given))
    for folder in (path, path / "policy" / "final", path / "policy"):
        if (folder / HEAD).is_file():
            return folder
    raise CheckpointError(
        f"{at}: {given!r} holds no policy. Give the folder of a run that has ended, a policy of one "
        "(runs/<folder>/policy/base), or any folder with a policy.json."
    )


def read_head(folder: Path) -> dict[str, Any]:
    """Returns the policy.json of a saved policy: `policy` is how to build it, `meta` what it was made for.

    Raises:
        CheckpointError: it is missing, or not what was written.
    """
    return read_json(folder / HEAD, CheckpointError, NEEDS)
