"""Formulas: what a text means, how a monitor follows it over both kinds of arrays, and episodes of it."""

from typing import Any, Literal

import numpy as np
import pytest

from robot_rl.config.used import used
from robot_rl.core.arrays import Kind, namespace_of, to_numpy
from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import TABLE, resolve
from robot_rl.hal.conformance import check_vector_env
from robot_rl.sim.formula import Both, Either, Formula, Not, Predicate, Stage, parse
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.monitor import NAMES, Monitor
from robot_rl.sim.predicates import predicates_of
from robot_rl.sim.reflection import reflection_of
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

A, B, C = (Predicate(name) for name in "abc")
KINDS: tuple[Kind, ...] = ("numpy", "torch")


def make(
    num_envs: int,
    formula: str,
    *,
    autoreset: Literal["same_step", "disabled"] = "same_step",
    **config: Any,
) -> SimVectorEnv:
    values: dict[str, Any] = {"task": "reach", "formula": formula, "num_threads": 1, **config}
    return SimVectorEnv(EnvConfig(**values), num_envs, autoreset=autoreset)


def moved(env: SimVectorEnv, way: Any = 0.0) -> Any:
    """Returns the actions of `reach` that move the tool, with the gripper as it is."""
    actions = np.zeros((env.num_envs, 4), np.float32)
    actions[:, :3] = way
    return actions


def towards(env: SimVectorEnv, target_m: Any) -> Any:
    """Returns the actions of `reach` that move the tool to a point."""
    return moved(env, np.clip((target_m - env.view["tool.pos"]) / 0.05, -1, 1))


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("a", Formula((Stage(A),))),
        ("a then b then a", Formula((Stage(A), Stage(B), Stage(A)))),
        ("hold(a, 0.5) then b", Formula((Stage(A, 0.5), Stage(B)))),
        ("a; avoid(b); avoid(c)", Formula((Stage(A),), (B, C))),
        ("avoid(b); a", Formula((Stage(A),), (B,))),
        ("a or b and not c", Formula((Stage(Either(A, Both(B, Not(C)))),))),
        ("(a or b) and c", Formula((Stage(Both(Either(A, B), C)),))),
        ("a or b then c", Formula((Stage(Either(A, B)), Stage(C)))),
    ],
)
def test_a_text_means_one_formula(text: str, formula: Formula) -> None:
    assert parse(text) == formula


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at character 1: got the end, need the name of a predicate, not or \\(, or hold\\("),
        ("a then then b", "at character 8: got 'then', need the name of a predicate"),
        ("a b", "at character 3: got 'b', need the end, ; then, and or or"),
        ("a $ b", r"at character 3: got '\$'"),
        ("(a and b", r"at character 9: got the end, need \)"),
        ("hold(a, 0)", "at character 9: got '0', need seconds above 0"),
        ("hold(a, soon)", "at character 9: got 'soon', need seconds above 0"),
        ("hold(a)", "at character 7: got '\\)', need ,"),
        ("avoid(a)", "at character 9: got the end, need ; and what has to be done"),
        ("a; b", r"at character 4: got 'b', need avoid\(...\): one sequence is enough"),
        ("not " * 60 + "a", "need at most 50 parentheses and not inside of each other"),
    ],
)
def test_a_text_without_meaning_is_refused_with_its_position(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.formula: .*{message}"):
        EnvConfig(task="reach", formula=text)


def test_an_unknown_predicate_is_refused_with_all_known_ones() -> None:
    message = (
        r"env\.formula: reach has no predicate 'rised'\. Did you mean 'raised'\? "
        r"Known: raised, solved, tool_near_goal, tool_still\."
    )
    with pytest.raises(ConfigError, match=message):
        make(1, "rised then solved")


def test_a_formula_that_takes_longer_than_an_episode_is_refused() -> None:
    # 2.5 s at 20 Hz are 50 control steps: 49 of the hold and 1 of the other stage fit, 50 and 1 do not.
    make(1, "raised then hold(solved, 2.45)")
    with pytest.raises(ConfigError, match=r"at most env.horizon_s=2.5; this takes at least 2.55 s"):
        make(1, "raised then hold(solved, 2.5)")


# --- the automaton ---------------------------------------------------------------------------------


def follow(text: str, kind: Kind, **traces: str) -> tuple[list[str], Monitor]:
    """Runs a monitor over one trace a simulation, and returns what happened in each.

    A trace of a predicate has simulations separated by blanks, and a 1 where it holds. Each control step
    gives `.`, or `+` after completion, or `-` after a violation.
    """
    xp = namespace_of(kind)
    values = {
        name: np.array([[mark == "1" for mark in row] for row in trace.split()])
        for name, trace in traces.items()
    }
    num_sims, num_steps = next(iter(values.values())).shape
    device = xp.zeros(1).device
    monitor = Monitor(parse(text), num_sims, control_hz=20.0, xp=xp, device=device)
    marks = [""] * num_sims
    everyone = xp.ones(num_sims, dtype=xp.bool, device=device)
    for step in range(num_steps):
        at = {name: xp.asarray(value[:, step].copy()) for name, value in values.items()}
        monitor.advance(at.__getitem__, everyone)
        complete, violated = to_numpy(monitor.complete), to_numpy(monitor.violated)
        assert not (complete & violated).any()
        for sim in range(num_sims):
            marks[sim] += "+" if complete[sim] else "-" if violated[sim] else "."
    return marks, monitor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "complete"),
    [  # a b: 00 01 10 11
        ("a and b", "...+"),
        ("a or b", ".+++"),
        ("not a", "++.."),
        ("not (a or b)", "+..."),
        ("not a and b", ".+.."),
        ("not a or b", "++.+"),
        ("a and b or not a and not b", "+..+"),
    ],
)
def test_conditions_have_their_truth_tables(kind: Kind, text: str, complete: str) -> None:
    assert "".join(follow(text, kind, a="0 0 1 1", b="0 1 0 1")[0]) == complete


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_then_holds_later(kind: Kind) -> None:
    #   both at once: only the first stage ends; b before a does not count; a need not hold on
    marks, monitor = follow("a then b", kind, a="1000 0100 1000 0001", b="1010 1001 0000 1111")
    assert marks == ["..++", "...+", "....", "...."]
    np.testing.assert_array_equal(to_numpy(monitor.progress), [1.0, 1.0, 0.5, 0.5])
    every = np.arange(4)
    np.testing.assert_array_equal(to_numpy(monitor.observed(every))[:, 0], [1.0, 1.0, 0.5, 0.5])


