"""PPO inside of a world model that learns in the same loop: collect, fit, audit, imagine, probe, refit.

    collect   real episodes of the present policy, exploring
    fit       the world model, on all real episodes; then it is audited
    imagine   PPO on imagined rollouts, under a lease of the world model; refused while it is not believed
    probe     real episodes of the policy as it is: the judge

After a probe the loop imagines on, or, where the model shows more success than is real or is surprised by the
newest episodes, trust lapses: the lease of the model ends, real episodes are collected and it is fitted
again (WoVR, arXiv 2602.13977, section 3.4, calls that PACE; deviation: it is triggered by measured trust, and
as often as needed). The policy with the best probe is the result. Every real step is billed, those of probes
too; imagined steps are billed apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from robot_rl.core.policy import Mode
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.episodes import Episodes, episodes_meta
from robot_rl.data.rollout import Rollout
from robot_rl.data.transitions import Segment
from robot_rl.hal.leased import EnvDevice, LeasedEnv
from robot_rl.hal.vector import Array, Obs
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.chunks import RolloutSource
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.sources import EpisodeLog, Here
from robot_rl.rollout.stepping import seed_batches
from robot_rl.rollout.weights import Published, Publisher, Subscriber, load_weights
from robot_rl.sched.leases import HeldLease, LeaseStore
from robot_rl.sched.opened import open_taken, opened
from robot_rl.sched.preemption import PreemptedError
from robot_rl.sim.config import EnvConfig
from robot_rl.train.demos import Columns, joined, played
from robot_rl.train.deploy.online import arm_of
from robot_rl.train.hooks import checkpoint_hooks, env_steps, show_progress
from robot_rl.train.improve.config import ImaginedSettings
from robot_rl.train.improve.imagined_fit import ModelFit
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.improve.ppo import acting_copy, chunk_options, make_policy
from robot_rl.train.loop import Hook, Learner, Pacer, Run
from robot_rl.train.rollouts import RolloutExperience
from robot_rl.train.schedule import Always, Counters, Every
from robot_rl.train.session import Session
from robot_rl.worlds.audit import judged, measured, shift_of
from robot_rl.worlds.build import RealEnv
from robot_rl.worlds.env import ImaginedConfig, WorldEnv, begun_as
from robot_rl.worlds.history import AUDIT, History
from robot_rl.worlds.inventory import enter, refusal_of
from robot_rl.worlds.outcome import outcome_of
from robot_rl.worlds.saved import World, imitated, load_world
from robot_rl.worlds.starts import recorded_starts
from robot_rl.worlds.trust import samples_blind

Stage = Literal["collect", "fit", "imagine", "probe", "done"]
WORLD = "world"
"""Folder of the model in the run folder, and group of its metrics."""


@dataclass(kw_only=True)
class RealEpisodes(Segment):
    """Whole real episodes."""

    episodes: Episodes
    is_probe: bool
    """Whether the policy acted without exploration."""

    @property
    def cost(self) -> int:
        return len(self.episodes.reward)


class CoEvolution:
    """Where the loop is, the real experience so far, and the newest model with its trust."""

    def __init__(self, session: Session, history: History, real: RealEnv) -> None:
        """Begins with real experience, perhaps demonstrations."""
        self.session, self.config = session, settings_of(session.config, ImaginedSettings)
        self.history, self.real = history, real
        self.folder = session.folder / WORLD
        self.stage: Stage = "collect"
        self.world: World | None = None
        self.fit: ModelFit | None = None
        self.codes: Array | None = None
        """(N, C, h, w): of the history's pictures, once the codec has learned; it keeps few of these then."""
        self.version = self.rollouts = self.probes = 0
        self.flawless = 0
        """Probes without a failure since the last one with."""
        self.best: tuple[float, dict[str, torch.Tensor]] | None = None
        """Success of the best probe, and the weights behind it."""
        self.seed = train_seed(session.config.seed, "collect") // 2

    # What the parts of the loop ask

    @property
    def wanted(self) -> int:
        """How many real episodes are to be played now."""
        if self.stage == "probe":
            return self.config.probe_episodes
        if self.stage == "collect":
            return self.config.more_episodes if self.version else self.config.first_episodes
        return 0

    @property
    def fit_owed(self) -> int:
        """How many updates of the model are due in this turn."""
        if self.stage != "fit":
            return 0
        if self.fit is None:
            self.fit = self._new_fit()
            self.say(f"fits the world model to {self.history.num_episodes} episodes: {self.fit.plan}")
        return self.fit.owed

    @property
    def doing(self) -> str:
        """What goes on that is not imagination, for the progress line."""
        if self.fit is None:
            return {"collect": "real episodes", "probe": "probe"}.get(self.stage, "")
        return self.fit.doing

    def next_seeds(self, number: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Returns seeds of real episodes that were never used before."""
        first, self.seed = self.seed, self.seed + number
        return np.arange(first, first + number, dtype=np.uint64)

    # What happens

    def add_real(
        self, found: RealEpisodes, weights: Mapping[str, torch.Tensor], imagined: Callable[[], float]
    ) -> None:
        """Takes real episodes, and decides what comes next.

        Args:
            found: the episodes.
            weights: of the policy that played them.
            imagined: returns the success of that policy in the model, from the same first states.
        """
        cameras = self.config.world.images.cameras
        part = replace(History.of(found.episodes, cameras=cameras), meta=self.history.meta)
        self.history = History.joined([self.history, part])
        if self.codes is not None:
            images = None if self.world is None else self.world.images
            assert images is not None
            self._keep(np.concatenate([self.codes, images.kept_codes(part.pictures)]))
        if not found.is_probe:
            self.stage, self.fit = "fit", None
            return
        assert self.world is not None
        self.probes += 1
        real = float(part.solved().mean())
        if self.best is None or real >= self.best[0]:
            self.best = real, {name: value.detach().clone().cpu() for name, value in weights.items()}
        shown = imagined()
        stride = self.world.model.config.stride
        is_long = int((part.last - part.first).max()) >= stride  # else nothing can be a surprise
        shift = shift_of(self.world, part) if is_long else None
        report = replace(self.world.report, imagined_success=shown, real_success=real, shift=shift)
        report, refused = judged(self.world, report), refusal_of(self.folder)
        if not refused:  # else another lost trust in it since: a probe that finds nothing does not restore it
            self.world.save_report(self.folder, report)
        self.session.write(
            self.session.config.method.kind,
            {
                "probe/real": real,
                "probe/imagined": shown,
                "probe/bias": shown - real,
                "probe/shift": report.shift or 0.0,
                "probe/trusted": float(not refused and self.world.report.is_trusted),
                "probe/real_steps": float(self.history.steps),
            },
        )
        self.flawless = self.flawless + 1 if real == 1.0 else 0
        is_last = self.history.steps >= self.config.real_steps or self.probes >= self.config.probes
        is_last |= 0 < self.config.enough <= self.flawless
        self.rollouts = 0
        if is_last:
            self.stage = "done"
        elif refused or not self.world.report.is_trusted:
            self.lapse(refused or f"{'; '.join(self.world.report.reasons)}.")
        else:
            self.stage = "imagine"

    def _keep(self, codes: Array) -> None:
        """Keeps codes (N, C, h, w) in the place of pictures, but for the episodes that judge the model."""
        self.codes = codes
        self.history = self.history.with_pictures_of(self.history.split(AUDIT))

    def imagined_rollout(self) -> None:
        """Counts a rollout; after enough of them the policy is probed."""
        self.rollouts += 1
        if self.rollouts >= self.config.rollouts:
            self.stage = "probe"

    def lapse(self, why: str) -> None:
        """Ends imagination in a model that lost trust, by a probe or by another's `robot-rl worlds audit`.

        Args: why: sentences.
        """
        is_spent = self.history.steps >= self.config.real_steps
        self.stage = "done" if is_spent else "collect"
        then = "The real steps are spent: the run ends" if is_spent else "Real episodes are booked"
        self.say(f"trust lapsed: {why} {then}")

    def fitted(self) -> None:
        """Audits the model, once all its updates are taken."""
        fit = self.fit
        if fit is None:
            return
        if self.codes is None and fit.codes is not None:
            self._keep(fit.codes)
        if fit.owed:
            return
        fit.finish()
        self.version += 1
        wanted = self.config.world
        outcome = outcome_of(
            self.history, wanted.outcome, codes=self.codes, vote=wanted.outcome_vote, seed=self.version
        )
        how: dict[str, Any] = {"limits": wanted.trust, "version": self.version, "images": fit.images}
        self.world, _ = measured(
            fit.model, outcome, self.history, env=self.real.env, horizon=self.real.horizon, **how
        )
        self.fit = None
        self.world.save(self.folder)
        enter(self.folder)
        report = self.world.report
        depth = report.depths[0] if report.depths else {}
        pictures = report.pictures[0] if report.pictures else {}
        self.session.write(
            self.session.config.method.kind,
            {f"{WORLD}/{name}": value for name, value in depth.items()}
            | {f"{WORLD}/pictures_{name}": value for name, value in pictures.items()}
            | {
                f"{WORLD}/version": float(self.version),
                f"{WORLD}/episodes": float(report.episodes),
                f"{WORLD}/false_success": report.false_success or 0.0,
                f"{WORLD}/missed_success": report.missed_success or 0.0,
                f"{WORLD}/trusted": float(report.is_trusted),
            },
        )
        reasons = report.reasons
        if self.config.gate == "samples" and (
            blind := samples_blind(report, self.world.calibration, self.world.limits)
        ):
            reasons = (*reasons, f"gate=samples is blind: {blind}")
        self.say(
            f"world model, version {self.version}: {report.episodes} episodes, {report.real_steps:,} real "
            f"steps, {'not believed: ' + '; '.join(reasons) if reasons else 'believed'}"
        )
        is_spent = self.history.steps >= self.config.real_steps
        self.stage = "imagine" if not reasons else "done" if is_spent else "collect"
        self.rollouts = 0

    def _new_fit(self) -> ModelFit:
        return ModelFit(
            self.history,
            self.real,
            self.config,
            version=self.version,
            seed=train_seed(self.session.config.seed, f"fit {self.version}"),
            before=self.world,
            codes=self.codes,
            device=self.session.config.device,
        )

    def say(self, line: str) -> None:
        """Shows a line in the run's display."""
        self.session.display.message(line)

    def state_dict(self) -> dict[str, Any]:
        names = ("stage", "version", "rollouts", "probes", "flawless", "best", "seed")
        return {
            **{name: getattr(self, name) for name in names},
            "history": {name: value for name, value in vars(self.history).items() if name != "meta"},
            "codes": self.codes,
            "fitter": None if self.fit is None else self.fit.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = replace(self.history, **{"start": None, **state["history"]})  # earlier ones had none
        for name in ("stage", "version", "rollouts", "probes", "flawless", "best", "seed"):
            setattr(self, name, state[name])
        self.codes = state.get("codes")  # checkpoints of earlier versions have none
        self.world = load_world(self.folder, device=self.session.config.device) if self.version else None
        if state["fitter"] is not None:
            self.fit = self._new_fit()
            self.fit.load_state_dict(state["fitter"])


class RealSource(Here):
    """Plays real episodes when they are wanted, under a lease that it books for them."""

    def __init__(self, conductor: CoEvolution, policy: Module, num_envs: int) -> None:
        self._conductor, self._num_envs = conductor, num_envs
        self._policy = policy
        self._weights = Subscriber(policy)
        self.episodes = EpisodeLog(num_envs)

    def collect(self, published: Published) -> RealEpisodes | None:
        """Returns the episodes that are wanted now, all with the newest weights; None where none are."""
        conductor = self._conductor
        wanted, is_probe = conductor.wanted, conductor.stage == "probe"
        if not wanted:
            return None
        session, version = conductor.session, self._weights.refresh(published)
        device, rows = self._device(wanted, is_probe=is_probe), list[Columns]()
        is_arm, config = device.spec.kind == "robot", session.config
        holder, noise, wait_s = f"train {config.recipe}: real episodes", conductor.seed, config.lease_wait_s
        seeds = conductor.next_seeds(wanted)
        while True:
            how: dict[str, Any] = config.booking(wait_s) if is_arm else {"wait_s": wait_s}
            with (
                LeaseStore().hold(device.spec, holder=holder, slots=1, **how) as lease,
                closing(open_taken(device, lease, config.preempt_s if is_arm else None)) as env,
            ):
                self._play(env, lease, seeds[len(rows) :], rows, "ode" if is_probe else "explore", noise)
                if len(rows) == wanted:
                    episodes = joined(env, rows)
                    break
            conductor.say("the arm is parked: another goes first. Waits for it")
            wait_s = math.inf
        made = "real" if device.spec.real else "sim"
        return RealEpisodes(source=made, policy_version=version, episodes=episodes, is_probe=is_probe)

    def _play(
        self, env: LeasedEnv, lease: HeldLease, seeds: Array, rows: list[Columns], mode: Mode, noise: int
    ) -> None:
        """Adds an episode for every seed, until another, who goes first, wants the device."""
        session = self._conductor.session
        executor = ChunkExecutor(
            self._policy,
            env.num_envs,
            n_exec=session.config.n_exec,
            mode=mode,
            seed=noise,
            device=session.config.device,
        )

        def act(obs: Obs) -> Array:
            if executor.is_between_chunks:
                lease.give_way()
            return executor.act(obs).action

        with suppress(PreemptedError):
            for where, batch in seed_batches(seeds, env.num_envs):
                lease.give_way()
                lease.check()
                executor.reset(np.ones(env.num_envs, bool), batch)
                rows += played(env, batch, act)[: where.stop - where.start]

    def _device(self, wanted: int, *, is_probe: bool) -> EnvDevice:
        """Returns what the episodes are played on: the run's arm, one after the other, or simulations.

        These begin in the run's bank, if it has one; probes begin as evaluations do.
        """
        session = self._conductor.session
        if session.config.station is not None:
            return arm_of(session.config, session.folder)
        env = session.config.env
        resets = env.evaluated().resets if is_probe else env.resets
        return simulation(replace(self._conductor.real.env, resets=resets), min(self._num_envs, wanted))

    def close(self) -> None:
        """Nothing is open between two calls."""

    def state_dict(self) -> dict[str, Any]:
        return self._weights.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._weights.load_state_dict(state)


class ImaginedSource(Here):
    """Imagines rollouts while the model is believed, under a lease of it; each version has its own env."""

    def __init__(self, conductor: CoEvolution, policy: Module) -> None:
        self._conductor, self._policy = conductor, policy
        self._stack = ExitStack()
        self._inner: RolloutSource | None = None
        self._version = 0
        self.episodes = EpisodeLog(conductor.session.config.num_envs)

    def collect(self, published: Published) -> Rollout | None:
        """Returns an imagined rollout; None where none is wanted."""
        if self._conductor.stage == "imagine" and (why := refusal_of(self._conductor.folder)):
            self._conductor.lapse(why)
        if self._conductor.stage != "imagine":
            self.close()  # the lease is free for others, and a version that is not believed is not held
            return None
        if self._inner is None:
            self._inner = self._begun()
        return self._inner.collect(published)

    def _begun(self) -> RolloutSource:
        conductor, session = self._conductor, self._conductor.session
        settings, config, world = conductor.config, session.config, conductor.world
        assert world is not None, "a model is fitted before anything is imagined"
        how: dict[str, Any] = {"known": settings.starts.classes, "at": "method.starts"}
        env = EnvConfig(
            kind="world",
            id=str(conductor.folder),
            task=config.env.task,
            settings={
                "strides": settings.strides,
                "starts": recorded_starts(settings.starts, world.history, **how),
                "vote": settings.vote,
                "hold": settings.hold,
                "gate": settings.gate,
                "smooth": settings.smooth,
                "gamma_step": settings.algorithm.gamma_step,
                "device": config.device,
            },
        )
        holder, wait_s = f"train {config.recipe}: imagination", config.lease_wait_s
        device = simulation(env, config.num_envs, autoreset="same_step")
        opened_env = self._stack.enter_context(opened(device, holder=holder, wait_s=wait_s))
        self._version += 1
        options = chunk_options(config, "")
        options["seed"] += 1000 * self._version
        source = RolloutSource(opened_env, self._policy, decisions=settings.decisions, **options)
        source.episodes = self.episodes
        return source

    def close(self) -> None:
        """Ends the lease."""
        self._stack.close()
        self._stack, self._inner = ExitStack(), None

    def state_dict(self) -> dict[str, Any]:
        """Returns how often it began; a resumed run begins new imagined episodes."""
        return {"version": self._version, "episodes": self.episodes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._version = int(state["version"])
        self.episodes.load_state_dict(state["episodes"])


class Experience:
    """Imagined rollouts to the policy's learner, real episodes to the model's; neither takes the other's."""

    def __init__(self, conductor: CoEvolution, rollouts: RolloutExperience, policy: Module) -> None:
        self._conductor, self._rollouts, self._policy = conductor, rollouts, policy

    def add(self, segment: Any) -> None:
        """Hands a segment on."""
        if isinstance(segment, RealEpisodes):
            first, weights = _first_obs(segment.episodes), self._policy.state_dict()
            self._conductor.add_real(segment, weights, lambda: self._imagined_success(first))
            return
        assert segment.source == WORLD, "rollouts of this run are imagined"
        self._rollouts.add(segment)
        self._conductor.imagined_rollout()

    def _imagined_success(self, first: Obs) -> float:
        """Returns the success of the policy in the model, without exploration, from these observations."""
        conductor, number = self._conductor, len(first["state"])
        assert conductor.world is not None
        options = begun_as(conductor.world, first)
        members = conductor.world.model.config.members
        solved = list[float]()
        for member in range(members):
            env = WorldEnv(
                conductor.world,
                number,
                autoreset="disabled",
                settings=ImaginedConfig(gate=False, member=member),
                by=f"train {conductor.session.config.recipe}: probes",
            )
            executor = ChunkExecutor(
                self._policy,
                number,
                n_exec=conductor.session.config.n_exec,
                device=conductor.session.config.device,
            )
            obs, _ = env.reset(seed=0, options=options)
            live, success = np.ones(number, bool), np.zeros(number, bool)
            while live.any():
                action = executor.act(obs).action
                step = env.step_masked if executor.is_between_chunks else env.step_unseen
                obs, _, terminated, truncated, infos = step(action, live)
                success |= infos["success"] & live
                live &= ~(terminated | truncated)
            env.close()
            solved.append(float(success.mean()))
        return float(np.mean(solved))

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts.state_dict(), "conductor": self._conductor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rollouts.load_state_dict(state["rollouts"])
        self._conductor.load_state_dict(state["conductor"])


def _first_obs(episodes: Episodes) -> Obs:
    begin, _ = episodes.bounds()
    return {key: values[begin] for key, values in episodes.obs.items()}


class _Fitting:
    """The model's learner in the loop: its batches are its own."""

    def __init__(self, conductor: CoEvolution) -> None:
        self._conductor = conductor

    def sample(self) -> None:
        """The fitter draws its windows itself."""

    def update(self, batch: None) -> Mapping[str, torch.Tensor | float]:
        assert self._conductor.fit is not None
        return self._conductor.fit.update()

    def policy_weights(self) -> Mapping[str, torch.Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the conductor keeps the fitter."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop, and the policy that it trains."""
    config, cfg = session.config, settings_of(session.config, ImaginedSettings)
    session.counters.updates = 0
    policy = make_policy(config, start.base).to(config.device)
    (real,) = start.eval_envs.values()
    cameras = cfg.world.images.cameras
    history = replace(History.of(start.episodes, cameras=cameras), meta=episodes_meta(real))
    conductor = CoEvolution(session, history, RealEnv.of(imitated(config.env.evaluated(), cameras), real))
    algorithm = resolve("algorithm", "chain_ppo", at="imagined")(
        policy, cfg.algorithm, train_seed(config.seed, "ppo"), privileged=None
    )
    rollouts = RolloutExperience(
        algorithm,
        batch=cfg.algorithm.batch,
        epochs=cfg.algorithm.epochs,
        seed=train_seed(config.seed, "ppo batches"),
    )
    experience = Experience(conductor, rollouts, policy)
    fitting = _Fitting(conductor)
    run = Run(
        sources=[
            ImaginedSource(conductor, acting_copy(config, policy)),
            RealSource(conductor, acting_copy(config, policy), cfg.real_envs),
        ],
        experience=experience,
        learners=[
            Learner(algorithm, rollouts, Always(rollouts.owed), Publisher()),
            Learner(fitting, fitting, Always(lambda: conductor.fit_owed), None, name=WORLD),
        ],
        pacer=Pacer(finished=lambda at: conductor.stage == "done" or at.env_steps >= config.env_steps),
        stage=session.timer.stage,
        counters=session.counters,
        result=lambda: None if conductor.best is None else conductor.best[1],
    )
    _add_hooks(session, run, policy, conductor)
    return run, policy


def _add_hooks(session: Session, run: Run, policy: Module, conductor: CoEvolution) -> None:
    name, config = session.config.method.kind, session.config

    def offer(at: Counters) -> None:
        session.check_leases()
        assert run.leader.publisher is not None
        run.leader.publisher.offer(at.updates, run.leader.algorithm.policy_weights)
        load_weights(policy, run.leader.algorithm.policy_weights())

    def look(_: Counters) -> None:
        conductor.fitted()

    offer(session.counters)

    def show(at: Counters) -> None:
        show_progress(session, at.env_steps, at.updates, conductor.doing)

    turns = iter(range(2**62))
    run.pacer.hooks = [
        Hook("offer", Every(1), lambda _: next(turns), offer),
        Hook("fitted", Every(1), lambda _: next(turns), look),
        Hook("progress", Every(1), lambda _: next(turns), show),
        *checkpoint_hooks(session, run, name, config.checkpoint, env_steps),
    ]


IMAGINED = Method(make_policy=make_policy, assemble=assemble, opens=False, records=False)
