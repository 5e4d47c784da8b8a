"""What a world model cost and gave, by version: the real control steps behind it, the imagined ones in it.

A table in the model's folder, which every process that imagines adds to; it outlives them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from robot_rl.config.build import build
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import read_json, write_json
from robot_rl.worlds.inventory import changing

logger = logging.getLogger(__name__)

_FILE = "bill.json"
_EVERY_S = 5.0
"""A process that is killed loses the imagined steps of so long."""


@dataclass(kw_only=True)
class VersionBill:
    """Of one version of a model."""

    version: int
    episodes: int
    """Real ones behind it."""
    real_steps: int
    """Their control steps; those of earlier versions are among them."""
    imagined: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    """Imagined control steps by who made them: the holder of the lease, as `robot-rl devices` shows it."""

    def words(self) -> str:
        """Returns a sentence for people."""
        total = sum(self.imagined.values())
        by = ", ".join(f"{who} {steps:,}" for who, steps in sorted(self.imagined.items()))
        found = (
            f"version {self.version}: {self.real_steps:,} real control steps behind it, {total:,} imagined"
        )
        return f"{found} ({by})" if by else found


@dataclass(kw_only=True)
class _Table:
    versions: list[VersionBill]


def bills_of(folder: Path) -> list[VersionBill]:
    """Returns the bills of all versions, the newest last; none of a model that an earlier program fitted.

    Raises:
        CheckpointError: the table is damaged, or no such table.
    """
    path = folder / _FILE
    if not path.is_file():
        return []
    remedy = f"Remove {path}: counting begins at 0 again."
    content = read_json(path, CheckpointError, remedy)
    try:
        return build(_Table, content).versions
    except ConfigError as error:
        raise CheckpointError(f"{path}: damaged: {error} {remedy}") from error


def keep_version(folder: Path, *, version: int, episodes: int, real_steps: int) -> None:
    """Notes what is behind a version; what was imagined in it stays. The caller is `changing` the folder.

    A bill that cannot be read or written costs a warning: the model is more than its bill.
    """
    facts: dict[str, Any] = {"version": version, "episodes": episodes, "real_steps": real_steps}
    try:
        bills = bills_of(folder)
        before = next((bill.imagined for bill in bills if bill.version == version), {})
        others = [bill for bill in bills if bill.version != version]
        _write(folder, [*others, VersionBill(**facts, imagined=before)])
    except (CheckpointError, OSError) as error:
        logger.warning("%s: version %d is not in its bill: %s", folder, version, error)


def add_imagined(folder: Path, steps: int, *, version: int, episodes: int, real_steps: int, by: str) -> None:
    """Adds imagined control steps to the bill of a version, made by `by`; the rest is as in `VersionBill`.

    Raises:
        CheckpointError: the folder is gone, the table is damaged, or another process still changes the model
            after half a minute.
        OSError: nothing can be written there.
    """
    with changing(folder):
        bills = bills_of(folder)
        if not any(bill.version == version for bill in bills):
            bills.append(VersionBill(version=version, episodes=episodes, real_steps=real_steps))
        for bill in bills:
            if bill.version == version:
                bill.imagined[by] = bill.imagined.get(by, 0) + steps
        _write(folder, bills)


def _write(folder: Path, bills: list[VersionBill]) -> None:
    rows = [asdict(bill) for bill in sorted(bills, key=lambda bill: bill.version)]
    write_json(folder / _FILE, {"versions": rows}, is_checked=True)


class Meter:
    """Counts the imagined control steps of one env, and adds them to the bill now and then."""

    def __init__(self, folder: Path | None, *, version: int, episodes: int, real_steps: int, by: str) -> None:
        """Begins at 0.

        Args:
            folder: of the model; None: it is in memory alone, and nothing is kept.
            version, episodes, real_steps: of the model, as in `VersionBill`.
            by: who imagines.
        """
        self._folder, self.by = folder, by
        self._version: dict[str, int] = {"version": version, "episodes": episodes, "real_steps": real_steps}
        self._steps, self._failures = 0, 0
        self._due_s = time.monotonic() + _EVERY_S

    def add(self, steps: int) -> None:
        """Counts control steps over all envs."""
        self._steps += steps
        if time.monotonic() >= self._due_s:
            self.write()

    def write(self) -> None:
        """Adds what was counted since the last time to the bill.

        Where that fails, it costs a warning, not the run: the steps are added the next time, and each failure
        in a row doubles the time until then.
        """
        if self._folder is not None and self._steps:
            try:
                add_imagined(self._folder, self._steps, by=self.by, **self._version)
                self._steps = self._failures = 0
            except (CheckpointError, OSError) as error:
                words = "%s: %d imagined steps are not in its bill: %s"
                logger.warning(words, self._folder, self._steps, error)
                self._failures += 1
        self._due_s = time.monotonic() + _EVERY_S * 2**self._failures
