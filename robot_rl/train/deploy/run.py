"""Deployment: a policy of a run folder plays held-out episodes on a station.

    check that it fits -> lease the arm -> driver and supervisor -> play, record, measure -> report

Driver and supervisor are processes of their own; if this one dies, they hold and stop the arm.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robot_rl.config import dump
from robot_rl.core.errors import CheckpointError, ConfigError, RenderError, RobotRLError
from robot_rl.core.names import GRIPPER
from robot_rl.core.seeding import eval_seeds
from robot_rl.data.episode import observed
from robot_rl.data.episodes import episodes_meta
from robot_rl.data.transitions import StepBatch
from robot_rl.hal.device import LeaseLike
from robot_rl.hal.leased import EnvDevice, LeasedEnv
from robot_rl.hal.vector import Array, Obs, VectorEnv
from robot_rl.policies.async_executor import AsyncExecutor
from robot_rl.policies.checkpoint import PolicyMeta, load_policy
from robot_rl.policies.executor import Act
from robot_rl.policies.export import ExportedPolicy, export_policy
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.real.claim import device_of
from robot_rl.real.launch import StationProcesses
from robot_rl.real.remote import RemoteConfig
from robot_rl.real.sensors import open_sensors
from robot_rl.real.station import StationConfig, load_station
from robot_rl.rollout.stepping import Moment, lockstep
from robot_rl.sched.leases import HeldLease, LeaseStore
from robot_rl.sched.opened import keeping_stops, open_taken
from robot_rl.sched.preemption import PreemptedError
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.config import RunConfig
from robot_rl.train.deploy.config import DeployConfig
from robot_rl.train.deploy.env import StationEnv
from robot_rl.train.deploy.journal import FILMED, EpisodeOutcome, Journal, film
from robot_rl.train.deploy.measured import Measured
from robot_rl.train.deploy.place import Place, places
from robot_rl.train.deploy.remote import RemotePolicy, open_remote
from robot_rl.train.record import load_config_here, new_folder
from robot_rl.train.recording import Recorder

_WARM_UP = 3
"""Plans made before the arm moves: the first takes several times as long."""


def deploy(config: DeployConfig, display: ProgressDisplay, ask: Callable[[str], None] | None) -> Journal:
    """Plays the episodes. However it ends, what was done so far is on the disk.

    Args:
        config: what and where.
        display: shows progress.
        ask: asks a person to put the scene of a real station back.

    Raises:
        RobotRLError: the policy does not fit, the arm is not there or stopped; the message says what to do.
    """
    run_config, _ = load_config_here(Path(config.run), at="run")
    policy, meta = _policy(config)
    able = places(config, run_config, meta)
    torch.set_num_threads(run_config.torch_threads)
    seeds, began_s = eval_seeds(run_config.seed, config.episodes), time.monotonic()
    with ExitStack() as held:
        lease = held.enter_context(_leased(config, able))  # without a lease there is no folder
        (place,) = (one for one in able if one.device.name == lease.device)
        config, station, shown = place.config, place.station, place.shown
        folder = new_folder(config.out, f"deploy-{station.name}")
        display.message(f"deployment: {folder}")
        if config.export is not None:
            policy = _exported(policy, meta, run_config, folder / "export")
        journal = Journal(folder=folder, config=config, task=shown.task, real=station.real)
        journal.waited_s.append(time.monotonic() - began_s)
        try:
            while True:
                device = station_device(station, config, shown, folder, ask)
                with (
                    closing(open_taken(device, lease, config.preempt_s)) as env,
                    _recorder(config, station, env, folder) as recorder,
                ):
                    if shown.instruction:
                        journal.instruction = env.instruction
                        display.message(f"instruction: {env.instruction}")
                    player = Player(config, env, policy, meta, journal, recorder, display)
                    player.play(seeds[len(journal.episodes) :], lease)
                player.draw()
                if len(journal.episodes) == len(seeds):
                    break
                display.message(f"the arm is parked: {journal.preempted[-1]} has it now. Waits for it")
                held.close()
                began_s = time.monotonic()
                lease = held.enter_context(_leased(config, [place], wait_s=math.inf))
                journal.waited_s.append(time.monotonic() - began_s)
            journal.ended = "complete"
        except RobotRLError as error:
            journal.ended = str(error)
            raise
        except KeyboardInterrupt as interrupt:
            if journal.episodes:
                done = folder / ("experience" if config.record else "deploy.json")
                interrupt.add_note(
                    f"The arm rests. What was done: {'robot-rl replay info ' * config.record}{done}"
                )
            raise
        finally:
            journal.write()
    return journal


def _leased(
    config: DeployConfig, able: Sequence[Place], wait_s: float = 0.0
) -> AbstractContextManager[HeldLease]:
    """Returns a lease of the first arm that is free, which this deployment gives up for who goes first."""
    devices, holder = [place.device for place in able], f"deploy {able[0].shown.task}"
    return LeaseStore().hold(devices, holder=holder, **config.booking(max(wait_s, config.lease_wait_s)))


def station_device(
    station: StationConfig,
    config: DeployConfig,
    shown: EnvConfig,
    folder: Path,
    ask: Callable[[str], None] | None,
    *,
    holder: str | None = None,
) -> EnvDevice:
    """Returns a station's arm. Opened, it has driver and supervisor; closed, it is left at rest.

    Args:
        station: where it stands.
        config: how it is deployed.
        shown: the task, as in training.
        folder: of the deployment, for logs.
        ask: see `deploy`.
        holder: named where a stop is noted; the name of the folder if None.
    """

    def make(lease: LeaseLike) -> StationEnv:
        logs = folder / "station"
        file = file_of(station, config.station, logs)
        with ExitStack() as stack:
            processes = stack.enter_context(StationProcesses(file, logs, token=lease.token, task=shown.task))
            env = StationEnv(
                station,
                shown,
                processes.client(),
                open_sensors(station, processes.sockets),
                compensate=config.compensate,
                ask=ask,
            )
            gc.collect()
            gc.freeze()  # no collection of these objects while the arm moves
            stack.callback(gc.unfreeze)
            env.on_close = stack.pop_all().close
        return env

    spec = device_of(station)
    return EnvDevice(spec, make, on_stop=keeping_stops(spec, f"{holder or folder.name} of {shown.task}"))


def file_of(station: StationConfig, name: str, folder: Path) -> str:
    """Returns what the station's processes load: its name, or a file where the task has changed it."""
    if station == load_station(name):
        return name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "station.yaml"
    path.write_text(dump(station))
    return str(path)


