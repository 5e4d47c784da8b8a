"""A base of others, `bc.policy=<folder>`: whether it fits the run, and opening it; torch only to open it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.core.errors import CheckpointError, ConfigError, require
from robot_rl.core.files import read_json
from robot_rl.core.names import ENVIRONMENT
from robot_rl.core.registry import resolve
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.fit import misfit
from robot_rl.policies.onnx_saved import NOISE, onnx_folder, read_onnx_folder
from robot_rl.policies.vla.lerobot_saved import (
    GivenFolder,
    lerobot_folder,
    names_of,
    read_lerobot_folder,
)
from robot_rl.train.config import RunConfig
from robot_rl.train.finetune.settings import LoraConfig
from robot_rl.train.improve.config import ChainSettings, LatentSettings

if TYPE_CHECKING:
    from robot_rl.policies.spec import SavedPolicy

_STATE, _APART = "observation.state", f"observation.{ENVIRONMENT}"


def find_given(config: RunConfig) -> GivenFolder | None:
    """Returns what `bc.policy` says of a policy of others; None where it names one of ours."""
    if config.bc.policy is None:
        return None
    if folder := lerobot_folder(config.bc.policy):
        return read_lerobot_folder(folder)
    return _described(folder) if (folder := onnx_folder(config.bc.policy)) else None


def _described(folder: Path) -> GivenFolder:
    """Returns what a graph of ONNX reads, by LeRobot's names."""
    _, found = read_onnx_folder(folder)
    inputs: dict[str, tuple[int, ...]] = {}
    for key, shape in found.shapes.items():
        if key.endswith(".rgb"):
            inputs[f"observation.images.{key.removesuffix('.rgb')}"] = (shape[2], *shape[:2])
        elif key != NOISE:
            inputs[f"observation.{key}"] = shape
    return GivenFolder(
        folder=folder,
        type="onnx" if NOISE in found.shapes else "onnx_without_noise",
        inputs=inputs,
        action_dim=found.action_dim,
        horizon=found.horizon,
        n_exec=found.horizon,
        scheduler="",
        dataset=None,
    )


def check_given(
    config: RunConfig, given: GivenFolder, meta: EpisodesMeta, features: Mapping[str, Feature]
) -> None:
    """Refuses a policy of others that does not fit the run's env, or that its method cannot improve.

    Args:
        config: of the run.
        given: the policy.
        meta: of the env's episodes.
        features: of the env's observations.

    Raises:
        ConfigError: the method cannot improve it, or the run shows it something else.
        CheckpointError: it is of another embodiment; the message names each feature that differs.
    """
    at = f"bc.policy: {given.folder}"
    if "online" in config.plan:
        _check_method(config, given, at)
    check_embodiment(at, given, meta)
    _check_shown(at, given, features)
    check_adapters(config, given.kind)
    require(config.n_exec <= given.horizon, "n_exec", config.n_exec, f"1 to the base's {given.horizon}")


def check_adapters(config: RunConfig, kind: str) -> None:
    """Refuses adapters where a base of that kind does not learn by them."""
    rank, learns = config.bc.lora.rank, isinstance(config.method, ChainSettings)
    is_fine = rank == 0 or (learns and kind == "lerobot_flow" and "online" in config.plan)
    require(is_fine, "bc.lora.rank", rank, "0 but with method=ppo or grpo and LeRobot's smolvla, pi0, pi05")


def check_embodiment(at: str, given: GivenFolder, meta: EpisodesMeta) -> None:
    """Refuses a policy of another state or action; by names, if the dataset of its training is still there.

    Raises:
        CheckpointError: names each feature that differs.
    """
    sizes = ((_STATE, given.inputs.get(_STATE, (0,))[0], meta.state_names),)
    sizes = (*sizes, ("action", given.action_dim, meta.action_names))
    wrong = [
        f"{feature} has {size or 'no'} elements, here it is {len(names)} ({', '.join(names)})"
        for feature, size, names in sizes
        if size != len(names)
    ]
    info = given.dataset_info()
    if not wrong and info:
        wrong = [found] if (found := misfit(_trained_on(info, meta), meta)) else []
    if wrong:
        raise CheckpointError(
            f"{at}: made for another embodiment: {'; '.join(wrong)}. Take the task, robot and env.state of "
            "the data that it was trained on."
        )


