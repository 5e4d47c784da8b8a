"""What a run leases, the token that goes to its arm, and a state that lacks something."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import CheckpointError, LeaseError
from robot_rl.hal.device import DeviceSpec, LeaseLike
from robot_rl.hal.leased import EnvDevice
from robot_rl.hal.vector import VectorEnv
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.loop import Pacer, Run
from robot_rl.train.session import RunSession

CPU = DeviceSpec(name="cpu", kind="cpu", slots=4)
ARM = DeviceSpec(name="arm1", kind="robot", last_token=lambda: 41)


@pytest.mark.parametrize(
    ("devices", "message"),
    [([(CPU, 1)], "device arm1: opened without a lease of it"), ([(CPU, 1), (ARM, 1)], "")],
)
def test_what_a_run_acts_on_is_opened_under_its_own_lease(
    devices: list[tuple[DeviceSpec, int]], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The arm has seen 41, whatever this lease file has given.
    tokens: list[int] = []

    def make(lease: LeaseLike) -> VectorEnv:
        tokens.append(lease.token)
        return FakeEnv(1)

    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    session = RunSession(
        tmp_path / "run", command="train", holder="test", devices=devices, lease_wait_s=0.0, keep=1
    )
    (tmp_path / "run").mkdir()
    with session, pytest.raises(LeaseError, match=message) if message else nullcontext():
        session.open(EnvDevice(ARM, make)).reset(seed=0)
    assert tokens == ([] if message else [42])


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


def test_a_checkpoint_is_not_part_of_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    session = RunSession(
        tmp_path / "run", command="train", holder="test", devices=[], lease_wait_s=0.0, keep=1
    )
    clock, run = ManualClock(), Run(learners=[], pacer=Pacer(finished=lambda at: True), stage=nullcontext)
    session.display = ProgressDisplay(clock=clock)
    monkeypatch.setattr(session._store, "save", lambda *_: clock.advance(9))
    with session, session.phase("residual", 100, unit="steps") as progress:
        clock.advance(1)
        progress.update(10)
        session.save("residual", run)
        clock.advance(1)
        progress.update(20)
        # 80 steps left at 10 a second, and 9 s of checkpoints in every 2 s of steps: 8 * 11 / 2.
        assert progress.status() == "20/100 steps  10 steps/s  ETA 0:44"
