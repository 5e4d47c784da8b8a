"""A bench per test, taken apart afterwards."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from robot_rl.real.station import StationConfig
from robot_rl.real.writer import Writer
from robot_rl.testing.devices import Behaviour
from tests.real.supervisor.rig import Rig, two_joint_station

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes a rig of a station, the two joints if None, with a script for the arm."""
    rigs: list[Rig] = []

    def make(
        station: StationConfig | None = None, script: Sequence[Behaviour] = (), writer: Writer | None = None
    ) -> Rig:
        rigs.append(Rig(tmp_path, station or two_joint_station(), script, writer))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
