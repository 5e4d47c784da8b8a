"""Policies that were judged in both worlds, by numbers by hand."""

from pathlib import Path

import pytest

from robot_rl.core.errors import CheckpointError
from robot_rl.worlds.agreement import keep_policy, numbers_of, policies_of


def test_each_policy_is_kept_once_for_each_version_of_the_model(tmp_path: Path) -> None:
    assert policies_of(tmp_path) == []
    assert numbers_of([], 1) == {}
    keep_policy(tmp_path, "a", version=1, imagined=0.9, real=0.1, episodes=10)
    keep_policy(tmp_path, "a", version=1, imagined=0.5, real=0.25, episodes=20)  # judged again
    keep_policy(tmp_path, "a", version=2, imagined=0.4, real=0.3, episodes=20)
    rows = policies_of(tmp_path)
    assert [(Path(row["policy"]).name, row["kind"], row["imagined"]) for row in rows] == [
        ("a", "version 1", 0.5),
        ("a", "version 2", 0.4),
    ]
    assert numbers_of(rows, 1) == {"bias": pytest.approx(0.25)}  # of one nothing correlates
    assert numbers_of(rows, 3) == {}


def test_agreement_is_that_of_one_version(tmp_path: Path) -> None:
    keep_policy(tmp_path, "old", version=1, imagined=1.0, real=0.0, episodes=10)
    for name, imagined, real in (("a", 0.2, 0.1), ("b", 0.6, 0.5), ("c", 0.4, 0.3)):
        keep_policy(tmp_path, name, version=2, imagined=imagined, real=real, episodes=10)
    found = numbers_of(policies_of(tmp_path), 2)
    assert found["pearson"] == pytest.approx(1.0)
    assert found["bias"] == pytest.approx(0.1)


def test_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "agreement.json").write_text("{")
    with pytest.raises(CheckpointError, match="can be judged again"):
        policies_of(tmp_path)
