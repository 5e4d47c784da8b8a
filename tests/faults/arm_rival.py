"""A second deployment of the same arm, which must not get it.

    python tests/faults/arm_rival.py <station.yaml> <folder>

Prints one JSON object: `refused` is why it did not get the arm; without it, it drove.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from robot_rl.core.errors import DeviceError
from robot_rl.real.launch import StationProcesses
from robot_rl.real.messages import Plan

_DRIVES_S = 0.5


def main(words: list[str]) -> int:
    station, folder = words
    begun_s, found = time.monotonic(), dict[str, object]()
    try:
        with (
            StationProcesses(station, Path(folder), linger_s=10.0) as processes,
            processes.client() as client,
        ):
            client.control("start", by="the rival")
            state = client.status.state
            assert state is not None
            plan = Plan(
                number=1,
                start_ns=time.monotonic_ns(),
                period_ns=50_000_000,
                targets_rad=np.tile(state.position_rad, (4, 1)),
                gripper=np.zeros(4),
            )
            client.send(plan)
            time.sleep(_DRIVES_S)
            found["phase"] = client.status.phase
    except DeviceError as error:
        found["refused"] = str(error)
    print(json.dumps({**found, "seconds": time.monotonic() - begun_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
