"""Acting in another process: what travels, who waits for whom, who hears of a death.

Most of it runs the actor in a thread; processes, of which the first loads torch, are `slow`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.config import load
from robot_rl.core.errors import DeviceError, DriverGoneError, SafetyStopError
from robot_rl.core.policy import ChunkSample, Encoded, Policy
from robot_rl.data.episode import SOURCES
from robot_rl.data.store.reader import open_source
from robot_rl.data.transitions import StepBatch
from robot_rl.hal.vector import Array
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.process import ProcessSource, _act, _Failure
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.shared import Inbox, SharedWeights
from robot_rl.rollout.sources import InlineSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.testing.devices import FakeEnv
from robot_rl.train import phases, session
from robot_rl.train.config import RunConfig
from tests.rollout.test_sources import VersionPolicy, weights


class FallingEnv(FakeEnv):
    """Fails at its fourth step."""

    error: type[DeviceError] = DeviceError

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        if self._step[0] == 3:
            raise self.error("the cable is out")
        return super().step_masked(actions, active)


def build(env: FakeEnv | None = None) -> InlineSource:
    policy = VersionPolicy()
    executor = ChunkExecutor(cast(Policy, policy), 1, n_exec=2)
    return InlineSource(env or FakeEnv(1, truncate_after=5), policy, executor, seed=3)


def build_falling() -> InlineSource:
    return build(FallingEnv(1))


class LimitedEnv(FakeEnv):
    """Says that safety limited every third step, and that its simulation diverged in every fifth."""

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        obs, reward, terminated, truncated, infos = super().step_masked(actions, active)
        self.steps = getattr(self, "steps", 0) + 1
        infos |= {"limited": np.array([self.steps % 3 == 0]), "diverged": np.array([self.steps % 5 == 0])}
        return obs, reward, terminated, truncated, infos


def build_limited() -> InlineSource:
    return build(LimitedEnv(1, truncate_after=5))


class DivergingEnv(SimVectorEnv):
    """A simulation in whose state a NaN appears before every seventh step."""

    steps = 0

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        self.steps += 1
        if self.steps % 7 == 0:
            self.backend.bind("qpos")[0, 0] = np.nan
        return super().step_masked(actions, active)


class Thrash(VersionPolicy):
    """Asks for one end of the range, then for the other: faster than the arm may accelerate."""

    horizon, action_dim = 4, 5

    def sample(self, obs: dict[str, Tensor], **_: Any) -> ChunkSample:
        return ChunkSample(torch.tensor([1.0, -1.0, 1.0, -1.0])[None, :, None].expand(1, 4, 5))

    def refine(self, encoded: Encoded, action: Tensor, **_: Any) -> Tensor:
        return action


def build_diverging() -> InlineSource:
    policy, env = Thrash(), DivergingEnv(EnvConfig(task="pick_cube"), 1)
    executor = ChunkExecutor(cast(Policy, policy), 1, n_exec=4)
    return InlineSource(env, policy, executor, seed=3)


def offered(version: int = 0) -> Publisher:
    publisher = Publisher()
    publisher.offer(version, lambda: weights(float(version)))
    return publisher


@contextmanager
def actor(make: Any, handle: Publisher, turns: Any = None) -> Any:
    """Runs the actor's function in a thread; yields the learner's end of the pipe and the weights."""
    ours, theirs = Pipe(duplex=False)
    shared, (stop, stops) = SharedWeights(handle), Pipe(duplex=False)
    thread = threading.Thread(target=_act, args=(make, 0.0, turns, theirs, shared.address, stop))
    thread.start()
    yield ours, shared
    stops.close()
    while ours.poll(0.1):
        try:
            ours.recv()
        except EOFError:
            break
    thread.join(20.0)
    assert not thread.is_alive()
    shared.close()


def test_steps_come_in_order_and_new_weights_act_in_time() -> None:
    handle = offered(0)
    with actor(build, handle) as (pipe, shared):
        first = [pipe.recv().segment for _ in range(12)]
        handle.offer(7, lambda: weights(7.0))
        shared.publish()
        deadline = time.monotonic() + 20.0
        while (steps := pipe.recv().segment).policy_version != 7:
            assert time.monotonic() < deadline
    # Every step of every episode of five, none twice: (step, episode) as the env counts them.
    counts = [tuple(step.obs["state"][0, :2].astype(int)) for step in first]
    assert counts == [(i % 5, i // 5) for i in range(12)]
    assert all(step.policy_version == 0 for step in first)
    # Version 7 adds 0.7 to what it wants, clipped by nothing.
    assert float(steps.action[0, 0] - steps.base_action[0, 0]) == pytest.approx(0.7)


def test_a_failure_is_the_last_that_is_heard() -> None:
    with actor(build_falling, offered(0)) as (pipe, _):
        messages = [pipe.recv() for _ in range(4)]
    assert isinstance(messages[3], _Failure)
    assert messages[3].error == "DeviceError: the cable is out"


@pytest.mark.parametrize(
    ("error", "may_pass"), [(DeviceError, True), (SafetyStopError, False), (DriverGoneError, True)]
)
def test_only_a_stop_that_a_person_looks_at_is_the_end(
    error: type[DeviceError], may_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FallingEnv, "error", error)
    with actor(build_falling, offered(0)) as (pipe, _):
        messages = [pipe.recv() for _ in range(4)]
    assert messages[3] == _Failure(f"{error.__name__}: the cable is out", may_pass)


def test_clamps_and_resets_of_another_process_are_counted() -> None:
    handle, source = offered(0), ProcessSource(build_limited)
    with actor(build_limited, handle) as (pipe, _):
        source._actor = cast(Any, SimpleNamespace(publish=lambda: None, receive=lambda wait_s: pipe.recv()))
        for _ in range(16):
            source.collect(handle)
    # Of 16 steps, 3, 6, 9, 12 and 15 were limited; 5, 10 and 15 diverged.
    assert source.episodes.nan_resets == 3
    assert source.episodes.take()["safety_clamps"] == 5
    assert source.episodes.take()["safety_clamps"] == 0
    assert source.episodes.nan_resets == 3


def test_an_actor_whose_learner_is_gone_leaves() -> None:
    handle = offered(0)
    ours, theirs = Pipe(duplex=False)
    shared = SharedWeights(handle)
    stop, stops = Pipe(duplex=False)
    arguments = (build, 0.0, None, theirs, shared.address, stop)
    thread = threading.Thread(target=_act, args=arguments)
    thread.start()
    ours.recv()
    ours.close()
    thread.join(20.0)
    assert not thread.is_alive()
    stops.close()
    shared.close()


def test_an_actor_that_waits_for_leave_ends_with_its_learner() -> None:
    ours, theirs = Pipe(duplex=False)
    turns, leave = Pipe(duplex=False)
    shared = SharedWeights(offered(0))
    stop, stops = Pipe(duplex=False)
    arguments = (build, 0.0, turns, theirs, shared.address, stop)
    thread = threading.Thread(target=_act, args=arguments)
    thread.start()
    leave.send_bytes(b"")
    ours.recv()
    leave.close()
    thread.join(20.0)
    assert not thread.is_alive()
    stops.close()
    shared.close()


@pytest.mark.parametrize("gone", ["stopped", "killed"])
def test_an_actor_that_never_gets_whole_weights_leaves(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe(duplex=False)
    (stop, stops), shared = Pipe(duplex=False), SharedWeights(offered(0))
    parent = SimpleNamespace(is_alive=lambda: True)
    monkeypatch.setattr("multiprocessing.parent_process", lambda: parent)
    monkeypatch.setattr(Inbox, "newest", None)  # a bit flipped in them, or the learner died before
    thread = threading.Thread(target=_act, args=(build, 0.0, None, theirs, shared.address, stop))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    if gone == "stopped":
        stops.close()
    else:
        parent.is_alive = lambda: False
    thread.join(20.0)
    assert not thread.is_alive()
    with pytest.raises(EOFError):
        ours.recv()
    shared.close()


def test_a_failed_arm_saves_the_run_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(loop: Any) -> None:
        raise ActorError("actor: DeviceError: the cable is out")

    @contextmanager
    def phase(*args: Any, **kwargs: Any) -> Any:
        yield SimpleNamespace()

    saved: list[str] = []
    run = SimpleNamespace(
        loop_state=lambda phase: None,
        is_resumed=False,
        phase=phase,
        save=lambda phase, loop: saved.append(phase),
        command="train",
        folder="runs/one",
    )
    loop = SimpleNamespace(counters=SimpleNamespace(updates=0, env_steps=0), sources=[])
    monkeypatch.setattr(session, "train", fail)
    with pytest.raises(
        DeviceError, match="the cable is out The run is saved: `robot-rl train resume=runs/one`"
    ):
        session.learn(cast(Any, run), cast(Any, loop), "residual", 10, unit="steps")
    assert saved == ["residual"]


def collect_until(source: ProcessSource, handle: Publisher, number: int) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + 120.0
    while len(found) < number:
        assert time.monotonic() < deadline, "the actor is silent"
        steps = source.collect(handle)
        if steps is not None:
            found.append(steps)
    return found


@pytest.mark.slow
def test_a_spawned_actor_acts_dies_and_is_begun_anew() -> None:
    handle = offered(0)
    source = ProcessSource(build, period_s=0.01)
    assert source.pid is None
    found = collect_until(source, handle, 7)
    assert [step.begins for step in found] == [True, *[False] * 6]
    np.testing.assert_array_equal([int(step.obs["state"][0, 0]) for step in found], [0, 1, 2, 3, 4, 0, 1])
    assert source.pid not in (None, os.getpid())
    state = source.state_dict()
    os.kill(cast(int, source.pid), signal.SIGKILL)
    with pytest.raises(ActorError, match="ended with exit code -9 and gave no reason"):
        collect_until(source, handle, 10**9)
    source.close()
    again = ProcessSource(build, period_s=0.01)
    again.load_state_dict(state)
    (steps,) = collect_until(again, handle, 1)
    assert steps.begins
    assert steps.obs["state"][0, 0] == 0, "an arm cannot be put back to where it was: a new episode"
    again.close()


def build_named() -> InlineSource:
    """The horizon of episodes is what the environment says."""
    return build(FakeEnv(1, truncate_after=int(os.environ["ROBOT_RL_TEST_HORIZON"])))


@pytest.mark.slow
def test_an_actor_has_the_environment_that_the_learner_has_as_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for horizon in (2, 3):
        monkeypatch.setenv("ROBOT_RL_TEST_HORIZON", str(horizon))
        source = ProcessSource(build_named, period_s=0.01)
        found = collect_until(source, offered(0), 5)
        source.close()
        assert [bool(step.truncated[0]) for step in found].index(True) == horizon - 1


def learner() -> None:
    """Has an actor, says which process that is, and goes on until it is killed."""
    source, handle = ProcessSource(build, period_s=0.05), offered(0)
    collect_until(source, handle, 1)
    sys.stdout.write(f"{source.pid}\n")
    sys.stdout.flush()
    while True:
        source.collect(handle)


@pytest.mark.slow
def test_the_actor_of_a_learner_that_is_killed_ends_and_so_does_what_it_was_forked_from() -> None:
    def is_there(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    code = "from tests.rollout.test_process import learner; learner()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        actor = int(process.stdout.readline())
        server = int(Path(f"/proc/{actor}/stat").read_text().rpartition(")")[2].split()[1])
        assert server not in (process.pid, actor)
        process.kill()
    deadline = time.monotonic() + 30.0
    while is_there(actor) or is_there(server):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_clamps_and_resets_in_a_spawned_actor_are_those_of_one_here() -> None:
    handle, here, there = offered(0), build_diverging(), ProcessSource(build_diverging)
    for _ in range(22):
        here.collect(handle)
    collect_until(there, handle, 22)
    there.close()
    here.close()
    assert here.episodes.nan_resets == there.episodes.nan_resets == 3  # steps 7, 14 and 21 of 22
    clamps = here.episodes.take()["safety_clamps"]
    assert there.episodes.take()["safety_clamps"] == clamps > 0


@pytest.mark.slow
def test_a_spawned_actor_that_fails_says_why() -> None:
    source = ProcessSource(build_falling)
    with pytest.raises(ActorError, match="actor: DeviceError: the cable is out"):
        collect_until(source, offered(0), 10)
    source.close()


def test_an_actor_that_may_not_run_ahead_waits_to_be_asked() -> None:
    publisher, (turns, leave) = offered(0), Pipe(duplex=False)
    for _ in range(2):
        leave.send_bytes(b"")
    with actor(build, publisher, turns) as (pipe, shared):
        assert [pipe.recv().segment.policy_version for _ in range(2)] == [0, 0]
        publisher.offer(5, lambda: weights(5.0))
        shared.publish()
        assert not pipe.poll(0.3), "two turns were allowed"
        for _ in range(2):
            leave.send_bytes(b"")
        # Its next action was decided at the end of the second turn, with the weights of then.
        assert [pipe.recv().segment.policy_version for _ in range(2)] == [0, 5]
        assert not pipe.poll(0.3)


@pytest.mark.slow
def test_what_acts_when_it_is_asked_collects_what_it_would_collect_here() -> None:
    here, there = build(), ProcessSource(build, ahead=0)
    ours, theirs = offered(0), offered(0)
    for turn in range(12):
        one, other = here.collect(ours), there.collect(theirs)
        assert isinstance(other, StepBatch)
        for name in ("action", "base_action", "reward", "truncated", "next_base_action", "policy_version"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        for publisher in (ours, theirs):
            publisher.offer(turn, lambda turn=turn: weights(float(turn)))
    assert here.episodes.take() == there.episodes.take()
    assert not there.is_ahead
    there.close()


@pytest.mark.slow
def test_a_run_in_real_time_with_a_person_that_loses_its_arm_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "recipe=smoke num_envs=1 real_time=true restarts=0 human.input=scripted human.ratio=0.2 "
        "method.env_steps=120 method.explore_steps=40 method.capacity=1000 method.utd=1 bc.updates=20 "
        "demos.episodes=10 evaluate.every_env_steps=0 evaluate.episodes=10 evaluate.num_envs=10 "
        "video.episodes=0 "
        "video.failures=0"
    )
    config = load(RunConfig, [*words.split(), f"out={tmp_path}"], config_name="train")
    collect, collected = ProcessSource.collect, list[Any]()

    def dies_once(source: ProcessSource, handle: Publisher) -> Any:
        steps = collect(source, handle)
        collected.append(steps)
        if sum(step is not None for step in collected) == 60:
            os.kill(cast(int, source.pid), signal.SIGKILL)
        return steps

    monkeypatch.setattr(ProcessSource, "collect", dies_once)
    with pytest.raises(DeviceError, match=r"exit code -9 .* The run is saved: `robot-rl train resume="):
        phases.run(config)
    monkeypatch.setattr(ProcessSource, "collect", collect)
    (folder,) = tmp_path.iterdir()
    summary = phases.resume(folder)
    assert summary.env_steps == 120
    source = open_source(folder / "experience")
    episodes = [source.read(number) for number in range(len(source))]
    assert sum(len(episode) for episode in episodes) == 120, "no step is lost, none is there twice"
    assert any((episode.source == SOURCES.index("human")).any() for episode in episodes)
    drove = np.concatenate([episode.source for episode in episodes]) == SOURCES.index("human")
    wanted = np.concatenate([episode.obs["policy_action"] for episode in episodes])
    sent = np.concatenate([episode.action for episode in episodes])
    np.testing.assert_array_equal(wanted[~drove], sent[~drove])
    assert not np.array_equal(wanted[drove], sent[drove])
