"""Discovery settings, word for word those of rmw_cyclonedds_cpp (Jazzy; Humble where it says so)."""

import logging
import os

import pytest

from robot_rl.real.ros2.api import Ros2Error
from robot_rl.real.ros2.discovery import discovery

AUTO = "<ParticipantIndex>auto</ParticipantIndex><MaxAutoParticipantIndex>32</MaxAutoParticipantIndex>"
NO_MULTICAST = "<General><AllowMulticast>false</AllowMulticast></General>"


def ros_part(**environment: str) -> str:
    """Returns the fragment that ROS's settings make, without the one for our buffers."""
    return discovery(environment).config().partition("</CycloneDDS>")[2].lstrip(",")


def test_by_default_the_subnet_is_searched_by_multicast():
    expected = f"<CycloneDDS><Domain><Discovery>{AUTO}</Discovery></Domain></CycloneDDS>"
    assert ros_part() == expected
    assert ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="SUBNET") == expected


def test_peers_are_searched_beside_the_subnet():
    peers = '<Peers><Peer address="10.0.0.2"/><Peer address="robot.local"/></Peers>'
    assert ros_part(ROS_STATIC_PEERS="10.0.0.2;robot.local") == (
        f"<CycloneDDS><Domain><Discovery>{AUTO}{peers}</Discovery></Domain></CycloneDDS>"
    )


def test_localhost_and_peers_are_searched_without_multicast():
    peers = '<Peers><Peer address="localhost"/><Peer address="10.0.0.2"/></Peers>'
    assert ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST", ROS_STATIC_PEERS="10.0.0.2") == (
        f"<CycloneDDS><Domain>{NO_MULTICAST}<Discovery>{AUTO}{peers}</Discovery></Domain></CycloneDDS>"
    )


def test_localhost_alone_is_loopback():
    # Here we say more than rmw_cyclonedds_cpp: its CycloneDDS hears Fast DDS on loopback, 11 does not.
    general = (
        '<General><AllowMulticast>false</AllowMulticast><Interfaces><NetworkInterface address="127.0.0.1"/>'
        "</Interfaces></General>"
    )
    peers = '<Peers><Peer address="localhost"/></Peers>'
    assert ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST") == (
        f"<CycloneDDS><Domain>{general}<Discovery>{AUTO}{peers}</Discovery></Domain></CycloneDDS>"
    )


def test_localhost_only_wins_over_range_and_peers():
    said = {"ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET", "ROS_STATIC_PEERS": "10.0.0.2"}
    assert ros_part(ROS_LOCALHOST_ONLY="1", **said) == ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST")
    assert ros_part(ROS_LOCALHOST_ONLY="0", **said) == ros_part(**said)


def test_off_keeps_to_itself_and_system_default_says_nothing():
    inner = f"<ParticipantIndex>none</ParticipantIndex><Tag>ros_discovery_off_{os.getpid()}</Tag>"
    assert ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="OFF", ROS_STATIC_PEERS="10.0.0.2") == (
        f"<CycloneDDS><Domain>{NO_MULTICAST}<Discovery>{inner}</Discovery></Domain></CycloneDDS>"
    )
    assert ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="SYSTEM_DEFAULT") == ""


def test_humble_knows_localhost_only_and_nothing_else():
    assert ros_part(ROS_DISTRO="humble", ROS_AUTOMATIC_DISCOVERY_RANGE="OFF", ROS_STATIC_PEERS="x") == ""
    assert ros_part(ROS_DISTRO="humble", ROS_LOCALHOST_ONLY="1") == (
        '<CycloneDDS><Domain><General><Interfaces><NetworkInterface address="127.0.0.1"/></Interfaces>'
        "</General></Domain></CycloneDDS>"
    )


def test_the_users_own_settings_come_last():
    assert discovery({"CYCLONEDDS_URI": "file:///mine.xml"}).config().endswith(",file:///mine.xml")


def test_an_unknown_range_is_localhost_with_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        said = ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="EVERYWHERE")
    assert said == ros_part(ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST")
    assert "'EVERYWHERE', allowed: OFF, LOCALHOST, SUBNET, SYSTEM_DEFAULT" in caplog.text


def test_domain_and_distribution():
    assert discovery({}).domain_id == 0
    assert discovery({"ROS_DOMAIN_ID": "42"}).domain_id == 42
    assert discovery({"ROS_DOMAIN_ID": "42"}, domain_id=7).domain_id == 7
    assert discovery({"ROS_DISTRO": "rolling"}).distro == "lyrical"
    with pytest.raises(Ros2Error, match="ROS_DOMAIN_ID is 'x', allowed: 0 to 232"):
        discovery({"ROS_DOMAIN_ID": "x"})
    with pytest.raises(Ros2Error, match="domain 233, allowed: 0 to 232"):
        discovery({"ROS_DOMAIN_ID": "233"})
    with pytest.raises(Ros2Error, match="ROS_DISTRO is 'noetic', allowed: humble"):
        discovery({"ROS_DISTRO": "noetic"})
