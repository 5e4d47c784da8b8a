"""A policy that a server computes (`robot-rl serve-policy`); it acts like any other policy.

While the server is gone, `AsyncExecutor` follows the last chunk to its end and then holds. It goes on from
a new observation when the server is back. B rows, H chunk length, A action dim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from typing import Any, Literal, NoReturn, Self

import numpy as np
import torch
from torch import Generator, Tensor

from robot_rl.core.errors import DeviceError
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.real.messages import Array, Reply
from robot_rl.real.remote import IDENTITY, PolicyClient, RemoteConfig

logger = logging.getLogger(__name__)

_REFINE_SHARE = 0.5
"""Share of a control step that a refinement may take."""


class RemotePolicy:
    """Acts, and refuses what only a learner needs."""

    def __init__(self, client: PolicyClient, refiner: PolicyClient | None) -> None:
        """Takes connections to one server.

        Args:
            client: for chunks.
            refiner: for refinements, which may be due while a chunk is computed; None if there are none.
        """
        facts = client.facts
        self.horizon, self.action_dim = int(facts["horizon"]), int(facts["action_dim"])
        self._client, self._refiner = client, refiner
        self.refine_s = _REFINE_SHARE / float(facts["control_hz"])
        """How long a refinement is waited for."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="refine")
        self._pending: Future[Reply] | None = None
        self.unrefined = 0
        """Control steps whose refinement came too late: they took the chunk's action."""

    @property
    def refines(self) -> bool:
        return self._refiner is not None

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the observations as they are: the server encodes them."""
        return Encoded(obs)

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A); exploration noise is the server's, `generator` is not used."""
        if record:
            _refuse("record a chain")
        return self._chunk("sample", encoded, {} if z is None else {"z": z}, mode)

    def refine(
        self,
        encoded: Encoded,
        action: Tensor,
        *,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> Tensor:
        """Returns the refined action (B, A), or the chunk's own if the answer is late; that is counted.

        Raises:
            DeviceError: this question, or the late one before, was refused or stays unanswered.
        """
        if self._refiner is None:
            return action
        reply: Reply | None = None
        if self._pending is not None and self._pending.done():
            self._pending.result()  # too late to be used, and a failure all the same
            self._pending = None
        if self._pending is None:
            arrays = {"action": _array(action)}
            self._pending = self._pool.submit(
                self._refiner.ask, "refine", obs=_arrays(encoded), arrays=arrays, mode=mode
            )
            try:
                reply = self._pending.result(self.refine_s)
            except TimeoutError:
                reply = None
        if reply is not None:
            return torch.from_numpy(reply.actions.copy())
        self.unrefined += 1
        if self.unrefined == 1:
            logger.warning(
                "policy server: no refinement within %.0f ms: the chunk's own action is taken, and counted",
                1e3 * self.refine_s,
            )
        return action

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Raises `DeviceError`: a server does not do that."""
        _refuse("score chains")

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Raises `DeviceError`: a server does not do that."""
        _refuse("learn")

    def to(self, device: torch.device | str) -> Self:
        """Returns itself: the server chooses its device."""
        return self

    def continuing(self) -> ContinuingRemotePolicy:
        """Returns the same policy with real-time chunking, on the same connections.

        Raises:
            ValueError: the served policy cannot do that.
        """
        if not self._client.facts["continues"]:
            raise ValueError("real_time: the served policy shows no velocity field to steer")
        return ContinuingRemotePolicy(self._client, self._refiner)

    @property
    def lost(self) -> int:
        """How often the server was gone."""
        return self._client.lost

    def close(self) -> None:
        """Ends the connections. Close the executor after this: its thread may wait for them."""
        self._client.close()
        if self._refiner is not None:
            self._refiner.close()
        self._pool.shutdown(cancel_futures=True)

    def _chunk(
        self,
        what: Literal["sample", "sample_after"],
        obs: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        mode: Mode,
        frozen: int = 0,
    ) -> ChunkSample:
        reply = self._client.ask(what, obs=_arrays(obs), arrays=_arrays(tensors), mode=mode, frozen=frozen)
        n_exec = None if reply.n_exec is None else torch.from_numpy(reply.n_exec.copy())
        return ChunkSample(torch.from_numpy(reply.actions.copy()), n_exec=n_exec)


class ContinuingRemotePolicy(RemotePolicy):
    """A `RemotePolicy` whose chunks continue each other (real-time chunking)."""

    def sample_after(
        self,
        encoded: Encoded,
        before: Tensor,
        known: Tensor,
        *,
        frozen: int,
        z: Tensor,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (B, H, A) that continues the one before; see `ContinuingPolicy`."""
        tensors = {"before": before, "known": known, "z": z}
        return self._chunk("sample_after", encoded, tensors, mode, frozen)


def open_remote(
    config: RemoteConfig, *, expect: PolicyMeta | None = None, real_time: bool = True
) -> tuple[RemotePolicy, PolicyMeta]:
    """Connects to a policy server; returns its policy and what that was made for.

    Args:
        config: where it is.
        expect: what the policy must have been made for.
        real_time: whether chunks continue each other, where the policy can do that.

    Raises:
        DeviceError: no server answers, or it refuses the connection.
        CheckpointError: its policy was made for something else.
    """
    wanted = {} if expect is None else {name: getattr(expect, name) for name in IDENTITY}
    client = PolicyClient(config, wanted)
    try:
        facts = client.facts
        refiner = PolicyClient(config, wanted) if facts["refines"] else None
    except BaseException:
        client.close()
        raise
    kind = ContinuingRemotePolicy if real_time and facts["continues"] else RemotePolicy
    known = {field.name: facts[field.name] for field in fields(PolicyMeta) if field.name in facts}
    known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return kind(client, refiner), PolicyMeta(**known)


def _refuse(what: str) -> NoReturn:
    raise DeviceError(f"policy server: it acts, and does not {what}. Load the run on this computer for that.")


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: np.ascontiguousarray(_array(tensor)) for name, tensor in tensors.items()}
