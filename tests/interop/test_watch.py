"""What we say on the wire, read by Wireshark's dissector."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cyclonedds")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PEER = HERE.parent / "real" / "ros2" / "managed_peer.py"


@pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed: apt-get install tshark")
def test_wireshark_reads_our_topics_and_types(namespace) -> None:
    watch = [sys.executable, str(HERE / "watch.py"), "--seconds", "12", sys.executable, str(PEER)]
    done = subprocess.run(watch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    action = "control_msgs::action::dds_::FollowJointTrajectory"
    assert {
        "ros_discovery_info": "rmw_dds_common::msg::dds_::ParticipantEntitiesInfo_",
        "rq/arm/follow/_action/send_goalRequest": f"{action}_SendGoal_Request_",
        "rr/arm/follow/_action/get_resultReply": f"{action}_GetResult_Response_",
        "rt/arm/follow/_action/feedback": f"{action}_FeedbackMessage_",
        "rt/arm/follow/_action/status": "action_msgs::msg::dds_::GoalStatusArray_",
        "rt/parameter_events": "rcl_interfaces::msg::dds_::ParameterEvent_",
        "rr/arm/peer/get_stateReply": "lifecycle_msgs::srv::dds_::GetState_Response_",
    }.items() <= seen.items()
