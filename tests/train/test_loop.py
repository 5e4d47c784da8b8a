"""Segments are counted once, by who made them; several learners share one loop, and resume exactly."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.algos.residual import ResidualConfig, ResidualTD
from robot_rl.cli.train import result
from robot_rl.config import build
from robot_rl.core.policy import Chain, DemoBatch
from robot_rl.core.registry import resolve
from robot_rl.data.normalize import Normaliser
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.rollout import Rollout
from robot_rl.data.transitions import Segment, StepBatch
from robot_rl.policies.config import ChunkPolicyConfig, ResidualHeadConfig
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.sources import EpisodeLog, InlineSource
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.vector import EnvConfig
from robot_rl.train import phases
from robot_rl.train.checkpoint import read_state, write_state
from robot_rl.train.config import RunConfig
from robot_rl.train.experience import Draws, ReplayExperience
from robot_rl.train.hooks import write_metrics
from robot_rl.train.loop import Hook, Learner, Pacer, Run, train
from robot_rl.train.schedule import UNKNOWN, Counters, Every, Ratio
from tests.runs import SMALL

NUM_ENVS = 3


def step(rows: int, **changes: Any) -> StepBatch:
    ones, off = np.ones((rows, 2), np.float32), np.zeros(rows, bool)
    fields: dict[str, Any] = {"obs": {"state": ones}, "next_obs": {"state": ones}, "reward": np.zeros(rows)}
    fields |= dict.fromkeys(("base_action", "action", "next_base_action"), ones)
    return StepBatch(**fields, terminated=off, truncated=off, **changes)


def rollout(steps: list[list[int]], **changes: Any) -> Rollout:
    counts = torch.tensor(steps)
    nothing = torch.zeros(counts.shape)
    chain: Any = Chain(nothing, nothing, nothing, nothing)
    return Rollout({}, chain, nothing, nothing, {}, nothing.bool(), counts, **changes)


def test_a_segment_costs_the_control_steps_of_all_its_envs() -> None:
    assert step(3).cost == 3
    assert rollout([[4, 2], [1, 0]]).cost == 7  # of two envs that decide twice


def test_every_kind_is_billed_once() -> None:
    counters = Counters()
    taken: list[Segment] = [
        step(3),
        step(1, source="human"),
        step(2, source="real", actor=1),
        rollout([[4, 2], [1, 0]]),
        step(5, source="world", actor=2),
    ]
    for segment in taken:
        counters.add(segment)
    counters.bill("demo", 40)
    # Simulated: 3 + 7. Demonstrations are no steps of reinforcement learning: 3 + 1 + 2 + 7 + 5 are.
    assert counters.by_kind == {"sim": 10, "human": 1, "real": 2, "world": 5, "demo": 40}
    assert (counters.env_steps, counters.by_source) == (18, [11, 2, 5])
    again = Counters()
    again.load_state_dict(counters.state_dict())
    assert again == counters


def test_a_checkpoint_of_before_the_bill_is_of_unknown_kind() -> None:
    counters = Counters()
    counters.load_state_dict({"env_steps": 40, "updates": 4, "by_source": [40]})
    counters.add(step(2))
    assert (counters.env_steps, counters.by_kind) == (42, {UNKNOWN: 40, "sim": 2})


@pytest.mark.parametrize("imagined", [False, True])
def test_imagined_steps_have_a_replay_of_their_own(imagined: bool) -> None:
    replay = ReplayBuffer(20, 2, {"state": ((2,), np.float32)}, 2, imagined=imagined)
    own, other = ("world", "sim") if imagined else ("sim", "world")
    replay.add(step(2, source=own))
    with pytest.raises(ValueError, match=f"replay: got steps of source '{other}' for the .* never mixed"):
        replay.add(step(2, source=other))
    assert len(replay) == 2


class Recorded:
    """What hooks write to."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, phase: str, row: dict[str, float]) -> None:
        self.rows.append(row)


def flow(env: Any, seed: int) -> Any:
    state_dim, action_dim = len(env.state_names), len(env.action_names)
    normaliser = Normaliser.fit(
        {"state": np.array([[-1.0], [1.0]]).repeat(state_dim, 1)},
        np.array([[-1.0], [1.0]]).repeat(action_dim, 1),
    )
    return resolve("policy", "flow", at="test")(
        ChunkPolicyConfig(horizon=4, width=16, depth=1, time_dim=8, steps=2),
        state_dim=state_dim,
        action_dim=action_dim,
        normaliser=normaliser,
        generator=torch.Generator().manual_seed(seed),
    )


def clone_batch(replay: ReplayBuffer, rng: np.random.Generator) -> DemoBatch:
    chunks = replay.sample_chunks(8, horizon=4, gamma_step=0.9, rng=rng)
    return DemoBatch(chunks.obs, chunks.action, chunks.valid)


