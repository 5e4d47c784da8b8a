"""The sources of a method, in this process or each in another one."""

from __future__ import annotations

import copy
import math
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robot_rl.config import dump
from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import train_seed
from robot_rl.hal.device import LeaseLike
from robot_rl.hal.leased import LeasedEnv, open_under
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.real.claim import device_of
from robot_rl.real.station import StationConfig, load_station
from robot_rl.rollout.booked import BookedSource
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.on_node import NodeJob, NodeSource
from robot_rl.rollout.on_ray import RaySource
from robot_rl.rollout.process import ProcessSource
from robot_rl.rollout.sources import Array, InlineSource, Source
from robot_rl.sched.leases import HeldLease
from robot_rl.sched.needs import need_of
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy.online import at_station, make_arm, places_of, settings_there
from robot_rl.train.improve.method import Method, Module, Start, method_of
from robot_rl.train.improve.stay import job_of, order
from robot_rl.train.session import Session
from robot_rl.worlds.inventory import device_spec

_WAIT_S = 0.05
"""How long a turn of the loop waits for the arms of a run, of which none has to have anything."""


def sources_of(session: Session, start: Start, policy: Module, reads: Collection[str] = ()) -> list[Source]:
    """Returns the sources of a run: an acting copy of the policy in each of its envs.

    Args:
        session: the run's session.
        start: its envs are those of this process; the other sources act in others.
        policy: the learner's; each source acts with a copy.
        reads: names in the frozen policy's encoding that machines send whose pictures stay there.
    """
    config = session.config
    return [
        source_in(config, policy, start.envs[name], name)
        if name in start.envs
        else _elsewhere(session, start, name, reads)
        for name in config.acting
    ]


def _elsewhere(session: Session, start: Start, name: str, reads: Collection[str]) -> Source:
    """Returns a source in another process, or on another machine."""
    config, source = session.config, session.config.acting[name]
    if config.transport == "ray" and not source.is_arm:
        return _on_ray(session, name)
    leases = [held.lease for held in session.leases]
    if source.station is None:
        return in_process(config, session.folder, leases, name)
    holder = f"train {config.recipe} seed {config.seed} {name}".strip()
    if source.needs.node is not None:
        return _at_node(session, start, name, holder, reads)
    others = {
        device_of(load_station(one.named)).name
        for one in config.acting.values()
        if one.named not in (None, source.station)
    }
    how: dict[str, Any] = {"others": others, "holder": holder, "say": session.display.message}
    return booked(config, session.folder, name, leases, **how)


def booked(
    config: RunConfig,
    folder: Path,
    name: str,
    leases: Sequence[LeaseLike] = (),
    *,
    others: Collection[str] = (),
    holder: str,
    say: Callable[[str], None],
) -> BookedSource:
    """Returns a source on an arm of this machine, which it leases when it acts.

    Args:
        config: of the run.
        folder: of the run; has the base.
        name: of the source.
        leases: of the run.
        others: devices that other sources of the run name.
        holder: of the arm's lease.
        say: gets what a person may want to know.
    """
    places = [one for one in places_of(config, folder, name) if one.device.name not in others]
    files = {place.device.name: place.config.station for place in places}
    known = {device: load_station(file) for device, file in files.items()}

    def begin(held: HeldLease) -> Source:
        here = at_station(config, name, files[held.device])
        return in_process(here, folder, [*leases, held.lease], name, station=known[held.device])

    return BookedSource(
        [place.device for place in places],
        begin,
        holder=holder,
        priority=config.priority,
        preempt_s=config.preempt_s,
        turn_s=config.turn_s,
        wait_s=_WAIT_S / len(config.acting),
        say=say,
    )


def in_process(
    config: RunConfig,
    folder: Path,
    leases: Sequence[LeaseLike],
    name: str,
    station: StationConfig | None = None,
) -> ProcessSource:
    """Returns a source in another process, under leases of the run and its own."""
    source = config.acting[name]
    hz = config.env_of(name).rate_hz
    is_real = station is not None and station.real  # a person looks at it before it moves again
    return ProcessSource(
        partial(act_alone, config, folder, leases, name, station),
        ahead=None if source.is_arm else config.ahead,
        wait_s=_WAIT_S / len(config.acting),
        period_s=1.0 / hz if source.real_time else 0.0,
        restarts=0 if is_real else config.restarts,
        silence_s=math.inf if is_real or source.human else config.silence_s,
        holds_up=not config.has_arm,
    )


def source_in(config: RunConfig, policy: Module, env: VectorEnv, name: str) -> Source:
    """Returns the source of the run's method in an env."""
    return (method_of(config).make_source or step_by_step)(config, policy, env, name)


