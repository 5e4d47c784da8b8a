"""The table of the engines by hand, and MJX where it is missing."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from robot_rl.bench.engines import _opened, _Ours, _rows
from robot_rl.sim.config import EnvConfig


def test_rates_are_medians_of_turns_and_shares_of_limit_and_cpu() -> None:
    found = {
        "robot_rl": (64, [50.0, 100.0, 60.0]),
        "bare MuJoCo Warp": (64, [120.0, 120.0, 500.0]),
        "robot_rl on the CPU": (8, [30.0, 20.0, 10.0]),
    }
    ours, limit, cpu = _rows(found)
    assert (ours["control_steps_per_s"], ours["lowest"], ours["highest"]) == (60, 50, 100)
    assert (ours["of_limit"], ours["of_cpu"], ours["envs"]) == (0.5, 3.0, 64)
    assert (limit["of_limit"], limit["of_cpu"]) == (1.0, 6.0)
    assert (cpu["of_cpu"], cpu["envs"]) == (1.0, 8)


@pytest.mark.skipif(find_spec("jax") is not None, reason="JAX is installed here")
def test_without_mjx_the_others_are_measured_and_a_note_says_how_to_install_it(tmp_path: Path) -> None:
    cpu, notes = _Ours(EnvConfig(task="reach"), 2), list[str]()
    with _opened(None, cpu, 2, notes) as peer:
        assert peer is None
    with _opened(str(tmp_path), cpu, 2, notes) as peer:
        assert peer is None
    assert notes[0].startswith(
        "MJX is left out. To measure it: uv pip install --target /tmp/mjx mujoco-mjx jax"
    )
    assert notes[1].startswith(
        "MJX is left out: ModuleNotFoundError: No module named 'jax'. How to install it: uv"
    )
    assert cpu.bare(2) > 0
    cpu.env.close()


def test_states_of_more_simulations_are_those_that_there_are_again() -> None:
    cpu = _Ours(EnvConfig(task="reach"), 2)
    states = cpu.states(5)
    assert states["qpos"].shape[0] == 5
    assert (states["qpos"][[0, 1, 0]] == states["qpos"][2:]).all()
    assert (states["qpos"][0] != states["qpos"][1]).any()
    cpu.env.close()
