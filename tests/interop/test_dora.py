"""The pip-only transport and dora-rs (RustDDS), in a network of their own: topics, service, action."""

import json
import sys
from pathlib import Path

import pytest

from tests.interop import ros_share

pytest.importorskip("cyclonedds")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
# It announces itself by multicast on every interface.
ENVIRONMENT = {"ROS_DOMAIN_ID": "0", "ROS_DISTRO": "jazzy", "ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET"}


def test_dora_echoes_serves_and_follows(start, namespace, tmp_path) -> None:
    pytest.importorskip("dora")
    ros_share.write_share(tmp_path)
    python = (*namespace, sys.executable, "-W", "ignore")
    start(*python, HERE / "dora_peer.py", tmp_path, env=ENVIRONMENT).expect("ready")
    ours = start(*python, HERE / "robot_peer.py", env=ENVIRONMENT)
    report = json.loads(ours.expect("{", 60.0))
    assert report == {
        "echoed": 100,
        "enabled": [[True, "dora"], [False, "dora"]],
        "followed": {
            "accepted": True,
            "feedback": [0.1 * k for k in range(4)],
            "status": 4,
            "result": [4, "succeeded"],
            "cancel": [True, 5],
        },
    }
