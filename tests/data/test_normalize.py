"""Normaliser: hand-computed statistics, floors, images, and the messages for damaged data."""

import numpy as np
import pytest
import torch

from robot_rl.core.errors import DatasetError
from robot_rl.data.normalize import Normaliser


def fitted() -> Normaliser:
    state = np.array([[0.0, 5.0], [2.0, 5.0], [4.0, 5.0]], np.float32)
    actions = np.array([[-0.4, 0.2], [0.0, 0.2], [0.8, 0.2]], np.float32)
    return Normaliser.fit({"state": state, "front.rgb": np.zeros((3, 4, 4, 3), np.uint8)}, actions)


def test_states_are_standardised_with_a_floor() -> None:
    # Element 0: mean 2, variance (4 + 0 + 4) / 3, so 4 -> 2 / sqrt(8 / 3) = 1.224745.
    # Element 1 never moves: std is the floor 0.01, so 5.02 -> 0.02 / 0.01 = 2.
    out = fitted().obs({"state": torch.tensor([[4.0, 5.02]])})["state"]
    assert out[0].tolist() == pytest.approx([1.224745, 2.0], abs=1e-3)


def test_actions_map_to_the_unit_range_with_a_floor() -> None:
    # Element 0: from [-0.4, 0.8], centre 0.2, half 0.6. Element 1: constant 0.2, half-range 0.1.
    normaliser = fitted()
    scaled = normaliser.action(torch.tensor([[-0.4, 0.2], [0.8, 0.25], [0.5, 0.1]]))
    assert scaled.numpy() == pytest.approx(np.array([[-1.0, 0.0], [1.0, 0.5], [0.5, -1.0]]), abs=1e-6)
    back = normaliser.unaction(scaled)
    assert back.numpy() == pytest.approx(np.array([[-0.4, 0.2], [0.8, 0.25], [0.5, 0.1]]), abs=1e-6)


def test_images_become_unit_floats_and_depth_passes() -> None:
    depth = torch.full((1, 2, 2), 0.7)
    obs = {"front.rgb": torch.full((1, 2, 2, 3), 51, dtype=torch.uint8), "front.depth": depth}
    out = fitted().obs(obs)
    assert out["front.rgb"].unique().tolist() == pytest.approx([0.2])  # 51 / 255
    assert out["front.depth"] is depth


def test_statistics_are_buffers() -> None:
    assert set(fitted().state_dict()) == {
        "mean_state",
        "std_state",
        "action_centre",
        "action_half_range",
    }


def test_unfitted_is_identity() -> None:
    normaliser = Normaliser({"state": 2}, 1)
    state = torch.tensor([[3.0, -1.0]])
    assert torch.equal(normaliser.obs({"state": state})["state"], state)
    assert torch.equal(normaliser.unaction(normaliser.action(state[:, :1])), state[:, :1])


def test_nan_names_feature_count_and_first_row() -> None:
    state = np.zeros((6, 3), np.float32)
    state[2, 1] = np.nan
    state[4, 0] = np.inf
    with pytest.raises(
        DatasetError,
        match=r"feature 'state': 2 values are NaN or infinite, the first in row 2, element 1",
    ):
        Normaliser.fit({"state": state}, np.zeros((6, 2), np.float32))
    actions = np.zeros((6, 1), np.float32)
    actions[5] = np.nan
    with pytest.raises(DatasetError, match=r"feature 'action': 1 values are NaN .* row 5, element 0"):
        Normaliser.fit({"state": np.zeros((6, 3), np.float32)}, actions)


def test_lengths_and_shapes_are_checked() -> None:
    with pytest.raises(DatasetError, match=r"feature 'state': shape \(5, 3\), allowed \(6, elements\)"):
        Normaliser.fit({"state": np.zeros((5, 3))}, np.zeros((6, 2)))
    with pytest.raises(DatasetError, match=r"feature 'action': shape \(0, 2\), allowed \(at least 1"):
        Normaliser.fit({"state": np.zeros((0, 3))}, np.zeros((0, 2)))


def test_unknown_or_resized_features_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"'stat': .* no statistics for it. Did you mean 'state'"):
        fitted().obs({"stat": torch.zeros(1, 2)})
    with pytest.raises(DatasetError, match=r"'state': 7 elements, normalised with 2"):
        fitted().obs({"state": torch.zeros(1, 7)})
