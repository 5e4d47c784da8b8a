"""How a dataset fits a LeRobot policy: names, sizes, cameras, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.data.facts import DatasetFacts
from robot_rl.policies.vla.lerobot_files import option

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
STD_FLOOR = 1e-3
"""Smallest standard deviation, and half-range, in the dataset's units: a joint that never moved."""

_PADS = ("smolvla", "pi0", "pi05")
"""Types that pad state and action to a largest size, and accept fewer cameras."""
_PADDED = 32
"""The largest size in LeRobot's configurations."""
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def padded_sizes(kind: str, facts: DatasetFacts, given: Mapping[str, Any], *, at: str) -> dict[str, int]:
    """Returns the sizes that a new policy pads state and action to: LeRobot's, or the dataset's if larger.

    Raises:
        ConfigError: a size in `given` that the dataset does not fit into.
    """
    if kind not in _PADS:
        return {}
    sizes = {
        "max_state_dim": len(facts.meta.state_names),
        "max_action_dim": len(facts.meta.action_names),
    }
    for name, needed in sizes.items():
        size = given.get(name)
        if isinstance(size, int) and size < needed:
            raise ConfigError(
                f"{at}: config.{name} is {size}, the dataset has {needed} elements. Leave it out, and it "
                "becomes large enough."
            )
    return {name: max(_PADDED, needed) for name, needed in sizes.items()}


def check_cameras(facts: DatasetFacts, cameras: Mapping[str, str], *, at: str) -> None:
    """Refuses a dataset without pictures, and a renaming that leaves out every camera.

    Raises:
        ConfigError: the message says how to get one.
    """
    if not facts.cameras:
        raise ConfigError(
            f"{at}: it needs at least one camera, the dataset has none. Record with one, as in `robot-rl "
            "collect cameras=[front]`, or give another dataset."
        )
    if not cameras:
        raise ConfigError(
            f"{at}: it needs at least one camera, and rename leaves out every one of the dataset's: "
            f"{', '.join(facts.cameras)}. Keep one."
        )


def features(facts: DatasetFacts, cameras: Mapping[str, str]) -> dict[str, Any]:
    """Returns `input_features` and `output_features` of LeRobot's configuration, as plain values."""
    inputs: dict[str, Any] = {STATE: {"type": "STATE", "shape": [len(facts.meta.state_names)]}}
    for camera, target in cameras.items():
        height, width, _ = facts.features[f"{camera}.rgb"].shape
        inputs[IMAGES + target] = {"type": "VISUAL", "shape": [3, height, width]}
    outputs = {ACTION: {"type": "ACTION", "shape": [len(facts.meta.action_names)]}}
    return {"input_features": inputs, "output_features": outputs}


def dataset_stats(
    facts: DatasetFacts, cameras: Mapping[str, str]
) -> dict[str, dict[str, NDArray[np.float32]]]:
    """Returns the dataset's statistics under LeRobot's names, after its cameras were renamed.

    Pictures without statistics take ImageNet's, as LeRobot's own training does. Spreads have a
    floor, or a joint that never moved would turn rounding into thousands of deviations.
    """
    names = {"state": STATE, ACTION: ACTION}
    stats = {
        target: {name: np.asarray(value, np.float32) for name, value in facts.stats[key].items()}
        for key, target in names.items()
        if key in facts.stats
    }
    for table in stats.values():
        if "std" in table:
            table["std"] = np.maximum(table["std"], STD_FLOOR)
        for low, high in (("min", "max"), ("q01", "q99"), ("q10", "q90")):
            if low in table and high in table:
                short = np.maximum(STD_FLOOR - (table[high] - table[low]) / 2, 0)
                table[low], table[high] = table[low] - short, table[high] + short
    for camera, target in cameras.items():
        measured = facts.stats.get(f"{camera}.rgb") or _IMAGENET
        stats[IMAGES + target] = {
            name: np.asarray(value, np.float32).reshape(-1, 1, 1) for name, value in measured.items()
        }
    return stats