def step_by_step(
    config: RunConfig,
    policy: Module,
    env: VectorEnv,
    name: str,
    *,
    advise: Callable[[], Array] | None = None,
) -> InlineSource:
    """Returns a source of single control steps, as most methods have; `advise`: see `InlineSource`.

    With advice the policy acts without noise: its noise is as wide as its errors, and drops what it holds.
    """

    def seed(stream: str) -> int:
        return train_seed(config.seed, f"{stream} {name}" if name else stream)

    acting = copy.deepcopy(policy).to("cpu").eval()
    executor = ChunkExecutor(
        acting,
        config.acting[name].batch,
        n_exec=config.n_exec,
        mode="explore" if advise is None else "ode",
        seed=seed("explore"),
    )
    return InlineSource(env, acting, executor, seed=seed("collect") // 2, advise=advise)


def act_alone(
    config: RunConfig,
    folder: Path,
    leases: Sequence[LeaseLike],
    name: str,
    station: StationConfig | None = None,
) -> Source:
    """Returns the source; called in the actor's process.

    Args:
        config: of the run.
        folder: of the run.
        leases: of the run, and of the source's arm.
        name: of the source.
        station: as it was when the run began to collect; None without one.

    Raises:
        ConfigError: the station's file was edited since.
    """
    torch.set_num_threads(1)
    file = config.acting[name].station
    if station is not None and file is not None and load_station(file) != station:
        raise ConfigError(
            f"station: {file} was edited since the run began to collect there. Put it back, or end the run "
            "and resume it, which takes the new one."
        )
    base, _ = load_policy(folder / "policy" / "base")
    method = method_of(config)
    how = (config, folder, leases, name)
    env = make_arm(*how) if config.acting[name].is_arm else open_sim(*how, method)
    return source_in(config, method.make_policy(config, base), env, name)


def _base_files(session: Session) -> dict[str, bytes]:
    """Returns what a source elsewhere needs of the run folder."""
    base = session.folder / "policy" / "base"
    return {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()}


def _at_node(session: Session, start: Start, name: str, holder: str, reads: Collection[str]) -> Source:
    """Returns a source on an arm of another machine of the fleet."""
    config, source, stays = session.config, session.config.acting[name], None
    if config.keeps_pictures_there(name):
        stays = order(reads, start.eval_envs[config.scene_of(name)] if config.replay.record else None)
    return NodeSource(
        NodeJob(
            name=job_of(config, session.folder, name),
            source=name,
            holder=f"{holder}, of {socket.gethostname()}",
            config=dump(settings_there(config).used()),
            files=_base_files(session),
            stays=stays,
        ),
        config.hub,
        need=need_of(source.needs),
        wait_s=_WAIT_S / len(config.acting),
        away_s=config.silence_s,
        say=session.display.message,
    )


def _on_ray(session: Session, name: str) -> Source:
    """Returns a source on a Ray cluster; what it needs of the run folder goes along."""
    config = session.config
    return RaySource(
        partial(_act_on_ray, config, _base_files(session), name),
        config.ray,
        spec=device_spec(config.env_of(name)),
        holder=f"train {config.recipe}, on Ray",
        ahead=config.ahead,
        lease_wait_s=config.lease_wait_s,
        wait_s=_WAIT_S / len(config.acting),
        restarts=config.restarts,
        holds_up=not config.has_arm,
    )


def _act_on_ray(
    config: RunConfig, files: Mapping[str, bytes], name: str, leases: Sequence[LeaseLike]
) -> Source:
    """Returns the source, under leases of the node that it acts on; called in the Ray actor."""
    folder = Path(tempfile.mkdtemp(prefix="robot-rl-ray-"))
    try:
        (folder / "policy" / "base").mkdir(parents=True)
        for file, content in files.items():
            (folder / "policy" / "base" / file).write_bytes(content)
        return act_alone(config, folder, leases, name)
    finally:
        shutil.rmtree(folder)


def open_sim(
    config: RunConfig, folder: Path, leases: Sequence[LeaseLike], name: str, method: Method
) -> LeasedEnv:
    """Opens the simulations of a source; states of those that diverge are kept for inspection."""
    env = config.env_of(name)
    if env.kind == "sim":
        env = replace(env, dump_diverged=env.dump_diverged or str(folder / "diverged"))
    how: dict[str, Any] = {"autoreset": method.autoreset, "tensors": method.takes_tensors}
    return open_under(leases, simulation(env, config.acting[name].batch, **how))
