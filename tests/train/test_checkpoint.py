"""Checkpoints: what goes in comes out bit for bit, and a bad disk never costs the last good one."""

import errno
import json
import math
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import without_checksum, write_json
from robot_rl.train import checkpoint
from robot_rl.train.checkpoint import CheckpointStore, read_state, write_state
from robot_rl.train.record import new_folder
from robot_rl.train.session import saying_how_to_resume


def _state(step: int = 1) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 0.1 + 0.2,
        "nothing": None,
        "flag": True,
        "name": "residual",
        "optimiser": {
            "state": {0: {"exp_avg": torch.arange(3.0), "step": torch.tensor(7.0)}},
            "betas": (0.9, 0.999),
        },
        "rng": np.random.default_rng(5).bit_generator.state,
        "torch_rng": torch.Generator().manual_seed(3).get_state(),
        "replay": {"reward": np.array([1.5, math.nan], np.float32), "seeds": np.array([2**63], np.uint64)},
        "half": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "tied": [torch.ones(2), np.zeros((0, 4), np.float32), np.float64(0.5)],
    }


def _assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            _assert_same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert type(got) is type(expected)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got, expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()
    else:
        assert type(got) is type(expected)
        assert got == expected


def test_a_nested_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write_state(_state(), tmp_path / "one")
    _assert_same(read_state(tmp_path / "one"), _state())


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    write_state(_state(), tmp_path / "one")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes()[:2] != b"\x80\x04"
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == [
        "arrays.safetensors",
        "state.json",
        "tensors.safetensors",
    ]


def test_tensors_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    write_state({"a": weight, "b": weight[1:], "c": weight.reshape(2, 2).T}, tmp_path / "one")
    got = read_state(tmp_path / "one")
    assert got["b"].tolist() == [1.0, 2.0, 3.0]
    assert got["c"].tolist() == [[0.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"checkpoint/x/y: cannot save a object"),
        (np.array(["a"]), r"checkpoint/x/y: cannot save an array of <U1"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        write_state({"x": {"y": value}}, tmp_path / "one")


def test_only_the_last_two_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    assert store.load() is None
    for step in range(4):
        store.save(_state(step), "bc")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["000002-bc", "000003-bc", "latest"]
    state = store.load()
    assert state is not None
    assert state["step"] == 3


def test_an_abandoned_write_is_cleared_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(_state(1), "bc")
    (tmp_path / ".writing-000001-bc").mkdir()  # what kill -9 in the middle of a write leaves
    state = store.load()
    assert state is not None
    assert state["step"] == 1
    store.save(_state(2), "bc")
    assert not list(tmp_path.glob(".writing-*"))


def test_the_folder_of_a_first_checkpoint_is_synced_with_those_above(
    tmp_path: Path, synced: list[str]
) -> None:
    CheckpointStore(tmp_path / "run" / "checkpoints").save(_state(1), "bc")
    assert {str(tmp_path), str(tmp_path / "run"), str(tmp_path / "run/checkpoints")} <= set(synced)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()], ids=["EIO", "memory"]
)
def test_whatever_is_refused_the_message_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(_state(1), "bc")

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "write_synced", refuse)
    with pytest.raises(CheckpointError, match=rf"cannot write checkpoint 'bc': .*resume={tmp_path}` goes on"):
        store.save(_state(2), "bc")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path}/checkpoints: (the disk|there is not enough memory) "
    ):
        store.load()