@pytest.mark.parametrize("kind", KINDS)
def test_a_hold_counts_control_steps_without_a_break(kind: Kind) -> None:
    # 0.2 s at 20 Hz: 4 control steps in a row; a break begins again; 3 of them are 3/4.
    marks, monitor = follow("hold(a, 0.2)", kind, a="11110000 11101111 00000111 11101110")
    assert marks == ["...+++++", ".......+", "........", "........"]
    np.testing.assert_array_equal(to_numpy(monitor.progress), [1.0, 1.0, 0.75, 0.0])
    np.testing.assert_array_equal(to_numpy(monitor.gained), [0.0, 0.25, 0.25, -0.75])
    np.testing.assert_array_equal(to_numpy(monitor.observed(np.arange(4)))[2:], [[0, 0.75], [0, 0]])


def test_a_hold_lasts_at_least_as_long_as_it_says() -> None:
    # 0.5 s * 20 Hz = 10; 0.3 * 20 = 6 (5.999.. and 6.000..1 too); 0.51 * 20 = 10.2, so 11; 1 ms is a step.
    steps = [Stage(A, hold_s).steps(20.0) for hold_s in (0.5, 0.3, 0.51, 0.001, 0.0)]
    assert steps == [10, 6, 11, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_avoided_fails_for_good_even_in_the_last_step(kind: Kind) -> None:
    # Before, at once with completion, never, and after it: the episode has ended then.
    marks, _ = follow(
        "a then b; avoid(c)", kind, a="1000 1000 1000 1000", b="0010 0010 0010 0010", c="0100 0010 0000 0001"
    )
    assert marks == [".---", "..--", "..++", "..++"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_monitor_is_reset_copied_and_held_by_rows(kind: Kind) -> None:
    _, monitor = follow(
        "a then hold(b, 0.2); avoid(c)", kind, a="100 100 000", b="011 011 000", c="000 000 001"
    )
    xp = namespace_of(kind)
    np.testing.assert_array_equal(to_numpy(monitor.rows()), [[1, 2, 0], [1, 2, 0], [0, 0, 1]])
    kept = xp.asarray(monitor.rows(), copy=True)
    monitor.reset(xp.asarray(np.array([0, 2])))
    np.testing.assert_array_equal(to_numpy(monitor.rows()), [[0, 0, 0], [1, 2, 0], [0, 0, 0]])
    true = xp.asarray(np.array([True, True, True]))
    monitor.advance(lambda name: true & (name != "c"), xp.asarray(np.array([True, False, False])))
    np.testing.assert_array_equal(to_numpy(monitor.rows()), [[1, 0, 0], [1, 2, 0], [0, 0, 0]])
    np.testing.assert_array_equal(to_numpy(monitor.gained), [0.5, 0.0, 0.0])
    monitor.put(xp.asarray(np.array([0, 2])), kept[[0, 2]])
    np.testing.assert_array_equal(to_numpy(monitor.rows()), to_numpy(kept))


# --- tasks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TABLE["task"]])
def test_predicates_of_every_task_are_bool_for_each_simulation(name: str) -> None:
    predicates = predicates_of(resolve("task", name)())
    env = make(2, "solved", task=name)
    env.reset(seed=0)
    for predicate in predicates.values():
        value = predicate(env.view)
        assert value.shape == (2,)
        assert value.dtype == np.bool_


def test_picking_a_cube_passes_its_predicates_in_order() -> None:
    """The scripted expert grasps, lifts and brings the cube: 8 of 8, as it solves all of its own task."""
    env = make(8, "tool_near_cube then grasped then lifted then near_goal then solved", task="pick_cube")
    obs, _ = env.reset(seed=0)
    expert, done, stages = env.expert(), np.zeros(8, bool), set[float]()
    for _ in range(env.horizon):
        obs, _, terminated, _, _ = env.step(expert.act())
        stages |= {*obs["state"][:, -2].tolist()}
        done |= terminated
    assert done.all()
    assert {round(5 * stage) for stage in stages} == {0, 1, 2, 3, 4}  # 5 is seen in `final_obs` alone


# --- episodes ------------------------------------------------------------------------------------------


def test_the_state_has_the_stage_whatever_is_left_out() -> None:
    env = make(2, "raised then solved", state=("joint",), privileged=True)
    obs, infos = env.reset(seed=0)
    assert env.state_names[-2:] == NAMES
    assert env.true_names[-2:] == NAMES
    assert obs["state"].shape == (2, 9)  # 7 joints
    np.testing.assert_array_equal(obs["state"][:, -2:], 0.0)
    np.testing.assert_array_equal(env.true_state()[:, -2:], 0.0)
    assert not infos["success"].any()


@pytest.mark.parametrize(
    ("reward", "paid"),
    # Half of what each gained: 1/2 for `raised`, then 1/2 * 1/2 for each of the first step of the hold.
    [("sparse", (0.0, 0.0, 1.0)), ("dense", (0.25, 0.125, 1.0))],
)
def test_a_script_on_reach_goes_through_the_stages(reward: str, paid: tuple[float, ...]) -> None:
    env = make(1, "raised then hold(solved, 0.1)", reward=reward)
    obs, _ = env.reset(seed=3)
    goal = env.view["goal.pos"].copy()
    high, first, rewards, seen = np.array([[0.5, 0.0, 0.5]]), 0, list[float](), list[list[float]]()
    infos: dict[str, Any] = {}
    for step in range(env.horizon):
        is_raised = obs["state"][0, -2] == 0.5
        first = first or (step if is_raised else 0)
        obs, value, terminated, _, infos = env.step(towards(env, goal if is_raised else high))
        rewards.append(float(value[0]))
        seen.append((infos["final_obs"] if terminated.any() else obs)["state"][0, -2:].tolist())
        if terminated.any():
            break
    assert infos["success"].all()
    assert 0 < first < len(rewards) - 2
    # The last two control steps are the hold's; the start of the next episode is in no stage.
    assert seen[-3:] == [[0.5, 0.0], [0.5, 0.5], [1.0, 0.0]]
    assert rewards[first - 1] == paid[0]
    assert rewards[-2:] == pytest.approx(paid[1:])
    assert sum(rewards) == pytest.approx(sum(paid))
    np.testing.assert_array_equal(obs["state"][:, -2:], 0.0)
    assert not env.judge()[0].any()


def test_what_is_avoided_ends_the_episode_as_a_failure() -> None:
    """The tool rises in env 0 alone; the next episode begins without a trace of it."""
    env = make(2, "solved; avoid(raised)", horizon_s=2.5)
    env.reset(seed=0)
    for _ in range(env.horizon):
        _, reward, terminated, truncated, infos = env.step(moved(env, [[0, 0, 1], [0, 0, 0]]))
        assert not (truncated | infos["success"] | (reward != 0)).any()
        if terminated.any():
            assert terminated.tolist() == [True, False]
            break
    else:
        pytest.fail("the tool did not rise")
    assert not env.judge()[1].any()


def test_a_reset_of_one_env_leaves_the_others_in_their_stage() -> None:
    env = make(2, "not solved then solved", autoreset="disabled")
    env.reset(seed=0)
    obs = env.step(moved(env))[0]
    np.testing.assert_array_equal(obs["state"][:, -2], 0.5)
    obs, _ = env.reset(options={"reset_mask": np.array([True, False])})
    np.testing.assert_array_equal(obs["state"][:, -2], [0.0, 0.5])


def test_an_inactive_env_stays_in_its_stage() -> None:
    env = make(2, "not solved then solved")
    env.reset(seed=0)
    obs = env.step_masked(moved(env), np.array([True, False]))[0]
    np.testing.assert_array_equal(obs["state"][:, -2], [0.5, 0.0])


def test_states_and_checkpoints_have_the_monitor() -> None:
    """A fork and a resumed env continue in the same stage, to the same observations and rewards."""
    env, other = (make(2, "raised then hold(tool_near_goal, 0.2)", reward="dense") for _ in range(2))
    obs, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-0.5, 1.0, (40, 2, 4)).astype(np.float32)
    for action in actions[:15]:
        obs = env.step(action)[0]
    assert (obs["state"][:, -2] > 0).any()
    saved, rows = env.state_dict(), env.get_state().copy()
    future = [env.step(action)[:2] for action in actions[15:]]
    np.testing.assert_array_equal(other.load_state_dict(saved)["state"], obs["state"])
    for action, (state, reward) in zip(actions[15:], future, strict=True):
        again = other.step(action)[:2]
        np.testing.assert_array_equal(again[0]["state"], state["state"])
        np.testing.assert_array_equal(again[1], reward)
    other.reset(seed=0)
    np.testing.assert_array_equal(other.set_state(rows)["state"], obs["state"])


def test_a_formula_leaves_the_physics_and_other_elements_as_they_are() -> None:
    plain = SimVectorEnv(EnvConfig(task="reach", num_threads=1), 2)
    env = make(2, "raised then solved")
    np.testing.assert_array_equal(env.reset(seed=1)[0]["state"][:, :-2], plain.reset(seed=1)[0]["state"])
    for _ in range(5):
        action = moved(env, 0.3)
        np.testing.assert_array_equal(env.step(action)[0]["state"][:, :-2], plain.step(action)[0]["state"])


@pytest.mark.parametrize("reward", ["sparse", "dense"])
def test_an_env_with_a_formula_keeps_the_contract(reward: str) -> None:
    formula = "hold(not raised, 0.1) then hold(tool_near_goal or raised, 0.2); avoid(solved)"
    check_vector_env(lambda num: make(num, formula, reward=reward, horizon_s=1.0))
    check_vector_env(lambda num: make(num, formula, reward=reward, horizon_s=1.0, autoreset="disabled"))


def test_tensors_and_numpy_go_through_the_same_stages() -> None:
    """The env hands its monitor the arrays of the engine; here the CPU engine's, as tensors."""
    config = EnvConfig(
        task="reach", formula="raised then hold(tool_still or raised, 0.2)", reward="dense", num_threads=1
    )
    env, tensors = SimVectorEnv(config, 2), SimVectorEnv(config, 2, array="torch")
    assert tensors.xp is not np
    obs, _ = env.reset(seed=0)
    tensors.reset(seed=0)
    total = 0.0
    for _ in range(30):
        action = moved(env, [[0, 0, 1], [0, 0, 0.5]])
        (obs, reward, ended, *_), (other, paid, over, *_) = env.step(action), tensors.step(action)
        np.testing.assert_array_equal(to_numpy(other["state"])[:, -2:], obs["state"][:, -2:])
        np.testing.assert_array_equal(to_numpy(paid), reward)
        np.testing.assert_array_equal(to_numpy(over), ended)
        total += reward.sum()
    assert total > 1.0
    rows = tensors.get_state()
    np.testing.assert_array_equal(to_numpy(rows)[:, -3:], env.get_state()[:, -3:])
    assert to_numpy(tensors.set_state(rows)["state"]).shape == obs["state"].shape


def test_what_has_no_formula_says_so() -> None:
    with pytest.raises(ConfigError, match=r"env\.formula: got 'solved', allowed: none with an arm"):
        Mirror(EnvConfig(task="reach", formula="solved"))
    with pytest.raises(ConfigError, match=r"env\.formula: got 'solved', allowed: left out with env.kind=gym"):
        EnvConfig(kind="gym", id="Hopper-v5", formula="solved")


def test_a_mirror_image_is_in_the_same_stage() -> None:
    config = EnvConfig(task="reach", formula="raised then solved", num_threads=1)
    state = SimVectorEnv(config, 1).reset(seed=0)[0]["state"]
    state[:, -2:] = 0.5, 0.25
    image = reflection_of(config).state(state)
    assert image.shape == state.shape
    np.testing.assert_array_equal(image[:, -2:], [[0.5, 0.25]])


def test_settings_of_a_run_have_a_formula_only_where_there_is_one() -> None:
    run: dict[str, Any] = {"method": {"kind": "plain_ppo"}, "env": {"task": "reach", "formula": None}}
    assert used(run)["env"] == {"task": "reach"}
    run["env"]["formula"] = "solved"
    assert used(run)["env"]["formula"] == "solved"
