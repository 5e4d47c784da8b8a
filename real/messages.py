"""The messages between policy, supervisor and driver, each in its own process.

    policy --Plan--> supervisor --Command | Plan | Beat--> driver --> arm
           <-Status--           <-------- ArmState -------

and between an arm's policy process and a policy server: Hello, Offer, then Ask and Reply, or a Refusal.

Stamps are `time.monotonic_ns()`, which all processes of a host share; an arm's own clock stays in
`device_stamp_ns` and is compared with itself only. Messages are msgpack, never pickle: bytes from
another process are data, not code. n arm joints, H points of a plan.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DeviceError
from robot_rl.core.policy import Mode
from robot_rl.hal.arm import ArmState

Array = NDArray[Any]
Operation = Literal["start", "pause", "hold", "stop", "estop", "clear", "home", "park", "reset"]
Phase = Literal["waiting", "paused", "homing", "running", "holding", "stopped"]


class MessageError(DeviceError):
    """Bytes that are no message of ours."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Joint targets at equal intervals: those of the policy, or those that the supervisor passes on."""

    number: int
    """Counts up; a plan older than the last is ignored."""
    start_ns: int
    """When the first target is due, monotonic; from then on the plan replaces the one before."""
    period_ns: int
    targets_rad: Array
    """(H, n)"""
    gripper: Array
    """(H,)"""
    token: int = 0
    """Fencing token of the sender's lease; older ones than the arm has seen are refused."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One target for now, after safety."""

    number: int
    stamp_ns: int
    target_rad: Array
    """(n,)"""
    gripper: float
    token: int = 0
    """As in `Plan`."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Says that the supervisor is alive, in cycles without a Command, for an arm that follows plans too."""

    stamp_ns: int


@dataclass(frozen=True, kw_only=True)
class Control:
    """An order for the whole arm, from a policy, a person or a program."""

    operation: Operation
    """`start` lets plans through; `pause` holds, and forgets the plan; `hold` is pause for the driver;
    `stop` brings to rest and latches; `estop` is `stop` by a person; `clear` lifts a latched stop;
    `home` and `park` move to the station's home and safe pose; `reset` puts a simulated scene back, of
    episode `seed`."""
    by: str
    """The sender: a person's name for `clear`."""
    seed: int = 0
    token: int = 0
    """As in `Plan`; 0 for a watcher, who may stop an arm but not move it."""


DRIVER_GONE = "the driver is gone"
"""Begins the reason of a stop by the supervisor of an arm without its driver."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The supervisor's report to its clients, once a cycle."""

    stamp_ns: int
    state: ArmState | None
    """The newest; None before the first."""
    phase: Phase
    plan: int
    """Number of the plan that is followed; -1 for none."""
    sent_rad: Array
    """(n,), the last target after safety; NaN before the first."""
    sent_gripper: float
    limited: bool
    """Whether safety changed a target since the status before."""
    reason: str = ""
    """Why it is stopped or holding; empty otherwise."""
    unlogged: int = 0
    """Lines, moments and files that the supervisor could not write: its disk is full, or too slow."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a `Control`."""

    operation: Operation
    done: bool
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One reading of a camera or tracker that comes through a driver."""

    name: str
    """`front.rgb` and the like; `cube` for a tracked object's pose."""
    stamp_ns: int
    array: Array
    """uint8 (h, w, 3) of a camera; (7,) position in metres and quaternion (w, x, y, z) of an object."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A client's first message to a policy server."""

    version: int
    token: str
    """Empty for a client that has shown a certificate."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A policy server's first message to a client that it accepts: the facts about its policy."""

    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to a policy server: the arguments of a policy's method, B rows each."""

    number: int
    """That of the answer too."""
    what: Literal["sample", "sample_after", "refine"]
    mode: Mode
    obs: dict[str, Array]
    arrays: dict[str, Array]
    """`z`, `before`, `known` or `action`, as the method has them."""
    frozen: int = 0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer: a chunk (B, H, A), or a refined action (B, A)."""

    number: int
    actions: Array
    n_exec: Array | None = None
    """(B,), as in `ChunkSample`."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a policy server does not accept a client, or does not answer a request."""

    reason: str