def open_given(
    given: GivenFolder, *, instruction: str, is_frozen: bool = True, lora: LoraConfig | None = None
) -> SavedPolicy:
    """Returns the policy: frozen, with the state for features; or LeRobot's own, to be trained.

    Args:
        given: which.
        instruction: its instruction where it was saved without one.
        is_frozen: whether it learns nothing.
        lora: adapters that learn in the place of all weights.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    from robot_rl.policies.given import GivenPolicy

    if given.kind.startswith("onnx"):
        graph = resolve("policy", "onnx", at="bc.policy").from_folder(given.folder)
        return GivenPolicy(graph, graph.state_scale()).eval()
    is_flow = given.kind == "lerobot_flow"
    options: dict[str, Any] = {"flow": {"process": "flow_ode"}} if is_flow else {}
    if lora is not None and lora.rank:
        options["lora"] = {"rank": lora.rank, "alpha": lora.alpha}
    kind = "lerobot" if is_frozen and not is_flow else given.kind  # LeRobot's own sampling where it can be
    policy = resolve("policy", kind, at="bc.policy").from_pretrained(given.folder, **options)
    policy.instruction = policy.instruction or instruction
    return GivenPolicy(policy, policy.state_scale()).eval() if is_frozen else policy


def given_policy(config: RunConfig, given: GivenFolder, instruction: str) -> SavedPolicy:
    """Returns the base of a run: frozen, unless the method learns from its chain."""
    import torch

    from robot_rl.policies.vla.lerobot import seeded
    from robot_rl.train.assemble import generator

    learns = "online" in config.plan and isinstance(config.method, ChainSettings)
    how: dict[str, Any] = {"instruction": instruction, "is_frozen": not learns, "lora": config.bc.lora}
    with seeded(generator(config.seed, "lora"), torch.device("cpu")):  # LeRobot draws from the global one
        return open_given(given, **how)


def meta_of(given: GivenFolder, dataset: Path | None) -> tuple[EpisodesMeta, tuple[str, ...]]:
    """Returns what a policy is for, and its `environment_state`, as the dataset of its training says.

    Args:
        given: the policy.
        dataset: of its training; None for the one that its train_config.json names.

    Raises:
        CheckpointError: there is no such dataset, or it is none of ours, so that it names no task.
    """
    from robot_rl.data.lerobot.reader import Dataset

    root = dataset or given.dataset
    if root is None or not (root / "meta" / "robot_rl.json").is_file():
        why = f"{root} names no task" if root else "its dataset is not where its train_config.json says"
        raise CheckpointError(
            f"policy: {given.folder} does not say for which task and robot it is, and {why}. Name the "
            "dataset of its training, recorded by `robot-rl collect`: dataset=<folder>."
        )
    meta = Dataset(root).meta
    check_embodiment(f"policy: {given.folder}", given, meta)
    collected = root / "meta" / "collected.json"
    settings = read_json(collected, CheckpointError, "")["settings"] if collected.is_file() else {}
    return meta, tuple(settings.get(ENVIRONMENT, ()))


def _check_method(config: RunConfig, given: GivenFolder, at: str) -> None:
    method = config.method
    method.check_base(at, given.kind)
    if isinstance(method, LatentSettings) and given.type == "diffusion" and given.scheduler != "DDIM":
        raise ConfigError(
            f"{at}: noise_scheduler_type is {given.scheduler}, allowed with method=latent: DDIM. DDPM draws "
            "more noise than what is steered. The same weights serve: write DDIM and num_inference_steps 10 "
            "into its config.json, or use method=residual."
        )


def _check_shown(at: str, given: GivenFolder, features: Mapping[str, Feature]) -> None:
    """Refuses an env that does not show what the policy reads."""
    known = [_STATE, _APART, *(key for key in given.inputs if key.startswith("observation.images."))]
    unknown = [key for key in given.inputs if key not in known]
    if unknown:
        raise CheckpointError(f"{at}: it reads {', '.join(unknown)}, which no env here shows.")
    wrong: list[str] = []
    words: list[str] = []
    for camera, (height, width) in given.cameras.items():
        shown = features.get(f"{camera}.rgb")
        if shown is None or shown.shape[:2] != (height, width):
            found = "not at all" if shown is None else f"at {shown.shape[0]} x {shown.shape[1]}"
            wrong.append(f"it reads camera {camera} at {height} x {width} pixels, the run shows it {found}")
            words = [f"env.cameras=[{','.join(given.cameras)}]", f"env.image_size=[{height},{width}]"]
    size = given.inputs.get(_APART, (0,))[0]
    shown = features.get(ENVIRONMENT)
    if size != (shown.shape[0] if shown else 0) and size:
        found = f"{shown.shape[0]} elements of it" if shown else "none"
        wrong.append(f"it reads {_APART} with {size} elements, the run shows {found}")
        words.append(f"env.{ENVIRONMENT}=[<as in robot-rl collect>]")
    if wrong:
        raise ConfigError(f"{at}: {'; '.join(wrong)}. Say {' '.join(words)}.")


def _trained_on(info: Mapping[str, Any], meta: EpisodesMeta) -> EpisodesMeta:
    """Returns the names and the rate of a dataset; where it has none, those of `meta`."""
    table = dict(info)
    return EpisodesMeta(
        task=meta.task,
        robot=meta.robot,
        control_hz=float(table.get("fps") or meta.control_hz),
        instruction=meta.instruction,
        state_names=names_of(table, _STATE) or meta.state_names,
        action_names=names_of(table, "action") or meta.action_names,
    )
