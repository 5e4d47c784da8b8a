"""The arms that a run learns on: their envs, the person at them, and the judge of success."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.core.errors import ConfigError, DeviceError, require
from robot_rl.core.seeding import train_seed
from robot_rl.data.reading import ReadingConfig
from robot_rl.hal.device import LeaseLike
from robot_rl.hal.leased import EnvDevice, open_under
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import load_policy
from robot_rl.real.claim import device_of
from robot_rl.real.inventory import stations
from robot_rl.real.station import StationConfig, load_station
from robot_rl.real.teleop.intent import Hand, NoTeleop, Teleop
from robot_rl.real.teleop.keyboard import Keyboard, check_terminal
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.hub_connection import machines
from robot_rl.rollout.hub_devices import nodes_for
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.needs import ANY, NeedsConfig, choose, need_of
from robot_rl.sched.opened import opened
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy.human import Intervening
from robot_rl.train.deploy.person import ScriptedPerson
from robot_rl.train.deploy.reward import make_judge
from robot_rl.train.human_config import HumanConfig
from robot_rl.train.recorded import ReplayConfig

if TYPE_CHECKING:
    from robot_rl.train.deploy.place import Place


def make_arm(config: RunConfig, folder: Path, leases: Iterable[LeaseLike], name: str = "") -> Intervening:
    """Returns the arm that a run learns on, with its person: a station's, or a simulation without ROS.

    Args:
        config: of the run.
        folder: of the run.
        leases: of the run; the arm is opened under its own.
        name: of the source that it is.
    """
    source = config.acting[name]
    station = None if source.station is None else load_station(source.station)
    human = config.human if source.human else _unwatched(config.human)
    with ExitStack() as stack:
        env = stack.enter_context(closing(open_under(leases, arm_of(config, folder, name))))
        is_real = station is not None and station.real
        return Intervening(
            env,
            make_teleop(human, env, config.seed, station),
            make_judge(human.reward, human.classifier),
            reset=human.reset,
            reward=config.env_of(name).reward,
            label="real" if is_real else "sim",
            close=stack.pop_all().close,
        )


def _unwatched(human: HumanConfig) -> HumanConfig:
    """Returns the settings of an arm without a person, of a run in which another has one."""
    reward = "task" if human.reward == "key" else human.reward
    return replace(human, input="none", reward=reward, reset="automatic")


def arm_of(config: RunConfig, folder: Path, name: str = "") -> EnvDevice:
    """Returns the arm that a source of a run is, without a person: a station's, or a simulation without ROS.

    Raises:
        RobotRLError: the base of the run does not fit the station.
    """
    station = config.acting[name].station
    if station is None:
        return simulation(config.env_of(name), 1)
    return _stationed(config, station, folder, name)


def places_of(config: RunConfig, folder: Path, name: str) -> list[Place]:
    """Returns the stations whose arm can be a source of a run, once it has a base.

    Raises:
        RobotRLError: the base does not fit, or no arm has what is needed; the message says what is missing.
    """
    from robot_rl.train.deploy.config import DeployConfig  # ROS: only where a station is used
    from robot_rl.train.deploy.place import places

    source = config.acting[name]
    _, meta = load_policy(folder / "policy" / "base")
    robot = config.scene_of(name) or None
    wanted = DeployConfig(run=str(folder), station=str(source.station), needs=source.needs, robot=robot)
    return places(wanted, config, meta)


def at_station(config: RunConfig, name: str, file: str) -> RunConfig:
    """Returns the config with the station of a source."""
    if not name:
        return replace(config, station=file, needs=NeedsConfig())
    source = replace(config.sources[name], station=file, needs=NeedsConfig())
    return replace(config, sources={**config.sources, name: source})


def settings_there(config: RunConfig) -> RunConfig:
    """Returns the settings of a run for a machine that has an arm, but neither this one's files nor its GPU.

    Raises:
        ConfigError: they name files that the arm's machine would need.
    """

    def at_home(needs: NeedsConfig) -> NeedsConfig:
        return replace(needs, node=None)

    for name, given in (
        ("human.classifier", config.human.classifier),
        ("env.resets.bank", config.env.resets.bank),
    ):
        require(given is None, name, given, "null with needs.node: the arm's machine has no such file")
    return replace(
        config,
        device="cpu",
        needs=at_home(config.needs),
        sources={name: replace(one, needs=at_home(one.needs)) for name, one in config.sources.items()},
        hub=HubConfig(),
        demos=replace(config.demos, path=None, by=(), read=ReadingConfig()),
        bc=replace(config.bc, policy=None, encoder=None),
        replay=ReplayConfig(),
    )


def check_arms(config: RunConfig) -> None:
    """Checks that the arms and the person's input are there, before the base is cloned.

    Raises:
        RobotRLError: one is missing; the message has the remedy.
    """
    make_judge(config.human.reward, config.human.classifier)
    if config.human.input == "keyboard":
        check_terminal()
    for name, source in config.acting.items():
        station = None if source.named is None else load_station(source.named)
        if source.human and config.human.input in ("gamepad", "leader"):
            how: dict[str, Any] = {"holder": "train, a look", "wait_s": config.lease_wait_s}
            with opened(simulation(config.env_of(name), 1), **how) as env:
                if source.needs.node is None:
                    make_teleop(config.human, env, config.seed, station).close()
                else:
                    hand_names(env)
        if station is not None:
            _check_station(station, config, name)
        elif source.needs.node is not None:
            settings_there(config)
            nodes_for(need_of(source.needs), machines(config.hub))
        elif source.station == ANY:
            known = [device_of(each) for _, each in stations()]
            choose(need_of(source.needs), known, LeaseStore().active())


def _check_station(station: StationConfig, config: RunConfig, name: str) -> None:
    """Starts the station's processes and ends them."""
    from robot_rl.real.launch import StationProcesses
    from robot_rl.train.deploy.fit import in_scene_of
    from robot_rl.train.deploy.run import file_of

    store, spec = LeaseStore(), device_of(station)
    if config.sources and store.active(spec.name):  # in use, so it is there; the others go on meanwhile
        return
    with store.hold(spec, holder=f"train {config.recipe}, a look", wait_s=config.lease_wait_s) as lease:
        logs = Path(tempfile.mkdtemp(prefix="robot-rl-station-"))
        scene = in_scene_of(config.env_of(name), station)
        file = file_of(scene, str(config.acting[name].station), logs)
        try:
            with StationProcesses(file, logs, token=lease.token):
                pass
        except DeviceError as error:
            raise DeviceError(f"station: {str(error).rstrip('.')}. Nothing was begun.") from error
    shutil.rmtree(logs, ignore_errors=True)


