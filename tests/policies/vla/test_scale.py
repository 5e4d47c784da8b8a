"""Units: what is standardised, what is relative, and what cannot leave the data's range."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.policy import DemoBatch
from robot_rl.policies.vla.scale import ChunkScale, relative_indices

STATS: dict[str, dict[str, Any]] = {
    "state": {"mean": np.array([1.0, 2.0]), "std": np.array([0.5, 0.0])},
    "action": {
        "min": np.array([-2.0, 0.0]),
        "max": np.array([2.0, 3.0]),
        "q01": np.array([-1.0, 0.5]),
        "q99": np.array([1.0, 2.5]),
    },
}


def absolute() -> ChunkScale:
    scale = ChunkScale(2, 2, 3, relative_to=(-1, -1))
    scale.fit(STATS)
    return scale


def chunks(actions: Tensor, state: Tensor, valid: Tensor | None = None) -> DemoBatch:
    shown = torch.ones(actions.shape[:2], dtype=torch.bool) if valid is None else valid
    return DemoBatch({"state": state}, actions, shown)


def test_absolute_actions_by_hand() -> None:
    # Quantiles -1 to 1 and 0.5 to 2.5: centres 0 and 1.5, half-ranges 1 and 1.
    scale, state = absolute(), torch.zeros(1, 2)
    actions = torch.tensor([[[1.0, 2.5], [0.0, 1.5], [-0.5, 0.5]]])
    scaled = scale.action(actions, state)
    assert scaled[0].tolist() == [[1.0, 1.0], [0.0, 0.0], [-0.5, -1.0]]
    assert torch.allclose(scale.unaction(scaled, state), actions)


def test_actions_stay_inside_the_range_of_the_data() -> None:
    far = absolute().unaction(torch.full((1, 3, 2), 9.0), torch.zeros(1, 2))
    assert far[0].tolist() == [[2.0, 3.0]] * 3
    assert absolute().unaction(torch.full((1, 3, 2), -9.0), torch.zeros(1, 2))[0, 0].tolist() == [-2.0, 0.0]


def test_states_by_hand() -> None:
    # (2 - 1) / 0.5; an element that never moved is divided by 1 mrad, and clipped.
    assert absolute().state(torch.tensor([[2.0, 2.001]]))[0].tolist() == pytest.approx([2.0, 1.0], abs=1e-3)
    assert absolute().state(torch.tensor([[-99.0, 2.5]]))[0].tolist() == [-5.0, 5.0]


def test_relative_actions_by_hand() -> None:
    # The first action follows state element 1, the second is absolute.
    scale = ChunkScale(2, 2, 2, relative_to=(1, -1))
    scale.fit(STATS)
    state = torch.tensor([[7.0, 0.3], [7.0, -0.4]])
    steps = torch.tensor([[0.1, 0.2], [0.3, 0.6]])  # distance from the state: row x step
    actions = torch.stack([state[:, 1:] + steps, torch.tensor([[1.0, 2.0], [1.0, 2.0]])], dim=-1)
    assert torch.allclose(scale.origin(state)[:, 0], torch.tensor([[0.3, 0.0], [-0.4, 0.0]]))
    scale.measure([chunks(actions, state)])
    # Step 0: 0.1 and 0.3, step 1: 0.2 and 0.6. Quantiles 0.01 and 0.99 of two values: 1 % inwards.
    assert scale.centre[:, 0].tolist() == pytest.approx([0.2, 0.4])
    assert scale.half_range[:, 0].tolist() == pytest.approx([0.098, 0.196])
    scaled = scale.action(actions, state)
    assert scaled[:, :, 0].tolist() == [pytest.approx([-1 / 0.98] * 2), pytest.approx([1 / 0.98] * 2)]
    assert torch.allclose(scale.unaction(scaled, state), actions, atol=1e-6)


def test_a_joint_outside_the_range_may_stay_but_go_no_further() -> None:
    # The first action, -2 to 2 in the data, is relative to a joint at 5, -5 and 1; the second is absolute.
    scale = ChunkScale(2, 2, 1, relative_to=(0, -1))
    scale.fit(STATS)
    state = torch.tensor([[5.0, 9.0], [-5.0, 9.0], [1.0, 9.0]])

    def joint(distance: float) -> list[float]:
        scaled = torch.full((3, 1, 2), distance)
        assert scale.unaction(scaled, state)[:, 0, 1].max() <= 3.0
        return scale.unaction(scaled, state)[:, 0, 0].tolist()

    assert joint(0.0) == [5.0, -5.0, 1.0]
    assert joint(9.0) == [5.0, 2.0, 2.0]
    assert joint(-1.0) == [4.0, -5.0, 0.0]
    assert joint(-9.0) == [-2.0, -5.0, -2.0]


def test_the_end_of_an_episode_is_not_measured() -> None:
    scale = ChunkScale(1, 1, 2, relative_to=(0,))
    actions = torch.tensor([[[1.0], [1.0]], [[2.0], [50.0]]])
    valid = torch.tensor([[True, True], [True, False]])
    scale.measure([chunks(actions, torch.zeros(2, 1), valid)])
    assert scale.centre.flatten().tolist() == pytest.approx([1.5, 1.0])


def test_names_decide_what_is_relative() -> None:
    assert relative_indices(("a", "b", "grip"), ("b", "speed", "a")) == (1, -1, 0)
    # The last action is nearer to the next ones than the joint is.
    assert relative_indices(("a", "b", "b.last_action"), ("b", "a")) == (2, 0)


def test_a_regression_takes_away_what_is_linear() -> None:
    # State -1, -1, 1, 1 (mean 0, std 1), distances 5 + 2 x + (-1, 1, 1, -1) in step 0 and -3 in step 1:
    # at strength 1 the offset is the mean and the weight sum(x y) / (n + n) = 8 / 8 = 1 and 0.
    scale = ChunkScale(1, 1, 2, relative_to=(0,), linear=1.0)
    state = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]])
    noise = torch.tensor([[-1.0], [1.0], [1.0], [-1.0]])
    distance = torch.stack([5 + 2 * state + noise, torch.full((4, 1), -3.0)], dim=1)
    actions = state[:, None] + distance
    with pytest.raises(ConfigError, match="were never measured"):
        scale.check()
    scale.measure([chunks(actions[:3], state[:3]), chunks(actions[3:], state[3:])])
    scale.check()
    origin = scale.origin(torch.tensor([[0.0], [10.0]]))[..., 0]
    assert origin[0].tolist() == pytest.approx([5.0, -3.0])
    assert origin[1].tolist() == pytest.approx([10 + 15.0, 10 - 3.0])
    # What is left of step 0 is x + noise: -2, 0, 2, 0; of step 1 nothing.
    assert scale.centre.flatten().tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    assert scale.half_range.flatten().tolist() == pytest.approx([1.97 * 2 / 2, 1e-3], rel=0.02)
    assert torch.allclose(scale.unaction(scale.action(actions, state), state), actions, atol=1e-5)


def test_a_regression_is_part_of_the_weights() -> None:
    scale = ChunkScale(1, 1, 1, relative_to=(-1,), linear=0.1)
    state = torch.tensor([[-1.0], [1.0]])
    scale.measure([chunks(4 * state[:, None], state)])
    again = ChunkScale(1, 1, 1, relative_to=(-1,), linear=0.1)
    again.load_state_dict(scale.state_dict())
    again.check()
    assert torch.equal(again.origin(state), scale.origin(state))
    assert "weights" not in ChunkScale(1, 1, 1, relative_to=(-1,)).state_dict()  # as in older files


def test_a_regression_cannot_leave_the_range() -> None:
    scale = ChunkScale(1, 1, 1, relative_to=(-1,), linear=1e-6)
    scale.low.fill_(-4.0)
    scale.high.fill_(4.0)
    state = torch.tensor([[-1.0], [1.0]])
    scale.measure([chunks(4 * state[:, None], state)])
    assert scale.unaction(torch.zeros(1, 1, 1), torch.tensor([[9.0]])).item() == 4.0  # not 36


@pytest.mark.parametrize("relative_to", [(0,), (0, 2), (0, -2)])
def test_another_arm_s_indices_are_refused(relative_to: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"relative_to: got .* allowed: 2 indices from -1 to 1"):
        ChunkScale(2, 2, 3, relative_to=relative_to)


def test_relative_actions_want_measuring() -> None:
    scale = ChunkScale(2, 2, 3, relative_to=(0, -1))
    with pytest.raises(ConfigError, match=re.escape("Call `policy.measure(loader.batches())`")):
        scale.check()
    with pytest.raises(DatasetError, match="no chunks to measure"):
        scale.measure([])
    absolute().check()
    absolute().measure([])  # nothing to do


def test_lost_statistics_are_named() -> None:
    without = {"state": STATS["state"], "action": {"min": np.zeros(2)}}
    with pytest.raises(DatasetError, match="no 'max' of 'action', which small_vla needs"):
        ChunkScale(2, 2, 3, relative_to=(-1, -1)).fit(without)
    broken = {**STATS, "state": {"mean": np.array([np.nan, 0.0]), "std": np.ones(2)}}
    with pytest.raises(DatasetError, match="'mean' of 'state' is not finite"):
        ChunkScale(2, 2, 3, relative_to=(-1, -1)).fit(broken)
