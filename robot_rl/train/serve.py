"""A policy server: computes actions for robots that are connected to it.

One thread for each client. Chunks are computed one at a time, since one fills the device; refinements, small
and due within a control step, at the same time. B rows, H chunk length, A action dim.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import DeviceError
from robot_rl.core.language import INSTRUCTION
from robot_rl.core.policy import ChunkSample, ContinuingPolicy
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.policies.spec import SavedPolicy
from robot_rl.real.link import Link
from robot_rl.real.messages import Array, Ask, Message, MessageError, Refusal, Reply
from robot_rl.real.remote import Door, DoorConfig

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""A robot needs one connection, or two if its policy refines."""
_POLL_S = 0.2
_TAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sample": ((), ("z",)),
    "sample_after": (("before", "known", "z"), ()),
    "refine": (("action",), ()),
}
"""The arrays that a question must bring, and may bring."""
_PICTURES = (".rgb", ".depth")


@dataclass
class ServerCounts:
    """What a server has done."""

    clients: int = 0
    refused: int = 0
    chunks: int = 0
    refined: int = 0
    errors: int = 0


class PolicyServer:
    """One policy behind a door."""

    def __init__(
        self,
        policy: SavedPolicy,
        meta: PolicyMeta,
        config: DoorConfig,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        """Listens; `run` lets clients in.

        Args:
            policy: a flow policy, or a residual on one, is served with real-time chunking.
            meta: what it was made for.
            config: where to listen, and which clients to accept.
            device: where to compute.
            seed: of exploration noise, which each client draws from its own generator.

        Raises:
            RobotRLError: see `Door`.
        """
        self._policy, self._meta = continuing(policy), meta
        cast("nn.Module", self._policy).to(device).eval()
        self._device, self._seed = torch.device(device), seed
        self._door = Door(config, facts_of(self._policy, meta))
        self._chunks = threading.Lock()
        self._links: set[Link] = set()
        self.counts = ServerCounts()

    @property
    def address(self) -> str:
        """What clients call: tls://host:port."""
        return self._door.address

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set."""
        threads: list[threading.Thread] = []
        try:
            while not stop.is_set():
                connection = self._door.next_connection(_POLL_S)
                threads = [thread for thread in threads if thread.is_alive()]
                if connection is None:
                    continue
                if len(threads) == MAX_CLIENTS:
                    logger.warning("%d clients: no room for another", MAX_CLIENTS)
                    connection.close()
                    continue
                threads.append(threading.Thread(target=self._serve, args=(connection, stop), daemon=True))
                threads[-1].start()
        finally:
            self._door.close()
            for thread in threads:
                thread.join()

    def _serve(self, connection: Any, stop: threading.Event) -> None:
        try:
            link = self._door.admit(connection)
        except DeviceError as error:
            self.counts.refused += 1
            logger.warning("%s", error)
            return
        self.counts.clients += 1
        generator = Generator(self._device).manual_seed(self._seed + self.counts.clients)
        with closing(link):
            while not (link.closed or stop.is_set()):
                link.wait(_POLL_S)
                try:
                    messages = link.receive()
                except MessageError as error:
                    logger.warning("%s", error)
                    return
                if messages:  # a client asks again only after it gave up on its last question
                    link.send(self._answer(messages[-1], generator))

    def _answer(self, message: Message, generator: Generator) -> Message:
        if not isinstance(message, Ask):
            return Refusal(reason=f"a {type(message).__name__} is no question")
        try:
            with self._chunks if message.what != "refine" else nullcontext(), torch.inference_mode():
                reply = self._computed(message, generator)
        except Exception as error:  # its client gets the error, others are served
            self.counts.errors += 1
            logger.exception("%s: a question could not be answered", message.what)
            return Refusal(reason=f"{message.what}: {type(error).__name__}: {error}")
        return reply

    def _computed(self, ask: Ask, generator: Generator) -> Reply:
        check_ask(ask, self._policy, self._meta)
        obs, given = self._tensors(ask.obs), self._tensors(ask.arrays)
        encoded = self._policy.encode(obs)
        how: dict[str, Any] = {"mode": ask.mode, "generator": generator}
        if ask.what == "refine":
            self.counts.refined += 1
            action = self._policy.refine(encoded, given["action"], **how)
            return Reply(number=ask.number, actions=_array(action))
        self.counts.chunks += 1
        sample: ChunkSample
        if ask.what == "sample":
            sample = self._policy.sample(encoded, z=given.get("z"), **how)
        elif isinstance(self._policy, ContinuingPolicy):
            parts = {name: given[name] for name in ("before", "known", "z")}
            sample = self._policy.sample_after(encoded, **parts, frozen=ask.frozen, **how)
        else:
            raise ValueError("this policy's chunks do not continue each other")
        n_exec = None if sample.n_exec is None else sample.n_exec.cpu().numpy()
        return Reply(number=ask.number, actions=_array(sample.actions), n_exec=n_exec)

    def _tensors(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        # A copy: what came over the link is read-only, and torch's tensors are not.
        return {name: torch.from_numpy(np.array(value)).to(self._device) for name, value in arrays.items()}


def check_ask(ask: Ask, policy: SavedPolicy, meta: PolicyMeta) -> None:
    """Checks a question: names and shapes must be those of this policy.

    Raises:
        ValueError: names what is missing, unknown or of another shape.
    """
    needed, optional = _TAKES[ask.what]
    _check_names("obs", ask.obs, ("state",), (INSTRUCTION,), endings=_PICTURES)
    _check_names("arrays", ask.arrays, needed, optional)
    rows, h, a = len(np.atleast_1d(ask.obs["state"])), policy.horizon, policy.action_dim
    shapes = {"state": (rows, len(meta.state_names)), "known": (rows,), "action": (rows, a)}
    shapes |= {"z": (rows, h, a), "before": (rows, h, a)}
    for name, array in (*ask.obs.items(), *ask.arrays.items()):
        got = np.shape(array)
        want = shapes.get(name, (rows, *got[1:]))
        if got != want or not rows:
            raise ValueError(f"{name}: has shape {got}, allowed {want}, of at least 1 row")
    if not 0 <= ask.frozen <= h:
        raise ValueError(f"frozen: got {ask.frozen}, allowed: 0 to {h}, the policy's horizon")


def _check_names(
    where: str,
    given: Mapping[str, Any],
    needed: tuple[str, ...],
    optional: tuple[str, ...],
    endings: tuple[str, ...] = (),
) -> None:
    for name in needed:
        if name not in given:
            raise ValueError(f"{where}: {name!r} is missing")
    for name in given:
        if name not in (*needed, *optional) and not (endings and str(name).endswith(endings)):
            known = ", ".join((*needed, *optional, *(f"<camera>{ending}" for ending in endings)))
            raise ValueError(f"{where}: {name!r} is unknown, allowed: {known}")


def continuing(policy: SavedPolicy) -> SavedPolicy:
    """Returns the policy with real-time chunking around it, if it can have that."""
    if isinstance(policy, ContinuingPolicy):
        return policy
    try:
        return RealTimeChunks(cast("nn.Module", policy))
    except ValueError:  # no flow acts
        return policy


def facts_of(policy: SavedPolicy, meta: PolicyMeta) -> dict[str, Any]:
    """Returns the facts of a policy that clients get."""
    module = cast("nn.Module", policy)
    return {
        **asdict(meta),
        "kind": policy.kind,
        "horizon": policy.horizon,
        "action_dim": policy.action_dim,
        "continues": isinstance(policy, ContinuingPolicy),
        "refines": policy.refines,
        "weights": _digest(module),
    }


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _array(tensor: Tensor) -> Array:
    return tensor.to("cpu", torch.float32).numpy()
