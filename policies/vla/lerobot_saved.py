"""What a folder that LeRobot saved says of its policy; without torch: a misfit is reported at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robot_rl.core.errors import CheckpointError
from robot_rl.core.files import at_home

FLOWS = ("smolvla", "pi0", "pi05")
"""Types whose chunks are the end of a flow."""
_PLACES = ("", "policy", "pretrained_model", "checkpoints/last/pretrained_model", "last/pretrained_model")
"""Where below a given folder the policy may be: `lerobot-train` makes folders of this form."""
_IMAGES = "observation.images."


@dataclass(frozen=True, kw_only=True)
class GivenFolder:
    """A policy of others as its files describe it: of LeRobot, config.json and train_config.json."""

    folder: Path
    type: str
    """`act`, `diffusion`, `smolvla`, ..."""
    inputs: dict[str, tuple[int, ...]]
    """LeRobot's name of what it observes -> shape; pictures (3, height, width)."""
    action_dim: int
    horizon: int
    """H, the length of its chunks."""
    n_exec: int
    """Actions of a chunk that LeRobot executes."""
    scheduler: str
    """Of a diffusion policy: `DDPM` or `DDIM`."""
    dataset: Path | None
    """What it was trained on, where that was a folder that is still there."""

    @property
    def cameras(self) -> dict[str, tuple[int, int]]:
        """Camera -> height and width of its pictures."""
        shown = {key.removeprefix(_IMAGES): s for key, s in self.inputs.items() if key.startswith(_IMAGES)}
        return {name: (s[1], s[2]) for name, s in shown.items() if not name.startswith("empty_camera")}

    @property
    def kind(self) -> str:
        """The kind of base: what the methods that can improve it ask for."""
        if self.type.startswith("onnx"):
            return self.type
        return "lerobot_flow" if self.type in FLOWS else f"lerobot_{self.type}"

    def dataset_info(self) -> dict[str, Any]:
        """Returns the meta/info.json of the dataset, or nothing."""
        path = self.dataset and self.dataset / "meta" / "info.json"
        return _table(path) if path and path.is_file() else {}


def lerobot_folder(given: str | Path) -> Path | None:
    """Returns the folder in `given` that LeRobot saved a policy to, or None."""
    path = Path(at_home(str(given)))
    for place in _PLACES:
        found = path / place
        if (found / "config.json").is_file() and not (found / "policy.json").is_file():
            return found
    return None


def read_lerobot_folder(folder: Path) -> GivenFolder:
    """Reads what a folder says of its policy.

    Raises:
        CheckpointError: a file is damaged, or says no type, no input or no action.
    """
    table = _table(folder / "config.json")
    trained = _table(folder / "train_config.json") if (folder / "train_config.json").is_file() else {}
    root = (trained.get("dataset") or {}).get("root")
    try:
        outputs = {key: _shape(feature) for key, feature in table["output_features"].items()}
        rename = _renamed(folder)
        inputs: dict[str, tuple[int, ...]] = {}
        for key, feature in table["input_features"].items():
            inputs[rename.get(str(key), str(key))] = _shape(feature)
        horizon = int(table.get("chunk_size") or table["horizon"])
        return GivenFolder(
            folder=folder,
            type=str(table["type"]),
            inputs=inputs,
            action_dim=outputs["action"][0],
            horizon=horizon,
            n_exec=min(int(table.get("n_action_steps", horizon)), horizon),
            scheduler=str(table.get("noise_scheduler_type", "")),
            dataset=Path(root) if root and Path(root).is_dir() else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{folder}: config.json does not describe a policy: {error!r}. Take another copy of the folder "
            "that LeRobot saved (its pretrained_model/)."
        ) from error


def names_of(info: dict[str, Any], feature: str) -> tuple[str, ...]:
    """Returns the names of a feature's elements in a dataset's info.json; () where it has none."""
    names = (info.get("features", {}).get(feature) or {}).get("names")
    if isinstance(names, dict) and len(names) == 1:  # {"motors": [...]}
        names = next(iter(names.values()))
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _renamed(folder: Path) -> dict[str, str]:
    """Returns what the preprocessor renames, backwards: the policy's name -> the observation's."""
    path = folder / "policy_preprocessor.json"
    renamed: dict[str, str] = {}
    for step in _table(path).get("steps", ()) if path.is_file() else ():
        renamed |= step.get("config", {}).get("rename_map", {})
    return {after: before for before, after in renamed.items()}


def _shape(feature: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in feature["shape"])


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}. Take another copy of the folder.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is no table of keys. Take another copy of the folder.")
    return found
