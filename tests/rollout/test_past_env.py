"""The past that a policy was trained with, in an env: the same numbers, moment for moment."""

import re
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.hal.host import HostEnv
from robot_rl.hal.vector import Obs
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.past_env import PastEnv
from robot_rl.sim.pictures import Pictures
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.finetune.past import Past, names_of


class Walk(FakeEnv):
    """Every state is drawn anew, so that no two moments are alike."""

    def __init__(self, action_names: tuple[str, ...]) -> None:
        super().__init__(num_envs=2, action_dim=2)
        self.state_names, self.action_names = ("a", "b", "c"), action_names
        self._random = np.random.default_rng(0)
        self.seen: list[np.ndarray] = []

    def _moment(self) -> Obs:
        self.seen.append(self._random.standard_normal((2, 3)).astype(np.float32))
        return {"state": self.seen[-1]}

    def reset(self, **_: Any) -> tuple[Obs, dict[str, Any]]:
        return self._moment(), {}

    def step_masked(self, actions: Any, active: Any) -> tuple[Obs, Any, Any, Any, dict[str, Any]]:
        ends = np.zeros(2, bool)
        return self._moment(), np.zeros(2), ends, ends, {"commanded_action": np.clip(actions, -1, 1)}


@pytest.mark.parametrize("action_names", [("a", "b"), ("speed", "grip")])
def test_an_env_tells_what_the_dataset_told(action_names: tuple[str, ...]) -> None:
    inner = Walk(action_names)
    names = names_of(inner.state_names, action_names, lags=(3,), last_action=True)
    env = PastEnv(inner, names)
    sent = np.random.default_rng(1).uniform(-1, 1, (8, 2, 2)).astype(np.float32)
    shown = [env.reset()[0]["state"], *(env.step_masked(action, None)[0]["state"] for action in sent)]
    for row in range(2):
        recorded: Any = SimpleNamespace(  # one episode, as a dataset has it
            columns={
                "state": np.stack(inner.seen)[:, row],
                "action": np.concatenate([sent, sent[:1]])[:, row],
            },
            meta=SimpleNamespace(state_names=inner.state_names, action_names=action_names),
            episode_starts=np.array([0]),
            episode_ends=np.array([9]),
        )
        told = Past(recorded, lags=(3,)).at(np.arange(9)).inputs(last_action=True)
        np.testing.assert_allclose(np.stack(shown)[:, row], told, atol=1e-6)
    assert env.observation_space.contains({"state": shown[0]})


def test_what_was_sent_counts_and_not_what_was_asked_for() -> None:
    env = PastEnv(Walk(("speed", "grip")), ("a", "grip.last_action"))
    env.reset()
    obs, *_ = env.step_masked(np.full((2, 2), 5.0, np.float32), None)
    assert obs["state"][:, 1].tolist() == [1.0, 1.0]


def test_a_new_episode_knows_nothing_of_the_one_before() -> None:
    env = PastEnv(Walk(("a", "b")), ("a", "b", "a.change_1", "a.last_action"))
    env.reset()
    env.step_masked(np.ones((2, 2), np.float32), None)
    obs, _ = env.reset()
    np.testing.assert_array_equal(obs["state"][:, 2], 0)
    np.testing.assert_array_equal(obs["state"][:, 3], obs["state"][:, 0])  # the present joints


def test_the_steps_inside_of_a_chunk_become_its_past() -> None:
    config = EnvConfig(task="reach", num_threads=1)
    with closing(make_env(config, 1, autoreset="disabled")) as plain:
        own = plain.state_names
    config = replace(config, state=(*own, f"{own[0]}.change_2"))
    with closing(make_env(config, 1, autoreset="disabled")) as env:
        chunk = np.random.default_rng(0).uniform(-1, 1, (1, 4, len(env.action_names))).astype(np.float32)
        env.reset(seed=0)
        singly = [env.step_masked(chunk[:, k], None)[0]["state"] for k in range(4)]
        env.reset(seed=0)
        np.testing.assert_array_equal(env.step_chunk(chunk, 4).obs["state"], singly[-1])
        assert singly[3][0, -1] == singly[3][0, 0] - singly[1][0, 0]


