"""What generators make: starts that are what their class says, and the same ones for the same seed."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import TABLE, resolve
from robot_rl.resets import generate as generate_module
from robot_rl.resets.accept import TESTS, NoStartsError, Tolerances
from robot_rl.resets.generate import GenerateSettings, classes_of, coordinates, generate
from robot_rl.resets.walk import draw_way, walk_out
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.bank_files import Bank
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.start_classes import CLASSES, USUAL, Resets
from robot_rl.sim.vector import SimVectorEnv
from tests.arms import write_arm
from tests.resets.conftest import ROWS

LIMITS = Tolerances()


def bench_of(task: str, num: int = 16, robot: str | None = None, **config: Any) -> Workbench:
    return Workbench(
        SimVectorEnv(EnvConfig(task=task, robot=robot, num_threads=1, **config), num, autoreset="disabled")
    )


def made(bench: Workbench, *classes: str, rows: int = 8) -> Bank:
    return generate(bench, GenerateSettings(rows=rows, seed=0, classes=classes))


def test_every_class_of_the_light_task_accepts_starts(bank: Bank) -> None:
    assert tuple(bank.sets) == USUAL
    for name, found in bank.sets.items():
        bill = bank.bills[name]
        assert len(found) == ROWS
        assert bill.tried >= ROWS
        assert set(bill.rejected) <= set(TESTS)
        assert sum(bill.rejected.values()) <= bill.tried - ROWS
        assert bill.physics_steps == 10 * bill.control_steps > 0  # 20 Hz of 5 ms


def test_every_stored_start_passes_its_tests_again(bank: Bank) -> None:
    """Invariants: at rest, no overlap, not solved, not lost; and a row is the whole state."""
    for found in bank.sets.values():
        env = SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1), ROWS, autoreset="disabled")
        env.set_state(found.states)
        ids = np.arange(ROWS)
        assert env.backend.penetration_m(ids).max() < LIMITS.penetration_m
        success, failed, _ = env.judge()
        assert not success.any()
        assert not failed.any()
        assert not found.solved.any()
        assert (env.backend.bind("time") == 0).all()
        before = env.true_state()
        assert not env.backend.step(env.num_substeps).any()
        assert np.abs(env.true_state() - before).max() < 0.05  # speeds are at most 5 cm/s


def test_classes_are_where_their_names_say(bank: Bank) -> None:
    """Of a peg in the hand: heights over its place in the hole, which is 5 cm deep."""
    thing = {name: found.coords[:, :3] for name, found in bank.sets.items()}
    assert thing["reaching"][:, 2].min() > 0.15  # the task begins at home, high over the block
    assert np.linalg.norm(thing["near_goal"][:, :2], axis=1).max() < 0.04
    assert thing["near_goal"][:, 2].max() < 0.065
    assert thing["near_goal"][:, 2].min() < 0.03  # in the hole
    assert np.abs(thing["near_object"][:, :2]).max() < 0.085
    assert thing["grasped"][:, 2].min() < 0.12 < thing["grasped"][:, 2].max()
    for found in bank.sets.values():
        assert np.linalg.norm(found.coords[:, 3:], axis=1).max() < 0.03  # in the hand


@pytest.mark.parametrize("threads", [2])
def test_a_seed_gives_one_bank_at_any_number_of_threads(bank: Bank, threads: int) -> None:
    bench = Workbench(
        SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=threads), 32, autoreset="disabled")
    )
    again = generate(bench, GenerateSettings(rows=ROWS, seed=3, classes=()))
    other = generate(bench, GenerateSettings(rows=ROWS, seed=4, classes=("grasped",)))
    for name, found in bank.sets.items():
        assert found.states.tobytes() == again.sets[name].states.tobytes(), name
    assert other.sets["grasped"].states.tobytes() != bank.sets["grasped"].states.tobytes()


def test_coordinates_are_those_of_the_states(bank: Bank) -> None:
    bench = bench_of("gantry_peg", ROWS)
    found = bank.sets["near_goal"]
    bench.env.set_state(found.states)
    assert coordinates(bench) == pytest.approx(found.coords, abs=1e-6)


@pytest.mark.parametrize("task", [name for name in TABLE["task"] if resolve("task", name).body == "arm"])
def test_every_task_declares_starts(task: str) -> None:
    """That its robot can be in them, the slow test shows."""
    declared: Resets = resolve("task", task).resets
    assert declared.classes[0] == "reaching"
    assert "near_goal" in declared.classes


def test_a_cube_is_grasped_in_the_air() -> None:
    found = made(bench_of("pick_cube"), "grasped", rows=6).sets["grasped"]
    assert np.abs(found.coords[:, 3:]).max() < 0.02  # the tool is in the cube of 4 cm


@pytest.mark.slow
@pytest.mark.parametrize("task", [name for name in TABLE["task"] if resolve("task", name).body == "arm"])
def test_every_class_of_every_task_accepts_starts_with_randomised_models(task: str) -> None:
    bench = bench_of(task, 64, randomize=True)
    found = made(bench, rows=40)
    vary = resolve("task", task).vary
    assert tuple(found.sets) == tuple(name for name in CLASSES if name in bench.declared.classes)
    assert len(found.key.varied) == len(vary)
    for each in found.sets.values():
        assert each.varied.shape == (40, len(vary))
        assert not vary or np.ptp(each.varied, axis=0).min() > 0


def test_a_bare_arm_has_the_starts_that_need_no_hand(tmp_path) -> None:
    bench = bench_of("open_drawer", robot=str(write_arm(tmp_path)))
    assert classes_of(bench, ()) == ("reaching", "near_object", "near_goal")
    assert len(made(bench, "near_object", rows=4).sets["near_object"]) == 4
    with pytest.raises(ConfigError, match="classes: got 'grasped', open_drawer on ur has reaching, near_obj"):
        made(bench, "grasped")


def test_a_task_without_a_declaration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve("task", "reach"), "resets", None)
    with pytest.raises(ConfigError, match=r"task: 'reach' declares no starts. Give it `resets = Resets\("):
        bench_of("reach")


@pytest.mark.parametrize(
    ("task", "robot"),
    [
        ("bimanual_reach", "two_pandas, of kind two_arms"),
        ("hand_turn", "claw, of kind hand"),
        ("quadrotor_hover", "crazyflie, of kind rotors"),
    ],
)
def test_a_body_of_two_arms_or_none_is_refused(
    task: str, robot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"robot: got {robot}; banks of starts are made with the tool of one arm. Let episodes begin as"
    with pytest.raises(ConfigError, match=message):
        bench_of(task)
    monkeypatch.setattr(resolve("task", task), "resets", resolve("task", "reach").resets)
    with pytest.raises(ConfigError, match=message):
        bench_of(task)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"goal": "goal"}, r"got no `thing` to grasp, hold='grasp', .*thing='cube', or declare these"),
        ({"hold": "held", "classes": ("reaching",)}, r"no `thing` to grasp, hold='held', way='straight', "),
        ({"hold": "none", "classes": ("near_object",)}, r"allowed without .* \('reaching', 'near_goal'\)"),
        (
            {"hold": "none", "way": "walk", "classes": ("near_goal",)},
            r"way='walk'.* allowed .*way='straight'",
        ),
        (
            {"thing": "cube", "hold": "none"},
            r"got hold='none' with classes grasped, in which a hand holds 'cu",
        ),
        (
            {"thing": "cube", "classes": ("far",)},
            r"resets of a task: classes: got \('far',\), allowed: of rea",
        ),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_where_it_is_written(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Resets(**wrong)
    assert Resets(goal="goal", hold="none", classes=("reaching", "near_goal")).thing == "tool"


def declare(monkeypatch: pytest.MonkeyPatch, task: str, **changes: object) -> Workbench:
    declared: Resets = resolve("task", task).resets
    monkeypatch.setattr(resolve("task", task), "resets", replace(declared, **changes))
    return bench_of(task)


def test_a_class_that_accepts_nothing_names_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = declare(monkeypatch, "reach", workspace_m=((2.0, 0.0, 0.2), (2.1, 0.1, 0.3)))
    with pytest.raises(
        NoStartsError, match=r"'reaching' has accepted 0 of 64 .* unreachable 64.*workspace_m"
    ) as e:
        made(bench, "reaching")
    assert e.value.rejected.shape == (16, bench.env.bank_key().num_state)


def test_patience_ends_only_while_rows_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "_PATIENCE", 0)
    assert len(made(bench_of("reach"), "reaching").sets["reaching"]) == 8
    with pytest.raises(NoStartsError, match=r"class 'reaching' has accepted .* of 16 starts"):
        made(bench_of("reach"), "reaching", rows=17)


def test_a_thing_wider_than_the_fingers_open_has_no_grasp(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = declare(monkeypatch, "pick_cube", grip_half_m=(0.05, 0.05, 0.02))
    with pytest.raises(ConfigError, match=r"'cube' is 100 x 100 mm, and the fingers of panda open by 80 mm"):
        made(bench, "grasped")


def test_a_box_that_is_not_there_has_no_grasp(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = declare(monkeypatch, "pick_cube", grip_m=(0.0, 0.0, 0.2))
    pattern = r"none of 128 grasps of 'cube' holds; failed first by: (?:\w+ \d+, )*\w+ \d+. Check `grip_m`"
    with pytest.raises(NoStartsError, match=pattern) as e:
        made(bench, "grasped", rows=2)
    assert sum(int(count) for count in re.findall(r"\w+ (\d+)[,.]", str(e.value).split("by:")[1])) == 128
    # In the pictures the fingers are open, and 20 cm above the middle of the cube.
    bench.env.set_state(e.value.rejected)
    assert bench.fingers() == pytest.approx(bench.robot.gripper_open)
    between = bench.tool_pose()[:, 2] - bench.thing_pose()[:, 2]
    assert between == pytest.approx(0.2, abs=0.02)


def test_a_thing_that_does_not_fit_into_its_place_is_shown_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peg of 2 x 40 mm with its middle 30 mm over the table is 10 mm in it."""
    bench = declare(monkeypatch, "gantry_peg", at_goal_m=(0.0, 0.0, 0.03))
    with pytest.raises(
        NoStartsError,
        match=r"'peg' does not fit into its place in 'hole': penetrating 16 of 16, by at least 10.0 mm",
    ) as e:
        made(bench, "near_goal", rows=2)
    bench.env.set_state(e.value.rejected)
    np.testing.assert_allclose(bench.thing_pose(), bench.goal_pose(), atol=1e-9)


