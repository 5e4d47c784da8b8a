"""Turns and weights on their way over a network: the same values, and nothing but values."""

import pickle
import zlib
from dataclasses import fields, replace
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import torch

from robot_rl.data.transitions import StepBatch
from robot_rl.rollout import wire
from robot_rl.rollout.process import Turn
from robot_rl.rollout.sources import Tally
from robot_rl.rollout.weights import Snapshot, checksum
from robot_rl.rollout.wire import WireError, decode_turn, decode_weights, encode_turn, encode_weights

STEP = StepBatch(
    source="robot",
    policy_version=7,
    stamp_ns=123_456_789_012,
    begins=True,
    obs={"state": np.array([[1.0, 2.0]], np.float32), "wrist.rgb": np.full((1, 2, 2, 3), 9, np.uint8)},
    base_action=np.array([[0.5]], np.float32),
    action=np.array([[0.25]], np.float32),
    reward=np.array([1.0], np.float32),
    terminated=np.array([False]),
    truncated=np.array([True]),
    next_obs={"state": np.array([[3.0, 4.0]], np.float32)},
    next_base_action=np.array([[0.0]], np.float32),
    success=np.array([True]),
    instruction="reach",
    picture_stamp_ns={"wrist.rgb": 123_456_700_000},
)
TALLY = Tally(np.array([[1.0, 20.0, 1.0, -1.0]]), 3, 0, ("own", "near"), 0.5)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and one == other


def test_a_turn_arrives_as_it_was() -> None:
    turn = decode_turn(encode_turn(Turn(STEP, TALLY)))
    for kind, sent, got in ((StepBatch, STEP, turn.segment), (Tally, TALLY, turn.tally)):
        for one in fields(kind):
            assert same(getattr(sent, one.name), getattr(got, one.name)), one.name
    assert isinstance(turn.segment, StepBatch)
    turn.segment.reward[0] = 2.0  # its arrays are its own


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"none of ours",
        pickle.dumps(STEP),
        zlib.compress(b""),
        zlib.compress(pickle.dumps(STEP)),
        zlib.compress(cast("bytes", msgpack.packb([{}, {}]))),
        zlib.compress(
            cast("bytes", msgpack.packb([{**vars(STEP), "obs": None, "more": 1}, {}], default=lambda _: None))
        ),
        encode_turn(Turn(STEP, TALLY))[:-3],
    ],
)
def test_what_is_no_turn_is_refused(octets: bytes) -> None:
    with pytest.raises(WireError, match="bytes are no turn of this version"):
        decode_turn(octets)


def test_pictures_are_compressed() -> None:
    """A picture of one colour, 12,288 bytes twice, takes less than a tenth."""
    picture = {"front.rgb": np.full((1, 64, 64, 3), 90, np.uint8)}
    step = replace(STEP, obs=picture, next_obs=picture)
    assert len(encode_turn(Turn(step, TALLY))) < 2 * 12_288 / 10


def test_a_turn_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    octets = encode_turn(Turn(STEP, TALLY))
    monkeypatch.setattr(wire, "_MOST_BYTES", 100)
    with pytest.raises(WireError, match="more than 100 bytes"):
        decode_turn(octets)


def test_weights_arrive_as_they_were() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor([1, 2], dtype=torch.bfloat16)}
    sent = Snapshot(3, checksum(weights), weights)
    got = decode_weights(encode_weights(sent))
    assert (got.version, checksum(got.weights)) == (3, sent.checksum)
    assert all(torch.equal(got.weights[name], weights[name]) for name in weights)
    with pytest.raises(WireError, match="bytes are no weights of this version"):
        decode_weights(encode_weights(sent)[:-1])
