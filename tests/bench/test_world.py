"""What the benchmark of world models claims, from numbers by hand."""

from dataclasses import replace
from typing import Any

import pytest

from robot_rl.bench.world import _claims, _numbers
from robot_rl.worlds.saved import World
from tests.worlds.conftest import history, made_once, world

__all__ = ["history", "made_once", "world"]


def _row(kind: str, real: float, imagined: float) -> dict[str, Any]:
    return {"kind": kind, "real": real, "imagined": imagined}


ROWS = [
    _row("passive", 0.0, 0.1),
    _row("passive", 0.5, 0.6),
    _row("optimised", 0.2, 0.5),
    _row("optimised", 0.4, 0.7),
    _row("without controls", 0.0, 1.0),
]


def test_agreement_is_of_all_with_controls_and_of_each_kind() -> None:
    found = _numbers(ROWS)
    assert list(found) == ["all", "passive", "optimised", "without controls"]
    assert found["all"]["bias"] == pytest.approx((0.1 + 0.1 + 0.3 + 0.3) / 4)
    assert found["optimised"]["bias"] == pytest.approx(0.3)
    assert found["passive"]["pearson"] == pytest.approx(1.0)


@pytest.mark.parametrize(("share", "holds"), [(0.70, True), (0.74, False)])
def test_each_claim_is_held_against_its_threshold(world: World, share: float, holds: bool) -> None:
    depths = [{"depth": 1.0, "coverage_68%": share, "coverage_90%": 0.91}, {"depth": 16.0}]
    world.report = replace(world.report, depths=depths, false_success=0.2)
    claims = {row["claim"]: row for row in _claims(world, _numbers(ROWS))}
    assert claims["E1 coverage, largest distance from its level"]["found"] == pytest.approx(share - 0.68)
    assert claims["E1 coverage, largest distance from its level"]["holds"] is holds
    assert not claims["E2 bias, optimised"]["holds"]  # 0.3 of 0.15
    assert not claims["E5 replayed failures that succeed"]["holds"]  # 0.2 of 0.1
    assert len(claims) == 5
