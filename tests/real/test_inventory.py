"""Station files that were entered: listed, refused where two have one name, gone where the file is gone."""

from pathlib import Path

import pytest

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.real import inventory
from robot_rl.real.station import STATIONS


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))


def copied(folder: Path, name: str, **more: str) -> str:
    folder.mkdir(exist_ok=True)
    text = (STATIONS / "sim_in_process.yaml").read_text().replace("name: sim_in_process", f"name: {name}")
    path = folder / f"{name}.yaml"
    path.write_text(text + "".join(f"\n{key}: {value}" for key, value in more.items()))
    return str(path)


def test_stations_are_listed_with_their_labels_until_they_leave(tmp_path: Path) -> None:
    inventory.enter("sim_in_process")
    inventory.enter(copied(tmp_path / "cells", "west", labels="{cell: west}"))
    found = {spec.name: spec.labels for spec in inventory.specs()}
    assert found["arm-west"] == {"robot": "panda", "driver": "sim", "cell": "west"}
    assert list(found) == ["arm-sim_in_process", "arm-west"]
    inventory.leave("sim_in_process")
    assert [spec.name for spec in inventory.specs()] == ["arm-west"]
    with pytest.raises(ConfigError, match=r"remove=sim_in_process: not there. Known stations: .*west"):
        inventory.leave("sim_in_process")


def test_a_second_station_of_a_name_is_refused_and_the_same_file_is_not(tmp_path: Path) -> None:
    first = copied(tmp_path / "a", "cell")
    inventory.enter(first)
    inventory.enter(first)
    with pytest.raises(ConfigError, match="has the name 'cell' already"):
        inventory.enter(copied(tmp_path / "b", "cell"))
    assert len(inventory.specs()) == 1


def test_a_file_that_is_gone_is_left_out_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    path = Path(copied(tmp_path / "a", "cell"))
    inventory.enter(str(path))
    path.write_text("name: [")
    with pytest.raises(DeviceError, match=f"station {path}"):
        inventory.specs()
    inventory.leave(str(path))
    assert inventory.specs() == []
    gone = Path(copied(tmp_path / "b", "gone"))
    inventory.enter(str(gone))
    gone.unlink()
    assert inventory.specs() == []


def test_labels_that_a_station_says_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="labels: got 'robot'"):
        inventory.enter(copied(tmp_path / "a", "cell", labels="{robot: ur5e}"))
