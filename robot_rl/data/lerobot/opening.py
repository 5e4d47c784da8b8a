"""Makes the index of a dataset of any version that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.index import NOT_UNDERSTOOD, DatasetIndex, not_understood, read_info, read_v3
from robot_rl.data.lerobot.v21 import read_v21


def open_index(
    folder: Path, known: dict[Path, Any] | None = None, sums: Checksums | None = None
) -> DatasetIndex:
    """Returns the index of a dataset of version 3 or 2.1.

    Args: known: see `read_v3`.

    Raises:
        DatasetError: no dataset, another version, or damaged metadata.
    """
    sums = Checksums(folder) if sums is None else sums
    info = read_info(folder, sums)
    version = str(info["codebase_version"])
    try:
        if version.startswith("v3."):
            return read_v3(folder, info, sums, known)
        if version == "v2.1":
            return read_v21(folder, info, sums)
    except DatasetError:
        raise
    except NOT_UNDERSTOOD as error:
        raise DatasetError(not_understood(folder / "meta", error)) from error
    raise DatasetError(
        f"{folder}: codebase_version {version!r}, allowed: 'v2.1' and 'v3.*'. {_converter(version)}"
    )


def _converter(version: str) -> str:
    """Returns a sentence that names the tool for a version that is not read here."""
    if version.startswith("v2"):
        return (
            "LeRobot 0.3 makes v2.0 into v2.1: `pip install lerobot==0.3.3`, then "
            "`python -m lerobot.datasets.v21.convert_dataset_v20_to_v21 --repo-id=...`."
        )
    if version.startswith("v1"):
        return (
            "LeRobot 0.3 makes v1.x into v2.0 and that into v2.1: `pip install lerobot==0.3.3`, then "
            "`python -m lerobot.datasets.v2.convert_dataset_v1_to_v2 --repo-id=...` and "
            "`python -m lerobot.datasets.v21.convert_dataset_v20_to_v21 --repo-id=...`."
        )
    return "A later robot_rl may read it; LeRobot of that version does."
