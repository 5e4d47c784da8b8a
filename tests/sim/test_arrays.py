"""The same code on numpy arrays and on torch tensors: equal numbers, above the same simulation.

Bit for bit where only sums, products and comparisons are made. The controller's matrix products and
`solve`, and the roots and tangents of rewards, are rounded otherwise by torch, in the last bits.
"""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.arrays import solve
from robot_rl.core.registry import resolve, table
from robot_rl.hal.host import HostEnv, on_host
from robot_rl.hal.vector import VectorEnv
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.task import Control
from robot_rl.sim.tasks.reach import Reach
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from tests.read_back import reads_back

JOINTS = Control(kind="joint_delta")
ROUNDING = 1e-9
"""Of positions in metres and rewards after half a second: kernels differ by 1e-15, contacts amplify it."""


def pair(num_envs: int = 4, autoreset: Any = "same_step", **config: Any) -> tuple[SimVectorEnv, SimVectorEnv]:
    values: dict[str, Any] = {"task": "reach", "horizon_s": 0.5, "num_threads": 1, "randomize": True}
    asked = EnvConfig(**{**values, **config})
    ours = SimVectorEnv(asked, num_envs, autoreset=autoreset)
    return ours, SimVectorEnv(asked, num_envs, autoreset=autoreset, array="torch")


def tensor(values: Any) -> Any:
    return torch.tensor(values)


def actions(env: VectorEnv, steps: int, *, seed: int = 3) -> np.ndarray[Any, Any]:
    shape = (steps, env.num_envs, len(env.action_names))
    return np.random.default_rng(seed).uniform(-1.2, 1.2, shape).astype(np.float32)


def require_equal(tensors: Any, arrays: Any, *, atol: float = 0.0) -> None:
    """Compares two trees leaf by leaf: kinds of numbers, shapes and values."""
    if isinstance(arrays, dict):
        assert tensors.keys() == arrays.keys()
        pairs = [(tensors[key], arrays[key]) for key in arrays]
    elif isinstance(arrays, tuple):
        pairs = list(zip(tensors, arrays, strict=True))
    else:
        assert isinstance(tensors, torch.Tensor)
        got = tensors.numpy()
        assert (got.dtype, got.shape) == (arrays.dtype, arrays.shape)
        np.testing.assert_allclose(got, arrays, rtol=0.0, atol=atol)
        return
    for got, array in pairs:
        require_equal(got, array, atol=atol)


@pytest.fixture
def joint_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reach, "control", JOINTS)


@pytest.mark.usefixtures("joint_control")
def test_joint_control_is_equal_bit_for_bit() -> None:
    # 10 control steps an episode: 25 steps begin two more, of which one row's first is late.
    ours, theirs = pair()
    require_equal(theirs.reset(seed=5), ours.reset(seed=5))
    for step, action in enumerate(actions(ours, 25)):
        if step == 4:
            action[1, 2] = np.nan  # that row is held until its episode ends
        active = np.arange(4) > 0 if step == 6 else None
        given = None if active is None else tensor(active)
        seen = theirs.step_masked(tensor(action), given)
        require_equal(seen, ours.step_masked(action, active))
    require_equal(theirs.get_state(), ours.get_state())
    np.testing.assert_array_equal(on_host(theirs.episode_seeds()).view(np.uint64), ours.episode_seeds())


@pytest.mark.usefixtures("joint_control")
def test_chunks_are_equal_bit_for_bit() -> None:
    ours, theirs = pair()
    ours.reset(seed=5)
    theirs.reset(seed=5)
    for chunk in actions(ours, 16).reshape(4, 4, 4, -1):
        seen = vars(theirs.step_chunk(tensor(chunk), 4))
        require_equal(seen, vars(ours.step_chunk(chunk, 4)))


@pytest.mark.usefixtures("joint_control")
def test_a_state_dict_goes_from_one_kind_to_the_other() -> None:
    ours, theirs = pair()
    ours.reset(seed=5)
    theirs.reset(seed=2**63 + 5)  # more than an int64 holds
    for action in actions(ours, 3):
        ours.step(action)
        theirs.step(action)
    kept, swapped = ours.state_dict(), theirs.state_dict()
    for state in (kept, swapped):
        assert all(isinstance(state[name], np.ndarray) for name in ("state", "seed", "episode", "elapsed"))
    assert swapped["seed"].tolist() == [2**63 + 5 + i for i in range(4)]
    require_equal(theirs.load_state_dict(kept), ours.load_state_dict(kept))
    for action in actions(ours, 12, seed=4):
        require_equal(theirs.step(action), ours.step(action))


