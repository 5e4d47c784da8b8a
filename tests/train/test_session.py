"""What a run leases, the token that goes to its arm, and a state that lacks something."""

from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.errors import CheckpointError
from robot_rl.hal.device import DeviceSpec
from robot_rl.train.session import RunSession

CPU = DeviceSpec(name="cpu", kind="cpu", slots=4)


@pytest.mark.parametrize(
    ("devices", "token"),
    [([(CPU, 1)], 0), ([(CPU, 1), (DeviceSpec(name="arm1", kind="robot", last_token=lambda: 41), 1)], 42)],
)
def test_the_arm_is_driven_under_the_token_of_its_lease(
    devices: list[tuple[DeviceSpec, int]], token: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The arm has seen 41, whatever this lease file has given; a run without an arm has no token.
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    session = RunSession(
        tmp_path / "run", command="train", holder="test", devices=devices, lease_wait_s=0.0, keep=1
    )
    (tmp_path / "run").mkdir()
    with session:
        assert session.arm_token == token


def test_a_state_that_lacks_its_clocks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    how: dict[str, Any] = {
        "command": "train",
        "holder": "test",
        "devices": [],
        "lease_wait_s": 0.0,
        "keep": 1,
    }
    first = RunSession(tmp_path / "run", **how)
    with first:
        whole = first._state(None)
        monkeypatch.setattr(first, "_state", lambda loop: {k: v for k, v in whole.items() if k != "timer"})
        first.finish("demos")
    with pytest.raises(CheckpointError, match=r"run: the newest checkpoint has no timer: .* begin a new run"):
        RunSession(tmp_path / "run", **how).__enter__()
