"""Every task of the registry keeps the rules of tasks; a rule that is broken is named."""

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import resolve, table
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.conformance import TASK_RULES
from robot_rl.sim.task_rules import make, success_of_expert
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

TASKS = sorted(table("task"))
WITH_EXPERT = [name for name in TASKS if resolve("task", name).has_expert()]
FOR_ARMS = [name for name in TASKS if resolve("task", name).body == "arm"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("rule", TASK_RULES)
def test_keeps_the_rules(rule: str, task: str) -> None:
    TASK_RULES[rule](task, None)


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
