"""A person beside the arm: who drives, what is kept of it, how episodes end and begin."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DeviceError, SafetyStopError
from robot_rl.core.policy import Policy
from robot_rl.data.replay import ReplayBuffer
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.real.teleop.intent import Array, Intent, NoTeleop
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.sources import InlineSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.vector import EnvConfig
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy.human import Intervening
from robot_rl.train.deploy.online import make_arm
from robot_rl.train.deploy.person import ScriptedPerson
from robot_rl.train.deploy.reward import KeyJudge, TaskJudge
from robot_rl.train.experience import ReplayExperience
from robot_rl.train.human_config import HumanConfig, ScriptedPersonConfig
from tests.hal.test_device import Ticket
from tests.rollout.test_sources import VersionPolicy, weights

LEASES = [Ticket("mujoco")]

WANTED = np.array([[0.5, 0.5]], np.float32)
DRIVES = Intent(takes_over=True, action=np.array([-1.0, 1.0]))


class Script:
    """A person who does one thing after another, then nothing."""

    def __init__(self, intents: Sequence[Intent] = ()) -> None:
        self.intents, self.seen = list(intents), list[Array]()
        self.questions, self.begins = list[str](), 0

    def begin(self) -> None:
        self.begins += 1

    def read(self, wanted: Array) -> Intent:
        self.seen.append(wanted)
        return self.intents.pop(0) if self.intents else Intent()

    def ask(self, question: str) -> None:
        self.questions.append(question)

    def close(self) -> None: ...


def arm(intents: Sequence[Intent] = (), **lengths: Any) -> tuple[Intervening, Script]:
    script = Script(intents)
    env = Intervening(FakeEnv(1, autoreset="disabled", **lengths), script, TaskJudge())
    env.reset(seed=3)
    return env, script


def test_the_policy_drives_until_a_person_takes_over_and_both_streams_are_told() -> None:
    env, script = arm([Intent(), DRIVES, Intent()])
    found = [env.step(WANTED)[4] for _ in range(3)]
    assert [infos["commanded_action"][0].tolist() for infos in found] == [[0.5, 0.5], [-1, 1], [0.5, 0.5]]
    assert all((infos["policy_action"] == WANTED).all() for infos in found)
    assert [infos["source"] for infos in found] == ["sim", "human", "sim"]
    assert [bool(infos["human"][0]) for infos in found] == [False, True, False]
    assert script.seen[0].tolist() == [0.5, 0.5]


def test_episodes_end_by_the_task_or_the_clock_and_the_next_begins_by_itself() -> None:
    env, script = arm(terminate_after=2)
    env.step(WANTED)
    obs, reward, terminated, truncated, infos = env.step(WANTED)
    assert (reward[0], terminated[0], truncated[0], infos["success"][0]) == (1.0, True, False, True)
    assert infos["final_obs"]["state"][0, :2].tolist() == [2, 0]  # step 2 of episode 0
    assert obs["state"][0, :2].tolist() == [0, 1]
    assert script.begins == 2


@pytest.mark.parametrize(("verdict", "reward"), [("success", 1.0), ("fail", 0.0)])
def test_a_verdict_ends_the_episode(verdict: Any, reward: float) -> None:
    env, _ = arm([Intent(), Intent(verdict=verdict)])
    assert not env.step(WANTED)[2][0]
    _, rewards, terminated, truncated, _ = env.step(WANTED)
    assert (rewards[0], terminated[0], truncated[0]) == (reward, True, False)


def test_with_rewards_by_key_the_task_ends_nothing() -> None:
    env = Intervening(FakeEnv(1, autoreset="disabled", terminate_after=1), Script(), KeyJudge())
    env.reset(seed=3)
    _, reward, terminated, _, infos = env.step(WANTED)
    assert (reward[0], terminated[0], infos["success"][0]) == (0.0, False, False)


def test_a_person_puts_the_scene_back_and_what_is_observed_is_after_it() -> None:
    script = Script()
    env = Intervening(FakeEnv(1, autoreset="disabled"), script, TaskJudge(), reset="assisted")
    obs, _ = env.reset(seed=3)
    assert len(script.questions) == 1
    assert obs["state"][0, 1] == 1, "the second reset's, which saw the new scene"
    with pytest.raises(DeviceError, match="nobody is there to be asked: Put the scene back"):
        Intervening(FakeEnv(1, autoreset="disabled"), NoTeleop(), TaskJudge(), reset="assisted").reset()


def test_words_hold_from_then_on() -> None:
    env, _ = arm([Intent(), Intent(instruction="the red one")])
    said = [env.step(WANTED)[4]["instruction"] for _ in range(3)]
    assert said == ["Count to the end.", "the red one", "the red one"]


def test_a_person_stops_the_arm_before_anything_is_sent() -> None:
    stopped: list[bool] = []
    inner = FakeEnv(1, autoreset="disabled")
    vars(inner)["safe_stop"] = lambda: stopped.append(True)
    env = Intervening(inner, Script([Intent(stop=True)]), TaskJudge())
    env.reset(seed=3)
    with pytest.raises(SafetyStopError, match=r"the person stopped the arm. Clear the stop"):
        env.step(WANTED)
    assert stopped == [True]
    assert inner._step[0] == 0


def test_an_input_that_cannot_be_closed_leaves_no_arm_open() -> None:
    class Broken(Script):
        def close(self) -> None:
            raise OSError("the gamepad is gone")

    inner = FakeEnv(1, autoreset="disabled")
    with pytest.raises(OSError, match="gamepad is gone"):
        Intervening(inner, Broken([]), TaskJudge()).close()
    assert inner.closed


@pytest.mark.parametrize("action", [None, np.array([1.0]), np.array([np.nan, 0.0])])
def test_taking_over_without_an_action_is_refused(action: Any) -> None:
    env, _ = arm([Intent(takes_over=True, action=action)])
    with pytest.raises(DeviceError, match=r"took over with action .*allowed: 2 finite numbers"):
        env.step(WANTED)


def test_a_person_watches_one_arm() -> None:
    for env in (FakeEnv(2, autoreset="disabled"), FakeEnv(1)):
        with pytest.raises(ConfigError, match="allowed: one env with autoreset disabled"):
            Intervening(env, Script(), TaskJudge())


def test_the_plan_of_before_is_forgotten_after_a_person_moved_the_arm() -> None:
    env, _ = arm([Intent(), DRIVES, Intent(), Intent()])
    policy = VersionPolicy()
    source = InlineSource(env, policy, ChunkExecutor(cast(Policy, policy), 1, n_exec=4), seed=3)
    handle, planned, sources = Publisher(), [], []
    for version in range(4):
        handle.offer(version, lambda version=version: weights(float(version)))
        steps = source.collect(handle)
        planned.append(round(100 * float(steps.next_base_action[0, 0])))
        sources.append(steps.source)
        assert steps.policy_action is not None
    assert sources == ["sim", "human", "sim", "sim"]
    # Without a person the chunk of version 0 would last 4 steps; the person's step has it planned anew.
    assert planned == [0, 1, 1, 1]


def test_a_persons_share_of_the_steps_is_counted_anew_for_each_row() -> None:
    env, _ = arm([DRIVES, Intent(), Intent(), Intent(), DRIVES, DRIVES])
    policy = VersionPolicy()
    source = InlineSource(env, policy, ChunkExecutor(cast(Policy, policy), 1, n_exec=4), seed=3)
    replay = ReplayBuffer(50, 1, {"state": ((5,), np.float32)}, 2)
    experience = ReplayExperience(replay, has_person=True)
    handle = Publisher()
    handle.offer(0, lambda: weights(0.0))
    shares: list[float] = []
    for steps in (4, 2):
        for _ in range(steps):
            experience.add(source.collect(handle))
        shares.append(experience.metrics()["collect/human_share"])
    assert shares == [0.25, 1.0]


def test_dense_reward_stays_dense_beside_an_arm(tmp_path: Path) -> None:
    dense = EnvConfig(task="reach", reward="dense", num_threads=1)
    env = make_arm(RunConfig(num_envs=1, real_time=True, env=dense), tmp_path, LEASES)
    alone = make_env(dense, 1, autoreset="disabled")
    env.reset(seed=1)
    alone.reset(seed=1)
    rng, rewards = np.random.default_rng(0), list[float]()
    for _ in range(5):
        action = rng.uniform(-1, 1, (1, len(env.action_names))).astype(np.float32)
        rewards.append(float(env.step(action)[1][0]))
        assert rewards[-1] == alone.step(action)[1][0]
    assert all(0 < reward < 0.5 for reward in rewards)
    assert len(set(rewards)) == 5
    env.close()
    alone.close()


class Shaped(FakeEnv):
    """Rewards a step by 0.3, and success by 1."""

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        obs, _, terminated, truncated, infos = super().step_masked(actions, active)
        return obs, np.where(terminated, 1.0, 0.3), terminated, truncated, infos


@pytest.mark.parametrize(
    ("reward", "verdict", "wanted"),
    [
        ("dense", None, [0.3, 1.0]),
        ("sparse", None, [0.0, 1.0]),
        ("dense", "success", [0.3, 1.0]),
        ("dense", "fail", [0.3, 0.5]),  # the env saw success, the person did not: what shaping gives at most
        ("sparse", "fail", [0.0, 0.0]),
    ],
)
def test_the_judge_decides_what_is_success_and_the_task_shapes_the_way(
    reward: Any, verdict: Any, wanted: list[float]
) -> None:
    inner = Shaped(1, autoreset="disabled", terminate_after=2)
    env = Intervening(inner, Script([Intent(), Intent(verdict=verdict)]), TaskJudge(), reward=reward)
    env.reset(seed=3)
    assert [float(env.step(WANTED)[1][0]) for _ in range(2)] == wanted


def test_a_dense_reward_that_the_task_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("robot_rl.sim.tasks.reach.Reach.dense_reward")
    words = r"env.reward: got 'dense', allowed: sparse: 'reach' has no `dense_reward`"
    with pytest.raises(ConfigError, match=words):
        RunConfig(env=EnvConfig(task="reach", reward="dense"))
    with pytest.raises(ConfigError, match=words):
        make_env(EnvConfig(task="reach", reward="dense"), 1)


# The scripted person, in the simulation it stands for


def test_a_scripted_person_takes_over_late_and_brings_it_to_success() -> None:
    env = make_env(EnvConfig(task="reach", num_threads=1), 1, autoreset="disabled")
    person = ScriptedPerson(env, ScriptedPersonConfig(), seed=1)
    still = np.zeros((1, len(env.action_names)), np.float32)
    env.reset(seed=5)
    person.begin()
    began, succeeded = -1, False
    for step in range(100):
        intent = person.read(still[0])
        if intent.takes_over and began < 0:
            began = step
        sent = still if intent.action is None else intent.action[None]
        succeeded = bool(env.step(sent)[4]["success"][0])
        if succeeded:
            break
    env.close()
    assert began >= round(1.1 * env.control_hz), "patience 0.8 s, then 0.3 s to react"
    assert succeeded


def test_a_scripted_person_looks_away_in_time() -> None:
    env = make_env(EnvConfig(task="reach", num_threads=1), 1, autoreset="disabled")
    person = ScriptedPerson(env, ScriptedPersonConfig(half_life_s=1e-3), seed=1)
    still = np.zeros(len(env.action_names), np.float32)
    env.reset(seed=5)
    person.read(still)
    person.begin()  # 50 half lives later
    assert not any(person.read(still).takes_over for _ in range(60))
    env.close()


def test_a_scripted_person_goes_on_from_its_state() -> None:
    env = make_env(EnvConfig(task="reach", num_threads=1), 1, autoreset="disabled")
    env.reset(seed=5)
    still = np.zeros(len(env.action_names), np.float32)
    first = ScriptedPerson(env, ScriptedPersonConfig(), seed=1)
    for _ in range(25):
        first.read(still)
    second = ScriptedPerson(env, ScriptedPersonConfig(), seed=2)
    second.load_state_dict(first.state_dict())
    a, b = first.read(still), second.read(still)
    assert a.takes_over
    assert b.takes_over
    np.testing.assert_array_equal(cast(Array, a.action), cast(Array, b.action))
    env.close()


def test_a_leader_arm_is_followed_with_the_actions_of_the_task() -> None:
    env = make_env(EnvConfig(task="reach", num_threads=1), 1, autoreset="disabled")
    sim = cast(Any, env)
    env.reset(seed=5)
    goal = sim.controller.joint_positions() + np.array([[0.1, 0.05, -0.05, 0.1, 0.0, 0.05, 0.1]])
    before = np.linalg.norm(sim.view["tool.pos"])
    start = sim.view["tool.pos"].copy()
    for _ in range(60):
        env.step(sim.action_towards(goal, np.array([1.0])))
    assert before > 0
    now = sim.view["tool.pos"].copy()
    sim.backend.bind("qpos")[:, sim.index.arm_qpos] = goal
    sim.backend.forward()
    there = sim.view["tool.pos"].copy()
    env.close()
    assert np.linalg.norm(now - there) < 0.1 * np.linalg.norm(start - there)


def test_a_scripted_person_needs_one_simulated_arm() -> None:
    with pytest.raises(ConfigError, match="a scripted person watches one simulated arm, got 1 of FakeEnv"):
        ScriptedPerson(FakeEnv(1), ScriptedPersonConfig(), seed=0)


def test_the_arm_of_a_run_is_built_from_its_configuration(tmp_path: Path) -> None:
    config = RunConfig(
        num_envs=1, env=EnvConfig(task="reach", num_threads=1), human=HumanConfig(input="scripted")
    )
    env = make_arm(config, tmp_path, LEASES)
    env.reset(seed=1)
    _, _, _, _, infos = env.step(np.zeros((1, len(env.action_names)), np.float32))
    assert infos["source"] == "sim"
    env.load_state_dict(env.state_dict())
    env.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "classifier"}, "human.classifier: missing"),
        ({"reward": "key"}, "human.input: got 'none' with human.reward=key"),
        ({"reset": "assisted"}, "human.input: got 'none' .*human.reset=assisted"),
        ({"input": "leader"}, "human.leader: missing"),
        ({"ratio": 1.0}, "human.ratio: got 1.0, allowed: 0 to below 1"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HumanConfig(**change)


def test_shares_of_a_batch_leave_room_for_new_steps() -> None:
    with pytest.raises(ConfigError, match=r"human.ratio: got 0.6 with method.demo_ratio 0.5"):
        RunConfig(num_envs=1, human=HumanConfig(input="scripted", ratio=0.6))
    with pytest.raises(ConfigError, match="num_envs: got 16, allowed: 1 with an arm or a person"):
        RunConfig(num_envs=16, real_time=True)
