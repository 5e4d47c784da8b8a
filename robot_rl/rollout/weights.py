"""How the newest weights get from the learner to the sources.

    learner -> Publisher.offer -> Snapshot (version, checksum, weights) -> Subscriber.refresh -> acting policy

Weights are swapped between two acts. A chunk is sampled whole within one act and waits in the executor's
queue, so for a chunk policy that is a swap at the chunk's border: no chunk mixes two versions. Only
`refine`, the residual head, changes within a chunk, at the control step it corrects.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from robot_rl.core.errors import RobotRLError

_NUMBERS = itertools.count()
"""Of snapshots that stay in this process."""


class WeightsError(RobotRLError):
    """No weights were published, or they were damaged on the way."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of the learner's weights, which later updates do not change."""

    version: int
    """Learner updates behind them."""
    checksum: int
    """CRC-32, see `checksum`."""
    weights: Mapping[str, Tensor]
    stays: bool = False
    """Whether they are for this process alone, on the learner's device. Then `checksum` is the number of the
    snapshot, and nobody compares it: nothing is read back."""
    is_own: bool = False
    """Whether they were compared with the checksum here, and nobody else has these tensors."""

    @property
    def stamp(self) -> tuple[int, int]:
        """Version and checksum: a resumed learner counts to the same version with other weights."""
        return self.version, self.checksum


class Published(Protocol):
    """Where sources find the newest weights: the publisher, or its image in another process."""

    @property
    def newest(self) -> Snapshot | None:
        """The newest weights; None before the first."""
        ...


def newest_of(published: Published) -> Snapshot:
    """Returns the newest weights.

    Raises:
        WeightsError: nothing was published.
    """
    newest = published.newest
    if newest is None:
        raise WeightsError("weights: none are published yet. Offer the learner's before collecting.")
    return newest


class Publisher:
    """The learner's end: takes a snapshot of its weights every few updates."""

    def __init__(self, *, publish_every: int = 1, stays: bool = False) -> None:
        """Has published nothing yet.

        Args:
            publish_every: learner updates between two snapshots.
            stays: whether all sources are in this process; see `Snapshot`.
        """
        if publish_every < 1:
            raise ValueError(f"publisher: publish_every must be 1 or more updates, got {publish_every}")
        self._publish_every, self._stays = publish_every, stays
        self._newest: Snapshot | None = None

    @property
    def newest(self) -> Snapshot | None:
        return self._newest

    def offer(self, version: int, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Publishes the learner's weights after `version` updates if that is due."""
        if self._newest is None or version - self._newest.version >= self._publish_every:
            self._publish(version, weights())

    def state_dict(self) -> dict[str, Any]:
        newest = self._newest
        if newest is None:
            return {"weights": {}, "version": -1}
        return {"weights": dict(newest.weights), "version": newest.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version = int(state["version"])
        if version < 0:
            self._newest = None
        else:
            self._publish(version, state["weights"])

    def _publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        if self._stays:
            kept = {name: value.detach().clone() for name, value in weights.items()}
            self._newest = Snapshot(version, next(_NUMBERS), kept, stays=True)
            return
        copies = {name: value.detach().to("cpu", copy=True) for name, value in weights.items()}
        self._newest = Snapshot(version, checksum(copies), copies)


class Subscriber:
    """The source's end: a policy, and the version of its weights."""

    def __init__(self, policy: torch.nn.Module) -> None:
        """Args: policy: the acting copy; the learner never touches it."""
        self._policy = policy
        self.version = -1
        """Learner updates behind the weights that act; -1 before the first."""
        self._stamp: tuple[int, int] | None = None
        """Of the weights that act, if they were loaded from a snapshot."""

    def refresh(self, published: Published) -> int:
        """Loads the newest weights if they are others than those that act; returns their version.

        Raises:
            WeightsError: nothing was published, or the weights were damaged on the way.
        """
        newest = newest_of(published)
        if newest.stamp != self._stamp:
            is_known = newest.is_own or newest.stays
            if not is_known and checksum(newest.weights) != newest.checksum:
                raise WeightsError(f"weights: version {newest.version} and its checksum differ.")
            load_weights(self._policy, newest.weights, take=newest.is_own)
            self.version, self._stamp = newest.version, newest.stamp
        return self.version

    def state_dict(self) -> dict[str, Any]:
        return {"policy": dict(self._policy.state_dict()), "version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        self.version, self._stamp = int(state["version"]), None


def checksum(weights: Mapping[str, Tensor]) -> int:
    """Returns a CRC-32 over names and bytes, in the order of the names."""
    crc = 0
    for name in sorted(weights):
        octets = weights[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(octets.data, zlib.crc32(name.encode(), crc))
    return crc


def load_weights(policy: torch.nn.Module, weights: Mapping[str, Tensor], *, take: bool = False) -> None:
    """Loads the learner's part of the weights; the frozen rest stays.

    Args:
        policy: gets them.
        weights: by name.
        take: whether the policy may have these tensors for its own, and need not copy them.
    """
    unknown = policy.load_state_dict(weights, strict=False, assign=take).unexpected_keys
    assert not unknown, f"the learner published weights that the policy lacks: {unknown}"
