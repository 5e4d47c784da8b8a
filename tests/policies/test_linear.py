"""The policy that is a linear map: by hand, from a checkpoint, and in closed loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.cli.main import main
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.linear import LinearPolicy

AXES = ("tool.dx", "tool.dy", "tool.dz")
REACH = PolicyMeta(
    task="reach",
    robot="panda",
    control_hz=20.0,
    state_names=(
        *(f"tool.pos.{axis}" for axis in range(3)),
        *(f"goal.pos.{axis}" for axis in range(3)),
        *(f"{name}.last_action" for name in (*AXES, "gripper")),
    ),
    action_names=(*AXES, "gripper"),
    instruction="",
    n_exec=1,
)


def small() -> LinearPolicy:
    """Two elements of state, chunks of two, one action: s0 + 1, then 2 s0 - s1."""
    return LinearPolicy(torch.tensor([[[1.0], [2.0]], [[0.0], [-1.0]]]), torch.tensor([[1.0], [0.0]]))


def test_the_chunk_is_a_linear_map_of_the_state(tmp_path: Path) -> None:
    obs = {"state": torch.tensor([[3.0, 4.0], [0.5, 0.0]])}
    save_policy(tmp_path / "linear", small(), meta=REACH)
    for policy in (small(), load_policy(tmp_path / "linear")[0]):
        assert policy.sample(policy.encode(obs), mode="explore").actions.tolist() == [
            [[4.0], [2.0]],
            [[1.5], [1.0]],
        ]
        assert (policy.horizon, policy.action_dim, policy.feature_dim) == (2, 1, 2)


def test_there_is_nothing_to_score_or_to_learn() -> None:
    obs: Any = {"state": torch.zeros(1, 2)}
    policy = small()
    with pytest.raises(ValueError, match="a linear policy has no chain to record"):
        policy.sample(policy.encode(obs), record=True)
    with pytest.raises(ValueError, match="a linear policy is solved for"):
        small().bc_loss(obs)
    with pytest.raises(ValueError, match=r"offset has shape \(1, 2\), allowed \(2, 1\)"):
        LinearPolicy(torch.zeros(2, 2, 1), torch.zeros(1, 2))


@pytest.mark.parametrize(("gain", "success"), [(10.0, 1.0), (0.0, 0.0)])
def test_evaluate_plays_it_with_its_past(
    gain: float, success: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Towards the goal by the distance it reaches all; the last action alone, which is 0, stands still."""
    weight = torch.zeros(10, 1, 4)
    for axis in range(3):
        weight[axis, 0, axis], weight[3 + axis, 0, axis] = -gain, gain
    if gain == 0:
        weight[6:, 0] = torch.eye(4)
    save_policy(tmp_path / "policy", LinearPolicy(weight, torch.zeros(1, 4)), meta=REACH)
    assert main(["evaluate", f"policy={tmp_path / 'policy'}", "episodes=6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["success"] == success
