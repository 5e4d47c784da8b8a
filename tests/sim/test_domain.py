"""What episodes draw of the arm, of what is sensed and of the line, and the curriculum on it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.hal.vector import Array
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.robots.panda import PANDA
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

ALL = DomainConfig(
    friction=(0.0, 0.05),
    damping=(0.8, 1.2),
    stiffness=(0.9, 1.1),
    armature=(0.5, 2.0),
    payload_kg=(0.0, 0.5),
    joint_noise_rad=0.002,
    joint_bias_rad=0.01,
    object_noise_m=0.001,
    object_bias_m=0.005,
    delay_steps=3,
)


def make(
    domain: DomainConfig, num_envs: int = 4, task: str = "reach", horizon_s: float | None = None, **how: Any
) -> SimVectorEnv:
    config = EnvConfig(task=task, horizon_s=horizon_s, num_threads=1, domain=domain)
    return SimVectorEnv(config, num_envs, **how)


def actions(env: SimVectorEnv, step: int) -> Array:
    shape = (env.num_envs, len(env.action_names))
    return np.random.default_rng(step).uniform(-1, 1, shape).astype(np.float32)


def test_starts_stay_as_they_are_and_true_states_too() -> None:
    plain, varied = make(DomainConfig(), task="pick_cube"), make(ALL, task="pick_cube")
    shown, sensed = plain.reset(seed=7)[0]["state"], varied.reset(seed=7)[0]["state"]
    np.testing.assert_array_equal(plain.true_state(), varied.true_state())
    np.testing.assert_array_equal(shown, plain.true_state())
    wrong = np.abs(sensed - shown)
    joints = [name.startswith("joint") for name in varied.state_names]
    things = [
        name.startswith(("cube.pos", "cube_in_tool.pos", "goal_in_tool.pos")) for name in varied.state_names
    ]
    others = [
        name.startswith(("finger", "tool.linvel", "cube.xaxis", "cube_in_tool.xaxis"))
        for name in varied.state_names
    ]
    assert (wrong[:, joints] > 0).all()
    assert wrong[:, joints].max() < 0.01 + 6 * 0.002
    assert (wrong[:, things] > 0).all()
    assert wrong[:, things].max() < 0.005 + 6 * 0.001
    assert (wrong[:, others] == 0).all()


def test_the_observed_tool_is_where_the_observed_joints_put_it() -> None:
    """Encoders that are wrong put the computed tool elsewhere: compared with the tool at these joints."""
    env = make(DomainConfig(joint_bias_rad=0.02), 3)
    sensed = env.reset(seed=1)[0]["state"].astype(float)
    names = list(env.state_names)
    joints = [names.index(f"joint{i}.pos") for i in range(1, 8)]
    tool = [names.index(f"tool.pos.{i}") for i in range(3)]
    true = env.true_state()[:, tool]
    env.backend.bind("qpos")[:, :7] = sensed[:, joints]
    env.backend.forward()
    there = env.true_state()[:, tool]
    moved = np.linalg.norm(there - true, axis=1)
    assert (moved > 1e-3).all()
    # To first order: what is left is the square of the angles, 0.05^2 over half a metre.
    assert (np.linalg.norm(sensed[:, tool] - there, axis=1) < 0.06 * moved).all()


def test_a_bias_stays_for_an_episode_and_noise_does_not() -> None:
    env = make(DomainConfig(object_bias_m=0.01), 2, autoreset="disabled")
    zeros = np.zeros((2, len(env.action_names)), np.float32)
    errors = [env.reset(seed=3)[0]["state"] - env.true_state()]
    errors += [env.step_masked(zeros, None)[0]["state"] - env.true_state() for _ in range(3)]
    np.testing.assert_allclose(np.array(errors[1:]), np.array(errors[:-1]), atol=1e-7)
    again = env.reset()[0]["state"] - env.true_state()
    assert np.abs(again - errors[0]).max() > 1e-4
    noisy = make(DomainConfig(object_noise_m=0.01), 200)
    first = noisy.reset(seed=0)[0]["state"] - noisy.true_state()
    second = (
        noisy.step_masked(np.zeros((200, zeros.shape[1]), np.float32), None)[0]["state"] - noisy.true_state()
    )
    column = noisy.state_names.index("goal_in_tool.pos.0")
    both = np.concatenate([first[:, column], second[:, column]])
    # 400 draws of standard deviation 0.01: their own is within 4 x 0.01 / sqrt(800) = 0.0014.
    assert both.std() == pytest.approx(0.01, abs=0.0014)
    assert abs(np.corrcoef(first[:, column], second[:, column])[0, 1]) < 0.3


def test_the_model_has_what_was_drawn() -> None:
    env = make(ALL, 500)
    nominal = make(DomainConfig(), 1).backend
    env.reset(seed=0)
    model = env.backend.expand
    friction = model("dof_frictionloss")[:, :7] / np.array(PANDA.limits.effort_n_m)
    # Uniform from 0 to 0.05: mean 0.025; 4 standard deviations of a mean of 500 are 4 x 0.0144 / 22 = 0.0026.
    assert friction.min() >= 0
    assert friction.max() <= 0.05
    assert friction.mean(axis=0) == pytest.approx(np.full(7, 0.025), abs=0.0026)
    gain, bias = model("actuator_gainprm")[:, :7, 0], model("actuator_biasprm")[:, :7]
    np.testing.assert_array_equal(gain, -bias[:, :, 1])  # force = kp (ctrl - position)
    kp = gain / nominal.expand("actuator_gainprm")[0, :7, 0]
    assert kp.min() >= 0.9
    assert kp.max() <= 1.1
    damping = model("dof_damping")[:, :7] / nominal.expand("dof_damping")[0, :7]
    servo = bias[:, :, 2] / nominal.expand("actuator_biasprm")[0, :7, 2]
    np.testing.assert_allclose(damping, servo)  # one draw for both: they act alike
    tool = env.index.tool_body
    mass, share = model("body_mass")[:, tool], model("body_gravcomp")[:, tool]
    own_kg = nominal.expand("body_mass")[0, tool]
    assert mass.max() - own_kg == pytest.approx(0.5, abs=0.01)
    np.testing.assert_allclose(mass * share, own_kg)  # the weight that is compensated is the arm's own


def test_a_payload_bends_the_arm_down() -> None:
    """A servo of stiffness kp holds a torque with an error of torque / kp: the arm sinks, then rests."""
    env = make(DomainConfig(payload_kg=(0.5, 0.5)), 1, autoreset="disabled")
    env.reset(seed=0)
    held = env.backend.bind("ctrl")[:, :7].copy()
    env.backend.step(400)
    sunk = env.backend.bind("qpos")[0, :7] - held[0]
    # The hand is about 0.48 m in front of the shoulder (joint 2): 0.5 x 9.81 x 0.48 / 400 = 0.0059 rad.
    assert sunk[1] == pytest.approx(0.0059, rel=0.2)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_command_acts_after_as_many_steps(delay: int) -> None:
    # No autoreset: an episode that random motion solves goes on.
    how: dict[str, Any] = {"autoreset": "disabled"}
    env, plain = make(DomainConfig(delay_steps=3), 64, **how), make(DomainConfig(), 64, **how)
    env.reset(seed=0)
    plain.reset(seed=0)
    (rows,) = np.nonzero(env._domain.delays() == delay)
    assert len(rows) >= 6  # 64 draws of four delays
    start = env.backend.bind("ctrl")[rows, :7].copy()
    first = plain.step_masked(actions(env, 0), None)[4]["executed_target_rad"][rows]
    for step in range(delay + 1):
        executed = env.step_masked(actions(env, step), None)[4]["executed_target_rad"][rows]
        np.testing.assert_array_equal(executed, first if step == delay else start)


def test_a_row_that_waits_keeps_its_commands() -> None:
    env = make(DomainConfig(delay_steps=2), 2, autoreset="disabled")
    env.reset(seed=5)
    for step in range(3):
        env.step_masked(actions(env, step), None)
    before = env.get_state()
    env.step_masked(actions(env, 3), np.array([True, False]))
    after = env.get_state()
    assert (before[0] != after[0]).any()
    np.testing.assert_array_equal(before[1], after[1])


def test_a_resumed_env_goes_on_with_the_same_bytes() -> None:
    domain = replace(ALL, curriculum=True, scale=0.4, window=3, narrow_below=0.9)
    env = make(domain, 3, horizon_s=0.5)
    env.reset(seed=11)
    for step in range(17):
        env.step_masked(actions(env, step), None)
    state = env.state_dict()
    twin = make(domain, 3, horizon_s=0.5)
    twin.reset(seed=99)
    obs = twin.load_state_dict(state)
    scales = set[float]()
    for step in range(17, 45):
        one, other = (each.step_masked(actions(env, step), None) for each in (env, twin))
        np.testing.assert_array_equal(one[0]["state"], other[0]["state"])
        assert one[4]["domain_scale"] == other[4]["domain_scale"]
        scales.add(one[4]["domain_scale"])
        obs = other[0]
    assert len(scales) > 2  # random actions fail, so it narrows
    assert obs["state"].shape == (3, len(env.state_names))


def test_a_copied_state_brings_its_late_commands() -> None:
    domain = DomainConfig(delay_steps=2)
    env = make(domain, 2)
    env.reset(seed=5)
    for step in range(4):
        env.step_masked(actions(env, step), None)
    rows = env.get_state()
    ends = []
    for _ in range(2):
        env.set_state(rows)
        for step in range(3):
            env.step_masked(actions(env, step), None)
        ends.append(env.get_state())
    np.testing.assert_array_equal(ends[0], ends[1])


def test_tensors_draw_the_same() -> None:
    kinds = [
        make(replace(ALL, joint_noise_rad=0.0, object_noise_m=0.0), 3, array=kind)
        for kind in ("numpy", "torch")
    ]
    shown = [np.asarray(env.reset(seed=2)[0]["state"]) for env in kinds]
    np.testing.assert_allclose(shown[0], shown[1], atol=1e-6)
    for field in ("dof_frictionloss", "actuator_biasprm", "body_mass"):
        one, other = (np.asarray(env.backend.expand(field)) for env in kinds)
        np.testing.assert_array_equal(one, other)
    for step in range(4):
        done = [env.step_masked(env.backend.asarray(actions(env, step)), None) for env in kinds]
        targets = [np.asarray(each[4]["executed_target_rad"]) for each in done]
        np.testing.assert_allclose(targets[0], targets[1], atol=1e-9)
    noisy = [make(ALL, 3, array=kind).reset(seed=2)[0]["state"] for kind in ("numpy", "torch")]
    np.testing.assert_allclose(np.asarray(noisy[0]), np.asarray(noisy[1]), atol=1e-6)


def test_the_scale_widens_with_success_and_narrows_without() -> None:
    """Windows of 4: 4 of 4 is above 0.95, 2 of 4 is below 0.9; steps of 0.25, at most 1, at least 0."""
    config = DomainConfig(friction=(0.0, 0.05), curriculum=True, window=4, step=0.25, scale=0.5)
    domain, all_ended = make(config)._domain, np.ones(4, bool)
    assert domain.scale == 0.5
    for success, scale in ((1, 0.75), (1, 1.0), (1, 1.0), (0, 0.75)):
        domain.note(all_ended, np.full(4, bool(success)))
        assert domain.scale == scale
    domain.note(all_ended, np.array([True, True, False, False]))
    assert domain.scale == 0.5
    domain.note(
        np.array([True, False, True, False]), np.zeros(4, bool)
    )  # two of four: the window is not full
    assert domain.scale == 0.5
    domain.note(np.array([True, False, True, False]), np.ones(4, bool))  # 2 of 4 in all
    assert domain.scale == 0.25


def test_a_scale_of_zero_is_no_difference_and_evaluation_has_the_full_ranges() -> None:
    config = replace(ALL, curriculum=True)
    learns, plain = make(config, autoreset="same_step"), make(DomainConfig())
    one, other = learns.reset(seed=4)[0], plain.reset(seed=4)[0]
    np.testing.assert_allclose(one["state"], other["state"], atol=1e-6)
    for step in range(5):
        one, other = (each.step_masked(actions(plain, step), None) for each in (learns, plain))
        np.testing.assert_allclose(one[0]["state"], other[0]["state"], atol=1e-6)
    judged = make(config, autoreset="disabled")
    full = make(ALL, autoreset="disabled")
    np.testing.assert_array_equal(judged.reset(seed=4)[0]["state"], full.reset(seed=4)[0]["state"])
    assert "domain_scale" not in judged.step_masked(actions(judged, 0), None)[4]


def test_a_virtual_force_carries_the_cube_and_is_withdrawn() -> None:
    """A push of 0.3 N less the friction of 0.5 x 0.98 N would not move a cube of 0.1 kg; 1.2 N does."""
    config = DomainConfig(curriculum=True, assist_n=1.2)
    ways = []
    for scale in (0.0, 1.0):
        env = make(replace(config, scale=scale), 8, task="push_cube")
        env.reset(seed=0)
        before = np.linalg.norm(env._task.assist(env.view)["cube"], axis=1)
        away = np.zeros((8, len(env.action_names)), np.float32)
        away[:, 2] = 1.0  # the tool rises: nothing else touches the cube
        for _ in range(15):
            env.step_masked(away, None)
        ways.append(before - np.linalg.norm(env._task.assist(env.view)["cube"], axis=1))
    assert (ways[0] > 0.03).all()
    assert (np.abs(ways[1]) < 1e-3).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"friction": (0.1, 0.0)}, r"env.domain.friction: got \[0.1, 0.0\], allowed: lowest and highest"),
        ({"damping": (0.0, 1.0)}, "env.domain.damping"),
        ({"delay_steps": 21}, "env.domain.delay_steps: got 21, allowed: 0 to 20"),
        ({"widen_above": 0.5}, "env.domain.narrow_below: got 0.9, allowed: 0 to widen_above=0.5"),
        ({"assist_n": 1.0}, "allowed: 0 without env.domain.curriculum=true"),
        ({"joint_bias_rad": -0.1}, "env.domain.joint_bias_rad: got -0.1, allowed: 0 or more"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DomainConfig(**settings)


def test_a_task_that_nothing_can_be_pulled_in_refuses_virtual_forces() -> None:
    with pytest.raises(ConfigError, match=r"assist_n: got 1, allowed: 0, as 'reach' has no `assist`"):
        make(DomainConfig(curriculum=True, assist_n=1.0))
