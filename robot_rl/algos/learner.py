"""What every learner does: save and restore its state, and hold a policy that is a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Generator, Tensor, nn

from robot_rl.algos.optim import keep_freed_memory
from robot_rl.core.policy import Encoded, Policy
from robot_rl.data.normalize import Normaliser


class PolicyModule(Policy, Protocol):
    """A policy that is a `torch.nn.Module` as well."""

    @property
    def feature_dim(self) -> int:
        """F, the length of the encoded `features`."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class GaussianModule(PolicyModule, Protocol):
    """A Gaussian policy with a standard deviation of its own, whatever it observes."""

    log_std: nn.Parameter
    """(A,)"""

    @property
    def normaliser(self) -> Normaliser: ...

    def moments(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Returns the mean (B, H, A), in the normaliser's scale, and the standard deviation (A,)."""
        ...


class Learner:
    """Saves and restores the parts that a learner names, and how many updates it has taken."""

    def __init__(self) -> None:
        keep_freed_memory()
        self._updates = 0

    def _parts(self) -> Mapping[str, Any]:
        """Returns all that an exact resume needs but the number of updates, see `saved`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {**saved(self._parts()), "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        restore(self._parts(), state)
        self._updates = int(state["updates"])


def saved(part: Any) -> Any:
    """Returns a copy of the state of a part, which training leaves alone.

    Args:
        part: a generator, a tensor, what has a `state_dict`, or a mapping or a list of parts. Entries of
            a mapping that are None are left out.
    """
    if isinstance(part, Mapping):
        return {name: saved(each) for name, each in part.items() if each is not None}
    if isinstance(part, Sequence):
        return [saved(each) for each in part]
    if isinstance(part, Generator):
        return part.get_state()
    if isinstance(part, Tensor):
        return part.detach().clone()
    state = part.state_dict()
    return {name: value.clone() for name, value in state.items()} if isinstance(part, nn.Module) else state


def restore(part: Any, state: Any) -> None:
    """Puts back what `saved` returned."""
    if isinstance(part, Mapping):
        for name, each in part.items():
            if each is not None:
                restore(each, state[name])
    elif isinstance(part, Sequence):
        for each, one in zip(part, state, strict=True):
            restore(each, one)
    elif isinstance(part, Generator):
        part.set_state(state)
    elif isinstance(part, Tensor):
        part.data.copy_(state)
    else:
        part.load_state_dict(state)
