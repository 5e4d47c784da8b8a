"""Policies that were judged in both worlds, by numbers by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.errors import CheckpointError
from robot_rl.worlds import inventory
from robot_rl.worlds.agreement import alike, keep_policy, numbers_of, policies_of

PLAIN: dict[str, Any] = {"settings": {"gate": False, "vote": 0.8}, "seed": 0, "episodes": 10}


def keep(folder: Path, policy: str, imagined: float, real: float, *, version: int = 1, **how: Any) -> None:
    keep_policy(folder, policy, version=version, imagined=imagined, real=real, **{**PLAIN, **how})


def test_each_policy_is_kept_once_for_each_way_to_judge_it(tmp_path: Path) -> None:
    assert policies_of(tmp_path) == []
    keep(tmp_path, "a", 0.9, 0.1)
    keep(tmp_path, "a", 0.5, 0.25)  # judged again
    keep(tmp_path, "a", 0.4, 0.3, version=2)
    gated: dict[str, Any] = {"settings": {"gate": True, "vote": 0.8}}
    for how in (gated, {"seed": 1}, {"episodes": 20}):
        keep(tmp_path, "a", 0.7, 0.3, **how)
    rows = policies_of(tmp_path)
    assert {Path(row["policy"]).name for row in rows} == {"a"}
    assert [(row["version"], row["imagined"]) for row in rows] == [(1, 0.5), (2, 0.4), *[(1, 0.7)] * 3]
    assert [row["seed"] for row in rows] == [0, 0, 0, 1, 0]


def test_agreement_is_that_of_policies_that_were_judged_alike(tmp_path: Path) -> None:
    gated: dict[str, Any] = {"settings": {"gate": True, "vote": 0.8}}
    keep(tmp_path, "old", 1.0, 0.0)
    keep(tmp_path, "a", 0.0, 1.0, version=2, **gated)
    for name, imagined, real in (("a", 0.2, 0.1), ("b", 0.6, 0.5), ("c", 0.4, 0.3)):
        keep(tmp_path, name, imagined, real, version=2)
    rows = policies_of(tmp_path)
    newest = alike(rows, 2)
    assert [Path(row["policy"]).name for row in newest] == ["a", "b", "c"]
    found = numbers_of(newest)
    assert found["pearson"] == pytest.approx(1.0)
    assert found["bias"] == pytest.approx(0.1)
    assert numbers_of(alike(rows, 1)) == {"bias": pytest.approx(1.0)}  # of one nothing correlates
    assert alike(rows, 3) == []
    assert numbers_of([]) == {}
    keep(tmp_path, "b", 0.3, 0.5, version=2, **gated)  # with a gate from here on: two were judged so
    assert numbers_of(alike(policies_of(tmp_path), 2))["bias"] == pytest.approx((-1.0 - 0.2) / 2)


def test_a_policy_waits_while_another_process_keeps_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "_CHANGES_S", 0.0)
    with inventory.changing(tmp_path), pytest.raises(CheckpointError, match="changes the world model"):
        keep(tmp_path, "a", 0.5, 0.5)
    keep(tmp_path, "a", 0.5, 0.5)
    assert len(policies_of(tmp_path)) == 1


def test_rows_that_do_not_tell_how_they_were_judged_are_left_out(tmp_path: Path) -> None:
    older = {"policy": "/a", "kind": "version 1", "imagined": 1.0, "real": 0.0, "episodes": 10}
    (tmp_path / "agreement.json").write_text(json.dumps({"policies": [older]}))
    assert policies_of(tmp_path) == []
    keep(tmp_path, "b", 0.5, 0.5)
    assert len(policies_of(tmp_path)) == 1


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "agreement.json").write_text("{")
    with pytest.raises(CheckpointError, match="can be judged again"):
        policies_of(tmp_path)
