"""Paths that are entered into the inventory of this machine: world models, station files."""

from __future__ import annotations

from pathlib import Path

from robot_rl.core.errors import DeviceError
from robot_rl.core.files import at_home, read_json, write_json
from robot_rl.sched.lease_file import default_path


class Entered:
    """A table in the folder of the leases; what it lists may be gone by now."""

    def __init__(self, name: str, key: str) -> None:
        """Args: name: of the file; key: of the paths in it."""
        self._name, self._key = name, key

    def paths(self) -> list[str]:
        """Returns the paths, absolute, in the order in which they were entered.

        Raises:
            DeviceError: the table cannot be read.
        """
        table = self._table
        if not table.is_file():
            return []
        return list(read_json(table, DeviceError, f"Remove {table}.")[self._key])

    def enter(self, path: str | Path) -> None:
        """Adds a path, as the last one."""
        self._write([*self._others(path), str(_absolute(path))])

    def remove(self, path: str | Path) -> None:
        """Takes a path out of the table; nothing happens if it is not there."""
        self._write(self._others(path))

    def _others(self, path: str | Path) -> list[str]:
        return [other for other in self.paths() if other != str(_absolute(path))]

    def _write(self, paths: list[str]) -> None:
        self._table.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._table, {self._key: paths}, is_checked=True)

    @property
    def _table(self) -> Path:
        return default_path().parent / self._name


def _absolute(path: str | Path) -> Path:
    return Path(at_home(str(path))).resolve()
