"""Where a policy can act: the station that was named, or those of this machine that have what it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.hal.device import DeviceSpec
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.real.claim import device_of
from robot_rl.real.inventory import stations
from robot_rl.real.station import StationConfig, load_station
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.needs import ANY, NeedsConfig, choose, need_of
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy.config import DeployConfig
from robot_rl.train.deploy.fit import check_fit, env_at, in_scene_of


@dataclass(frozen=True)
class Place:
    """A station, and what a policy is shown there."""

    config: DeployConfig
    """With the file of the station."""
    station: StationConfig
    shown: EnvConfig

    @property
    def device(self) -> DeviceSpec:
        return device_of(self.station)


def places(config: DeployConfig, run: RunConfig, meta: PolicyMeta) -> list[Place]:
    """Returns where a policy can act, the preferred place first.

    Args:
        config: names the station, or says what it must have.
        run: what the policy was trained in.
        meta: of the policy.

    Raises:
        ConfigError: the policy does not fit the station; or none of those that have what is needed.
        DeviceError: no arm has what is needed; the message says what the nearest lacks, and who holds it.
    """
    if config.station != ANY:
        return [_place(config, load_station(config.station), run, meta)]
    known = {device_of(station).name: (file, station) for file, station in stations()}
    if not known:
        raise DeviceError("station: no arm is known. `robot-rl devices add=<station>` enters one.")
    able = choose(
        need_of(config.needs), [device_of(station) for _, station in known.values()], LeaseStore().active()
    )
    found, reasons = list[Place](), list[str]()
    for file, station in (known[spec.name] for spec in able):
        try:
            found.append(_place(replace(config, station=file, needs=NeedsConfig()), station, run, meta))
        except ConfigError as error:
            reasons.append(str(error))
    if not found:
        raise ConfigError("\n".join(reasons))
    return found


def _place(config: DeployConfig, station: StationConfig, run: RunConfig, meta: PolicyMeta) -> Place:
    shown = env_at(station, run, config.robot).with_instruction(config.instruction)
    station = in_scene_of(shown, station)
    check_fit(meta, shown, station)
    return Place(config, station, shown)
