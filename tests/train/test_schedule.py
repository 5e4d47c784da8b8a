"""The clocks of a run: nothing lost, nothing made up, the same after a resume."""

import pytest

from robot_rl.train.schedule import Counters, Every, Ratio


def test_a_ratio_pays_whole_updates_and_carries_the_fraction() -> None:
    # 0.25 updates per step: 3 steps earn 0.75 -> 0; 3 more make 1.5 -> 1, 0.5 stays; 2 more make 1.0 -> 1.
    ratio = Ratio(0.25)
    assert [ratio.owed(3), ratio.owed(6), ratio.owed(8)] == [0, 1, 1]


def test_a_ratio_over_many_small_steps_pays_in_full() -> None:
    # 0.1 * 1000 = 100, although 0.1 has no exact binary form.
    ratio = Ratio(0.1)
    assert sum(ratio.owed(step) for step in range(1, 1001)) == 100


def test_steps_of_the_warm_up_earn_nothing() -> None:
    # 2 updates per step after 100 steps: at 100 none, at 116 there are 16 * 2 = 32.
    ratio = Ratio(2.0, after_steps=100)
    assert [ratio.owed(64), ratio.owed(100), ratio.owed(116)] == [0, 0, 32]


def test_a_restored_ratio_goes_on_where_it_was() -> None:
    whole, first, second = Ratio(0.3), Ratio(0.3), Ratio(0.3)
    expected = [whole.owed(step) for step in range(0, 40, 4)]
    got = [first.owed(step) for step in range(0, 20, 4)]
    second.load_state_dict(first.state_dict())
    got += [second.owed(step) for step in range(20, 40, 4)]
    assert got == expected


def test_every_fires_once_per_interval_and_makes_up_no_missed_beats() -> None:
    # Interval 10: fires at 10; 35 passes 20 and 30 and fires once; next at 40.
    every = Every(10)
    assert [every.due(step) for step in (5, 10, 11, 35, 39, 40)] == [False, True, False, True, False, True]


def test_zero_means_never() -> None:
    assert not Every(0).due(10**9)


def test_a_restored_every_keeps_its_beat() -> None:
    first = Every(10)
    assert first.due(13)
    second = Every(10)
    second.load_state_dict(first.state_dict())
    assert [second.due(19), second.due(20)] == [False, True]


def test_counters_come_back() -> None:
    counters = Counters()
    counters.load_state_dict(Counters(env_steps=3, updates=4).state_dict())
    assert counters == Counters(env_steps=3, updates=4)


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="updates_per_step must be finite and >= 0, got -1"):
        Ratio(-1)
    with pytest.raises(ValueError, match=r"interval must be >= 0 \(0 means never\), got -5"):
        Every(-5)


def test_what_there_is_no_time_for_is_forgone_and_counted() -> None:
    # 2 updates per step; late at step 2: its 2 are lost, and not made up for at step 3.
    late = [False, True, False]
    ratio = Ratio(2.0, is_late=lambda: late.pop(0))
    assert [ratio.owed(1), ratio.owed(2), ratio.owed(3)] == [2, 0, 2]
    assert ratio.forgone == 2