Message: TypeAlias = (
    ArmState
    | Plan
    | Command
    | Beat
    | Control
    | Status
    | Answer
    | Frame
    | Hello
    | Offer
    | Ask
    | Reply
    | Refusal
)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_ARRAY = 1
"""msgpack extension type: one byte, the length of the header with it; [dtype, shape]; the numbers."""
_SMALL_BYTES = 1024
_NUMBERS = "biuf"
"""Kinds of arrays: anything else could hold objects or text."""


def _allowed(hint: Any) -> tuple[Any, ...]:
    """Returns the classes that a field's values may have; for a Literal, its values."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) is types.UnionType:
        return tuple(kind for part in get_args(hint) for kind in _allowed(part))
    if get_origin(hint) in (np.ndarray, dict):
        return (get_origin(hint),)
    return (float, int) if hint is float else (hint,)


_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    name: {field: _allowed(hint) for field, hint in get_type_hints(kind).items()}
    for name, kind in _KINDS.items()
}


def encode(message: Message) -> bytes:
    """Returns one message as bytes."""
    # msgpack would map its default buffer of 256 KiB again for each small message.
    arrays = [message.array] if isinstance(message, Frame) else []
    arrays += message.obs.values() if isinstance(message, Ask) else []
    size = _SMALL_BYTES + sum(array.nbytes for array in arrays)
    packed = msgpack.packb([type(message).__name__, _fields(message)], default=pack_array, buf_size=size)
    return cast("bytes", packed)


def decode(octets: bytes) -> Message:
    """Returns the message that `encode` was given.

    Raises:
        MessageError: the bytes are none of ours, or of another version.
    """
    try:
        kind, values = msgpack.unpackb(octets, ext_hook=unpack_array)
        return _built(kind, values)
    except (ValueError, TypeError, KeyError, IndexError, SyntaxError, msgpack.UnpackException) as error:
        raise MessageError(
            f"link: {len(octets)} bytes are no message of this version: {error!r}. "
            "Run policy, supervisor and driver from one installation of robot_rl."
        ) from error


def _fields(message: Any) -> dict[str, Any]:
    # Not dataclasses.asdict: it copies every array.
    return {name: getattr(message, name) for name in _FIELDS[type(message).__name__]}


def _built(kind: str, values: dict[str, Any]) -> Message:
    if kind == "Status" and values["state"] is not None:
        values["state"] = _built("ArmState", values["state"])
    for name, allowed in _FIELDS[kind].items():
        value = values[name]
        # A bool is an int to Python, and no number to us.
        if type(value) not in allowed and not (isinstance(value, str) and value in allowed):
            raise TypeError(f"{kind}.{name} is a {type(value).__name__}")
    return cast("Message", _KINDS[kind](**values))


def pack_array(value: Any) -> Any:
    """Returns what msgpack does not know, as it can pack it: `default=` of `packb`."""
    if isinstance(value, ArmState):
        return _fields(value)
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _header(value.dtype, value.shape) + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent over a link")


def unpack_array(code: int, octets: bytes) -> Array:
    """Returns an array that `pack_array` packed: `ext_hook=` of `unpackb`. It cannot be written to."""
    if code != _ARRAY:
        raise ValueError(f"unknown extension type {code}")
    length = octets[0]
    kind, shape = _read_header(octets[1:length])
    return np.frombuffer(octets, kind, offset=length).reshape(shape)


@functools.cache
def _header(kind: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Returns the first bytes of an array: the header's length, dtype and shape."""
    header = cast("bytes", msgpack.packb([kind.str, shape]))
    return bytes([1 + len(header)]) + header


@functools.lru_cache(maxsize=256)  # bounded: peers choose the headers
def _read_header(octets: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    name, shape = msgpack.unpackb(octets)
    kind = np.dtype(name)
    if kind.kind not in _NUMBERS:
        raise ValueError(f"an array of {kind}")
    return kind, tuple(shape)