def test_a_walk_that_leaves_no_pose_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no way off is near, the first step of all 16 is too far; friction is as it was."""
    bench = declare(monkeypatch, "gantry_peg", near_goal_m=(1e-9, 1e-9, 1e-9))
    friction = bench.backend.expand("geom_friction").copy()
    with pytest.raises(
        NoStartsError, match=r"16 walks of 'peg' .* rejected first by: away 16\. Check `near"
    ) as e:
        made(bench, "near_goal", rows=2)
    assert e.value.rejected.shape == (16, bench.env.bank_key().num_state)
    np.testing.assert_array_equal(bench.backend.expand("geom_friction"), friction)


def test_a_walk_leaves_the_hole_and_comes_back_to_it() -> None:
    bench = bench_of("gantry_peg")
    friction = bench.backend.expand("geom_friction").copy()
    walk = walk_out(bench, np.random.default_rng(0), LIMITS)
    away = np.linalg.norm(walk[:, :3], axis=1)
    assert away[0] < 0.005
    assert away[-1] > 0.045
    assert (np.diff(away) >= 0).all()
    in_hole = walk[walk[:, 2] < 0.04]
    # The hole is 2.5 mm wider on each side; the middle of a peg that leans by 0.2 is off by 4 cm times that.
    assert np.abs(in_hole[:, :2]).max() < 0.0025 + 0.2 * 0.04
    assert (bench.backend.expand("geom_friction") == friction).all()
    drawn = np.linalg.norm(draw_way(walk, np.random.default_rng(1), 4000)[:, :3], axis=1)
    assert np.median(drawn) == pytest.approx(0.5 * away[-1], abs=0.003)  # all distances alike


def test_half_of_the_hands_near_a_thing_are_at_a_grasp_and_shut() -> None:
    """Of the others, up to 6 cm sideways with open fingers, 65 % are within 1.5 cm; evenly drawn 6 %."""
    bench = bench_of("pick_cube", 80)
    found = made(bench, "near_object", rows=80).sets["near_object"]
    away = np.abs(found.coords[:, 3:5]).max(axis=1)
    bench.env.set_state(found.states)
    fingers = bench.fingers().mean(axis=1)
    half_m, open_m = bench.declared.grip_half_m[1], bench.robot.gripper_open
    shut = fingers < open_m - 5e-4
    assert 0.35 < shut.mean() < 0.6
    assert (fingers[shut] > half_m - 0.001).all(), "around the thing"
    assert np.ptp(fingers[shut]) > 0.5 * (open_m - half_m)
    assert (away[shut] < 0.015).all()
    assert (away < 0.015).mean() > 0.4
    assert (away < 0.06 + 0.02).all()
