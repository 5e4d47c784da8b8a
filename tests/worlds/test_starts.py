"""Where imagined episodes begin."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.config import EnvConfig
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import ImaginedSettings
from robot_rl.train.improve.imagined import ImaginedSource
from robot_rl.worlds.config import StartsConfig
from robot_rl.worlds.env import ImaginedConfig
from robot_rl.worlds.history import AUDIT, History
from robot_rl.worlds.starts import Starts, drops, recorded_starts, values
from tests.worlds.conftest import META

EPISODES, LENGTH, STRIDE = 40, 13, 2


def forked() -> History:
    """Points that begin at 0: those of even number go right and are solved, the others go left and fail."""
    rng = np.random.default_rng(0)
    way = np.where(np.arange(EPISODES) % 2 == 0, 0.1, -0.1)[:, None] * np.arange(LENGTH)
    state = np.zeros((EPISODES, LENGTH, 4), np.float32)
    state[..., 0] = way + 0.001 * rng.standard_normal(way.shape)
    success = np.zeros((EPISODES, LENGTH), bool)
    success[::2, -1] = True
    first = np.arange(EPISODES) * LENGTH
    return History(
        meta=META,
        state=state.reshape(-1, 4),
        action=np.zeros((EPISODES * LENGTH, 2), np.float32),
        success=success.reshape(-1),
        episode=np.repeat(np.arange(EPISODES), LENGTH),
        first=first,
        last=first + LENGTH - 1,
        ended=success[:, -1],
    )


def test_the_value_of_a_state_is_what_became_of_others_near_it() -> None:
    history = forked()
    rows = np.concatenate([history.first, history.last])
    value = values(history, rows)
    assert value[:EPISODES] == pytest.approx(0.5, abs=0.15)
    # Nineteen of the 32 nearest of a last state are last ones too, the others begin.
    assert value[EPISODES::2].min() > 0.7
    assert value[EPISODES + 1 :: 2].max() < 0.3


def test_the_value_drops_where_episodes_part() -> None:
    history = forked()
    found = drops(history, np.arange(EPISODES), STRIDE)
    assert (history.episode[found] % 2 == 1).all()  # of those that fail
    assert (found - history.first[history.episode[found]]).max() <= STRIDE
    assert len(found) >= EPISODES // 4


def test_episodes_begin_in_drops_by_weight_and_never_in_those_that_judge() -> None:
    history = forked()
    starts = Starts(history, StartsConfig(initial=0, keyframe=0, replay=0, drop=1), stride=STRIDE)
    drawn = starts.draw(EpisodeRng(np.arange(200), np.zeros(200)))
    assert np.isin(drawn, starts.rows["drop"]).all()
    assert not np.isin(history.episode[drawn], history.split(AUDIT)).any()
    assert "drop" not in Starts(history, StartsConfig(), stride=STRIDE).rows


def test_without_a_failure_nothing_drops_and_episodes_begin_anywhere() -> None:
    history = forked()
    solved = replace(history, success=np.ones_like(history.success))
    starts = Starts(solved, StartsConfig(initial=0, keyframe=0, replay=0, drop=1), stride=STRIDE)
    assert np.isin(starts.draw(EpisodeRng(np.arange(50), np.zeros(50))), starts.rows["replay"]).all()


def classed() -> History:
    """The same points: of ten episodes three began `grasped`, one `own`; of the rest it is not known."""
    kinds = ["grasped"] * 3 + ["own"] + [""] * 6
    return replace(forked(), start=np.array(kinds * (EPISODES // 10)))


def test_episodes_begin_in_the_first_states_of_a_class_by_weight() -> None:
    history = classed()
    only = {"initial": 0, "keyframe": 0, "replay": 0}
    classes = {"grasped": 3.0, "own": 1.0}
    starts = Starts(history, StartsConfig(**only, classes=classes), stride=STRIDE)
    drawn = starts.draw(EpisodeRng(np.arange(400), np.zeros(400)))
    assert np.isin(drawn, history.first).all()
    begun = history.begun_in()[history.episode[drawn]]
    assert set(begun) == {"grasped", "own"}
    assert (begun == "grasped").mean() == pytest.approx(0.75, abs=0.07)  # three standard deviations
    assert not np.isin(history.episode[drawn], history.split(AUDIT)).any()
    mixed = Starts(history, StartsConfig(**{**only, "replay": 3.0}, classes={"own": 1.0}), stride=STRIDE)
    drawn = mixed.draw(EpisodeRng(np.arange(400), np.zeros(400)))
    assert np.isin(drawn, mixed.rows["class own"]).mean() == pytest.approx(0.25, abs=0.08)


def test_a_class_that_the_data_do_not_have_is_refused_with_those_that_they_have() -> None:
    counts = np.unique(np.delete(classed().begun_in(), classed().split(AUDIT)), return_counts=True)
    grasped, own = dict(zip(*counts, strict=True))["grasped"], dict(zip(*counts, strict=True))["own"]
    words = rf"got 'grasp', allowed: grasped \({grasped} episodes\), own \({own} episodes\)\."
    with pytest.raises(ConfigError, match=words):
        Starts(classed(), StartsConfig(classes={"grasp": 1.0}), stride=STRIDE)
    with pytest.raises(ConfigError, match=r"allowed: none, since no episode says in which class it began"):
        Starts(forked(), StartsConfig(classes={"grasped": 1.0}), stride=STRIDE)


def judging() -> History:
    """The same points: those that judge the model began `own`, all others `grasped`."""
    start = np.full(EPISODES, "grasped")
    start[forked().split(AUDIT)] = "own"
    return replace(forked(), start=start)


def test_the_weight_of_a_class_goes_to_the_others_where_only_episodes_that_judge_began_in_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # 1 for the class that has episodes and 3 for any state, as without the class that has none.
    only = {"initial": 0, "keyframe": 0, "replay": 3.0}
    history = judging()
    drawn, alone = (
        Starts(history, StartsConfig(**only, classes=classes), stride=STRIDE).draw(
            EpisodeRng(np.arange(400), np.zeros(400))
        )
        for classes in ({"own": 4.0, "grasped": 1.0}, {"grasped": 1.0})
    )
    np.testing.assert_array_equal(drawn, alone)
    assert "env.settings.starts.classes: no episode began in own" in caplog.text
    grasped = EPISODES - len(history.split(AUDIT))
    nothing = {"initial": 0, "keyframe": 0, "replay": 0}
    words = rf"^env\.settings\.starts\.classes: got 'own', allowed: grasped \({grasped} episodes\)\.$"
    with pytest.raises(ConfigError, match=words):
        Starts(history, StartsConfig(**nothing, classes={"own": 1.0}), stride=STRIDE)


def test_a_class_that_no_episode_happened_to_draw_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = StartsConfig(classes={"near_goal": 1.0, "grasped": 2.0})
    how: dict[str, Any] = {"known": ("near_goal", "grasped"), "at": "method.starts"}
    found = recorded_starts(config, judging(), **how)
    assert found == StartsConfig(classes={"grasped": 2.0})
    assert "method.starts.classes: no episode began in near_goal" in caplog.text
    alone = StartsConfig(initial=0, keyframe=0, replay=0, classes={"near_goal": 1.0})
    with pytest.raises(ConfigError, match=r"^method\.starts\.classes: got 'near_goal', allowed: grasped"):
        recorded_starts(alone, judging(), **how)
    with pytest.raises(ConfigError, match=r"^env\.settings\.starts\.classes: got 'near_goal', allowed"):
        recorded_starts(config, judging())


def test_a_run_imagines_from_the_classes_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"near_goal": 1.0, "grasped": 2.0}
    settings = ImaginedSettings(starts=StartsConfig(classes=classes))
    session = SimpleNamespace(config=RunConfig(recipe="imagined"))
    world = SimpleNamespace(history=judging())
    conductor: Any = SimpleNamespace(config=settings, session=session, folder="world", world=world)
    envs = list[EnvConfig]()

    def noted(env: EnvConfig, *_: Any, **__: Any) -> None:
        envs.append(env)
        raise InterruptedError

    monkeypatch.setattr("robot_rl.train.improve.imagined.simulation", noted)
    with pytest.raises(InterruptedError):
        ImaginedSource(conductor, nn.Linear(1, 1))._begun()
    assert envs[0].settings["starts"] == StartsConfig(classes={"grasped": 2.0})


def test_a_class_of_weight_0_is_none_that_was_asked_for() -> None:
    assert recorded_starts(StartsConfig(classes={"grasp": 0.0}), forked()) == StartsConfig()


def test_classes_stay_with_their_episodes_when_others_come() -> None:
    both = History.joined([forked(), classed()])
    assert (both.begun_in()[:EPISODES] == "").all()
    assert (both.begun_in()[EPISODES:] == classed().start).all()
    assert History.joined([forked(), forked()]).start is None


def test_weights_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="starts: got '0 for all'"):
        StartsConfig(initial=0, keyframe=0, replay=0)
    with pytest.raises(ConfigError, match=r"starts\.drop: got -1"):
        StartsConfig(drop=-1)
    with pytest.raises(ConfigError, match=r"starts\.classes\.own: got -1"):
        StartsConfig(classes={"own": -1.0})
    with pytest.raises(ConfigError, match=r"env\.settings\.starts\.grasped: no such key"):
        ImaginedConfig.of({"starts": {"grasped": 1.0}})
    assert ImaginedConfig.of({"starts": {"classes": {"grasped": 1}}}).starts.classes == {"grasped": 1.0}
