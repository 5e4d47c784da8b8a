"""Our loader is faster than LeRobot's dataset and DataLoader on the same files, every sample decoded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.bench.data import CASES, Case, Rate, _ratios, dataset, run
from robot_rl.data.lerobot.damage import check
from robot_rl.data.lerobot.reader import Dataset


def test_ratios_are_of_neighbouring_rounds() -> None:
    rates = {
        "ours": [Rate(200, 210), Rate(100, 105), Rate(300, 300)],
        "ours, pictures kept": [Rate(400, 400), Rate(200, 140), Rate(300, 300)],
        "LeRobot": [Rate(100, 100), Rate(50, 70), Rate(100, 150)],
    }
    # Wall 2, 2, 3: median 2, and 4, 4, 3: median 4. CPU 2.1, 1.5, 2: median 2, and 4, 2, 2: median 2.
    expected = {"wall": 2.0, "wall_pictures_kept": 4.0, "cpu": 2.0, "cpu_pictures_kept": 2.0}
    assert _ratios(rates, has_cpu=True) == expected
    assert set(_ratios(rates, has_cpu=False)) == {"wall", "wall_pictures_kept"}


def test_datasets_are_made_once_and_sound(tmp_path: Path) -> None:
    case = Case(name="tiny", images="png", size=(96, 96), episodes=2, steps=3, goal=1.0)
    folder = dataset(tmp_path, case)
    assert check(folder) == []
    made = (folder / "meta/info.json").stat().st_mtime_ns
    assert dataset(tmp_path, case) == folder
    assert (folder / "meta/info.json").stat().st_mtime_ns == made
    front, wrist = (Dataset(folder).frames(f"{camera}.rgb", 1, [2]) for camera in ("front", "wrist"))
    assert not np.array_equal(front, wrist)


@pytest.mark.parametrize("options", [{"rounds": 0}, {"batches": 0}, {"workers": -1}, {"cases": ("video",)}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed: image96, video96, video640; 1 or more rounds and batches"):
        run(**options)


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reading_is_faster_than_lerobot() -> None:
    pytest.importorskip("lerobot.datasets", exc_type=ImportError)
    result = run(rounds=3, batches=4, recording_s=0)
    for name, case in CASES.items():
        assert result["ratio_to_lerobot"][name]["cpu"] >= case.goal, result
        assert result["ratio_to_lerobot"][name]["wall"] >= case.goal, result
    assert result["replay"][0]["samples_per_s"] >= result["replay"][0]["goal"], result
