"""What a run leases, and the token that goes to its arm."""

from pathlib import Path

import pytest

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
