"""Policies by name, from a folder, or from the hub: what `policy=` may be.

Names of ours and of LeRobot's make a new policy for the dataset; a saved policy goes on with the
statistics of the dataset, after its state, actions and cameras were compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.policy import DemoBatch
from robot_rl.core.registry import resolve
from robot_rl.data.facts import DatasetFacts
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.vla import tiny
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.names import FLOWS, NAMES, OWN, PLAIN, saved_folder
from robot_rl.train.finetune.settings import Recipe

Module = Any
"""A policy that is a `torch.nn.Module` as well; Python has no type for both."""

PICTURES: dict[str, tuple[int, int]] = {"tiny": (48, 64), "small": (96, 128)}
"""Height and width of the pictures of new policies, by size."""

_SMALL: dict[str, dict[str, Any]] = {
    "act": {
        "dim_model": 128,
        "n_heads": 4,
        "dim_feedforward": 512,
        "pretrained_backbone_weights": None,
    },
    "diffusion": {
        "down_dims": (64, 128, 256),
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 10,
        "pretrained_backbone_weights": None,
    },
}
"""LeRobot's own settings for size=small; the VLAs have no such size, and take that of their authors."""


def make_policy(config: FinetuneConfig, facts: DatasetFacts, generator: torch.Generator) -> Module:
    """Builds or opens the policy that a run trains.

    Raises:
        ConfigError: no such name, folder or option; or the `lerobot` extra is missing.
        CheckpointError: a saved policy of other features, or a file that is damaged or not here.
    """
    name, folder = config.policy, saved_folder(config.policy)
    if name in OWN:
        _refuse_lora(config)
        options = {"preset": config.size, "horizon": config.horizon, **config.options}
        return resolve("policy", name, at="policy").create(facts, options, generator=generator)
    if folder is not None and (folder / "policy.json").is_file():
        _refuse_lora(config)
        policy, meta = load_policy(folder)
        check_features(str(folder), policy, meta, facts)
        return policy
    if name in NAMES:
        return new_lerobot(config, name, facts, generator)
    kind = _lerobot("act") if folder is None else _lerobot(_type_of(folder))
    return kind.create(facts, pretrained_options(config, folder), generator=generator)


def check_policy(config: FinetuneConfig, facts: DatasetFacts) -> None:
    """Refuses a LeRobot policy that does not fit; `facts` may lack statistics of pictures.

    Raises:
        ConfigError: see `make_policy`.
        CheckpointError: see `make_policy`.
    """
    name, folder = config.policy, saved_folder(config.policy)
    if name in OWN or (folder is not None and (folder / "policy.json").is_file()):
        return
    kind = _lerobot(name if folder is None else _type_of(folder))
    new = name in NAMES
    kind.check(facts, new_options(config, name) if new else pretrained_options(config, folder))


def pretrained_options(config: FinetuneConfig, folder: Path | None) -> dict[str, Any]:
    """Returns the options of a LeRobot policy that goes on from a folder, or from a model of the hub."""
    return {"pretrained": str(folder or config.policy), **_lora(config), **config.options}


def new_lerobot(config: FinetuneConfig, name: str, facts: DatasetFacts, generator: torch.Generator) -> Module:
    """Builds a LeRobot policy with random weights, or (full size) those that its configuration names."""
    options = new_options(config, name)
    kind = _lerobot(name)
    if config.size != "tiny":
        return kind.create(facts, options, generator=generator)
    patched = tiny.tiny_gemma() if name in ("pi0", "pi05") else nullcontext()
    with TemporaryDirectory(prefix="robot_rl-") as folder, patched:
        small = tiny.options(name, folder)
        settings = {**small["config"], **options["config"]}
        return kind.create(facts, {**small, **options, "config": settings}, generator=generator)


