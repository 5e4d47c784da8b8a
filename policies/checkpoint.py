"""Policy checkpoints: weights, normaliser, denoising options and what the policy was made for.

A folder holds `policy.safetensors` (every tensor, the normaliser's included) and `policy.json`
(kind, config, meta, versions, checksum). It is written under a temporary name and takes the
place of the old one only when complete, so a full disk or a kill leaves a whole checkpoint.
"""

from __future__ import annotations

import json
import platform
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from robot_rl.core.errors import CheckpointError, require_fields
from robot_rl.core.files import (
    make_folder,
    restore_folder,
    swap_folder,
    with_checksum,
    write_synced,
)
from robot_rl.core.refusal import refusal, refusals, refusing
from robot_rl.core.renamed import use_present_names
from robot_rl.policies.given_encoder import differences
from robot_rl.policies.saved import HEAD, NEEDS, WEIGHTS, read_head
from robot_rl.policies.spec import SavedPolicy, build, full_spec, read_config

FORMAT = 1
"""Raised when a checkpoint of the old form can no longer be read."""

_SEVERAL = {"robot": "robots", "task": "tasks"}
"""What a policy may serve several of, and where all of them are."""
_IDENTITY = ("task", "robot", "control_hz", "state_names", "action_names")


@dataclass(frozen=True, kw_only=True)
class PolicyMeta:
    """What a policy was made for; another task, robot, rate or state layout is refused."""

    task: str
    robot: str
    control_hz: float
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]
    instruction: str
    """The task in words; not compared."""
    n_exec: int
    """Actions executed per chunk; a setting of the evaluation, not compared."""
    robots: tuple[str, ...] = ()
    """All robots that it was trained on, of several sources: it serves each. `robot` is the first."""
    tasks: tuple[str, ...] = ()
    """All tasks that it was trained on, where they were several; its instruction says which. `task` is the
    first."""
    rates: tuple[float, ...] = ()
    """Control rate of each of `robots`, where they differ. `control_hz` is the first."""

    def rate_of(self, robot: str) -> float:
        """Returns the control rate at which it moves a robot, in Hz."""
        return dict(zip(self.robots, self.rates, strict=False)).get(robot, self.control_hz)

    def serves(self, robot: str) -> bool:
        """Whether it was made for this robot."""
        return robot in (self.robots or (self.robot,))

    def does(self, task: str) -> bool:
        """Whether it was made for this task."""
        return task in (self.tasks or (self.task,))

    def __post_init__(self) -> None:
        require_fields(self, "policy meta: ", "above 0", "control_hz")
        require_fields(self, "policy meta: ", "1 or more", "n_exec")


def save_policy(folder: Path | str, policy: SavedPolicy, *, meta: PolicyMeta) -> None:
    """Writes the policy as `folder`, replacing an older one only when the new one is complete.

    Raises:
        CheckpointError: the disk refused; the older checkpoint, if any, is untouched.
    """
    folder = Path(folder)
    tensors = _state(policy)
    weights = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    head = {
        "format": FORMAT,
        "crc32": zlib.crc32(weights),
        "policy": full_spec(policy),
        "meta": {
            name: value
            for name, value in asdict(meta).items()
            if value or name not in ("rates", *_SEVERAL.values())
        },
        "versions": _versions(),
    }
    temporary = folder.with_name(f".writing-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(temporary)
        write_synced(temporary / WEIGHTS, weights)
        write_synced(temporary / HEAD, json.dumps(with_checksum(head), indent=2).encode())
        swap_folder(temporary, folder)
    except (OSError, MemoryError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = "The older checkpoint is whole." if folder.exists() else "There is no older checkpoint."
        raise refusal(error, CheckpointError, folder, kept) from error


@refusing(CheckpointError)
def load_policy(folder: Path | str, *, expect: PolicyMeta | None = None) -> tuple[SavedPolicy, PolicyMeta]:
    """Returns the policy, in evaluation mode on the CPU, and what it was made for.

    Raises:
        CheckpointError: the files are missing, cut short or altered; a tensor is missing,
            unexpected or of another shape; or the policy is of another task, robot, rate or state
            layout than `expect`.
    """
    folder = Path(folder)
    restore_folder(folder)
    head, weights = _read(folder)
    meta = read_config(PolicyMeta, head.get("meta"), at=f"{folder}: meta")
    if expect is not None:
        check_meta(folder, meta, expect)
    policy = build(head.get("policy"), at=str(folder))
    module = cast("nn.Module", policy)
    use_present_names(module, weights)
    _check_tensors(folder, _state(policy), weights)
    module.load_state_dict(weights)
    module.eval()
    return policy, meta


def _state(policy: SavedPolicy) -> dict[str, Tensor]:
    return cast("nn.Module", policy).state_dict()


def _read(folder: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    head = read_head(folder)
    with refusals(CheckpointError, folder, NEEDS):
        blob = (folder / WEIGHTS).read_bytes()
    found = head.get("format")
    if found != FORMAT:
        raise CheckpointError(f"{folder}: policy format {found!r}, this version reads {FORMAT}.")
    if zlib.crc32(blob) != head.get("crc32"):
        raise CheckpointError(
            f"{folder}: {WEIGHTS} was cut short or altered (its checksum differs from {HEAD}'s). {NEEDS}"
        )
    try:
        return head, load(blob)
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {WEIGHTS} cannot be read: {error}.") from error


def _check_tensors(folder: Path, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuses anything that would leave a tensor untrained or unused."""
    if problems := differences(own, saved):
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise CheckpointError(
            f"{folder}: the weights do not fit the policy that {HEAD} describes: "
            f"{'; '.join(problems[:6])}{more}."
        )


def check_meta(at: Path | str, meta: PolicyMeta, expect: PolicyMeta) -> None:
    """Refuses a policy of another task, robot, rate or state layout than `expect`; `at` begins the message.

    Raises:
        CheckpointError: names what differs.
    """
    for name in _IDENTITY:
        have, want = getattr(meta, name), getattr(expect, name)
        if name == "control_hz":
            have = meta.rate_of(expect.robot)
        if several := getattr(meta, _SEVERAL.get(name, ""), ()):
            have = want if want in several else several
        if have != want:
            raise CheckpointError(
                f"{at}: the policy was trained with {name} = {_shown(have)}, here it is "
                f"{_shown(want)}. Use the task and robot it was trained on, or train a new one."
            )


def _shown(value: Any) -> str:
    return f"({len(value)}) {', '.join(value)}" if isinstance(value, tuple) else repr(value)


def _versions() -> dict[str, str]:
    try:
        own = version("robot-rl")
    except PackageNotFoundError:
        own = "not installed"
    return {"robot_rl": own, "torch": torch.__version__, "python": platform.python_version()}
