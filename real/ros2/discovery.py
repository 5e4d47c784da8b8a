"""Discovery: ROS 2's environment variables as settings, as in rmw_cyclonedds_cpp.

Other nodes do not see a node that reads them otherwise, and no message says so. Humble has only
ROS_DOMAIN_ID and ROS_LOCALHOST_ONLY.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

from robot_rl.real.ros2.api import Ros2Error

logger = logging.getLogger(__name__)

RANGES = ("OFF", "LOCALHOST", "SUBNET", "SYSTEM_DEFAULT")
DISTROS = ("humble", "iron", "jazzy", "kilted", "lyrical")
_MAX_DOMAIN = 232
"""Ports are 7400 + 250 * domain: higher ones do not exist."""
_LOOPBACK = '<NetworkInterface address="127.0.0.1"/>'
MAX_PARTICIPANTS = 32
"""Highest index of a participant on a host that others search for; as in ROS."""
# Room for a whole raw picture, as far as the kernel allows (net.core.rmem_max).
_BUFFER = (
    '<CycloneDDS><Domain><Internal><SocketReceiveBufferSize min="default" max="8MB"/></Internal></Domain>'
    "</CycloneDDS>"
)


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Discovery settings of this process."""

    distro: str = "jazzy"
    domain_id: int = 0
    range: str = "SUBNET"
    static_peers: tuple[str, ...] = ()
    cyclonedds_uri: str = ""
    """The user's own settings for CycloneDDS; they win."""

    def config(self) -> str:
        """Returns the configuration of CycloneDDS: XML fragments, later ones win."""
        ros = _humble(self) if self.distro == "humble" else _ranged(self)
        return ",".join(part for part in (_BUFFER, ros, self.cyclonedds_uri) if part)


def discovery(environment: Mapping[str, str] = os.environ, *, domain_id: int | None = None) -> Discovery:
    """Returns the settings of an environment.

    Raises:
        Ros2Error: an unknown distribution or domain, or a secure graph.
    """
    if environment.get("ROS_SECURITY_ENABLE", "") == "true":
        raise Ros2Error(
            "ros2: ROS_SECURITY_ENABLE is 'true', and the transport without rclpy knows no security: it "
            "would join in the clear. Run where rclpy can be imported (transport: rclpy), or unset it."
        )
    distro = environment.get("ROS_DISTRO", "") or "jazzy"
    distro = {"rolling": DISTROS[-1]}.get(distro, distro)
    if distro not in DISTROS:
        raise Ros2Error(f"ros2: ROS_DISTRO is {distro!r}, allowed: {', '.join(DISTROS)}. Set or unset it.")
    given = environment.get("ROS_DOMAIN_ID", "") or "0"
    if domain_id is None and not given.isdecimal():
        raise Ros2Error(f"ros2: ROS_DOMAIN_ID is {given!r}, allowed: 0 to {_MAX_DOMAIN}. Set or unset it.")
    domain = int(given) if domain_id is None else domain_id
    if not 0 <= domain <= _MAX_DOMAIN:
        raise Ros2Error(f"ros2: domain {domain}, allowed: 0 to {_MAX_DOMAIN} (ROS_DOMAIN_ID).")
    reach = environment.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "") or "SUBNET"
    if reach not in RANGES:
        logger.warning(
            "ros2: ROS_AUTOMATIC_DISCOVERY_RANGE is %r, allowed: %s; LOCALHOST is assumed, as ROS does.",
            reach,
            ", ".join(RANGES),
        )
        reach = "LOCALHOST"
    peers = tuple(peer for peer in environment.get("ROS_STATIC_PEERS", "").split(";") if peer)
    if environment.get("ROS_LOCALHOST_ONLY", "") == "1":
        reach, peers = "LOCALHOST", ()
    elif distro == "humble":
        reach, peers = "SUBNET", ()
    return Discovery(
        distro=distro,
        domain_id=domain,
        range=reach,
        static_peers=peers,
        cyclonedds_uri=environment.get("CYCLONEDDS_URI", ""),
    )


def _ranged(settings: Discovery) -> str:
    if settings.range == "SYSTEM_DEFAULT":
        return ""
    general = "" if settings.range == "SUBNET" else "<AllowMulticast>false</AllowMulticast>"
    if settings.range == "LOCALHOST" and not settings.static_peers:
        # Else CycloneDDS 11 does not hear Fast DDS, which speaks on loopback (rmw_cyclonedds_cpp does).
        general += f"<Interfaces>{_LOOPBACK}</Interfaces>"
    general = general and f"<General>{general}</General>"
    if settings.range == "OFF":
        # A unique tag keeps all other participants out.
        inner = f"<ParticipantIndex>none</ParticipantIndex><Tag>ros_discovery_off_{os.getpid()}</Tag>"
    else:
        inner = (
            "<ParticipantIndex>auto</ParticipantIndex>"
            f"<MaxAutoParticipantIndex>{MAX_PARTICIPANTS}</MaxAutoParticipantIndex>"
        )
        local = ("localhost",) if settings.range == "LOCALHOST" else ()
        peers = "".join(f"<Peer address={quoteattr(peer)}/>" for peer in local + settings.static_peers)
        inner += f"<Peers>{peers}</Peers>" if peers else ""
    return f"<CycloneDDS><Domain>{general}<Discovery>{inner}</Discovery></Domain></CycloneDDS>"


def _humble(settings: Discovery) -> str:
    if settings.range != "LOCALHOST":
        return ""
    return (
        f"<CycloneDDS><Domain><General><Interfaces>{_LOOPBACK}</Interfaces></General></Domain></CycloneDDS>"
    )