def new_options(config: FinetuneConfig, name: str) -> dict[str, Any]:
    """Returns the options of a new LeRobot policy; those of the run only for its own policy."""
    horizon = config.horizon
    settings: dict[str, Any] = {"chunk_size": horizon, "n_action_steps": horizon}
    if name == "diffusion":
        settings = {"horizon": horizon, "n_action_steps": min(8, horizon), "n_obs_steps": 1}
    given = dict(config.options) if name == config.policy else {}
    settings = {**_SMALL.get(name, {}), **settings} if config.size == "small" else settings
    options = {"type": name, "config": {**settings, **given.pop("config", {})}}
    lora = _lora(config) if name == config.policy else {}
    return {**options, **lora, **given}


def picture_size(config: FinetuneConfig) -> tuple[int, int] | None:
    """Returns the size to read pictures at; None leaves them as they were recorded."""
    if config.picture is not None:
        return config.picture
    if config.policy in (*OWN, *PLAIN, *FLOWS):
        return PICTURES.get(config.size)
    folder = saved_folder(config.policy)
    if folder is None or not (folder / "policy.json").is_file():
        return None  # LeRobot's policies resize by themselves
    policy, _ = load_policy(folder)
    seen = getattr(getattr(policy, "config", None), "picture", None)
    return None if seen is None else (int(seen[0]), int(seen[1]))


def recipe_of(policy: Module) -> Recipe:
    """Returns how the policy's authors train it."""
    preset = getattr(getattr(policy, "config", None), "get_optimizer_preset", None)
    if preset is None:
        return Recipe()
    own = preset()
    return Recipe(lr=own.lr, weight_decay=own.weight_decay, grad_clip=own.grad_clip_norm)


def fit_units(policy: Module, chunks: Callable[[], Iterable[DemoBatch]]) -> None:
    """Lets a policy measure what the dataset's statistics do not say, where it asks for it."""
    measure = getattr(policy, "measure", None)
    if measure is not None:
        measure(chunks())


def save(policy: Module, folder: Path, facts: DatasetFacts, meta: PolicyMeta | None = None) -> None:
    """Writes the policy so that it is complete: in LeRobot's format for LeRobot's policies.

    Args: meta: what it is for; None: the dataset, with all actions of a chunk executed.
    """
    if hasattr(policy, "save"):
        policy.save(folder)
    else:
        save_policy(folder, policy, meta=meta or PolicyMeta(**vars(facts.meta), n_exec=policy.horizon))


def check_features(at: str, policy: Module, meta: PolicyMeta, facts: DatasetFacts) -> None:
    """Refuses a saved policy of other joints or cameras than the dataset's.

    Raises:
        CheckpointError: the message names what only one of them has.
    """
    for what, have, want in (
        ("state", meta.state_names, facts.meta.state_names),
        ("action", meta.action_names, facts.meta.action_names),
    ):
        if have != want:
            only = [name for name in (*have, *want) if name not in have or name not in want]
            shown = ", ".join(only[:8]) if only else "the same names in another order"
            raise CheckpointError(
                f"policy: {at} was trained with {len(have)} {what} elements, the dataset has {len(want)}; "
                f"they differ in: {shown}. Fine-tune it on data of its own robot, or name a new policy."
            )
    cameras = tuple(getattr(getattr(policy, "config", None), "cameras", ()))
    lacking = [camera for camera in cameras if camera not in facts.cameras]
    if lacking:
        raise CheckpointError(
            f"policy: {at} sees {', '.join(lacking)}, the dataset's cameras are: "
            f"{', '.join(facts.cameras) or 'none'}. Record that camera, or name a new policy."
        )


def _lerobot(name: str) -> Any:
    return resolve("policy", "lerobot_flow" if name in FLOWS else "lerobot", at="policy")


def _type_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / "config.json").read_text())["type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"policy: {folder / 'config.json'} names no policy type: {error!r}. Take another copy."
        ) from error


def _lora(config: FinetuneConfig) -> dict[str, Any]:
    lora = config.lora
    return {"lora": {"rank": lora.rank, "alpha": lora.alpha}} if lora.rank else {}


def _refuse_lora(config: FinetuneConfig) -> None:
    if config.lora.rank:
        raise ConfigError(
            f"lora.rank: got {config.lora.rank} with policy={config.policy}, allowed: 0. "
            "Adapters are for LeRobot's policies; ours are small enough to train whole."
        )
