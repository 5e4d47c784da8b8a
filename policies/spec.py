"""What a policy writes into its checkpoint, and how it is built again from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

import torch

from robot_rl.core.errors import CheckpointError, UnknownComponentError, nearest
from robot_rl.core.policy import Mode, Policy
from robot_rl.core.registry import resolve

Config = TypeVar("Config")
MODES: tuple[Mode, ...] = ("ode", "explore", "mean")


class SavedPolicy(Policy, Protocol):
    """A policy that a checkpoint can hold; it is a `torch.nn.Module` as well."""

    kind: ClassVar[str]
    """Its name in the registry."""
    feature_dim: int
    """F, the length of the encoded `features`."""

    def spec(self) -> dict[str, Any]:
        """Returns what `from_spec` needs, as JSON values, without the weights."""
        ...

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        """Builds the policy with weights still to be loaded; `at` begins its messages."""
        ...


def full_spec(policy: SavedPolicy) -> dict[str, Any]:
    """Returns kind and spec of a policy."""
    return {"kind": policy.kind, **policy.spec()}


def build(spec: Any, *, at: str) -> SavedPolicy:
    """Builds the policy a spec describes.

    Raises:
        CheckpointError: no such kind, or a spec that its class refuses.
    """
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        raise CheckpointError(f"{at}: names no policy kind. Save the policy again.")
    try:
        policy_class = resolve("policy", spec["kind"], at=at)
    except UnknownComponentError as error:
        raise CheckpointError(str(error)) from error
    try:
        return policy_class.from_spec(spec, at=at)
    except KeyError as error:
        raise CheckpointError(f"{at}: policy {spec['kind']!r} lacks {error}.") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{at}: policy {spec['kind']!r}: {error}") from error


def read_config(config_class: type[Config], values: Any, *, at: str) -> Config:
    """Builds a config dataclass from JSON values.

    Raises:
        CheckpointError: an unknown or missing key, or a value out of range.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{at}: {config_class.__name__} is no table of keys: {values!r}.")
    known = {f.name: f for f in fields(cast("Any", config_class))}
    for key in values:
        if key not in known:
            raise CheckpointError(
                f"{at}: {config_class.__name__} has no {key!r}.{nearest(str(key), known)} "
                "Was it saved by another version?"
            )
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise CheckpointError(f"{at}: {config_class.__name__} lacks {name!r}.")
    try:
        return config_class(**{key: _tuples(value) for key, value in values.items()})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{at}: {error}") from error


def read_size(spec: Mapping[str, Any], name: str, *, at: str) -> int:
    """Reads a dimension.

    Raises:
        CheckpointError: it is no positive integer.
    """
    value = spec[name]
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{at}: {name} must be a positive integer, got {value!r}.")
    return value


def check_mode(mode: str) -> None:
    """Refuses a mode that no policy has."""
    if mode not in MODES:
        raise ValueError(f"sample: no mode {mode!r}.{nearest(mode, MODES)}")


def check_chunk(where: str, name: str, chunk: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuses a tensor of another shape."""
    if tuple(chunk.shape) != shape:
        raise ValueError(f"{where}: {name} has shape {tuple(chunk.shape)}, allowed {shape}")


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
