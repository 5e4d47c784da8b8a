import io
import re

import pytest
from rich.console import Console

from robot_rl.core.clock import ManualClock
from robot_rl.telemetry.progress import PhaseProgress, ProgressDisplay, RateMeter


def log_console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=False, width=60), text


def test_the_rate_is_that_of_the_last_fifteen_seconds():
    clock = ManualClock()
    rate = RateMeter(clock)
    rate.update(0)
    assert rate.per_s() == 0.0
    clock.advance(10)
    rate.update(100)
    assert rate.per_s() == 10.0
    for _ in range(20):  # then 50 a second
        clock.advance(1)
        rate.update(100 + 50 * (clock.now_s() - 10))
    assert rate.per_s() == pytest.approx(50.0)


def test_calls_between_two_refreshes_cost_no_memory():
    clock = ManualClock()
    rate = RateMeter(clock)
    for count in range(10_000):
        clock.advance(0.001)
        rate.update(count)
    # 10 s at one point each 0.2 s.
    assert len(rate._points) <= 52
    assert rate.per_s() == pytest.approx(1000.0, rel=0.01)


def test_the_status_has_counts_rates_time_left_and_success():
    clock = ManualClock()
    phase = PhaseProgress("residual", 12_000, "steps", 0, clock)
    assert phase.status() == "0/12,000 steps  0.0 steps/s  ETA -"
    clock.advance(2)
    phase.update(2_000, updates=5, success=0.625)
    clock.advance(2)
    phase.update(4_000, updates=11)
    # 4000 steps in 4 s; 6 updates in the 2 s since the first count of them; 8000 steps left.
    expected = "4,000/12,000 steps  1,000 steps/s  3.0 updates/s  ETA 0:08  success 62%"
    assert phase.status() == expected
    phase.update(4_000, note="refused 3 of 9")
    assert phase.status() == f"{expected}  refused 3 of 9"


def test_an_evaluation_in_between_leaves_rate_and_time_left_as_they_were():
    clock = ManualClock()
    phase = PhaseProgress("residual", 12_000, "steps", 0, clock)
    for _ in range(60):
        clock.advance(1)
        phase.update(phase.done + 100)
    assert "100 steps/s  ETA 1:00" in phase.status()
    with phase.paused():
        clock.advance(14)  # all but one of the seconds that a rate is of
    phase.update(phase.done, success=0.5)
    # 6,000 steps at 100 a second, and a pause of 14 s in every 60 s: 60 * 74 / 60.
    assert "100 steps/s  ETA 1:14" in phase.status()
    clock.advance(1)
    phase.update(phase.done + 100)
    assert "100 steps/s  ETA 1:13" in phase.status()


def test_the_start_of_what_acts_is_not_part_of_the_rate():
    clock = ManualClock()
    phase = PhaseProgress("residual", 50_400, "steps", 0, clock)
    phase.starts_late = True
    clock.advance(20)  # with it: 1 step in 20 s, 280 hours left
    phase.update(1)
    assert "0.0 steps/s  ETA -" in phase.status()
    clock.advance(2)
    phase.update(41)
    # 40 steps in 2 s; 50,359 steps left at 20 a second: 2,518 s.
    assert "20 steps/s  ETA 41:58" in phase.status()


def test_a_wait_between_quick_counts_is_not_part_of_the_rate_and_slow_counts_are():
    clock = ManualClock()
    phase = PhaseProgress("residual", 10_000, "steps", 0, clock)
    for done in (20, 40):
        clock.advance(1)
        phase.update(done)
    clock.advance(60)  # a person puts the scene back
    phase.update(41)
    assert "0.0 steps/s  ETA -" in phase.status()
    clock.advance(1)
    phase.update(61)
    assert "20 steps/s" in phase.status()
    slow = PhaseProgress("act settings", 6, "trials", 0, clock)
    for done in (1, 2, 3):
        clock.advance(30)
        slow.update(done)
    # 3 trials left at one in 30 s.
    assert slow.status() == "3/6 trials  0.0 trials/s  ETA 1:30"


def test_a_phase_that_went_beyond_its_total_has_no_time_left():
    clock = ManualClock()
    phase = PhaseProgress("ppo", 450, "steps", 0, clock)
    clock.advance(1)
    phase.update(460)  # the last round of a chain method is played to its end
    assert "460/450 steps  460 steps/s  ETA 0:00" in phase.status()


def test_a_narrow_terminal_keeps_the_bar_the_time_left_and_the_success():
    clock = ManualClock()
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with (
        ProgressDisplay(console=console, clock=clock) as display,
        display.phase("evaluate base", 4),  # its name makes the column of names wider
        display.phase("residual", 1_200_000) as phase,
    ):
        clock.advance(1)
        phase.update(12_345, updates=3)
        clock.advance(1)
        phase.update(23_456, updates=23_000, success=0.65)
        assert len(phase.status()) > 80 - len("residual")
    shown = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue()))
    last = [line for line in shown if line.startswith("residual")][-1]
    assert len(last) <= 80
    assert last.count("\u2501") == 10
    assert "23,456/1,200,000 steps" in last
    assert "ETA" in last
    assert last.rstrip().endswith("success 65%")


def test_a_resumed_phase_does_not_count_what_was_done_before():
    clock = ManualClock()
    phase = PhaseProgress("residual", 10_000, "steps", 9_000, clock)
    clock.advance(1)
    phase.update(9_100)
    assert "  100 steps/s  ETA 0:09" in phase.status()


def test_a_log_gets_a_line_every_ten_seconds_and_a_last_one():
    clock = ManualClock()
    console, text = log_console()
    with (
        ProgressDisplay(console=console, clock=clock) as display,
        display.phase("bc", 300, unit="updates") as bc,
    ):
        for second in range(1, 31):
            clock.advance(1)
            bc.update(second * 10)
    lines = text.getvalue().splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["bc", "33%", "100/300"],
        ["bc", "67%", "200/300"],
        ["bc", "100%", "300/300"],
    ]


def test_a_terminal_gets_a_bar_and_nothing_is_left_running_after_an_error(capsys):
    clock = ManualClock()
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    display = ProgressDisplay(console=console, clock=clock)

    def crash() -> None:
        with display, display.phase("residual", 10) as phase:
            clock.advance(1)
            phase.update(5)
            raise KeyError

    with pytest.raises(KeyError):
        crash()
    assert "5/10 steps" in text.getvalue()
    assert not display._bars.live.is_started
    assert capsys.readouterr().out == ""


def test_messages_and_lines_go_to_stderr(capsys):
    with ProgressDisplay() as display, display.phase("bc", 10) as phase:
        display.message("leased: cpu0 [2 slots]")
        phase.update(10)
    out, err = capsys.readouterr()
    assert out == ""
    assert "leased: cpu0 [2 slots]\n" in err
    assert "10/10 steps" in err


@pytest.mark.parametrize(("left_s", "shown"), [(42, "0:42"), (725, "12:05"), (11_049, "3:04:09")])
def test_time_left_is_written_as_on_a_clock(left_s, shown):
    clock = ManualClock()
    phase = PhaseProgress("bc", left_s + 1, "steps", 0, clock)
    clock.advance(1)
    phase.update(1)  # one a second
    assert f"ETA {shown}" in phase.status()