class Player:
    """Plays episodes, and keeps what happened."""

    def __init__(
        self,
        config: DeployConfig,
        env: LeasedEnv,
        policy: Any,
        meta: PolicyMeta,
        journal: Journal,
        recorder: Recorder | None,
        display: ProgressDisplay,
    ) -> None:
        self._config, self._env, self._journal = config, env, journal
        self._policy, self._meta = policy.to(config.device), meta
        self._recorder, self._display = recorder, display
        self._films: dict[int, list[Measured]] = {}
        self._executor: AsyncExecutor | None = None
        self._lease: HeldLease | None = None
        self._act: Act | None = None

    def play(self, seeds: Array, lease: HeldLease) -> None:
        """Plays one episode for every seed, until another, who goes first, wants the arm.

        Raises:
            LeaseError: the lease is lost.
        """
        begun = len(self._journal.episodes)
        phase, self._lease = (
            self._display.phase("deploy", begun + len(seeds), unit="episodes", start=begun),
            lease,
        )
        goes_on = False
        try:
            with phase as progress:
                for done, seed in enumerate(seeds, start=begun + 1):
                    lease.give_way()
                    lease.check()
                    self._episode(int(seed))
                    solved = sum(episode.success for episode in self._journal.episodes)
                    progress.update(done, success=solved / done)
        except PreemptedError as error:
            self._journal.preempted.append(error.by)
            goes_on = True
        finally:
            if isinstance(self._policy, RemotePolicy) and not goes_on:
                self._policy.close()  # first: the executor's thread may wait for its server
            if self._executor is not None:
                self._executor.close()

    def draw(self) -> None:
        """Draws the films: after the arm was let go, as drawing takes all cores there are."""
        try:
            for seed, moments in self._films.items():
                film(self._journal.folder / "videos" / f"deploy-seed{seed}.mp4", self._env, moments)
        except RenderError as error:
            self._display.message(f"no video: {str(error).splitlines()[0]}")

    def _episode(self, seed: int) -> None:
        """Plays an episode.

        Raises:
            PreemptedError: another, who goes first, wants the arm, and the chunk is executed.
        """
        env, journal = self._env, self._journal
        success, limited, steps = False, 0, 0

        def begin(obs: Obs, infos: dict[str, Any]) -> None:
            nonlocal success
            success = bool(infos["success"][0])
            executor = self._executor = self._executor or self._prepared(obs)
            executor.reset(seeds=np.array([seed], np.uint64))

        is_first = not journal.episodes
        for moment in lockstep(env, np.array([seed], np.uint64), begin, self._acting):
            success |= bool(moment.infos["success"][0])
            limited += int(moment.infos["limited"][0])
            steps += 1
            journal.timing.append(env.timing[-1])
            if is_first:
                journal.tracked.append((env.target_rad, env.measured.state.position_rad))
            if self._config.video and len(journal.episodes) < FILMED:
                self._films.setdefault(seed, []).append(env.measured)
            if self._recorder is not None:
                self._recorder.add(self._steps(moment))
        journal.episodes.append(EpisodeOutcome(seed=seed, success=success, steps=steps, limited=limited))
        self._note_execution()

    def _acting(self, obs: Obs) -> Array:
        """Returns the next action, and gives the env the planned ones after it."""
        assert self._executor is not None
        assert self._lease is not None
        if self._executor.is_between_chunks:
            self._lease.give_way()
        self._act = self._executor.act(obs)
        self._env.set_planned_actions(self._executor.ahead())
        return self._act.action

    def _steps(self, moment: Moment) -> StepBatch:
        assert self._act is not None
        base = self._act.base_action
        return StepBatch(
            obs=moment.obs,
            base_action=base,
            action=moment.infos["commanded_action"],
            executed_target_rad=moment.infos["executed_target_rad"],
            reward=moment.reward,
            terminated=moment.terminated,
            truncated=moment.truncated,
            next_obs=moment.next_obs,
            next_base_action=base,  # not read: the step is only recorded
            success=moment.infos["success"],
            source="real" if self._env.station.real else "sim",
            stamp_ns=moment.infos["stamp_ns"],
            picture_stamp_ns=moment.infos["picture_stamp_ns"],
        )

    def _prepared(self, obs: Obs) -> AsyncExecutor:
        """Returns the executor, after the policy has planned a few times: the arm rests meanwhile."""
        config = self._config
        executor = self._make_executor(self._policy)
        takes_s = _planning_s(executor, obs) + 1e-3 * config.delay_ms
        rtc = takes_s > executor.patience_s if config.rtc is None else config.rtc
        if rtc:
            try:
                remote = isinstance(self._policy, RemotePolicy)
                continuing = self._policy.continuing() if remote else RealTimeChunks(self._policy)
            except ValueError as error:
                if config.rtc:
                    raise ConfigError(f"rtc: {error}") from error
                self._display.message(f"no real-time chunking: {error}")
            else:
                executor.close()
                executor = self._make_executor(continuing)
                takes_s = _planning_s(executor, obs) + 1e-3 * config.delay_ms
                self._journal.execution["rtc"] = True
        executor.expect(takes_s)
        return executor

    def _make_executor(self, policy: Any) -> AsyncExecutor:
        config = self._config
        self._journal.execution["rtc"] = False
        return AsyncExecutor(
            policy,
            n_exec=min(config.n_exec or self._meta.n_exec, policy.horizon),
            control_hz=self._env.control_hz,
            delay_s=1e-3 * config.delay_ms,
            is_step=[name != GRIPPER for name in self._env.action_names],
            ensemble=config.ensemble,
            device=config.device,
        )

    def _note_execution(self) -> None:
        assert self._executor is not None
        self._journal.execution |= {
            "planning_ms": round(1e3 * self._executor.latency_s, 3),
            "late_chunks": self._executor.late_chunks,
            "held_steps": self._executor.held_steps,
        }


