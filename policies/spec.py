"""What a policy writes into its checkpoint, and how it is built again from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

from torch import Generator, Tensor, nn

from robot_rl.core.errors import CheckpointError, UnknownComponentError, nearest
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode, Policy
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


class Unrefined:
    """A policy whose chunks are executed as they are."""

    refines = False

    def refine(
        self, encoded: Encoded, action: Tensor, *, mode: Mode = "ode", generator: Generator | None = None
    ) -> Tensor:
        """Returns the chunk's action as it is."""
        return action


class Chainless(Unrefined):
    """A policy without a likelihood."""

    name: ClassVar[str]
    """What messages call it."""
    horizon: int
    action_dim: int

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A); see `_decide`.

        Raises:
            ValueError: an unknown mode, `z` of another shape, or a chain is asked for.
        """
        check_mode(mode)
        if record:
            raise ValueError(f"sample: {self.name} has no chain to record. Use a gaussian or flow policy.")
        features = encoded["features"]
        if z is not None:
            check_chunk("sample", "z", z, (len(features), self.horizon, self.action_dim))
        return self._decide(features, z, mode, generator)

    def _decide(
        self, features: Tensor, z: Tensor | None, mode: Mode, generator: Generator | None
    ) -> ChunkSample:
        """Returns a chunk (B, H, A), given the features (B, F) and perhaps noise (B, H, A)."""
        raise NotImplementedError

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Refuses: there is no chain to score."""
        raise ValueError(f"log_prob: {self.name} has no chains. Use a gaussian or flow policy.")


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


def build_module(spec: Mapping[str, Any], name: str, *, at: str) -> nn.Module:
    """Builds the policy that a spec holds under `name`, as a module; raises what `build` does."""
    return cast("nn.Module", build(spec[name], at=f"{at}: {name}"))


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
        return config_class(**{key: as_tuple(value) for key, value in values.items()})
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


def check_chunk(where: str, name: str, chunk: Tensor, shape: tuple[int, ...]) -> None:
    """Refuses a tensor of another shape."""
    if tuple(chunk.shape) != shape:
        raise ValueError(f"{where}: {name} has shape {tuple(chunk.shape)}, allowed {shape}")


def check_demonstration(batch: DemoBatch, horizon: int, action_dim: int) -> None:
    """Refuses demonstrations whose chunks have another size than the policy's."""
    shape = (len(batch.actions), horizon, action_dim)
    check_chunk("bc_loss", "actions", batch.actions, shape)
    check_chunk("bc_loss", "valid", batch.valid, shape[:2])


def as_tuple(value: Any) -> Any:
    """Returns a list, as JSON and YAML have it, as a tuple."""
    return tuple(value) if isinstance(value, list) else value
