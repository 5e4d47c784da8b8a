"""Where sources act on a Ray cluster; without torch and Ray, so that mistakes are refused at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from robot_rl.core.errors import require


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Where sources act with `transport=ray`."""

    address: str | None = None
    """Of the cluster: `auto` for the one that `ray start` joined this machine to, or host:port. None: this
    machine alone, for as long as the run lasts."""
    cpus: float = 1.0
    """Processors that a source gets on its node."""
    labels: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Labels that the node must have: `ray start --labels room=lab`."""
    place_s: float = 300.0
    """How long to wait for a node that has both, and for the source to begin there."""

    def __post_init__(self) -> None:
        require(self.cpus > 0, "ray.cpus", self.cpus, "above 0")
        require(self.place_s > 0, "ray.place_s", self.place_s, "above 0")