def _planning_s(executor: AsyncExecutor, obs: Obs) -> float:
    """Returns how long the policy takes to plan, once it is warm."""
    taken: list[float] = []
    for _ in range(_WARM_UP):
        began_s = time.monotonic()
        executor.base_action(obs)
        taken.append(time.monotonic() - began_s)
    return min(taken)


def _policy(config: DeployConfig) -> tuple[Any, PolicyMeta]:
    if config.policy is not None:
        remote = RemoteConfig(address=config.policy, **asdict(config.remote))
        return open_remote(remote, real_time=False)
    folder = Path(config.run) / "policy" / config.which
    if not folder.is_dir():
        raise CheckpointError(
            f"run: {config.run} has no policy {config.which!r} yet. "
            f"`robot-rl train resume={config.run}` goes on with it."
        )
    return load_policy(folder)


def _exported(policy: Any, meta: PolicyMeta, run_config: RunConfig, folder: Path) -> ExportedPolicy:
    """Writes the policy's graphs into the deployment's folder: never those of older weights."""
    env = run_config.env
    example = {"state": np.zeros((1, len(meta.state_names)), np.float32)}
    example |= {f"{name}.rgb": np.zeros((1, *env.image_size, 3), np.uint8) for name in env.cameras}
    export_policy(folder, policy, example)
    return ExportedPolicy(folder, threads=run_config.torch_threads)


def _recorder(
    config: DeployConfig, station: StationConfig, env: VectorEnv, folder: Path
) -> AbstractContextManager[Recorder | None]:
    if not config.record:
        return nullcontext()
    joints = len(station.joints)
    return Recorder(
        folder / "experience", episodes_meta(env), observed(env), joints=joints, device=station.name
    )
