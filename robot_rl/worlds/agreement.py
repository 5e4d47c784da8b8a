"""The policies judged both in a world model and in the env that it imitates, kept in the model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.core.errors import CheckpointError
from robot_rl.core.files import read_json, write_json
from robot_rl.worlds.audit import agreement
from robot_rl.worlds.inventory import changing

_FILE = "agreement.json"
_ALIKE = ("version", "settings", "seed", "episodes")
"""What rows have in common whose successes can be compared."""
_KEY = ("policy", *_ALIKE)
Row = dict[str, Any]


def keep_policy(
    folder: Path,
    policy: str,
    *,
    version: int,
    settings: Mapping[str, Any],
    seed: int,
    episodes: int,
    imagined: float,
    real: float,
) -> None:
    """Adds a policy's success in both worlds; it replaces what was kept of these settings, seed and episodes.

    Args:
        folder: of the model.
        policy: its folder.
        version: of the model.
        settings: of the imagined episodes, all of them.
        seed: of the starts.
        episodes: behind each success.
        imagined: success in the model.
        real: success in the env that it imitates.

    Raises:
        CheckpointError: the file is damaged, or another process still changes it after half a minute.
    """
    row: Row = {
        "policy": str(Path(policy).resolve()),
        "version": version,
        "settings": dict(settings),
        "seed": seed,
        "episodes": episodes,
        "imagined": imagined,
        "real": real,
    }
    with changing(folder):
        rows = [one for one in policies_of(folder) if any(one[name] != row[name] for name in _KEY)]
        write_json(folder / _FILE, {"policies": [*rows, row]}, is_checked=True)


def policies_of(folder: Path) -> list[Row]:
    """Returns the rows that `keep_policy` kept, the newest last.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return []
    rows = read_json(path, CheckpointError, f"Remove {path}: the policies can be judged again.")["policies"]
    return [row for row in rows if "settings" in row]  # older rows do not tell how they were judged


def alike(rows: list[Row], version: int) -> list[Row]:
    """Returns the rows of a version, of the settings, seed and episodes of the newest of them."""
    mine = [row for row in rows if row["version"] == version]
    return [row for row in mine if all(row[name] == mine[-1][name] for name in _ALIKE)]


def numbers_of(rows: list[Row]) -> dict[str, float]:
    """Returns the agreement over policies that were judged alike; one has a bias alone."""
    if not rows:
        return {}
    found = agreement(np.array([row["imagined"] for row in rows]), np.array([row["real"] for row in rows]))
    return found if len(rows) > 1 else {"bias": found["bias"]}
