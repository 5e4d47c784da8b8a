"""Turns and weights as bytes for a network: numbers in msgpack and safetensors, never pickle.

Turns are compressed, for pictures; weights are not: trained numbers are noise, they become 8 % smaller.
"""

from __future__ import annotations

import zlib
from dataclasses import fields
from typing import Any, cast

import msgpack
import numpy as np
import safetensors.torch

from robot_rl.core.errors import DeviceError
from robot_rl.data.transitions import StepBatch
from robot_rl.real.messages import pack_array, unpack_array
from robot_rl.rollout.process import Turn
from robot_rl.rollout.sources import Tally
from robot_rl.rollout.weights import Snapshot

_STEP, _TALLY = (frozenset(one.name for one in fields(kind)) for kind in (StepBatch, Tally))
_BROKEN = (ValueError, TypeError, KeyError, IndexError, SyntaxError, msgpack.UnpackException, zlib.error)
_MOST_BYTES = 1 << 28
"""Of a turn: pictures of many large cameras."""


class WireError(DeviceError):
    """Bytes that are no turn and no weights of this version."""


def encode_turn(turn: Turn) -> bytes:
    """Returns a turn as bytes; when it was sent is left out, for clocks of machines differ.

    Raises:
        WireError: its segment is of another kind than single control steps.
    """
    if not isinstance(turn.segment, StepBatch):
        raise WireError(f"wire: got a {type(turn.segment).__name__}, allowed: single control steps")
    tally = {**vars(turn.tally), "classes": list(turn.tally.classes)}
    packed = cast("bytes", msgpack.packb([vars(turn.segment), tally], default=pack_array))
    return zlib.compress(packed, 1)  # higher levels take longer, and save little more


def decode_turn(octets: bytes) -> Turn:
    """Returns the turn that `encode_turn` was given; it counts as sent now.

    Raises:
        WireError: the bytes are none of ours.
    """
    try:
        unpacking = zlib.decompressobj()
        packed = unpacking.decompress(octets, _MOST_BYTES)
        if not unpacking.eof:
            raise ValueError(f"cut short, or more than {_MOST_BYTES} bytes")
        read: Any = msgpack.unpackb(packed, ext_hook=unpack_array)
        step, tally = _owned(read)
        if step.keys() != _STEP or tally.keys() != _TALLY:
            raise KeyError(*sorted(step.keys() ^ _STEP | tally.keys() ^ _TALLY))
        tally["classes"] = tuple(tally["classes"])
        return Turn(StepBatch(**step), Tally(**tally))
    except _BROKEN as error:
        raise WireError(f"wire: {len(octets)} bytes are no turn of this version: {error!r}") from error


def encode_weights(snapshot: Snapshot) -> bytes:
    """Returns weights, with their version and checksum, as bytes."""
    tensors = safetensors.torch.save({name: value.contiguous() for name, value in snapshot.weights.items()})
    return cast("bytes", msgpack.packb([snapshot.version, snapshot.checksum, tensors]))


def decode_weights(octets: bytes) -> Snapshot:
    """Returns the weights that `encode_weights` was given; who loads them compares the checksum.

    Raises:
        WireError: the bytes are none of ours.
    """
    try:
        version, crc, tensors = msgpack.unpackb(octets)
        return Snapshot(int(version), int(crc), safetensors.torch.load(tensors))
    except (*_BROKEN, safetensors.SafetensorError) as error:
        raise WireError(f"wire: {len(octets)} bytes are no weights of this version: {error!r}") from error


def _owned(value: Any) -> Any:
    """Returns the same values with arrays that can be written to."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _owned(one) for key, one in value.items()}
    return [_owned(one) for one in value] if isinstance(value, list) else value
