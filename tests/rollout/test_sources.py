"""Sources and their weights: what travels, and when it is swapped."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robot_rl.core.policy import ChunkSample, Encoded, Mode, Policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.sources import EpisodeLog, InlineSource
from robot_rl.rollout.stepping import merge_rows
from robot_rl.rollout.weights import Publisher, Subscriber, WeightsError, checksum
from robot_rl.testing.devices import FakeEnv
from tests.plain import Plain
from tests.read_back import reads_back


class VersionPolicy(Plain, nn.Module):
    """Writes its version into every action of a chunk, and adds it again when it refines."""

    horizon, action_dim = 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(1))

    def sample(self, obs: dict[str, Tensor], *, mode: Mode = "ode", **_: Any) -> ChunkSample:
        return ChunkSample(self.version.expand(len(obs["state"]), 4, 2) / 100.0)

    def refine(self, encoded: Encoded, action: Tensor, **_: Any) -> Tensor:
        return action + self.version / 10.0


def weights(version: float) -> dict[str, Tensor]:
    return {"version": torch.tensor([version])}


def make_source(env: FakeEnv, *, n_exec: int) -> InlineSource:
    policy = VersionPolicy()
    executor = ChunkExecutor(cast(Policy, policy), env.num_envs, n_exec=n_exec)
    return InlineSource(env, policy, executor, seed=3)


def test_a_chunk_is_of_one_version_and_the_residual_of_the_newest() -> None:
    source, publisher = make_source(FakeEnv(2, truncate_after=None), n_exec=3), Publisher()
    base, refined, versions = [], [], []
    for version in range(7):
        publisher.offer(version, lambda version=version: weights(float(version)))
        steps = source.collect(publisher)
        base.append(round(100 * float(steps.base_action[0, 0])))
        refined.append(round(10 * float(steps.action[0, 0] - steps.base_action[0, 0])))
        versions.append(steps.policy_version)
    # The first two acts both come before version 1 is offered; an act is decided at the end of a turn.
    assert refined == versions == [0, 0, 1, 2, 3, 4, 5]
    # Chunks of 3 are planned at acts 0, 3 and 6, with the version newest then: 0, 2, 5.
    assert base == [0, 0, 0, 2, 2, 2, 5]


@pytest.mark.parametrize("stays", [False, True])
def test_weights_are_a_snapshot(stays: bool) -> None:
    publisher, policy = Publisher(stays=stays), VersionPolicy()
    mine = weights(1.0)
    publisher.offer(0, lambda: mine)
    mine["version"].fill_(9.0)  # the learner goes on in place
    Subscriber(policy).refresh(publisher)
    assert policy.version.item() == 1.0


def test_publishing_waits_for_its_interval() -> None:
    publisher = Publisher(publish_every=10)
    published = []
    for version in (0, 4, 9, 10, 19, 25):
        publisher.offer(version, lambda: weights(0.0))
        assert publisher.newest is not None
        published.append(publisher.newest.version)
    assert published == [0, 0, 0, 10, 10, 25]


def test_nobody_acts_before_there_are_weights() -> None:
    with pytest.raises(WeightsError, match="none are published yet"):
        Subscriber(VersionPolicy()).refresh(Publisher())


def test_damaged_weights_are_refused() -> None:
    publisher = Publisher()
    publisher.offer(3, lambda: weights(1.0))
    assert publisher.newest is not None
    publisher.newest.weights["version"].add_(1.0)
    with pytest.raises(WeightsError, match="version 3 and its checksum differ"):
        Subscriber(VersionPolicy()).refresh(publisher)


@pytest.mark.parametrize("stays", [False, True])
def test_other_weights_of_the_same_version_are_loaded(stays: bool) -> None:
    """A learner that was killed after version 3 and resumed before it comes to another version 3."""
    first, resumed, policy = Publisher(stays=stays), Publisher(stays=stays), VersionPolicy()
    first.offer(3, lambda: weights(1.0))
    resumed.offer(3, lambda: weights(2.0))
    subscriber = Subscriber(policy)
    for learner, value in ((first, 1.0), (resumed, 2.0)):
        assert subscriber.refresh(learner) == 3
        assert policy.version.item() == value


def test_the_checksum_sees_names_values_and_nothing_else() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    assert checksum(one) == checksum({"b": torch.tensor(3.0), "a": torch.tensor([1.0, 2.0])})
    assert checksum(one) != checksum({"a": torch.tensor([1.0, 2.0]), "c": torch.tensor(3.0)})
    assert checksum(one) != checksum({"a": torch.tensor([1.0, 2.5]), "b": torch.tensor(3.0)})


def test_a_publisher_comes_back_from_its_state() -> None:
    first, second, policy = Publisher(publish_every=5), Publisher(publish_every=5), VersionPolicy()
    second.load_state_dict(first.state_dict())
    assert second.newest is None
    first.offer(2, lambda: weights(2.0))
    first.offer(4, lambda: weights(4.0))  # not due: the newest published stays 2
    second.load_state_dict(first.state_dict())
    assert Subscriber(policy).refresh(second) == 2
    assert policy.version.item() == 2.0


def test_an_interval_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="publish_every must be 1 or more updates, got 0"):
        Publisher(publish_every=0)


def test_steps_keep_the_final_observation_and_the_next_episode_begins_afresh() -> None:
    env = FakeEnv(2, terminate_after=[2, None], truncate_after=[None, 3])
    source, publisher = make_source(env, n_exec=4), Publisher()
    publisher.offer(0, lambda: weights(0.0))
    steps = [source.collect(publisher) for _ in range(4)]
    # state[0] counts control steps: row 0 ends after 2, row 1 after 3.
    assert [s.obs["state"][0, 0] for s in steps] == [0, 1, 0, 1]
    assert [s.next_obs["state"][0, 0] for s in steps] == [1, 2, 1, 2]
    assert [s.next_obs["state"][1, 0] for s in steps] == [1, 2, 3, 1]
    assert [bool(s.terminated[0]) for s in steps] == [False, True, False, True]
    assert [bool(s.truncated[1]) for s in steps] == [False, False, True, False]


def test_collecting_goes_on_exactly_after_a_resume() -> None:
    def fresh() -> tuple[InlineSource, Publisher]:
        publisher = Publisher()
        publisher.offer(0, lambda: weights(0.0))
        return make_source(FakeEnv(3, truncate_after=[4, 5, 6]), n_exec=3), publisher

    (whole, publisher), (first, other), (second, _) = fresh(), fresh(), fresh()
    expected = [whole.collect(publisher) for _ in range(12)]
    for _ in range(5):
        first.collect(other)
    second.load_state_dict(first.state_dict())
    for step in expected[5:]:
        got = second.collect(other)
        for name in ("action", "base_action", "reward", "terminated", "truncated", "next_base_action"):
            np.testing.assert_array_equal(getattr(got, name), getattr(step, name), err_msg=name)
        np.testing.assert_array_equal(got.obs["state"], step.obs["state"])
        np.testing.assert_array_equal(got.next_obs["state"], step.next_obs["state"])


def test_the_log_counts_episodes_that_ended() -> None:
    log = EpisodeLog(2)
    nothing = np.zeros(2, bool)
    log.add(np.array([1.0, 5.0]), nothing, {"success": nothing, "limited": np.array([True, True])})
    log.add(
        np.array([2.0, 5.0]),
        np.array([True, False]),
        {"success": np.array([True, False]), "diverged": np.array([False, True])},
    )
    # Row 0 ended with return 1 + 2 after 2 steps; row 1 has not ended.
    assert log.take() == {"episodes": 1, "safety_clamps": 2, "return": 3.0, "length": 2.0, "success": 1.0}
    assert log.nan_resets == 1
    assert log.take() == {"episodes": 0, "safety_clamps": 0}
    log.add(np.array([0.0, 1.0]), np.array([False, True]), {"success": nothing})
    assert log.take()["return"] == 11.0  # 5 + 5 + 1


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_several_turns_are_logged_as_one_after_another(kind: Any) -> None:
    # Episodes of 2 and 1 turns: returns 1 + 3 and 4, lengths 2 + 1 and 2, the second a success of class 1.
    log = EpisodeLog(2, ("own", "near"))
    turns = [
        {"reward": [1.0, 4.0], "ended": [False, True], "steps": [2, 2], "success": [False, True]},
        {"reward": [3.0, 5.0], "ended": [True, False], "steps": [1, 2], "success": [False, False]},
    ]
    more = {"limited": [True, False], "reset_class": [0, 1]}
    given = [{name: kind(value) for name, value in (turn | more).items()} for turn in turns]
    with reads_back() as reads:
        assert log.add_turns([{**turn, "domain_scale": 0.5} for turn in given]) == 7
    assert len(reads) == (kind is torch.tensor)
    assert log.take() == {
        "episodes": 2.0,
        "safety_clamps": 2.0,
        "domain_scale": 0.5,
        "return": 4.0,
        "length": 2.5,
        "success": 0.5,
        **{"episodes_own": 1.0, "success_own": 0.0, "episodes_near": 1.0, "success_near": 1.0},
    }


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_turn_may_lack_what_others_have(kind: Any) -> None:
    # One action was limited in the first turn and two in the last; both rows end there, of class 1.
    log = EpisodeLog(2, ("own", "near"))
    nothing = {"reward": [1.0, 2.0], "ended": [False, False]}
    last = {"ended": [True, True], "success": [True, False], "limited": [True, True], "reset_class": [1, 1]}
    turns = [{**nothing, "limited": [True, False]}, nothing, {**nothing, **last}]
    given = [{name: kind(value) for name, value in turn.items()} for turn in turns]
    with reads_back() as reads:
        assert log.add_turns(given) == 6
    assert len(reads) == (kind is torch.tensor)
    assert log.take() == {
        "episodes": 2.0,
        "safety_clamps": 3.0,
        "return": 4.5,  # 3 and 6
        "length": 3.0,
        "success": 0.5,
        **{"episodes_near": 2.0, "success_near": 0.5},
    }


def test_the_log_of_another_process_is_merged() -> None:
    theirs, ours, nothing = EpisodeLog(1), EpisodeLog(0), np.zeros(1, bool)
    for number in range(4):  # two episodes of two steps; the third step diverged
        infos = {"success": ~nothing, "limited": ~nothing, "diverged": np.array([number == 2])}
        theirs.add(np.array([1.0]), np.array([number % 2 == 1]), infos)
        ours.merge(theirs.drain())
    assert ours.nan_resets == 1
    assert ours.take() == {"episodes": 2, "safety_clamps": 4, "return": 2.0, "length": 2.0, "success": 1.0}


def test_overflows_are_counted_where_room_is_limited() -> None:
    """Over 3 steps 2, 0 and 1 of two simulations run out of room; merged twice that is 6."""
    theirs, ours, nothing = EpisodeLog(2), EpisodeLog(0), np.zeros(2, bool)
    theirs.add(np.ones(2), nothing, {"success": nothing})
    assert theirs.overflows is theirs.drain().overflows is None
    for overflowed in ([True, True], [False, False], [True, False]):
        theirs.add(np.ones(2), nothing, {"success": nothing, "overflowed": np.array(overflowed)})
        theirs, kept = EpisodeLog(2), theirs.state_dict()
        theirs.load_state_dict(kept)
    assert theirs.overflows == 3
    tally = theirs.drain()
    ours.merge(tally)
    ours.merge(tally)
    assert (ours.overflows, theirs.drain().overflows) == (6, None)
    theirs.load_state_dict({name: value for name, value in kept.items() if name != "overflows"})
    assert theirs.overflows is None  # of a checkpoint of before


def test_success_is_counted_for_each_class_of_starts() -> None:
    log, copy = EpisodeLog(3, ("own", "grasped", "near_goal")), EpisodeLog(0)
    ended, success = np.array([True, True, True]), np.array([True, False, True])
    log.add(np.ones(3), ended, {"success": success, "reset_class": np.array([2, 2, 0])})
    log.add(np.ones(3), ended & success, {"success": success, "reset_class": np.array([2, 1, 0])})
    copy.load_state_dict(log.state_dict())
    copy.merge(log.drain())
    taken = copy.take()  # counted twice: restored, and merged
    assert (taken["episodes_own"], taken["success_own"]) == (4, 1.0)
    assert taken["episodes_near_goal"] == 6
    assert taken["success_near_goal"] == pytest.approx(2 / 3)
    assert "success_grasped" not in taken
    old = {**log.state_dict(), "ended": np.array([[1.0, 2.0, 1.0]])}  # of a checkpoint without classes
    log.load_state_dict(old)
    assert log.take()["success"] == 1.0


def test_rows_that_ended_take_their_final_observation() -> None:
    obs = {"state": np.zeros((2, 3)), "front.rgb": np.zeros((2, 4, 4, 3), np.uint8)}
    final = {"state": np.ones((2, 3)), "front.rgb": np.full((2, 4, 4, 3), 7, np.uint8)}
    merged = merge_rows(obs, final, np.array([False, True]))
    assert merged["state"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert merged["front.rgb"][0].max() == 0
    assert merged["front.rgb"][1].min() == 7