def _stationed(config: RunConfig, file: str, folder: Path, name: str) -> EnvDevice:
    """Returns a station's arm, once the base is known to fit."""
    from robot_rl.train.deploy.config import DeployConfig
    from robot_rl.train.deploy.fit import check_fit, in_scene_of
    from robot_rl.train.deploy.run import station_device

    _, meta = load_policy(folder / "policy" / "base")
    env = config.env_of(name)
    station = in_scene_of(env, load_station(file))
    check_fit(meta, env, station)
    deployed = DeployConfig(run=str(folder), station=file)
    return station_device(station, deployed, env, folder / name, None, holder=f"{folder.name} {name}".strip())


def make_teleop(config: HumanConfig, env: VectorEnv, seed: int, station: StationConfig | None) -> Teleop:
    """Returns the person's input device, for the env's actions."""
    if config.input == "none":
        return NoTeleop()
    if config.input == "scripted":
        return ScriptedPerson(env, config.scripted, train_seed(seed, "person"))
    if config.input == "leader":
        from robot_rl.real.teleop.leader import Leader, open_leader

        if station is None:
            raise ConfigError("human.input: a leader arm needs an arm that LeRobot drives: station=<name>.")
        return Leader(station, Keyboard(()), open_leader(config.leader, config.leader_options))
    if config.input == "gamepad":
        from robot_rl.real.teleop.gamepad import Gamepad

        return Gamepad(hand_names(env))
    return Keyboard(hand_names(env))


def hand_names(env: VectorEnv) -> tuple[str, ...]:
    """Returns the names of the actions by which a person moves the env's own robot; others are empty.

    Raises:
        ConfigError: they move no tool.
    """
    own = getattr(env, "own_action_names", env.action_names)
    names = tuple(name if name in own else "" for name in env.action_names)
    Hand(names)
    return names
