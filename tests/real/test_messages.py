"""Messages: what comes back, what is refused, and that nothing is ever executed."""

import inspect
import pickle
import random
from types import ModuleType
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from robot_rl.real import link, messages
from robot_rl.real.messages import (
    Answer,
    ArmState,
    Command,
    Control,
    Frame,
    Message,
    MessageError,
    Plan,
    Status,
    decode,
    encode,
)

STATE = ArmState(
    stamp_ns=5, device_stamp_ns=6, position_rad=np.arange(3.0), velocity_rad_s=np.zeros(3), stop_reason="bump"
)
STATUS = Status(
    stamp_ns=7,
    state=STATE,
    phase="running",
    plan=2,
    sent_rad=np.full(3, np.nan),
    sent_gripper=0.5,
    limited=True,
)
MESSAGES: list[Message] = [
    STATE,
    ArmState(stamp_ns=1, position_rad=np.ones(2), velocity_rad_s=np.ones(2), effort_n_m=np.ones(2)),
    Plan(number=1, start_ns=2, period_ns=3, targets_rad=np.ones((4, 3), np.float32), gripper=np.ones(4)),
    Command(number=1, stamp_ns=2, target_rad=np.ones(3), gripper=0.04),
    Control(operation="clear", by="Ada", seed=3),
    STATUS,
    Answer(operation="home", done=False, message="no"),
    Frame(name="front.rgb", stamp_ns=1, array=np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[:, ::-1]),
]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if isinstance(left, ArmState | Status):
        return all(same(getattr(left, name), getattr(right, name)) for name in vars(left))
    return bool(left == right)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_encoded_comes_back(message: Message) -> None:
    back = decode(encode(message))
    assert type(back) is type(message)
    assert all(same(value, getattr(back, name)) for name, value in vars(message).items())


def packed(kind: str, **values: Any) -> bytes:
    return cast("bytes", msgpack.packb([kind, values]))


def array_with(dtype: str, shape: list[int], octets: bytes) -> msgpack.ExtType:
    header = cast("bytes", msgpack.packb([dtype, shape]))
    return msgpack.ExtType(1, bytes([1 + len(header)]) + header + octets)


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps(print),
        packed("Control", operation="explode", by="", seed=0),
        packed("Control", operation="stop", by=7, seed=0),
        packed("Control", operation="stop", by="", seed=0, more=1),
        packed("Control", operation="stop", by=""),
        packed("Answer", operation="stop", done=1, message=""),
        packed("Command", number=True, stamp_ns=1, target_rad=None, gripper=0.0),
        packed("Frame", name="a", stamp_ns=1, array=[1, 2]),
        packed("Frame", name="a", stamp_ns=1, array=array_with("|O", [1], bytes(8))),
        packed("Frame", name="a", stamp_ns=1, array=array_with("<f8", [3], bytes(8))),
        packed("Frame", name="a", stamp_ns=1, array=msgpack.ExtType(2, b"")),
        packed("Frame", name="a", stamp_ns=1, array=msgpack.ExtType(1, b"")),
        packed("Nothing"),
        msgpack.packb(["Control", [1]]),
        msgpack.packb([["Control"], {}]),
        encode(STATE)[:-1],
        encode(STATE) + b"\0",
    ],
)
def test_what_is_no_message_is_refused(octets: bytes) -> None:
    with pytest.raises(MessageError, match=r"no message of this version.*one installation of robot_rl"):
        decode(octets)


def test_no_bytes_do_anything_but_decode_or_be_refused() -> None:
    rng, good = random.Random(0), encode(STATUS)
    refused = 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            decode(bytes(bad))
        except MessageError:
            refused += 1
    # 168 of the 392 bytes are numbers, where any value is as good as another.
    assert 500 < refused < 2900


def test_what_cannot_be_sent_is_named() -> None:
    unknown: Any = object()
    with pytest.raises(TypeError, match="object cannot be sent over a link"):
        encode(Answer(operation="stop", done=True, message=unknown))


@pytest.mark.parametrize("module", [link, messages], ids=lambda module: module.__name__)
def test_nothing_is_unpickled(module: ModuleType) -> None:
    assert not {"pickle", "marshal", "eval"} & set(vars(module))
    assert "allow_pickle" not in inspect.getsource(module)
