"""What is deployed, where, and how its chunks are executed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from robot_rl.core.errors import require
from robot_rl.real.remote import RemoteKeys
from robot_rl.sched.needs import LineConfig, NeedsConfig, check_needs


@dataclass(frozen=True, kw_only=True)
class DeployConfig(LineConfig):
    """A policy of a run folder on a station."""

    run: str
    """Run folder of `robot-rl train`."""
    station: str
    """A shipped station, the path of a station file, or `any` of those that `robot-rl devices` lists."""
    needs: NeedsConfig = field(default_factory=NeedsConfig)
    """With station=any: what the arm must have; robot, task and cameras are those of the policy anyway."""
    which: Literal["final", "base"] = "final"
    """The policy after residual RL, or the cloned one."""
    robot: str | None = None
    """One source of a run of several robots or tasks; the only one of the station's robot if None."""
    instruction: str | None = None
    """The instruction that the policy gets; the task's own words if None."""
    policy: str | None = None
    """tls://host:port of the `robot-rl serve-policy` that computes it; here if None."""
    remote: RemoteKeys = field(default_factory=RemoteKeys)
    """What that server is shown."""
    episodes: int = 10
    """Held-out episodes: the first of those that training evaluated on."""
    export: Literal["onnx"] | None = None
    """onnx: execute the policy's graphs by ONNX Runtime, several times as fast; no real-time chunking."""
    rtc: bool | None = None
    """Real-time chunking: the next chunk continues the one that is executed while it is planned.
    None: where planning takes so long that it matters; false: chunks are joined as they are."""
    n_exec: int | None = None
    """Control steps between two plans; as in training if None."""
    ensemble: float | None = None
    """m of the temporal ensemble of overlapping chunks; none if None."""
    delay_ms: float = 0.0
    """Planning takes at least so long: for experiments with slow policies."""
    compensate: bool = True
    """Observe and command for the moment at which a command takes effect."""
    record: bool = True
    """Keep every control step in `experience/`."""
    video: bool = True
    """Film the first episodes."""
    out: str = "runs"
    """Folder in which the folder of the deployment is made."""
    device: str = "cpu"
    """Where the policy computes."""
    lease_wait_s: float = 0.0
    """How long to wait for an arm that another program holds."""

    def __post_init__(self) -> None:
        require(1 <= self.episodes <= 10_000, "episodes", self.episodes, "1 to 10000")
        require(
            self.export is None or self.policy is None, "export", self.export, "null with policy=tls://..."
        )
        check_needs(self.station, self.needs)
        allowed = "null: a deployment is on an arm of this machine"
        require(self.needs.node is None, "needs.node", self.needs.node, allowed)
        require(self.delay_ms >= 0, "delay_ms", self.delay_ms, "0 or more")
        require(self.n_exec is None or self.n_exec >= 1, "n_exec", self.n_exec, "1 or more, or null")
        m = self.ensemble
        require(m is None or m >= 0, "ensemble", m, "0 or more, or null")
        require(self.lease_wait_s >= 0, "lease_wait_s", self.lease_wait_s, "0 or more")
        self.check_line()
