"""Every task of the registry: an expert solves it, and its episodes are the same bytes wherever they run."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve, table
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.task import Task
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

TASKS = sorted(table("task"))
WITH_EXPERT = [name for name in TASKS if resolve("task", name).has_expert()]
FOR_ARMS = [name for name in TASKS if resolve("task", name).body == "arm"]
STEPS = 8
Array = NDArray[np.float32]


def make(task: str, num_envs: int, num_threads: int = 1, *, randomize: bool = False) -> SimVectorEnv:
    config = EnvConfig(task=task, num_threads=num_threads, randomize=randomize)
    return SimVectorEnv(config, num_envs, autoreset="disabled")


def actions_of(env: SimVectorEnv, steps: int = STEPS, seed: int = 0) -> Iterator[Array]:
    """Yields random actions whose first rows do not depend on the number of envs."""
    for step in range(steps):
        rows = [
            np.random.default_rng([seed, step, i]).uniform(-1, 1, len(env.action_names))
            for i in range(env.num_envs)
        ]
        yield np.array(rows, np.float32)


def states_of(env: SimVectorEnv, seed: int | list[int]) -> list[NDArray[np.float64]]:
    """Returns the state rows after a reset and after each of a few random steps."""
    env.reset(seed=seed)
    return [env.get_state(), *(advance(env, action) for action in actions_of(env))]


def advance(env: SimVectorEnv, action: Array) -> NDArray[np.float64]:
    env.step(action)
    return env.get_state()


def success_of_expert(task: str, episodes: int, bias_m: float = 0.0, noise_m: float = 0.0) -> float:
    env = make(task, episodes)
    env.reset(seed=0)
    expert = env.expert(bias_m, noise_m)
    solved, live = np.zeros(episodes, bool), np.ones(episodes, bool)
    for _ in range(env.horizon):
        _, _, terminated, truncated, infos = env.step_masked(expert.act(), live)
        solved |= infos["success"]
        live &= ~(terminated | truncated)
        if not live.any():
            break
    return float(solved.mean())


@pytest.mark.parametrize("task", WITH_EXPERT)
def test_the_expert_solves_it(task: str) -> None:
    assert success_of_expert(task, 64) >= 0.9  # 1.0 measured for every task, 256 episodes


@pytest.mark.parametrize("task", WITH_EXPERT)
def test_a_wrong_target_spoils_the_expert(task: str) -> None:
    # The tasks' tolerances are 2 to 25 mm; a bias of 45 mm is beyond all of them.
    assert success_of_expert(task, 32, bias_m=0.045) < 0.3


@pytest.mark.parametrize("task", FOR_ARMS)
def test_the_gantry_does_every_task(task: str) -> None:
    env = SimVectorEnv(EnvConfig(task=task, robot="gantry", num_threads=1), 16, autoreset="disabled")
    env.reset(seed=0)
    expert, solved = env.expert(), np.zeros(16, bool)
    for _ in range(env.horizon):
        solved |= env.step(expert.act())[4]["success"]
    assert solved.mean() >= 0.9


@pytest.mark.parametrize("task", TASKS)
def test_says_what_it_is(task: str) -> None:
    described: Task = resolve("task", task)()
    assert described.name == task
    assert len(described.instruction.split()) >= 3
    text = type(described).__doc__ or ""
    assert "Randomised:" in text
    assert "Success:" in text
    assert described.default_robot in table("robot")


@pytest.mark.parametrize("task", TASKS)
def test_episodes_begin_unsolved_and_inside_the_space(task: str) -> None:
    env = make(task, 128)
    obs, infos = env.reset(seed=5)
    assert infos["success"].mean() <= 0.01
    assert np.isfinite(obs["state"]).all()
    assert env.observation_space.contains(obs)
    assert len(np.unique(obs["state"], axis=0)) == 128  # no two episodes begin alike
    for action in actions_of(env, 3):
        obs = env.step(action)[0]
        assert env.observation_space.contains(obs)
        assert np.isfinite(obs["state"]).all()


@pytest.mark.parametrize("task", TASKS)
def test_the_same_bytes_at_any_number_of_envs_and_threads(task: str) -> None:
    many = states_of(make(task, 16, num_threads=2), 3)
    few = states_of(make(task, 3, num_threads=1), 3)
    alone = states_of(make(task, 1, num_threads=1), [3])
    for at_16, at_3, at_1 in zip(many, few, alone, strict=True):
        np.testing.assert_array_equal(at_16[:3], at_3)
        np.testing.assert_array_equal(at_16[:1], at_1)


@pytest.mark.parametrize("task", TASKS)
def test_a_masked_reset_touches_only_the_masked_rows(task: str) -> None:
    env = make(task, 4)
    states_of(env, 0)
    before, mask = env.get_state(), np.array([False, True, False, True])
    env.reset(options={"reset_mask": mask})
    after = env.get_state()
    np.testing.assert_array_equal(after[~mask], before[~mask])
    assert (after[mask] != before[mask]).any(axis=1).all()


@pytest.mark.parametrize("task", TASKS)
def test_a_state_row_determines_the_future(task: str) -> None:
    env, other = make(task, 3), make(task, 3)
    states_of(env, 0)
    rows = env.get_state()
    other.reset(seed=99)
    other.set_state(rows)
    env.set_state(rows)  # both: safety starts afresh from the servos' set-points
    for action in actions_of(env, 4, seed=1):
        np.testing.assert_array_equal(advance(env, action), advance(other, action))


@pytest.mark.parametrize("task", TASKS)
def test_a_state_dict_resumes_exactly(task: str) -> None:
    env, other = make(task, 3, randomize=True), make(task, 3, randomize=True)
    states_of(env, 0)
    kept = env.state_dict()
    expected = [advance(env, action) for action in actions_of(env, 4, seed=1)]
    expected.append(env.reset()[0]["state"])  # the next episode is drawn from the restored counters
    other.reset(seed=99)
    other.load_state_dict(kept)
    got = [advance(other, action) for action in actions_of(other, 4, seed=1)]
    got.append(other.reset()[0]["state"])
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("task", WITH_EXPERT)
def test_the_dense_reward_lies_between_zero_and_one(task: str) -> None:
    config = EnvConfig(task=task, reward="dense", num_threads=1)
    env = SimVectorEnv(config, 16, autoreset="disabled")
    env.reset(seed=0)
    expert, described = env.expert(noise_m=0.01), resolve("task", task)()
    first, best = described.dense_reward(env.view), np.zeros(16)
    for step in range(40):
        _, reward, _, _, infos = env.step(expert.act())
        shaped = described.dense_reward(env.view)
        assert ((shaped >= 0) & (shaped <= 1)).all(), step
        assert (reward[infos["success"]] == 1.0).all()
        np.testing.assert_allclose(reward[~infos["success"]], 0.5 * shaped[~infos["success"]])
        best = np.maximum(best, shaped)
    assert (best > first).all()  # the expert is paid for progress in every episode


@pytest.mark.parametrize("task", sorted({*TASKS} - {*WITH_EXPERT}))
def test_without_an_expert_the_dense_reward_lies_between_zero_and_one(task: str) -> None:
    env = SimVectorEnv(EnvConfig(task=task, reward="dense", num_threads=1), 16, autoreset="disabled")
    env.reset(seed=0)
    described, seen = resolve("task", task)(), []
    for action in actions_of(env, 40):
        _, reward, _, _, infos = env.step(action)
        shaped = described.dense_reward(env.view)
        assert ((shaped >= 0) & (shaped <= 1)).all()
        assert not infos["success"].any()
        np.testing.assert_allclose(reward, 0.5 * shaped)
        seen.append(shaped)
    assert np.ptp(seen, axis=0).max() > 0.01  # it follows what happens in an episode


@pytest.mark.parametrize("task", sorted({*TASKS} - {*WITH_EXPERT}))
def test_a_task_without_an_expert_says_what_to_do(task: str) -> None:
    with pytest.raises(ConfigError, match=f"demos: the task '{task}' has no scripted expert.*env.expert="):
        make(task, 1).expert()


@pytest.mark.parametrize("task", TASKS)
def test_a_robot_of_another_kind_is_refused(task: str) -> None:
    body = resolve("task", task).body
    robot = "crazyflie" if body != "rotors" else "panda"
    with pytest.raises(ConfigError, match=rf"env.robot: {robot} is of kind \w+, and {task} is for {body}"):
        SimVectorEnv(EnvConfig(task=task, robot=robot), 1)


@pytest.mark.parametrize("task", [name for name in TASKS if resolve("task", name).vary])
def test_randomisation_changes_only_rows_that_begin(task: str) -> None:
    env = make(task, 4, randomize=True)
    env.reset(seed=0)
    fields = {term.field for term in resolve("task", task).vary}
    before = {field: env.backend.expand(field).copy() for field in fields}
    mask = np.array([False, True, False, False])
    env.reset(options={"reset_mask": mask})
    for field in fields:
        after = env.backend.expand(field)
        np.testing.assert_array_equal(after[~mask], before[field][~mask])
        assert (after[mask] != before[field][mask]).any()
        assert not np.array_equal(before[field][0], before[field][2])  # each simulation has its own


@pytest.mark.parametrize("task", [name for name in TASKS if resolve("task", name).vary])
def test_randomisation_stays_in_its_range(task: str) -> None:
    env = make(task, 32, randomize=True)
    env.reset(seed=0)
    plain = make(task, 1)
    for term in resolve("task", task).vary:
        varied = env.backend.expand(term.field).reshape(32, -1)
        nominal = np.asarray(getattr(on_cpu(plain.backend).model, term.field), float).reshape(-1)
        scale = varied[:, nominal != 0] / nominal[nominal != 0]
        assert scale.min() >= term.low
        assert scale.max() <= term.high
        assert scale.max() - scale.min() > 0.5 * (term.high - term.low)