def rename_map(table: Mapping[str, Any]) -> dict[str, str]:
    """Returns the renaming that a preprocessor's table does first."""
    for step in table.get("steps", ()):
        if step.get("registry_name") == "rename_observations_processor":
            return dict(step.get("config", {}).get("rename_map", {}))
    return {}


def matched_cameras(
    kind: str,
    table: Mapping[str, Any],
    rename: Mapping[str, str],
    given: Mapping[str, str | None],
    facts: DatasetFacts,
    *,
    at: str,
) -> dict[str, str]:
    """Returns camera of the dataset -> camera of the checkpoint.

    Raises:
        CheckpointError: they do not fit; the message names both.
        ConfigError: there is none.
    """
    known = [k.removeprefix(IMAGES) for k in table.get("input_features") or {} if k.startswith(IMAGES)]
    known = [camera for camera in known if not camera.startswith("empty_camera")]
    earlier = {before.removeprefix(IMAGES): after.removeprefix(IMAGES) for before, after in rename.items()}
    given = given or earlier
    cameras = {c: t for c in facts.cameras if (t := given.get(c, c)) is not None}
    check_cameras(facts, cameras, at=at)
    strangers = [c for c, t in cameras.items() if t not in known]
    unseen = [] if kind in _PADS else [t for t in known if t not in cameras.values()]
    if strangers or unseen or len(set(cameras.values())) < len(cameras):
        raise CheckpointError(
            f"{at}: the checkpoint sees the cameras {', '.join(known) or '(none)'}; the dataset has "
            f"{', '.join(facts.cameras)}. Say which is which: "
            + option(f"rename={{{facts.cameras[0]}: {(known or ['camera1'])[0]}}}")
            + "; null leaves a camera out."
        )
    return cameras


def check_sizes(kind: str, table: Mapping[str, Any], facts: DatasetFacts, *, at: str) -> None:
    """Refuses a dataset whose state or action does not fit the checkpoint's."""
    inputs, outputs = table.get("input_features") or {}, table.get("output_features") or {}
    for what, names, feature, limit in (
        ("state", facts.meta.state_names, inputs.get(STATE), "max_state_dim"),
        ("action", facts.meta.action_names, outputs.get(ACTION), "max_action_dim"),
    ):
        have, allowed = len(names), feature["shape"][0] if feature else 0
        fits = have <= table.get(limit, _PADDED) if kind in _PADS else have == allowed
        if not fits:
            other = f", or a new policy, which takes any size: policy={kind}" if kind in _PADS else ""
            want = f"at most {table.get(limit, _PADDED)}" if kind in _PADS else str(allowed)
            raise CheckpointError(
                f"{at}: the dataset's {what} has {have} elements ({', '.join(names[:4])}, ...), the "
                f"checkpoint takes {want}. Use a dataset of the robot it was trained on{other}."
            )


def check_statistics(pipeline: Any, features: Mapping[str, Any], config: Any, *, at: str) -> None:
    """Refuses features without statistics, which LeRobot would pass unnormalised, and other sizes."""
    state = {name: tensor for step in pipeline.state_dict().values() for name, tensor in step.items()}
    for key, feature in features.items():
        mode = config.normalization_mapping.get(feature.type.value)
        if mode is None or mode.value == "IDENTITY" or "empty_camera" in key:
            continue
        found = [tensor for name, tensor in state.items() if name.rpartition(".")[0] == key and tensor.ndim]
        if not found:
            raise CheckpointError(
                f"{at}: no statistics of {key!r}, which are needed to normalise it ({mode.value}). "
                f"Take those of a dataset: {option('normalisation=dataset')}."
            )
        sizes = {len(tensor) for tensor in found} - {1}
        if sizes and feature.shape[0] not in sizes:
            raise CheckpointError(
                f"{at}: the statistics of {key!r} have {max(sizes)} elements, the dataset has "
                f"{feature.shape[0]}. Take those of the dataset: {option('normalisation=dataset')}."
            )