def two_learners(env_steps: int) -> Run:
    """Returns residual RL on a flow, and a second flow that clones whatever is replayed."""
    env = make_env(EnvConfig(task="reach", horizon_s=0.5, num_threads=1), NUM_ENVS)
    head = ResidualHeadConfig(width=16, depth=1)

    def residual() -> Any:
        generator = torch.Generator().manual_seed(1)
        return resolve("policy", "residual", at="test")(flow(env, 0), head, 0.2, generator=generator)

    settings = ResidualConfig(num_critics=2, width=16, depth=1, critic_warmup=2)
    leader = ResidualTD(residual(), settings, seed=2)
    student = BehaviourCloning(flow(env, 3), BCConfig(warmup_updates=0), seed=4)
    spaces: Any = env.single_observation_space
    shapes = {key: (space.shape, space.dtype) for key, space in spaces.items()}
    replay = ReplayBuffer(200, NUM_ENVS, shapes, len(env.action_names))
    acting, publisher = residual(), Publisher()
    publisher.offer(0, leader.policy_weights)
    how: dict[str, Any] = {"n_step": settings.n_step, "gamma_step": settings.gamma_step}
    learners = [
        Learner(
            leader,
            Draws(lambda rng: replay.sample(8, rng=rng, **how), seed=5),
            Ratio(0.5, after_steps=12),
            publisher,
        ),
        Learner(student, Draws(partial(clone_batch, replay), seed=6), Ratio(0.25), name="student"),
    ]
    executor = ChunkExecutor(acting, NUM_ENVS, n_exec=2, mode="explore", seed=7)
    return Run(
        sources=[InlineSource(env, acting, executor, seed=8)],
        experience=ReplayExperience(replay),
        learners=learners,
        pacer=Pacer(
            finished=lambda at: at.env_steps >= env_steps,
            hooks=[
                Hook(
                    "offer",
                    Every(1),
                    lambda at: at.env_steps,
                    lambda at: publisher.offer(at.updates, leader.policy_weights),
                )
            ],
        ),
        stage=lambda name: nullcontext(),
    )


def weights(run: Run) -> list[Mapping[str, torch.Tensor]]:
    return [learner.algorithm.policy_weights() for learner in run.learners]


def require_same(one: Run, other: Run) -> None:
    for mine, others in zip(weights(one), weights(other), strict=True):
        assert mine.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in mine.items())
    assert [learner.meter.take() for learner in one.learners] == [
        learner.meter.take() for learner in other.learners
    ]


def test_each_learner_has_its_pace_and_the_first_one_leads() -> None:
    run = two_learners(60)
    before = [{name: value.clone() for name, value in found.items()} for found in weights(run)]
    train(run)
    # 60 control steps in 20 turns: (60 - 12) / 2 updates of the one, 60 / 4 of the other.
    assert [learner.updates for learner in run.learners] == [24, 15]
    assert run.counters.updates == 24
    assert run.counters.by_kind == {"sim": 60}
    newest = run.publisher.newest
    assert newest is not None
    assert newest.version == 24
    for found, first in zip(weights(run), before, strict=True):
        assert not all(torch.equal(value, first[name]) for name, value in found.items())


def test_the_metrics_of_a_second_learner_have_a_group_of_their_own() -> None:
    run, session = two_learners(60), Recorded()  # 24 updates: it reports every tenth
    train(run)
    write_metrics(cast(Any, session), run, "residual")
    (row,) = session.rows
    groups = {name.split("/")[0] for name in row}
    assert groups == {"residual", "student"}
    assert {name for name in row if name.startswith("student/")} == {"student/loss", "student/lr"}


def test_overflows_are_a_metric_of_the_sources_that_count_them() -> None:
    run, session = two_learners(60), Recorded()
    limited, free = (SimpleNamespace(episodes=EpisodeLog(2)) for _ in range(2))
    overflowed = {"success": np.zeros(2, bool), "overflowed": np.array([True, False])}
    limited.episodes.add(np.zeros(2), np.zeros(2, bool), overflowed)
    write_metrics(cast(Any, session), run, "residual", cast(Any, {"warp": limited, "cpu": free}))
    found = {name: value for name, value in session.rows[0].items() if name.endswith("/overflows")}
    assert found == {"collect.warp/overflows": 1}


def test_a_resumed_run_of_two_learners_is_the_unbroken_one(tmp_path: Path) -> None:
    whole, first, second = two_learners(60), two_learners(33), two_learners(60)
    train(whole)
    train(first)
    write_state(first.state_dict(), tmp_path / "state")
    second.load_state_dict(read_state(tmp_path / "state"))
    assert [learner.updates for learner in second.learners] == [10, 8]  # (33 - 12) / 2 and 33 / 4, whole ones
    train(second)
    require_same(whole, second)


@pytest.mark.parametrize("publisher", ["publisher", "handle"])
def test_a_checkpoint_of_before_there_could_be_several_learners_is_resumed(publisher: str) -> None:
    def one(env_steps: int) -> Run:
        run = two_learners(env_steps)
        run.learners = run.learners[:1]
        return run

    whole, first, second = one(60), one(33), one(60)
    train(whole)
    train(first)
    state = first.state_dict()
    (learner,) = state.pop("learners")
    old = {**state, "algorithm": learner["algorithm"], "meter": learner["meter"]}
    old[publisher] = learner["publisher"]
    old["experience"] = {**state["experience"], **learner["batches"]}
    old["pacer"] = {**state["pacer"], "updates": learner["pace"]}
    del old["counters"]["by_kind"]
    second.load_state_dict(old)
    train(second)
    require_same(whole, second)
    assert second.counters.by_kind == {UNKNOWN: 33, "sim": 27}


@pytest.mark.usefixtures("whole_runs")
def test_the_bill_of_a_run_is_in_its_summary_and_in_its_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(build(RunConfig, SMALL), out=str(tmp_path))
    summary = phases.run(config)
    demos = summary.demo_env_steps
    assert summary.env_steps == 40
    assert summary.control_steps == {"demo": demos, "sim": 40}
    assert summary.to_json()["control_steps"] == summary.control_steps
    result([f"resume={summary.run}"])
    assert f"after 40 simulated and {demos} demonstrated control steps and " in capsys.readouterr().out