def test_what_a_run_cannot_write_says_how_it_goes_on() -> None:
    said = r"^runs/a: the disk refuses .* `robot-rl train resume=runs/a` goes on from there\. See what"
    with pytest.raises(CheckpointError, match=said), saying_how_to_resume(Path("runs/a"), "train"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    with pytest.raises(ConnectionError), saying_how_to_resume(Path("runs/a"), "train"):
        raise ConnectionError("the robot is gone")


def test_a_run_folder_is_synced_or_not_there(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(str(tmp_path / "runs"), "reach")
    assert {str(tmp_path), str(tmp_path / "runs")} <= set(synced)

    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("robot_rl.core.files.sync_folder", refuse)
    with pytest.raises(ConfigError, match="cannot make"):
        new_folder(str(tmp_path / "runs"), "other")
    assert list((tmp_path / "runs").iterdir()) == [folder]


def test_a_full_disk_leaves_the_last_good_one_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(_state(1), "bc")

    def full(path: Path, blob: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(CheckpointError) as caught:
        store.save(_state(2), "bc")
    message = str(caught.value)
    assert "cannot write checkpoint 'bc': the disk is full" in message
    assert f"The last good checkpoint is {tmp_path}/run/checkpoints/000000-bc" in message
    assert f"robot-rl train resume={tmp_path}/run" in message
    monkeypatch.undo()
    state = store.load()
    assert state is not None
    _assert_same(state, _state(1))
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["000000-bc", "latest"]


def test_a_full_disk_gives_up_older_checkpoints_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(_state(1), "bc")
    store.save(_state(2), "bc")
    write, failures = checkpoint.write_synced, [OSError(errno.ENOSPC, "full")]

    def full_once(path: Path, blob: bytes) -> None:
        if failures:
            raise failures.pop()
        write(path, blob)

    monkeypatch.setattr(checkpoint, "write_synced", full_once)
    store.save(_state(3), "bc")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001-bc", "000002-bc", "latest"]


def test_a_write_that_the_system_refuses_is_survived(tmp_path: Path) -> None:
    """The genuine thing: the kernel refuses to make a file larger than 1 MB."""
    store = CheckpointStore(tmp_path)
    store.save({"weight": torch.ones(4)}, "small")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1_000_000, hard)
    )  # Python ignores the signal that goes with it
    try:
        with pytest.raises(CheckpointError, match="cannot write checkpoint 'large': the disk is full"):
            store.save({"weight": torch.ones(1_000_000)}, "large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    state = store.load()
    assert state is not None
    assert state["weight"].tolist() == [1.0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000-small", "latest"]


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    write_state(_state(), tmp_path / "one")
    path = tmp_path / "one" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"tensors.safetensors: \d+ bytes that do not match state.json: damaged"
    ):
        read_state(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"two/state.json: there is no such file. To resume"):
        read_state(tmp_path / "two")


def test_a_flipped_bit_of_the_head_is_refused(tmp_path: Path) -> None:
    """Numbers that stand in state.json itself, such as counters, are no less than those beside it."""
    state = {"counters": {"updates": 256}, "share": 0.5, "finished": ("bc", "base"), "loop": None}
    write_state(state, tmp_path / "one")
    path = tmp_path / "one" / "state.json"
    content = path.read_bytes()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with suppress(CheckpointError):
            assert read_state(tmp_path / "one") == state, flipped
    path.write_bytes(content.replace(b"256", b"216"))
    with pytest.raises(CheckpointError, match=r"state.json: damaged: it does not match its 'checksum'"):
        read_state(tmp_path / "one")


def test_a_head_without_a_checksum_is_read_or_named(tmp_path: Path) -> None:
    """Checkpoints of earlier versions have none."""
    write_state(_state(), tmp_path / "one")
    path = tmp_path / "one" / "state.json"
    head = json.loads(path.read_text())
    del head["checksum"]
    write_json(path, head)
    assert read_state(tmp_path / "one").keys() == _state().keys()
    write_json(path, {key: value for key, value in head.items() if key != "state"})
    with pytest.raises(
        CheckpointError, match=r"state.json lacks KeyError\('state'\). To resume from another"
    ):
        read_state(tmp_path / "one")


def test_a_flipped_bit_of_latest_does_not_name_another_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(2):  # 000000-own base and 000001-own base: one bit apart
        store.save(_state(step), "own base")
    latest = tmp_path / "latest"
    content = latest.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        latest.write_bytes(flipped)
        with suppress(CheckpointError):
            assert store.latest() == tmp_path / "000001-own base", flipped
    latest.write_text("000000-own base\n")  # by a person, as the message says
    state = store.load()
    assert state is not None
    assert state["step"] == 0


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_state(_state(), tmp_path / "one")
    path = tmp_path / "one" / "state.json"
    head = without_checksum(json.loads(path.read_text()))
    write_json(path, head | {"format": 99}, is_checked=True)
    with pytest.raises(CheckpointError, match="checkpoint format 99, this version reads 1"):
        read_state(tmp_path / "one")
