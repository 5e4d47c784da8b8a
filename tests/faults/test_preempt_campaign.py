"""A sample of the races between a holder and a more urgent rival; `make test-faults` runs all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("preempt_campaign.py")


def test_an_arm_goes_to_the_more_urgent_and_back_and_obeys_one_of_them(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--json", "--races", "12", "--arms", "2"]
    environment = {**os.environ, "ROBOT_RL_STATE": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["races"] == 12
    assert found["gave way"] + found["did not give way"] == 12
    assert found["did not give way"] > 0
    assert {found[name] for name in ("obeyed both at once", "lost jobs")} == {0}
