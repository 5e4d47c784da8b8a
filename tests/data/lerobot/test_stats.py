"""Statistics against numpy, by hand, and joined over episodes."""

import numpy as np
import pytest

from robot_rl.data.lerobot.stats import (
    PictureStats,
    aggregate,
    from_json,
    of_columns,
    sampled_steps,
    to_json,
)


def test_numbers_by_hand() -> None:
    stats = of_columns({"a": np.array([4, 1, 3, 2]), "b": np.array([[0.0, 5.0]] * 4)})
    assert stats["a"]["count"].tolist() == [4]
    assert [stats["a"][name].tolist() for name in ("min", "max", "mean", "q50")] == [[1], [4], [2.5], [2.5]]
    # Deviations 1.5, 0.5, 0.5, 1.5: the root of (2.25 + 0.25 + 0.25 + 2.25) / 4 = 1.25.
    assert stats["a"]["std"][0] == pytest.approx(1.25**0.5)
    assert stats["b"]["mean"].tolist() == [0, 5]


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(0).normal(size=(137, 5))
    stats = of_columns({"x": values})["x"]
    for name, share in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_allclose(stats[name], np.quantile(values, share, axis=0), rtol=1e-12)


def test_stamps_keep_their_spread() -> None:
    # Squares of such numbers leave nothing of a spread of 1 ms in 64 bits.
    stamps = 10**15 + np.array([0, 1_000_000, 2_000_000])
    assert of_columns({"stamp_ns": stamps})["stamp_ns"]["std"][0] == pytest.approx(1e6 * (2 / 3) ** 0.5)


def test_one_step_is_enough() -> None:
    stats = of_columns({"x": np.array([[7.0]])})["x"]
    assert {name: value.tolist() for name, value in stats.items() if name != "std"} == {
        name: [7.0] for name in ("min", "max", "mean", "q01", "q10", "q50", "q90", "q99")
    } | {"count": [1]}


def test_pictures_are_numpys_too() -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    pictures[..., 2] //= 3
    gathered = PictureStats()
    for picture in pictures:
        gathered.add(picture)
    stats, pixels = gathered.result(), pictures.reshape(-1, 3) / 255
    assert stats["count"].tolist() == [4]
    for name, want in (
        ("min", pixels.min(0)),
        ("max", pixels.max(0)),
        ("mean", pixels.mean(0)),
        ("std", pixels.std(0)),
        ("q01", np.quantile(pixels, 0.01, axis=0)),
        ("q90", np.quantile(pixels, 0.9, axis=0)),
    ):
        assert stats[name].shape == (3, 1, 1)
        np.testing.assert_allclose(stats[name].reshape(3), want, rtol=1e-12, err_msg=name)


def test_large_pictures_are_sampled() -> None:
    picture = np.zeros((480, 640, 3), np.uint8)
    picture[1::2] = 255  # 640 // 150 = 4: every fourth row, all of them even
    gathered = PictureStats()
    gathered.add(picture)
    assert gathered.result()["max"].max() == 0


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (80, 80), (400, 100), (10_000, 1000)])
def test_as_many_frames_as_lerobot_takes(steps: int, count: int) -> None:
    taken = sampled_steps(steps)
    assert len(taken) == count
    assert (taken[0], taken[-1]) == (0, steps - 1)


def test_episodes_together_are_all_their_steps() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(n, 2)) * n for n in (3, 50, 7)]
    joined = {}
    for part in parts:
        joined = aggregate([*([joined] if joined else []), of_columns({"x": part})])
    whole = of_columns({"x": np.concatenate(parts)})
    for name in ("min", "max", "mean", "std", "count"):
        np.testing.assert_allclose(joined["x"][name], whole["x"][name], rtol=1e-12)
    # Quantiles cannot be joined exactly; as LeRobot, their mean weighted by steps.
    medians = [np.median(part, axis=0) for part in parts]
    np.testing.assert_allclose(joined["x"]["q50"], np.average(medians, axis=0, weights=[3, 50, 7]))


def test_json_keeps_every_digit() -> None:
    stats = of_columns({"x": np.random.default_rng(0).normal(size=(9, 2))})
    for name, value in from_json(to_json(stats))["x"].items():
        assert value.tolist() == stats["x"][name].tolist()
