"""What the benchmark of world models claims, from numbers by hand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.bench import world as bench
from robot_rl.bench.trials import Training
from robot_rl.bench.world import _candidates, _claims, _draw, _numbers
from robot_rl.core.errors import ConfigError
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


def test_thirty_policies_are_behind_the_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve clones, two of them pushed six times each, and six optimised; six without controls on top."""

    def runs(*names: str) -> list[Training]:
        return [Training(name, Path(name), ()) for name in names]

    monkeypatch.setattr(bench, "_policy", lambda run: run.folder)
    clones = runs(*(f"clone-{1000 * bias:g}mm-{n}" for bias in bench._BIASES_M for n in bench._CLONED))
    inside = runs(
        *(f"inside-{i}{name}-seed{s}" for i in range(3) for s in (10, 11) for name in bench._CONTROLS)
    )
    found = _candidates(clones, inside)
    assert Counter(one.kind for one in found) == {"passive": 24, "optimised": 6, "without controls": 6}
    assert len({one.name for one in found}) == 36
    pushed = {str(one.folder) for one in found if one.disturb}
    assert pushed == {"clone-0mm-3000", "clone-25mm-3000"}


@pytest.mark.parametrize(("stride", "strides"), [(4, 8), (8, 4), (16, 2)])
def test_branches_are_as_long_in_any_stride(
    stride: int, strides: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Training, "done", lambda self: self.folder)
    base = Training("base", Path("base"), ())
    run = bench._optimised(Path(), "push_cube", Path("model"), base, 30_000, 10, "", stride)
    assert f"env.settings={{strides: {strides}}}" in run.words


def test_a_stride_that_does_not_divide_a_branch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stride must divide 32, got 6"):
        bench.run(stride=6, out=str(tmp_path))


def test_a_model_of_another_stride_is_not_measured_as_this_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(tmp_path / "model")
    for name in ("expert", *(f"of-{policy}" for policy in bench._SHARES)):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(bench, "_train", lambda runs, jobs: None)
    monkeypatch.setattr(bench, "_policy", lambda run: run.folder)
    with pytest.raises(ConfigError, match=r"has strides of 4, got stride=8\. Give each stride an `out`"):
        bench.run(stride=8, out=str(tmp_path))


def test_figures_are_named_by_experiment(world: World, tmp_path: Path) -> None:
    rows = [{**row, "episodes": 10} for row in ROWS]
    found = _draw(tmp_path / "world.png", "point", world, rows, _numbers(ROWS)["all"])
    names = {name: Path(path).name for name, path in found.items()}
    assert names == {"E1": "world_coverage.png", "E2": "world.png", "E5": "world_replays.png"}
    assert all(Path(path).stat().st_size > 5_000 for path in found.values())


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
