"""The sum tree against plain sums."""

import numpy as np
import pytest

from robot_rl.data.sum_tree import SumTree


def test_by_hand() -> None:
    tree = SumTree(5)
    tree.set(np.array([0, 2, 4]), np.array([1.0, 2.0, 5.0]))
    assert tree.total == 8.0
    # Cumulative: leaf 0 up to 1, leaf 2 up to 3, leaf 4 up to 8.
    assert tree.find(np.array([0.0, 0.999, 1.0, 2.999, 3.0, 7.999])).tolist() == [0, 0, 2, 2, 4, 4]
    tree.set(np.array([2, 2]), np.array([7.0, 3.0]))
    assert tree.total == 9.0
    tree.set_range(0, 3, 0.5)
    assert tree.get(slice(0, 5)).tolist() == [0.5, 0.5, 0.5, 0.0, 5.0]
    assert tree.total == 6.5


@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000])
def test_any_changes_keep_the_sums(size: int) -> None:
    rng = np.random.default_rng(size)
    tree, plain = SumTree(size), np.zeros(size)
    for _ in range(30):
        leaves = np.unique(rng.integers(0, size, 20))
        plain[leaves] = rng.random(len(leaves)) * (rng.random(len(leaves)) < 0.7)
        tree.set(leaves, plain[leaves])
        start, stop = np.sort(rng.integers(0, size + 1, 2))
        plain[start:stop] = rng.random(stop - start)
        tree.set_range(int(start), int(stop), plain[start:stop])
    plain[-1] = 1.0
    tree.set(np.array([size - 1]), 1.0)
    assert tree.total == pytest.approx(plain.sum())
    mass = rng.random(5000) * tree.total
    found = tree.find(mass)
    assert found.tolist() == np.searchsorted(np.cumsum(plain), mass, side="right").tolist()


def test_mass_at_the_very_end_falls_into_a_leaf_that_weighs_something() -> None:
    tree = SumTree(8)
    tree.set(np.array([0, 1, 2]), np.array([0.1, 0.2, 0.3]))
    assert tree.find(np.array([tree.total, 2 * tree.total])).tolist() == [2, 2]
