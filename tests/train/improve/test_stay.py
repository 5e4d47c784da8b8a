"""Pictures that stay on an arm's machine: recorded whole, encoded once each, and sent without pictures."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from torch import nn

from robot_rl.data.episode import Feature
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.store.layout import Layout
from robot_rl.data.store.reader import open_source
from robot_rl.data.transitions import StepBatch
from robot_rl.rollout.fetch import kept_folder
from robot_rl.rollout.process import Turn
from robot_rl.rollout.sources import EpisodeLog
from robot_rl.rollout.wire import decode_turn, encode_turn
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import stay
from robot_rl.train.improve.stay import Staying, staying
from robot_rl.train.recording import Recorder
from tests.train.test_recording import META

FEATURES = {"state": Feature("float32", (1,)), "cam.rgb": Feature("uint8", (4, 4, 3))}


def seen(at: int) -> dict[str, Any]:
    """An observation whose picture has the brightness `at`, everywhere."""
    return {"state": np.full((1, 1), at, np.float32), "cam.rgb": np.full((1, 4, 4, 3), at, np.uint8)}


def step(at: int, to: int, *, ends: bool = False, begins: bool = False) -> StepBatch:
    zero = np.zeros((1, 2), np.float32)
    return StepBatch(
        obs=seen(at),
        next_obs=seen(to),
        action=zero,
        base_action=zero,
        next_base_action=zero,
        reward=np.zeros(1, np.float32),
        terminated=np.array([ends]),
        truncated=np.zeros(1, bool),
        begins=begins,
    )


class Encoder:
    """The mean of a picture and the state; notes what it was shown."""

    def __init__(self) -> None:
        self.shown = list[float]()

    def __call__(self, obs: Any) -> dict[str, Any]:
        self.shown.append(float(obs["state"][0, 0]))
        mean = obs["cam.rgb"].mean(axis=(1, 2, 3))
        return {"features": np.stack([mean, obs["state"][:, 0]], axis=1).astype(np.float32)}


EPISODES = (
    step(1, 2, begins=True),
    step(2, 3),
    step(3, 9, ends=True),
    step(10, 11),  # of the next episode, which begins elsewhere
    step(11, 12),
    step(20, 21, begins=True),  # another one: that before was cut short
)
"""Control steps of one arm."""


def test_each_observation_is_encoded_once_and_continues_what_was_before() -> None:
    stays = Staying(encoder := Encoder(), None)
    sent = [stays(one) for one in EPISODES]
    assert encoder.shown == [1, 2, 3, 9, 10, 11, 12, 20, 21]
    assert [one.obs["features"].tolist() for one in sent] == [[[n, n]] for n in (1, 2, 3, 10, 11, 20)]
    assert [one.next_obs["features"].tolist() for one in sent] == [[[n, n]] for n in (2, 3, 9, 11, 12, 21)]
    assert all(one.obs.keys() == one.next_obs.keys() == {"features"} for one in sent)


def test_the_record_has_every_picture_and_what_is_sent_has_none(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "kept", replace(META, state_names=("x",)), FEATURES)
    stays = Staying(Encoder(), recorder)
    sent = [encode_turn(Turn(stays(one), EpisodeLog(1).drain())) for one in EPISODES]
    stays.close()
    kept = open_source(tmp_path / "kept")
    shown = [kept.read(number).obs["cam.rgb"][:][:, 0, 0, 0].tolist() for number in range(len(kept))]
    assert shown == [[1, 2, 3], [10, 11], [20]]
    for octets, one in zip(sent, EPISODES, strict=True):
        arrived = decode_turn(octets).segment
        assert isinstance(arrived, StepBatch)
        assert arrived.obs.keys() == {"features"}
        assert arrived.begins == one.begins


def test_an_order_that_an_earlier_version_left_here_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    monkeypatch.setattr(stay, "load_policy", lambda _: (None, None))
    method = SimpleNamespace(make_policy=lambda *_: nn.Identity())
    monkeypatch.setattr(stay, "method_of", lambda _: method)
    monkeypatch.setattr(stay, "encoder", lambda *_: Encoder())
    layout = Layout(meta=replace(META, state_names=("x",)), features=FEATURES)
    how = {"person": False, "joints": 0, "has_bank": False}  # `has_bank`: of that version
    order = {"reads": ["features"], "record": {"layout": layout.to_json(), **how}}
    stays = staying(cast(RunConfig, None), tmp_path / "job", order, "an arm")
    stays(EPISODES[0])
    stays.close()
    assert open_source(kept_folder() / "job").read(0).device == "an arm"


def test_a_replay_of_what_is_sent_is_that_of_a_learner_who_encodes_itself() -> None:
    shapes = {"features": ((2,), np.float32)}
    encodes = ReplayBuffer(20, 1, shapes, 2, keep=Encoder())
    takes, stays = ReplayBuffer(20, 1, shapes, 2), Staying(Encoder(), None)
    for one in EPISODES:
        encodes.add(one)
        takes.add(stays(one))
    for name, column in encodes.state_dict()["obs"].items():
        np.testing.assert_array_equal(takes.state_dict()["obs"][name], column)
    how: dict[str, Any] = {"n_step": 3, "gamma_step": 0.9}
    drawn = [replay.sample(16, **how, rng=np.random.default_rng(0)) for replay in (encodes, takes)]
    for key, value in drawn[0].obs.items():
        assert value.equal(drawn[1].obs[key])
