"""`robot-rl serve-sim-arm`: help that teaches, mistakes in one line, and the last line."""

import json

import pytest

from robot_rl.cli import main as cli


def test_help_names_what_is_on_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve-sim-arm", "--help"]) == 0
    text = capsys.readouterr().out
    for name in (
        "joint_states",
        "~/follow_joint_trajectory",
        "forward_position_controller",
        "~/delta_twist_cmds",
        "~/switch_controller",
        "~/clear_protective_stop",
        "objects/<name>/pose",
        "delay_ms=20 loss=0.05",
    ):
        assert name in text


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("rate=100", "rate: no such key. Did you mean 'rate_hz'?"),
        ("rate_hz=5000", "rate_hz: got 5000.0, allowed: 1 to 1000"),
        ("loss=1", "loss: got 1.0, allowed: 0 to below 1"),
        ("task=pick_cub", "task: no task named 'pick_cub'. Did you mean 'pick_cube'?"),
        ("active=[jtc]", "active: got ('jtc',), allowed: of joint_state_broadcaster, "),
        ("stop.ramp_s=0", "stop.ramp_s: got 0.0, allowed: above 0"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word: str, text: str
) -> None:
    from robot_rl.real.arm import server

    monkeypatch.setattr(server, "raise_priority", lambda: "")  # the test's process keeps its priority
    assert cli.main(["serve-sim-arm", word]) == 2
    assert text in capsys.readouterr().err


def test_the_last_line_says_how_punctual_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's facts pass through; the server itself runs in tests/real/arm, in another process."""
    from robot_rl.real.arm import server

    times = {"p50": 40.0, "p99": 300.0, "p99_9": 900.0, "max": 1000.0}
    facts = {"cycles": 100, "missed": 1, "late_us": times, "cost_us": times, "cpu_share": 0.125}
    monkeypatch.setattr(server, "serve", lambda *_: {**facts, "stop_reason": "a person", "log": "truth.npz"})
    assert cli.main(["serve-sim-arm", "rate_hz=500", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "100 cycles at 500 Hz: 1 missed, begun late by 40 us (median), 300 us (99 %), 1000 us (worst); "
        "40 us of work each, 12% of a core"
    )
    assert lines[1:3] == ["stopped: a person", "log: truth.npz"]
    assert json.loads(lines[-1])["missed"] == 1
