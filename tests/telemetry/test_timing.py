import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.telemetry.timing import StageTimer


def test_a_stage_inside_a_stage_is_counted_once():
    clock, cpu = ManualClock(), ManualClock()
    timer = StageTimer(clock, cpu.now_s)
    with timer.stage("collect"):
        clock.advance(1.0)
        with timer.stage("sim"):
            clock.advance(4.0)
            cpu.advance(8.0)  # two threads
        clock.advance(2.0)
    clock.advance(3.0)
    stages = {stage.name: stage for stage in timer.summary()}
    # collect 1 + 2, sim 4, and 3 outside of both: 10 s in all.
    assert [stages[name].wall_s for name in ("collect", "sim", "other")] == [3.0, 4.0, 3.0]
    assert stages["sim"].cpu_s == 8.0
    assert stages["collect"].calls == 1
    assert list(stages) == ["sim", "collect", "other"]


def test_a_stage_that_raises_is_closed():
    clock = ManualClock()
    timer = StageTimer(clock)

    def crash() -> None:
        with timer.stage("update"):
            clock.advance(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        crash()
    clock.advance(1.0)
    assert timer.seconds() == {"update": 1.0, "other": 1.0}


def test_counting_goes_on_after_a_resume():
    clock = ManualClock()
    first = StageTimer(clock)
    with first.stage("update"):
        clock.advance(2.0)
    state = first.state_dict()
    clock.advance(1000.0)
    second = StageTimer(clock)
    second.load_state_dict(state)
    with second.stage("update"):
        clock.advance(1.0)
    assert second.seconds() == {"update": 3.0, "other": 0.0}
    assert second.summary()[0].calls == 2


def test_minutes_leave_one_stage_out_and_go_on_after_a_resume():
    clock, cpu = ManualClock(), ManualClock()
    first = StageTimer(clock, cpu.now_s)
    for stage, wall_s, cpu_s in (("update", 60.0, 30.0), ("evaluate", 600.0, 300.0)):
        with first.stage(stage):
            clock.advance(wall_s)
            cpu.advance(cpu_s)
    clock.advance(12.0)
    second = StageTimer(clock, cpu.now_s)
    second.load_state_dict(first.state_dict())
    clock.advance(24.0)
    cpu.advance(6.0)
    # 60 + 12 + 24 seconds, and 30 + 6 of the processor.
    assert second.minutes(without="evaluate") == {"minutes": 1.6, "cpu_minutes": 0.6}
    assert second.minutes(without="nothing") == {"minutes": 11.6, "cpu_minutes": 5.6}
