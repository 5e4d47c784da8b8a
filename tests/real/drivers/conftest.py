"""ROS 2 arms over graphs in this process, on which no other driver is."""

import pytest

from tests.real.drivers.test_ros2_arm import CONFIG, Graph


@pytest.fixture
def make(monkeypatch):
    """Makes graphs. Their arms do not wait a second for another driver; those of test_ros2_presence do."""
    monkeypatch.setattr("robot_rl.real.drivers.ros2_presence._LISTEN_S", 0.0)
    made = []

    def build(config=CONFIG, offset_rad=None, **controllers):
        made.append(Graph(config, offset_rad, **controllers))
        return made[-1]

    yield build
    for graph in made:
        graph.arm.close()
        assert graph.node.is_closed
