"""LeRobot checkpoint folders: where their files come from, what they hold, how they are written.

A folder holds `config.json`, `model.safetensors`, the two processor pipelines as JSON with their
statistics and, in ours, the tokenizer (and for SmolVLA the configuration of its VLM) in a subfolder, so
that no file has to come from the hub. Hub names are resolved to local folders here, before LeRobot sees
them: this is the one place that can need a network.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import file_checksum, listed, restore_folder, swap_folder, write_json, write_synced
from robot_rl.core.files import read_json as read_checked_json
from robot_rl.core.refusal import refusals

CONFIG, WEIGHTS = "config.json", "model.safetensors"
CHECKSUMS = "robot_rl_checksums.json"
"""Of every other file of a folder that we wrote; LeRobot does not read it."""
PIPELINES = ("policy_preprocessor", "policy_postprocessor")
ASSETS = {"smolvla": "vlm", "pi0": "tokenizer", "pi05": "tokenizer"}
"""Subfolder of the tokenizer, and of the VLM's configuration, for the types that have one."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_NEEDED = {
    "smolvla": ((CONFIG,), ("processor_config.json", "preprocessor_config.json"), _TOKENIZERS),
    "pi0": (_TOKENIZERS,),
    "pi05": (_TOKENIZERS,),
}
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")

Files = dict[str, bytes]
"""Path relative to a checkpoint folder -> content; never the weights."""


def extra(module: str) -> Any:
    """Imports a module of the `lerobot` extra.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        with quiet():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"LeRobot policies: the package {error.name!r} is not installed. On Python 3.12 or later: "
            "pip install -e '.[lerobot]'. `small_vla`, `flow` and `diffusion` need no extra."
        ) from error


def option(setting: str) -> str:
    """Returns how to give a setting, in Python and on the command line."""
    return f"{setting} (for `robot-rl finetune`: options.{setting})"


def hub_folder(
    name: str, *, at: str, what: str, remedy: str, revision: str = "", weights: bool = False
) -> Path:
    """Returns the local folder `name`, or that of the hub repository `name` in the local cache.

    `remedy` ends the message: how to give the downloaded FOLDER.

    Raises:
        CheckpointError: it is no folder, and the hub cannot be reached or does not have it.
    """
    restore_folder(Path(name).absolute())
    if Path(name).is_dir():
        return Path(name)
    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else list(_SMALL_FILES)
    if name.startswith(("/", ".", "~")):
        raise CheckpointError(
            f"{at}: no such folder for {what}: {name!r}. Give an existing one, or a hub id."
        )
    hub = extra("huggingface_hub")
    try:
        with quiet():
            return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors, a bad name a ValueError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{at}: {what} {name!r} is no folder, and cannot be fetched from the hub ({reason}). Where there "
            f"is a network: `hf download {name} --local-dir FOLDER`; then give that folder: {remedy}."
        ) from error


def assets_folder(policy_type: str, name: str, *, at: str, weights: bool = False) -> Path:
    """Returns a local folder with the tokenizer, and the VLM's configuration, of a policy type.

    Raises:
        CheckpointError: it cannot be fetched, or lacks a file.
    """
    what = "the VLM" if policy_type == "smolvla" else "the tokenizer"
    folder = hub_folder(name, at=at, what=what, remedy=option("vlm=FOLDER"), weights=weights)
    heavy = ((WEIGHTS, "model.safetensors.index.json"),) if weights else ()
    for alternatives in _NEEDED[policy_type] + heavy:
        if not any((folder / file).is_file() for file in alternatives):
            raise CheckpointError(
                f"{at}: {what} in {folder} lacks {' or '.join(alternatives)}. Where there is a network: "
                f"`hf download {name} --local-dir FOLDER`; then give that folder: {option('vlm=FOLDER')}."
            )
    return folder


def read_json(path: Path, *, at: str) -> dict[str, Any]:
    """Reads a JSON table of a checkpoint.

    Raises:
        CheckpointError: it is missing or no JSON table.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        hint = ""
        if path.stem in PIPELINES and (path.parent / CONFIG).is_file():
            hint = (
                " Checkpoints of LeRobot before 0.4 have none: convert it once with `python -m "
                f"lerobot.processor.migrate_policy_normalization --pretrained-path {path.parent}`."
            )
        raise CheckpointError(f"{at}: {path.name} cannot be read: {error}.{hint}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{at}: {path.name} is no table of keys. Take another copy of it.")
    return values


