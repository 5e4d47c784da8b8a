"""The policies judged both in a world model and in the env that it imitates, kept in the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.core.errors import CheckpointError
from robot_rl.core.files import read_json, write_json
from robot_rl.worlds.audit import agreement

_FILE = "agreement.json"


def keep_policy(
    folder: Path, policy: str, *, version: int, imagined: float, real: float, episodes: int
) -> None:
    """Adds a policy's success in both worlds; it replaces what was kept of that policy and version.

    Args:
        folder: of the model.
        policy: its folder.
        version: of the model.
        imagined: success in the model.
        real: success in the env that it imitates.
        episodes: behind each.
    """
    row = {"policy": str(Path(policy).resolve()), "kind": f"version {version}"}
    rows = [one for one in policies_of(folder) if {name: one[name] for name in row} != row]
    rows.append({**row, "imagined": imagined, "real": real, "episodes": episodes})
    write_json(folder / _FILE, {"policies": rows}, is_checked=True)


def policies_of(folder: Path) -> list[dict[str, Any]]:
    """Returns `policy`, `kind` (the version of the model), `imagined`, `real` and `episodes` of each.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return []
    return read_json(path, CheckpointError, f"Remove {path}: the policies can be judged again.")["policies"]


def numbers_of(rows: list[dict[str, Any]], version: int) -> dict[str, float]:
    """Returns the agreement over the policies that a version was judged by; one has a bias alone."""
    mine = [row for row in rows if row["kind"] == f"version {version}"]
    if not mine:
        return {}
    found = agreement(np.array([row["imagined"] for row in mine]), np.array([row["real"] for row in mine]))
    return found if len(mine) > 1 else {"bias": found["bias"]}