@pytest.mark.parametrize("array", ["numpy", "torch"])
@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_a_chunk_looks_once_and_at_the_ends_of_episodes(
    autoreset: Any, array: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, show = list[int](), Pictures.show
    monkeypatch.setattr(Pictures, "show", lambda self, ids: shown.append(len(ids)) or show(self, ids))
    left: dict[str, Any] = {"cameras": ("left",), "missing_cameras": ("left",)}  # black, nothing is drawn
    own = ("joint", "tool")
    config = EnvConfig(task="reach", state=own, horizon_s=0.6, num_threads=1, **left)  # 12 control steps
    envs: list[Any] = []
    for _ in range(2):
        inner: Any = SimVectorEnv(config, 2, autoreset=autoreset, array=array)
        inner = inner if array == "numpy" else HostEnv(inner)
        envs.append(PastEnv(inner, (*own, "tool.pos.0.change_3", "last_action", "last_action.change_2")))
    chunked, single = envs
    sent = np.random.default_rng(0).uniform(-1, 1, (2, 16, len(single.action_names))).astype(np.float32)
    chunked.reset(seed=0)
    single.reset(seed=0)
    steps = [single.step(sent[:, k]) for k in range(12)]
    shown.clear()
    first = chunked.step_chunk(sent[:, :8], 8)
    assert shown == [2]
    np.testing.assert_array_equal(first.obs["state"], steps[7][0]["state"])
    second = chunked.step_chunk(sent[:, 8:], 8)  # both episodes end in its fourth step
    np.testing.assert_array_equal(second.obs["state"], steps[11][0]["state"])
    np.testing.assert_array_equal(second.valid.sum(axis=1), [4, 4])
    if autoreset == "same_step":
        ended = second.infos["final_obs"]["state"]
        np.testing.assert_array_equal(ended, steps[11][4]["final_obs"]["state"])
        assert ended[:, -1].all()
    assert shown == [2] * (3 if autoreset == "same_step" else 2)


def test_a_row_that_stands_still_keeps_its_past() -> None:
    env = PastEnv(Walk(("speed", "grip")), ("a", "speed.last_action"))
    env.reset()
    env.step_masked(np.full((2, 2), 0.5, np.float32), None)
    obs, *_ = env.step_masked(np.full((2, 2), -0.5, np.float32), np.array([True, False]))
    assert obs["state"][:, 1].tolist() == [-0.5, 0.5]


def test_names_of_nothing() -> None:
    with pytest.raises(
        ConfigError,
        match=r"env\.state: 'd\.change_2' tells the past of 'd', which is no element of the state of "
        r"'count'\. Known: a, b, c\.",
    ):
        PastEnv(Walk(("a", "b")), ("a", "d.change_2"))
    with pytest.raises(
        ConfigError,
        match=r"'c\.last_action' tells the past of 'c', which is no action of 'count'\. Known: a, b\.",
    ):
        PastEnv(Walk(("a", "b")), ("c.last_action",))


@pytest.mark.parametrize(
    ("robots", "element", "near"),
    [((), "joint1.pos", "joint1.po"), (("panda",), "panda.joint1.pos", "joint1.pos")],
)
def test_the_past_of_what_is_not_shown_is_refused_with_what_to_add(
    robots: tuple[str, ...], element: str, near: str
) -> None:
    config = EnvConfig(task="reach", robots=robots, state=("tool", f"{element}.change_3"), num_threads=1)
    says = f"tells the past of '{element}', which is not shown. Add {element} to env.state."
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_env(config, 1)
    make_env(replace(config, state=(element, *config.state)), 1).close()
    says = f"'{near}', which is no element of the state of 'reach'. Did you mean '{element}'?"
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_env(replace(config, state=("tool", f"{near}.change_3")), 1)


@pytest.mark.parametrize(
    ("name", "got"), [("a.change_0", "a.change_"), ("last_action.change_0", "a.last_action.change_")]
)
def test_a_change_is_over_a_control_step_or_more(name: str, got: str) -> None:
    allowed = f"env.state: got '{got}0', allowed: a change over 1 or more control steps, such as {got}1"
    with pytest.raises(ConfigError, match=re.escape(allowed)):
        PastEnv(Walk(("a", "b")), ("a", name))


def test_a_simulation_shows_its_past() -> None:
    plain = make_env(EnvConfig(task="reach"), 1, autoreset="disabled")
    own, first = plain.state_names, plain.state_names[0]
    plain.close()
    config = EnvConfig(task="reach", state=(*own, f"{first}.change_1"))
    env = make_env(config, 1, autoreset="disabled")
    before, _ = env.reset(seed=0)
    after, *_ = env.step_masked(np.ones((1, len(env.action_names)), np.float32), None)
    env.close()
    assert env.state_names == config.state
    assert after["state"][0, -1] == after["state"][0, 0] - before["state"][0, 0]


def test_an_episode_that_begins_by_itself_forgets_the_one_that_ended() -> None:
    env = PastEnv(FakeEnv(1, action_dim=1, truncate_after=2), ("step", "step.change_1", "d0.last_action"))
    env.reset(seed=0)
    env.step_masked(np.full((1, 1), 0.5, np.float32), None)
    obs, _, _, truncated, infos = env.step_masked(np.full((1, 1), -0.5, np.float32), None)
    assert truncated.all()
    np.testing.assert_array_equal(infos["final_obs"]["state"], [[2, 1, -0.5]])
    np.testing.assert_array_equal(obs["state"], [[0, 0, 0]])
    obs, *_ = env.step_masked(np.full((1, 1), 0.25, np.float32), None)
    np.testing.assert_array_equal(obs["state"], [[1, 1, 0.25]])


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_the_past_belongs_to_the_state(autoreset: Any) -> None:
    with closing(make_env(EnvConfig(task="reach"), 1, autoreset="disabled")) as plain:
        own, action = plain.state_names, plain.action_names[0]
    past = (f"{own[0]}.change_2", f"{action}.last_action", f"{action}.last_action.change_1")
    config = EnvConfig(task="reach", state=(*own, *past), horizon_s=0.5, num_threads=1)
    with closing(make_env(config, 2, autoreset=autoreset)) as env:
        actions = np.random.default_rng(0).uniform(-1, 1, (8, 2, len(env.action_names))).astype(np.float32)
        env.reset(seed=0)
        at_rows = [env.step(action)[0]["state"] for action in actions[:3]][-1]
        assert at_rows[:, len(own) :].all()
        kept, rows = env.state_dict(), env.get_state()
        expected = [env.step(action)[0]["state"] for action in actions[3:]]
        env.reset(seed=5)
        env.load_state_dict(kept)
        again = [env.step(action)[0]["state"] for action in actions[3:]]
        np.testing.assert_array_equal(again, expected)
        env.load_state_dict(kept)
        env.step(actions[7])
        env.set_state(rows, np.array([False, True]))
        np.testing.assert_array_equal(env.step(actions[3])[0]["state"][1], expected[0][1])
        before = env.reset(seed=5)[0]["state"]
        some: dict[str, Any] = {"states": rows, "reset_mask": np.array([False, True])}
        shown = env.reset(options=some)[0]["state"]
        np.testing.assert_array_equal(shown[0], before[0])
        np.testing.assert_array_equal(shown[1], at_rows[1])
        np.testing.assert_array_equal(env.step(actions[3])[0]["state"][1], expected[0][1])
        inner: Any = env
        assert inner.horizon == 10, "what is not named is that of the env inside"


def test_rows_of_the_env_inside_are_refused_with_both_widths() -> None:
    env = PastEnv(FakeEnv(2, action_dim=2), ("step", "step.change_1"))
    rows = env.env.get_state()  # its past: 2 states of 5 numbers, 2 actions of 2, and whether one was sent
    says = "count: got rows of shape (2, 4), need (2, 19): 4 numbers of the env and 15 of its past."
    for put in (env.set_state, lambda rows: env.reset(options={"states": rows})):
        with pytest.raises(ConfigError, match=re.escape(says)):
            put(rows)


def test_beginnings_and_all_actions_stand_for_their_names() -> None:
    names = ("joint", "goal", "last_action", "last_action.change_1", "joint1.pos.change_2")
    with closing(make_env(EnvConfig(task="reach", state=names), 1)) as env:
        own = [name for name in env.state_names if "change" not in name and "last_action" not in name]
        assert all(name.startswith(("joint", "goal")) for name in own), own
        actions = [f"{name}.last_action" for name in env.action_names]
        changes = [f"{name}.change_1" for name in actions]
        assert env.state_names == (*own, *actions, *changes, "joint1.pos.change_2")
    with closing(make_env(EnvConfig(task="reach", state=("last_action",)), 1)) as env:
        assert len(env.state_names) > len(env.action_names)
        assert env.state_names[-len(env.action_names) :] == tuple(actions)
