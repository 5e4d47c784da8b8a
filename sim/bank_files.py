"""A start bank on the disk: states in which episodes may begin, by class, and the key of what they are of.

A bank is a folder: `bank.json`, and `<class>.npz` for each class. N rows of states, F numbers that an
episode draws of the model.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import at_home, make_folder, read_json, temporary_of, write_json

Array = NDArray[Any]

OWN = "own"
"""The class of starts that the task draws itself, which no bank holds."""
HEAD = "bank.json"
_REMEDY = "Make a new bank: robot-rl resets generate task=<task>."


@dataclass(frozen=True, kw_only=True)
class BankKey:
    """What the states of a bank are of: a state means something only there."""

    task: str
    robot: str
    model_hash: str
    """See `robot_rl.sim.backends.inspect_model.model_hash`."""
    num_state: int
    """Numbers in a row of the back end's state."""
    mujoco: str
    """Version that simulated: contacts mean something else from one to the next."""
    varied: tuple[str, ...]
    """What episodes draw of the model; see `Randomizer.labels`."""

    def check(self, here: BankKey, *, at: str) -> None:
        """Refuses another key, by the names of what differs.

        Raises:
            DatasetError: `at` begins its message.
        """
        mine, theirs = asdict(self), asdict(here)
        differs = [
            f"{name}: {mine[name]!r}, here {theirs[name]!r}" for name in mine if mine[name] != theirs[name]
        ]
        if not differs:
            return
        remedy = f"robot-rl resets generate task={here.task} robot={here.robot}"
        if self.varied != here.varied:
            remedy += f" randomize={str(bool(here.varied)).lower()}"
            differs.append("`varied` is what env.randomize draws")
        raise DatasetError(f"{at}: the bank is of something else. {'; '.join(differs)}. Make one: {remedy}")


@dataclass(frozen=True, kw_only=True)
class ClassBill:
    """What a class cost, and why rows were not taken."""

    tried: int
    rejected: Mapping[str, int]
    """Test -> rows that failed it first."""
    control_steps: int
    """Simulated, of all simulations together; also those before: grasps, walks."""
    physics_steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StartSet:
    """The accepted starts of one class."""

    states: Array
    """(N, num_state) float64, rows of the back end's state."""
    varied: Array
    """(N, F) float64, one column for each of `BankKey.varied`."""
    solved: Array
    """(N,) bool: the task is done already."""
    coords: Array
    """(N, 6) float32: `COORDS`."""

    def __len__(self) -> int:
        return len(self.states)


COORDS = ("thing_x", "thing_y", "thing_z", "tool_x", "tool_y", "tool_z")
"""Of a start: where the thing is from its place at the goal, in the goal's axes, and the tool from the thing,
in the world's axes; metres, of a hinge radians."""


@dataclass(frozen=True, kw_only=True)
class Bank:
    """All of a bank."""

    key: BankKey
    sets: dict[str, StartSet]
    bills: dict[str, ClassBill]
    settings: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """With which it was made, `seed` among them."""

    @property
    def digest(self) -> str:
        """16 hex digits of all its classes and states: two banks of one key differ in it."""
        found = hashlib.sha256()
        for name, each in self.sets.items():
            found.update(name.encode())
            found.update(np.ascontiguousarray(each.states).tobytes())
        return found.hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Writes a new folder; `bank.json` comes last, so that a bank cut short is none."""
        make_folder(folder)
        for name, found in self.sets.items():
            path = folder / f"{name}.npz"
            temporary = temporary_of(path)
            with temporary.open("wb") as file:
                np.savez_compressed(file, **{part.name: getattr(found, part.name) for part in fields(found)})
            temporary.replace(path)
        head = {
            "key": asdict(self.key),
            "classes": {
                name: {"rows": len(self.sets[name]), **asdict(self.bills[name])} for name in self.sets
            },
            "settings": self.settings,
        }
        write_json(folder / HEAD, head, is_checked=True)


def load_bank(folder: str | Path, *, at: str = "bank") -> Bank:
    """Reads a bank.

    Raises:
        DatasetError: there is none, or it is damaged; `at` begins the message.
    """
    path = Path(at_home(str(folder)))
    if not (path / HEAD).is_file():
        raise DatasetError(f"{at}: {str(folder)!r} is no start bank: it has no {HEAD}. {_REMEDY}")
    head = read_json(path / HEAD, DatasetError, _REMEDY)
    try:
        parts: dict[str, Any] = {**head["key"], "varied": tuple(head["key"]["varied"])}
        key = BankKey(**parts)
        rows = {name: bill.pop("rows") for name, bill in head["classes"].items()}
        bills = {name: ClassBill(**bill) for name, bill in head["classes"].items()}
        settings = head["settings"]
    except (KeyError, TypeError) as error:
        raise DatasetError(f"{at}: {path / HEAD} is not of this version ({error}). {_REMEDY}") from error
    sets = {name: _load_set(path / f"{name}.npz", rows[name], key, at) for name in rows}
    return Bank(key=key, sets=sets, bills=bills, settings=settings)


def _load_set(path: Path, rows: int, key: BankKey, at: str) -> StartSet:
    shapes = {
        "states": (rows, key.num_state),
        "varied": (rows, len(key.varied)),
        "solved": (rows,),
        "coords": (rows, len(COORDS)),
    }
    try:
        with np.load(path, allow_pickle=False) as parts:
            found = {name: parts[name] for name in shapes}
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DatasetError(f"{at}: {path} cannot be read ({error}). {_REMEDY}") from error
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise DatasetError(
                f"{at}: {path} has {name} of shape {found[name].shape}, need {shape}. {_REMEDY}"
            )
    return StartSet(**found)