@pytest.mark.parametrize("task", sorted(table("task")))
def test_every_task_gives_equal_numbers(task: str) -> None:
    ours, theirs = pair(task=task, reward="dense")
    require_equal(theirs.reset(seed=5), ours.reset(seed=5), atol=ROUNDING)
    if not resolve("task", task).has_expert():
        for action in actions(ours, 12):
            require_equal(theirs.step(tensor(action)), ours.step(action), atol=ROUNDING)
        return
    expert, other = ours.expert(noise_m=0.01), theirs.expert(noise_m=0.01)
    for step, action in enumerate(actions(ours, 24)):
        expected, got = expert.act(), other.act()
        require_equal(got, expected, atol=1e-6)  # float32
        action = expected if step % 3 else action
        require_equal(theirs.step(tensor(action)), ours.step(action), atol=ROUNDING)


def test_both_ways_of_the_tool_are_equal_to_rounding() -> None:
    ours, theirs = pair(task="pick_cube")
    ours.reset(seed=5)
    theirs.reset(seed=5)
    for action in actions(ours, 5):
        position = ours.controller.joint_positions()
        target = ours.controller.targets(action, position)
        got = theirs.controller.targets(tensor(action), tensor(position))
        require_equal(got, target, atol=1e-14)
        towards = ours.action_towards(target, action[:, -1])
        require_equal(theirs.action_towards(got, tensor(action[:, -1])), towards, atol=1e-13)


def test_tensors_are_the_memory_of_the_simulation() -> None:
    _, env = pair()
    env.reset(seed=5)
    on_cpu(env.backend).state[2, 1] = 0.125
    assert on_cpu(env.backend).batch.state[2, 1] == 0.125


def test_a_simulation_that_diverges_is_contained_in_tensors(tmp_path: Any) -> None:
    ours, theirs = pair(dump_diverged=str(tmp_path))
    for env in (ours, theirs):
        env.reset(seed=5)
        on_cpu(env.backend).state[1, 8] = 1e12
    action = actions(ours, 1)[0]
    seen = theirs.step(tensor(action))
    require_equal(seen, ours.step(action), atol=ROUNDING)
    assert seen[4]["diverged"].tolist() == [False, True, False, False]
    dumped = np.load(sorted(tmp_path.glob("*.npz"))[0])
    assert dumped["state_before"].shape[0] == 1


def test_numpy_arrays_load_no_torch() -> None:
    code = """
import sys
import numpy as np
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
env = SimVectorEnv(EnvConfig(task="reach"), 2)
env.reset(seed=0)
env.step(env.expert().act())
env.step_chunk(np.zeros((2, 3, len(env.action_names))), 3)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_host_has_the_same_memory() -> None:
    zeros = torch.zeros(2)
    on_host({"a": (zeros, "words")})["a"][0][1] = 3.0
    assert zeros.tolist() == [0.0, 3.0]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_equations_are_solved_and_nothing_is_read_back(kind: Any) -> None:
    # 2 x + y = 4 and x + 3 y = 7: x = 1, y = 2.
    with reads_back() as reads:
        found = solve(kind([[[2.0, 1.0], [1.0, 3.0]]]), kind([[[4.0], [7.0]]]))
    assert reads == []
    assert found.flatten().tolist() == pytest.approx([1.0, 2.0])


def test_who_demonstrates_on_the_host_gets_and_gives_numpy_arrays() -> None:
    """As of a GPU, whose tensors numpy does not take: `method=dagger` with its scripted or own expert."""
    arrays, tensors = pair(task="pick_cube")
    host: Any = HostEnv(tensors)
    for env in (arrays, host):
        env.reset(seed=5)
    np.testing.assert_array_equal(host.episode_seeds(), arrays.episode_seeds())
    np.testing.assert_array_equal(host.true_state(), arrays.true_state())
    np.testing.assert_allclose(host.progress(), arrays.progress(), atol=ROUNDING)
    mine, theirs = (env.expert(bias_m=0.01, noise_m=0.01, noise_seed=2) for env in (host, arrays))
    assert isinstance(mine.act(), np.ndarray)
    np.testing.assert_allclose(mine.act(), theirs.act(), atol=ROUNDING)


def test_the_host_counts_what_the_env_inside_counts() -> None:
    _, tensors = pair(2)
    host: Any = HostEnv(tensors)
    host.reset(seed=5)
    on_cpu(tensors.backend).state[1, 8] = 1e12
    host.step(actions(host, 1)[0])
    assert (host.num_diverged, tensors.num_diverged) == (1, 1)