def load_weights(model: nn.Module, path: Path, *, at: str) -> None:
    """Loads every tensor of a safetensors file, and leaves none of the model's untouched.

    LeRobot's own loading ignores missing names, and for pi0 any failure; its policy is then untrained.
    Tied tensors may be stored under one of their names. Values are cast to the types of the model.

    Raises:
        CheckpointError: the file is missing or cut short, or a tensor is missing, unexpected or of
            another shape.
    """
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{at}: the weights {path.name} are missing or damaged: {error}. Copy the file again."
        ) from error
    saved = _present_names(model, saved)
    own = model.state_dict()
    tied = {name: group for group in tied_names(own) for name in group}
    problems = [
        f"{name} is missing"
        for name in own
        if name not in saved and not any(other in saved for other in tied.get(name, ()))
    ]
    problems += [f"{name} is unexpected" for name in saved if name not in own]
    problems += [
        f"{name} is {tuple(saved[name].shape)}, not {tuple(own[name].shape)}"
        for name in own.keys() & saved.keys()
        if saved[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise CheckpointError(
            f"{at}: {path.name} does not fit the policy that {CONFIG} describes: "
            f"{'; '.join(problems[:4])}{more}. Nothing was loaded."
        )
    model.load_state_dict(saved, strict=False)


def tied_names(state: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the groups of names that share one memory, in the order of `state`."""
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            groups.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def write_checksums(folder: Path) -> None:
    """Writes the checksum of every file of a folder, below it too."""
    paths = [path for path in listed(folder) if path.is_file() and path != folder / CHECKSUMS]
    checksums = {path.relative_to(folder).as_posix(): file_checksum(path)[1] for path in paths}
    write_json(folder / CHECKSUMS, {"files": checksums}, is_checked=True)


def verify(folder: Path, *, at: str) -> None:
    """Compares every file of a folder with its checksum; a folder of others has none.

    Raises:
        CheckpointError: a file is missing, cut short or altered.
    """
    if not (folder / CHECKSUMS).exists():
        return
    remedy = f"Take another copy of the folder; if you changed a file on purpose, remove {CHECKSUMS}."
    for name, checksum in read_checksums(folder, remedy).items():
        with refusals(CheckpointError, folder / name, remedy):
            found = file_checksum(folder / name)[1]
        if found != checksum:
            raise CheckpointError(f"{at}: {name} was cut short or altered. {remedy}")


def read_checksums(folder: Path, remedy: str) -> dict[str, int]:
    """Returns the checksums that a folder has, by the path of the file."""
    found = read_checked_json(folder / CHECKSUMS, CheckpointError, remedy).get("files")
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / CHECKSUMS}: damaged: it names no files. {remedy}")
    return found


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes files under a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, content)


def pack(folder: Path, prefix: str) -> Files:
    """Reads every file under a folder; their names begin with `prefix/`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def write_folder(folder: Path, files: Mapping[str, bytes], weights: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint folder, which takes the place of an older one only when complete.

    Raises:
        CheckpointError: the disk refused; the older folder, if any, is untouched.
    """
    temporary = folder.with_name(f".writing-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        unpack(files, temporary)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        with (temporary / WEIGHTS).open("rb") as file:
            os.fsync(file.fileno())
        write_checksums(temporary)
        swap_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: cannot write the checkpoint: {error}. Free some space and save again."
        ) from error


@contextmanager
def quiet() -> Generator[None]:
    """Keeps what LeRobot prints, and the notices of its dependencies, off the terminal."""
    root = logging.getLogger()
    loggers = [logging.getLogger(name) for name in ("transformers", "lerobot", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    root.addFilter(_not_lerobot)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeFilter(_not_lerobot)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _not_lerobot(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "lerobot" not in Path(record.pathname).parts


def _present_names(model: nn.Module, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors under LeRobot's present names: pi0 checkpoints exist under OpenPI's, too."""
    rename = getattr(model, "_fix_pytorch_state_dict_keys", None)
    if rename is None:
        return saved
    with quiet():
        named: dict[str, Tensor] = rename(saved, getattr(model, "config", None))
    return {name if name.startswith("model.") else f"model.{name}": tensor for name, tensor in named.items()}


def module_of(config: Any, part: str) -> ModuleType:
    """Imports `modeling_<type>` or `processor_<type>` of a policy, given its configuration."""
    return extra(type(config).__module__.replace("configuration_", f"{part}_"))
