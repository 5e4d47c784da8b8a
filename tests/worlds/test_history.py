"""Experience as a model reads it; numbers by hand."""

from dataclasses import replace

import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.episodes import Episodes
from robot_rl.worlds.fit import drawn_windows
from robot_rl.worlds.history import AUDIT, CALIBRATION, TRAIN, History, Windows, window_at
from tests.worlds.conftest import META, STEPS, point_history


def two_episodes() -> History:
    """One of two steps, 0 -> 1 -> 2, and one of one step, 10 -> 11, whose end is a success."""
    state = np.repeat(np.array([[0.0], [1.0], [10.0]], np.float32), 4, axis=1)
    final = np.repeat(np.array([[2.0], [11.0]], np.float32), 4, axis=1)
    return History.of(
        Episodes(
            meta=META,
            obs={"state": state},
            action=np.array([[0.1, 0], [0.2, 0], [0.3, 0]], np.float32),
            reward=np.array([0.0, 0.0, 1.0]),
            terminated=np.array([False, False, True]),
            truncated=np.array([False, True, False]),
            success=np.array([False, False, True]),
            episode_index=np.array([0, 0, 1]),
            final_obs={"state": final},
        )
    )


def test_states_of_episodes_follow_each_other_with_what_the_last_step_led_to() -> None:
    history = two_episodes()
    assert history.state[:, 0].tolist() == [0, 1, 2, 10, 11]
    assert history.action[:, 0] == pytest.approx([0.1, 0.2, 0.0, 0.3, 0.0])
    assert history.episode.tolist() == [0, 0, 0, 1, 1]
    assert history.success.tolist() == [False, False, False, False, True]
    assert (history.first.tolist(), history.last.tolist()) == ([0, 3], [2, 4])
    assert history.solved().tolist() == [False, True]
    assert history.ended.tolist() == [False, True]
    assert history.steps == 3


def test_histories_join() -> None:
    both = History.joined([two_episodes(), two_episodes()])
    assert both.first.tolist() == [0, 3, 5, 8]
    assert both.episode.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    with pytest.raises(DatasetError, match="allowed: one task"):
        History.joined([both, replace(both, meta=replace(META, task="other"))])


def test_pictures_of_some_episodes_are_kept_when_others_come() -> None:
    pictures = np.arange(5, dtype=np.uint8)[:, None, None, None]
    whole = replace(two_episodes(), pictures={"top": pictures})
    assert whole.shown("top", np.array([4, 0])).reshape(-1).tolist() == [4, 0]
    second = whole.with_pictures_of(np.array([1]))
    assert second.pictures["top"].reshape(-1).tolist() == [3, 4]
    both = History.joined([second, replace(whole, pictures={"top": pictures + 10})])
    assert both.pictured is not None
    assert both.pictured.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert both.shown("top", np.array([4, 5, 9])).reshape(-1).tolist() == [4, 10, 14]
    last = both.with_pictures_of(np.array([0, 3]))  # of the first episode there are none
    assert last.pictured is not None
    assert last.pictured.tolist() == [8, 9]
    assert last.pictures["top"].reshape(-1).tolist() == [13, 14]


def test_all_windows_may_be_of_the_newest_quarter() -> None:
    windows = Windows(point_history(8), np.arange(8), stride=4)
    rows = drawn_windows(windows, np.random.default_rng(0), (2, 500), 1.0)
    assert rows.shape == (2, 500)
    assert set(rows.reshape(-1).tolist()) == set(windows.rows[-len(windows) // 4 :].tolist())


def test_windows_stay_inside_of_their_episode() -> None:
    windows = Windows(two_episodes(), np.array([0, 1]), stride=2)
    assert windows.rows.tolist() == [0]  # the second episode is too short
    assert windows.states(windows.rows, 2)[0, 0] == 2.0
    assert windows.actions(windows.rows)[0, :, 0] == pytest.approx([0.1, 0.2])
    with pytest.raises(DatasetError, match="has 3 control steps"):
        Windows(two_episodes(), np.array([0, 1]), stride=3)


def test_the_past_is_a_stride_before_or_there_is_none() -> None:
    window = window_at(two_episodes(), np.array([2, 1, 3]), 2)
    assert window.has_past.tolist() == [True, False, False]
    assert window.past_state[:, 0].tolist() == [0, 1, 10]
    assert window.past_action[0, :, 0] == pytest.approx([0.1, 0.2])
    assert not window.past_action[1:].any()


def test_an_episode_keeps_its_split_when_others_come() -> None:
    few, many = point_history(40), point_history(80)
    for name in (TRAIN, CALIBRATION, AUDIT):
        assert few.split(name).tolist() == [e for e in many.split(name) if e < 40]
    parts = [set(many.split(name).tolist()) for name in (TRAIN, CALIBRATION, AUDIT)]
    assert sorted(parts[0] | parts[1] | parts[2]) == list(range(80))
    assert sum(map(len, parts)) == 80
    assert many.steps == 80 * STEPS
