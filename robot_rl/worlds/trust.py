"""Whether a world model is to be believed: what was measured of it, and what follows from that.

A device of kind `world` refuses leases while its verdict is not ok. B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.worlds.calibration import LEVELS, Calibration, Played
from robot_rl.worlds.config import TrustConfig
from robot_rl.worlds.history import Array

_JUDGED = 8
"""Strides: at larger depths nothing speaks against a model."""


@dataclass(frozen=True, kw_only=True)
class TrustReport:
    """What was measured of one version of a model, on episodes that it did not learn from."""

    version: int
    """How many times the model has been fitted."""
    episodes: int
    """Real episodes behind it."""
    real_steps: int
    """Control steps of these: the bill."""
    depths: list[dict[str, float]] = field(default_factory=lambda: list[dict[str, float]]())
    """By depth: error, coverage of the intervals, rank correlations with the error, and the share of strides
    that either gate cuts."""
    false_success: float | None = None
    """Share of replayed real failures that the model has succeed; None: there were none to replay."""
    missed_success: float | None = None
    """Share of replayed real successes that the model has fail."""
    replayed: tuple[int, int] = (0, 0)
    """How many failures, and successes, were replayed."""
    pictures: list[dict[str, float]] = field(default_factory=lambda: list[dict[str, float]]())
    """By depth: errors of predicted pictures, those of copying the last real one, and rank correlation of the
    members' disagreement with the error, if there are several; empty without pictures."""
    disagreement: float = 0.0
    """Median disagreement one stride ahead on the third split, with which newer episodes are compared."""
    shift: float | None = None
    """That on the newest real episodes over `disagreement`; None: none are newer."""
    imagined_success: float | None = None
    """Of the newest policy that was judged in both worlds."""
    real_success: float | None = None
    reasons: tuple[str, ...] = ()
    """Why the model is not believed; empty if it is."""

    @property
    def is_trusted(self) -> bool:
        return not self.reasons

    @property
    def behind(self) -> dict[str, int]:
        """What is behind this version, by the names that a `VersionBill` has for it."""
        return {"version": self.version, "episodes": self.episodes, "real_steps": self.real_steps}

    @property
    def bias(self) -> float | None:
        """Imagined minus real success of the newest policy that was judged in both worlds."""
        if self.imagined_success is None or self.real_success is None:
            return None
        return self.imagined_success - self.real_success


def depth_rows(calibration: Calibration, played: Sequence[Played]) -> list[dict[str, float]]:
    """Returns the table of a trust report, by depth, from play on the third split."""
    covered = {row["depth"]: row for row in calibration.coverage(list(played))}
    rows = list[dict[str, float]]()
    for found in played:
        size, depth = np.sqrt((found.error**2).mean(axis=1)), np.array(found.depth)
        rows.append(
            {
                **covered.get(float(found.depth), {"depth": float(found.depth)}),
                "error": float(np.sqrt((size**2).mean())),
                "error_of_copying": float(np.sqrt((found.moved**2).mean())),
                "rank_disagreement": spearman(found.uncertainty, size),
                "rank_samples": spearman(found.samples, size),
                "rank_distance": spearman(found.moved, size),
                "cut_disagreement": float((found.uncertainty > calibration.limit(depth)).mean()),
                "cut_samples": float((found.samples > calibration.limit(depth, "samples")).mean()),
            }
        )
    return rows


def reasons_against(report: TrustReport, limits: TrustConfig) -> tuple[str, ...]:
    """Returns why the model is not to be believed, one sentence each."""
    found = list[str]()
    if not report.depths:
        found.append("no depth was measured: the held-out episodes are too few")
    for row in report.depths:
        depth = int(row["depth"])
        if depth > _JUDGED:
            continue
        for level in LEVELS:
            held = row.get(f"coverage_{level:.0%}")
            if held is not None and abs(held - level) > limits.coverage_within:
                found.append(f"at depth {depth} its {level:.0%} intervals hold {held:.0%} of the errors")
        if row["rank_disagreement"] < limits.min_rank:
            found.append(
                f"at depth {depth} disagreement does not rank errors: correlation "
                f"{row['rank_disagreement']:.2f}, need {limits.min_rank:g}"
            )
    for row in report.pictures:
        depth = int(row["depth"])
        if depth == 1 and row["psnr"] <= row["psnr_of_copying"]:
            found.append(
                f"its pictures at depth 1 are no better than the last real ones: {row['psnr']:.1f} dB, "
                f"copying has {row['psnr_of_copying']:.1f}"
            )
        if row.get("rank_disagreement", 1.0) < limits.min_rank:
            found.append(
                f"at depth {depth} disagreement about pictures does not rank errors: correlation "
                f"{row['rank_disagreement']:.2f}, need {limits.min_rank:g}"
            )
    if report.false_success is not None and report.false_success > limits.max_false_success:
        failures = report.replayed[0]
        low, high = wilson_interval(report.false_success * failures, failures)
        found.append(
            f"{report.false_success:.0%} of {failures} replayed real failures succeed in it (95 % interval "
            f"{low:.0%} to {high:.0%}), allowed {limits.max_false_success:.0%}"
        )
    if report.bias is not None and report.bias > limits.max_bias:
        found.append(
            f"it shows {report.imagined_success:.0%} success where {report.real_success:.0%} is real, "
            f"allowed {limits.max_bias:.0%} more"
        )
    if report.shift is not None and report.shift > limits.max_shift:
        found.append(
            f"its members disagree {report.shift:.1f} times as much about the newest real episodes as "
            f"about those it was judged by, allowed {limits.max_shift:g} times"
        )
    return tuple(found)


def samples_blind(report: TrustReport, calibration: Calibration, limits: TrustConfig) -> str:
    """Returns why a gate by two samples of a member would be blind; empty if it is not.

    Raises:
        ConfigError: samples were not measured.
    """
    if calibration.limit(np.ones(1), "samples")[0] <= 0:
        return "its members state no noise, so two samples of one are never apart"
    for row in report.depths:
        if row["depth"] <= _JUDGED and row["rank_samples"] < limits.min_rank:
            return (
                f"at depth {int(row['depth'])} the distance of two samples does not rank errors: correlation "
                f"{row['rank_samples']:.2f}, need {limits.min_rank:g}"
            )
    return ""


def spearman(a: Array, b: Array) -> float:
    """Returns the rank correlation of two columns; 0 where one does not vary. Ties keep their order."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(float) for x in (a, b)]
    if len(a) < 2 or min(np.ptp(a), np.ptp(b)) == 0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
