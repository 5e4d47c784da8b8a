"""Calibration, the trust report and its verdict; numbers by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.worlds.audit import agreement, replayed, shift_of
from robot_rl.worlds.calibration import Calibration, Played, played_by_depth, samples_apart
from robot_rl.worlds.config import TrustConfig
from robot_rl.worlds.env import WorldEnv
from robot_rl.worlds.history import AUDIT, CALIBRATION, History, Windows
from robot_rl.worlds.saved import World
from robot_rl.worlds.trust import TrustReport, depth_rows, reasons_against, spearman
from tests.worlds.conftest import FIT, made, point_history


def test_intervals_hold_the_share_of_errors_that_they_say() -> None:
    # 100 errors of 1 to 100 with a width of 1: the 68 % interval is 68 wide, the 90 % one 90.
    error = np.arange(1.0, 101.0)[:, None]
    played = Played(1, error, np.ones((100, 1)), np.ones(100), np.ones(100), np.ones(100))
    widths = np.array([[[68.0], [90.0]]])
    calibration = Calibration(depths=np.array([1]), gate=np.array([1.0]), widths=widths, quantile=0.99)
    (row,) = calibration.coverage([played])
    assert (row["coverage_68%"], row["coverage_90%"]) == (0.68, 0.90)


def test_the_gate_is_interpolated_between_depths() -> None:
    calibration = Calibration(
        depths=np.array([1, 4]), gate=np.array([1.0, 3.0]), widths=np.zeros((2, 2, 1)), quantile=0.99
    )
    assert calibration.limit(np.array([1, 2, 4, 9])) == pytest.approx([1.0, 2.0, 3.0, 3.0])  # by logarithm


def test_two_samples_are_stated_as_two_members_are() -> None:
    # Deviations 3 and 4; samples at 1 and -1, 0 and 1 of them: 6 and 4 apart, so the two deviate from one
    # another by 6 / sqrt(2) and 4 / sqrt(2), as two members do whose means are as far apart.
    std, noise = np.array([[3.0, 4.0]]), np.array([[[1.0, 0.0], [-1.0, 1.0]]])
    assert samples_apart(std, noise) == pytest.approx([np.sqrt((36 / 2 + 16 / 2) / 2)])
    many = np.random.default_rng(0).standard_normal((20_000, 2, 2))
    assert (samples_apart(std, many) ** 2).mean() == pytest.approx((9 + 16) / 2, rel=0.03)


def test_both_gates_are_judged_alike() -> None:
    # Errors 1 to 4. Disagreement has their order, samples the opposite one; 1 of 4 and 2 of 4 are above.
    error, ones = np.arange(1.0, 5.0)[:, None], np.ones(4)
    played = Played(1, error, np.ones((4, 1)), np.arange(1.0, 5.0), np.arange(4.0, 0.0, -1.0), ones)
    sizes: dict[str, Any] = {"depths": np.array([1]), "widths": np.ones((1, 2, 1)), "quantile": 0.99}
    calibration = Calibration(gate=np.array([3.5]), samples=np.array([2.5]), **sizes)
    (row,) = depth_rows(calibration, [played])
    assert (row["rank_disagreement"], row["rank_samples"]) == (pytest.approx(1.0), pytest.approx(-1.0))
    assert (row["cut_disagreement"], row["cut_samples"]) == (0.25, 0.5)


def test_both_gates_cut_about_what_their_quantile_says(world: World) -> None:
    assert world.calibration.samples is not None
    for row in world.report.depths:
        assert 0.0 < row["cut_disagreement"] < 0.05
        assert 0.0 < row["cut_samples"] < 0.05


def test_coverage_is_near_its_level_on_the_third_split() -> None:
    noisy = made(point_history(200, noise=0.01))
    for row in noisy.report.depths:
        assert abs(row["coverage_68%"] - 0.68) < 0.08
        assert abs(row["coverage_90%"] - 0.90) < 0.06


def test_too_few_windows_are_no_calibration(world: World, history: History) -> None:
    two = Windows(history, history.split(CALIBRATION)[:2], stride=4)
    with pytest.raises(DatasetError, match="no depth has 200 windows"):
        Calibration.fit(world.model, two, quantile=0.99)


def test_actions_out_of_range_are_cut(world: World, history: History) -> None:
    windows = Windows(history, history.split(AUDIT), stride=4)
    rows, steps = windows.rows[:100], np.full(100, 4)
    limit = world.calibration.limit(np.array([1]))
    inside = world.model.predict(windows.at(rows), windows.actions(rows), steps).uncertainty.numpy()
    outside = world.model.predict(windows.at(rows), windows.actions(rows) * 6, steps).uncertainty.numpy()
    assert (inside > limit).mean() < 0.05
    assert (outside > limit).mean() > 0.6
    assert np.median(outside) > 5 * np.median(inside)


def good() -> TrustReport:
    row = {"depth": 1.0, "coverage_68%": 0.7, "coverage_90%": 0.9, "rank_disagreement": 0.8}
    return TrustReport(version=1, episodes=100, real_steps=5000, depths=[row], disagreement=0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"depths": []}, "no depth was measured"),
        ({"depths": [{**good().depths[0], "coverage_90%": 0.6}]}, "90% intervals hold 60% of the errors"),
        ({"depths": [{**good().depths[0], "rank_disagreement": 0.1}]}, "does not rank errors"),
        (
            {"false_success": 0.3, "replayed": (20, 5)},
            "30% of 20 replayed real failures succeed in it (95 % interval 15% to 52%)",
        ),
        ({"imagined_success": 0.9, "real_success": 0.5}, "90% success where 50% is real"),
        ({"imagined_success": 0.2, "real_success": 0.5}, None),
        ({"shift": 4.0}, "disagree 4.0 times as much"),
    ],
)
def test_a_model_is_not_believed_for_a_reason(change: dict[str, Any], words: str | None) -> None:
    reasons = reasons_against(replace(good(), **change), TrustConfig())
    if words is None:
        assert reasons == ()
    else:
        assert len(reasons) == 1
        assert words in reasons[0]


@pytest.mark.parametrize(
    ("rank", "limit", "words"),
    [
        ((0.3, 0.2, -1.0), 1.0, ""),  # at depth 16 nothing is judged
        (
            (0.3, 0.1, 0.9),
            1.0,
            r"at depth 8 the distance of two samples does not rank errors: correlation 0.10",
        ),
        ((0.3, 0.2, 0.9), 0.0, r"its members state no noise"),
    ],
)
def test_a_gate_by_samples_that_is_blind_is_refused(
    world: World, rank: tuple[float, ...], limit: float, words: str
) -> None:
    rows = [
        {**good().depths[0], "depth": d, "rank_samples": r}
        for d, r in zip((1.0, 8.0, 16.0), rank, strict=True)
    ]
    world.report = replace(good(), depths=rows)
    sizes: dict[str, Any] = {"depths": np.array([1, 8]), "samples": np.full(2, limit), "gate": np.ones(2)}
    world.calibration = replace(world.calibration, **sizes)
    assert WorldEnv(world, 1).config.measure == "disagreement"
    if not words:
        assert WorldEnv(world, 1, settings={"gate": "samples"}).config.measure == "samples"
        return
    with pytest.raises(
        ConfigError, match=r"env.settings.gate: got 'samples', allowed: disagreement: " + words
    ):
        WorldEnv(world, 1, settings={"gate": "samples"})


def test_replays_of_real_episodes_end_as_those_did(world: World, history: History) -> None:
    success, failed = replayed(world, history.split(AUDIT))
    assert success.mean() > 0.7
    assert failed.mean() < 0.2
    assert len(success) + len(failed) == len(history.split(AUDIT))


def test_episodes_of_another_world_are_a_surprise(world: World, history: History) -> None:
    assert 0.5 < shift_of(world, history) < 2.0
    far = replace(history, state=history.state * np.array([8, 8, 1, 1], np.float32))
    assert shift_of(world, far) > 5.0


def test_rank_correlation_and_agreement_by_hand() -> None:
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 15])) == pytest.approx(0.5)
    assert spearman(np.ones(3), np.arange(3.0)) == 0.0
    # Imagined 0.2, 0.6, 0.5 where 0.1, 0.4, 0.6 is real: the last two are in the wrong order, 0.2 apart.
    found = agreement(np.array([0.2, 0.6, 0.5]), np.array([0.1, 0.4, 0.6]))
    assert found["bias"] == pytest.approx((0.1 + 0.2 - 0.1) / 3)
    assert found["mmrv"] == pytest.approx((0.0 + 0.2 + 0.2) / 3)
    assert found["spearman"] == pytest.approx(0.5)


def test_errors_grow_with_depth_and_disagreement_ranks_them() -> None:
    model = made(point_history(200), fit=replace(FIT, updates=150)).model
    history = point_history(200)
    played = played_by_depth(model, Windows(history, history.split(AUDIT), stride=4), seed=1)
    sizes = [np.sqrt((found.error**2).mean()) for found in played]
    assert sizes == sorted(sizes)
    assert [found.depth for found in played] == [1, 2, 4]  # an episode has six strides
