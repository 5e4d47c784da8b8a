"""The configuration of a training run: nested and frozen; most parts are defined by their owners."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from robot_rl.config import plain
from robot_rl.config.used import used
from robot_rl.core.errors import ConfigError, require
from robot_rl.core.machine import check_device
from robot_rl.policies.config import ChunkPolicyConfig, PolicyConfig
from robot_rl.real.station import load_station
from robot_rl.rollout.hub_config import HubConfig
from robot_rl.rollout.ray_config import RayConfig
from robot_rl.sched.needs import ANY, LineConfig, NeedsConfig, check_needs
from robot_rl.sim.config import OWN_WORDS, EnvConfig, check_names, check_num_envs, check_reward
from robot_rl.sim.variation import check_variation
from robot_rl.train.finetune.names import is_ours, kind_of
from robot_rl.train.finetune.settings import FinetuneSettings
from robot_rl.train.human_config import HumanConfig
from robot_rl.train.improve.config import (
    DENOISING,
    FINETUNED,
    NOISE,
    ChainSettings,
    DaggerSettings,
    ImaginedSettings,
    LatentSettings,
    MethodSettings,
    OffPolicySettings,
    PlainPPOSettings,
    PPOSettings,
    ResidualSettings,
)
from robot_rl.train.recorded import CloningSettings, DemosConfig, ReplayConfig
from robot_rl.train.robots import SourceConfig, check_nodes, check_person, check_sources
from robot_rl.train.stages import check_stages

_UPDATES = {True: "1 or more with that stage", False: "0 without that stage"}
"""Of a stage that is, or is not, in the plan."""
_WITH_REPLAY = (
    "a method with a replay for sources: residual, latent, chunked, direct, sequence or qarl; dagger, ppo or "
    "plain_ppo"
)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How success is measured."""

    episodes: int = 200
    """Held-out episodes of the base and of the final policy, one seed each."""
    num_envs: int = 50
    """Batch size of every evaluation: part of what makes a repetition exact."""
    every_env_steps: int = 10_000
    """Control steps between quick evaluations during RL, on separate seeds; 0 means never."""
    every_updates: int = 0
    """The same for what a method learns before its first control step, in learner updates."""
    quick_episodes: int = 50

    def __post_init__(self) -> None:
        require(1 <= self.episodes <= 10_000, "evaluate.episodes", self.episodes, "1 to 10000")
        require(self.num_envs >= 1, "evaluate.num_envs", self.num_envs, "1 or more")
        require(self.every_env_steps >= 0, "evaluate.every_env_steps", self.every_env_steps, "0 or more")
        require(self.every_updates >= 0, "evaluate.every_updates", self.every_updates, "0 or more")
        quick = self.quick_episodes
        require(1 <= quick <= 10_000, "evaluate.quick_episodes", quick, "1 to 10000")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay."""

    every_s: float = 60.0
    """Seconds of wall-clock between checkpoints; 0 means only by steps."""
    every_steps: int = 0
    """Control steps (updates where nothing is collected) between checkpoints; 0 means only by time."""
    keep: int = 2

    def __post_init__(self) -> None:
        require(self.every_s >= 0, "checkpoint.every_s", self.every_s, "0 or more")
        require(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "0 or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "1 or more")


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Pictures of the final policy."""

    episodes: int = 2
    """Episodes filmed; 0 for none."""
    failures: int = 12
    """Failed episodes shown in the gallery; 0 for none."""
    camera: str = "front"
    """Of our tasks; others' environments draw as they do."""

    def __post_init__(self) -> None:
        require(self.episodes >= 0, "video.episodes", self.episodes, "0 or more")
        require(self.failures >= 0, "video.failures", self.failures, "0 or more")

    @property
    def is_wanted(self) -> bool:
        return self.episodes > 0 or self.failures > 0


@dataclass(frozen=True, kw_only=True)
class RunConfig(LineConfig):
    """A training run: demonstrations, cloning or fine-tuning, reinforcement learning, evaluation."""

    recipe: str = "custom"
    """Name of the recipe, for the run folder and the report."""
    seed: int = 0
    out: str = "runs"
    """Folder in which the run folder is made."""
    device: str = "cpu"
    """Where the learner computes: cpu, cuda, cuda:1, ..."""
    torch_threads: int = 1
    """Learner threads; the simulator has the other cores."""
    lease_wait_s: float = 0.0
    """How long to wait for cores that other runs hold."""
    num_envs: int = 16
    """Simulations that collect."""
    n_exec: int = 8
    """Control steps executed of each chunk before the next is sampled."""
    metrics_rows: int = 200
    """Rows that each learning phase writes into metrics.jsonl."""
    stages: tuple[str, ...] = ()
    """What the run does, in order, of demos, look, filter, clone, finetune, evaluate, online and distil; the
    usual list if empty: `robot_rl.train.stages`. `stages=demos,clone,evaluate` clones alone."""
    station: str | None = None
    """A station by name or path, whose arm collects; simulations without ROS if None."""
    needs: NeedsConfig = field(default_factory=NeedsConfig)
    """With station=any: what the arm must have; robot, task and cameras are those of the run anyway."""
    hub: HubConfig = field(default_factory=HubConfig)
    """With `needs.node`: where the machines of the fleet meet."""
    real_time: bool = False
    """One arm acts in another process, at the task's rate, and does not wait for the learner."""
    transport: Literal["inline", "process", "ray"] = "inline"
    """Where simulations act: between the learner's updates; meanwhile, in a process of each source; or
    meanwhile on the machines of a Ray cluster."""
    ray: RayConfig = field(default_factory=RayConfig)
    """Of `transport=ray`: which cluster, and what a source needs there."""
    ahead: int = 1
    """Turns of the loop by which simulations in other processes may be ahead of the learner. 0: they
    act when they are asked, and the run's numbers are those of `inline`."""
    restarts: int = 10
    """How many processes of a source in a row may die, fall silent or lose their device, each replaced by
    another one, before the run goes on without it, or is saved and ends."""
    silence_s: float = 600.0
    """A source in another process that collects nothing for so long is taken for lost."""
    env: EnvConfig = field(default_factory=EnvConfig)
    sources: dict[str, SourceConfig] = field(default_factory=lambda: dict[str, SourceConfig]())
    """Several robots, tasks, arms or world models at once, for one policy, by name. If empty, the robot of
    `env` collects, with `num_envs` and the method's `env_steps`."""
    demos: DemosConfig = field(default_factory=DemosConfig)
    policy: PolicyConfig = field(default_factory=ChunkPolicyConfig)
    bc: CloningSettings = field(default_factory=CloningSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)
    """Of the stage `finetune`, which makes a base in the place of `clone`: `policy` and `bc` are not read."""
    method: MethodSettings = field(default_factory=ResidualSettings)
    """How the base is improved, and its settings: `method=ppo method.env_steps=450000`."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    human: HumanConfig = field(default_factory=HumanConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    video: VideoConfig = field(default_factory=VideoConfig)

    def __post_init__(self) -> None:
        require(bool(self.out), "out", self.out, "a folder: out=runs, or out=. for this one")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2147483647")
        require(self.num_envs >= 1, "num_envs", self.num_envs, "1 or more")
        check_num_envs(self.num_envs)
        check_num_envs(self.evaluate.num_envs, at="evaluate.num_envs")
        require(self.n_exec >= 1, "n_exec", self.n_exec, "1 or more")
        require(self.torch_threads >= 1, "torch_threads", self.torch_threads, "1 or more")
        require(self.metrics_rows >= 1, "metrics_rows", self.metrics_rows, "1 or more")
        if self.env.kind == "sim":
            check_names(self.env.task, self.env.robot, at="env.")
            self.env.pairs()
            check_reward(self.env)
            check_variation(self.env.task, self.env.variation)
            formula, allowed = self.env.formula, "none with an arm or a person"
            require(formula is None or not self.has_arm, "env.formula", formula, allowed)
        else:
            require(not self.has_arm, "env.kind", self.env.kind, "sim with an arm or a person")
        check_stages(self.plan, self.method.needs)
        self._check_plan()
        if self.sources:
            self._check_sources()
        self._check_shares()
        require(self.ahead >= 0, "ahead", self.ahead, "0 or more")
        check_needs(self.station, self.needs)
        check_nodes(self.acting, self.hub, self.human.input)
        if self.hub.pictures == "stay":
            is_frozen = isinstance(self.method, ResidualSettings | LatentSettings)
            fits = is_frozen and bool(self.env.cameras) and not self.replay.reuse
            allowed = "send, but with env.cameras, method=residual or latent, and no replay.reuse"
            require(fits, "hub.pictures", "stay", allowed)
        self.check_line()
        require(self.restarts >= 0, "restarts", self.restarts, "0 or more")
        require(self.silence_s > 0, "silence_s", self.silence_s, "above 0")
        on_ray = self.transport == "ray"
        is_arm_alone = self.has_arm and not self.sources
        allowed = "inline or process with an arm or a person"
        require(not (on_ray and is_arm_alone), "transport", "ray", allowed)
        require(on_ray or self.ray == RayConfig(), "ray", self.ray, "left out without transport=ray")
        if is_arm_alone and not self.books_arm:
            require(self.num_envs == 1, "num_envs", self.num_envs, "1 with an arm or a person")
        if isinstance(self.method, ChainSettings | PlainPPOSettings):
            self._check_rollouts()
        self.method.check_run(self)
        if isinstance(self.method, DaggerSettings) and "online" in self.plan:
            self._check_labelled()
        self._check_critics()
        if "finetune" in self.plan:
            self._check_finetuned()
        elif self.bc.policy is None and ("clone" in self.plan or self._draws_chain):
            self._check_cloned()
        if isinstance(self.policy, ChunkPolicyConfig):
            frozen, allowed = self.policy.tuned_steps, "0: cloning is of all steps; method.exploration has it"
            require(frozen == 0, "policy.tuned_steps", frozen, allowed)
        check_device(self.device)
        if self.demos.path is not None and not Path(self.demos.path).is_dir():
            raise ConfigError(
                f"demos.path: no folder {self.demos.path!r}. Make one with "
                f"`robot-rl collect task={self.env.task} out={self.demos.path}`, or leave demos.path out."
            )
        if self.bc.policy is not None and not Path(self.bc.policy).is_dir():
            raise ConfigError(
                f"bc.policy: no folder {self.bc.policy!r}. Name the policy/base of a run folder, the policy "
                "of a `robot-rl finetune` run, a folder that LeRobot saved, or leave bc.policy out: then a "
                "base is cloned."
            )
        if self.bc.encoder is not None and not Path(self.bc.encoder).is_file():
            raise ConfigError(
                f"bc.encoder: no file {self.bc.encoder!r}. Name the policy.safetensors of a saved policy, as "
                "in <run>/policy/base, or a frozen encoder, <file>.onnx, or leave bc.encoder out: then image "
                "encoders are drawn."
            )
        filtered = self.demos.filter.updates
        allowed = "0 with bc.policy, which is not cloned again"
        require(filtered == 0 or self.bc.policy is None, "demos.filter.updates", filtered, allowed)

    @property
    def plan(self) -> tuple[str, ...]:
        """The run's stages: `stages`, or those of a run that improves a clone."""
        if self.stages:
            return self.stages
        distils = isinstance(self.method, ChainSettings) and self.method.distil.updates > 0
        return (
            "demos",
            *(("filter",) if self.demos.filter.updates else ()),
            "clone",
            "evaluate",
            "online",
            *(("distil",) if distils else ()),
            "evaluate",
        )

    @property
    def _draws_chain(self) -> bool:
        """Whether PPO through a denoising chain begins with a policy that was not cloned."""
        return "look" in self.plan and isinstance(self.method, PPOSettings)

    @cached_property
    def acting(self) -> dict[str, SourceConfig]:
        """What collects, by name: `sources`, or one source without a name."""
        if self.sources:
            return self.sources
        alone = SourceConfig(
            robot=self.env.robot,
            env_steps=self.method.env_steps,
            num_envs=self.num_envs,
            station=self.station,
            needs=self.needs,
            real_time=self.real_time,
            human=self.human.input != "none",
        )
        return {"": alone}

    def keeps_pictures_there(self, name: str) -> bool:
        """Whether the pictures of one of `acting` stay on the machine of its arm."""
        return self.hub.pictures == "stay" and self.acting[name].needs.node is not None

    @property
    def env_steps(self) -> int:
        """Control steps of reinforcement learning, over all sources."""
        return sum(source.env_steps for source in self.acting.values())

    @property
    def fewest_envs(self) -> int:
        """Envs of the source that has the fewest."""
        return min(source.batch for source in self.acting.values())

    def env_of(self, name: str) -> EnvConfig:
        """Returns the env in which one of `acting` collects."""
        source = self.acting[name]
        if source.world is not None:
            return EnvConfig(kind="world", id=source.world, task=source.task or self.env.task)
        return self._shown_by(name)

    @cached_property
    def scenes(self) -> dict[str, EnvConfig]:
        """The envs of demonstrations and evaluations, by the first source that has each.

        One of several sources has no name: they differ in what acts alone, as arms and simulations of a task.
        """
        found = dict[str, EnvConfig]()
        for name, scene in ((name, self._shown_by(name)) for name in self.acting):
            if scene not in found.values():
                found[name] = scene
        has_names = len(found) > 1 or len(self.sources) == 1
        return found if has_names else {"": next(iter(found.values()))}

    def scene_of(self, name: str) -> str:
        """Returns the name in `scenes` of what one of `acting` has."""
        shown = self._shown_by(name)
        return next(scene for scene, env in self.scenes.items() if env == shown)

    def _shown_by(self, name: str) -> EnvConfig:
        if not name:
            return self.env
        source = self.sources[name]
        own = self.env.cameras if source.cameras is None else source.cameras
        missing = tuple(camera for camera in self.env.cameras if camera not in own)
        task = source.task or self.env.task
        hz = source.control_hz or self.env.control_hz
        return replace(self.env, robot=source.robot, task=task, missing_cameras=missing, control_hz=hz)

    @property
    def task(self) -> str:
        """The task, or environment, of the run; all of them where the sources have several."""
        return ", ".join(dict.fromkeys(env.name for env in self.scenes.values()))

    def used(self) -> dict[str, Any]:
        """Returns the settings that the run reads, as plain data: what is left out has its default."""
        return used(plain(self))

    @property
    def has_arm(self) -> bool:
        """Whether an arm collects, perhaps with a person."""
        return any(source.is_arm for source in self.acting.values())

    @property
    def books_arm(self) -> bool:
        """Whether the arm is leased for real episodes alone, and rests while a run imagines."""
        return self.has_arm and isinstance(self.method, ImaginedSettings)

    def acts_alone(self, name: str) -> bool:
        """Returns whether one of `acting` acts in another process."""
        return self.acting[name].keeps_time or self.transport != "inline"

    def _check_plan(self) -> None:
        """Refuses stages that do not fit the other settings."""
        plan, filtered = self.plan, self.demos.filter.updates
        is_filter = "filter" in plan
        require(is_filter == (filtered > 0), "demos.filter.updates", filtered, _UPDATES[is_filter])
        if isinstance(self.method, ChainSettings):
            distils, is_distil, at = self.method.distil.updates, "distil" in plan, "method.distil.updates"
            require(is_distil == (distils > 0) or "online" not in plan, at, distils, _UPDATES[is_distil])
        elif "distil" in plan:
            raise ConfigError(
                f"stages: got 'distil' with method={self.method.kind}, whose policy needs one step"
            )
        if not self.env.has_expert and "demos" in plan and self.demos.path is None:
            raise ConfigError(
                f"stages: got 'demos', but nobody demonstrates {self.env.id}. Begin with 'look' instead, as "
                "recipe=crossq does, name an expert, env.expert=module:function, or give recorded episodes, "
                "demos.path=<folder>."
            )
        self._check_disturbed()
        for name, given in (("policy", self.bc.policy), ("encoder", self.bc.encoder)):
            require(given is None or "clone" in plan, f"bc.{name}", given, "none without the stage `clone`")
        given = self.bc.encoder
        require(
            given is None or self.bc.policy is None, "bc.encoder", given, "none with bc.policy, which has one"
        )
        by_hand = getattr(self.policy, "frozen_graph", ())
        require(not by_hand, "policy.frozen_graph", by_hand, "none: bc.encoder=<file>.onnx says so")
        sees = bool(getattr(self.policy, "cameras", ()))
        require(
            given is None or sees, "bc.encoder", given, "none without policy.cameras, whose pictures it reads"
        )
        if "look" not in plan:
            return
        if "demos" in plan:
            raise ConfigError("stages: got 'look' and 'demos', allowed: one of them")
        if "online" in plan:
            bases = self.method.bases
            require(
                NOISE in bases,
                "method",
                self.method.kind,
                "direct, ppo or plain_ppo, where nothing was cloned",
            )
        path = self.demos.path
        require(path is None, "demos.path", path, "none with the stage `look`, which plays noise")
        require(not self.has_arm, "stages", list(plan), "no `look` with an arm, which noise would break")

    def _check_sources(self) -> None:
        """Refuses wrong sources, and settings that contradict them or are for one robot alone."""
        alone = "one robot alone, for now: leave it out with sources"
        require(self.env.kind == "sim", "env.kind", self.env.kind, "sim with sources, for now")
        is_on_policy = type(self.method) in (PPOSettings, PlainPPOSettings)
        takes = is_on_policy or isinstance(self.method, OffPolicySettings | DaggerSettings)
        require(takes, "method", self.method.kind, _WITH_REPLAY)
        require(self.demos.path is None, "demos.path", self.demos.path, alone)
        require(not self.demos.mirror, "demos.mirror", self.demos.mirror, alone)
        if "finetune" in self.plan:
            raise ConfigError("stages: got 'finetune' with sources, allowed: 'clone', for now")
        require(not self.replay.reuse, "replay.reuse", list(self.replay.reuse), alone)
        check_sources(self.sources, self.env.task, self.env.cameras, is_apart=self.transport != "inline")
        given = {name: source.share for name, source in self.sources.items() if source.share is not None}
        allowed = f"none with method={self.method.kind}, which learns from all rollouts once"
        require(not (is_on_policy and given), "sources", given, allowed)
        check_person(self.sources, self.human.input)
        imagines = any(source.world for source in self.sources.values())
        is_labelled = isinstance(self.method, DaggerSettings)
        allowed = "a method with a replay, for a world model"
        require(not (imagines and (is_labelled or is_on_policy)), "method", self.method.kind, allowed)
        example = f"sources.{next(iter(self.sources))}"
        usual = {item.name: item.default for item in fields(self.method)}["env_steps"]
        for key, got, free, own in (
            ("env.robot", self.env.robot, None, "robot"),
            ("env.missing_cameras", self.env.missing_cameras, (), "cameras"),
            ("num_envs", self.num_envs, 16, "num_envs"),
            ("station", self.station, None, "station"),
            ("needs", self.needs, NeedsConfig(), "needs"),
            ("real_time", self.real_time, False, "real_time"),
            ("method.env_steps", self.method.env_steps, usual, "env_steps"),
        ):
            allowed = f"{free}, as if left out: with sources each has its own, {example}.{own}"
            require(got == free, key, got, allowed)

    def _check_shares(self) -> None:
        method = self.method
        shares = (
            {"method.demo_ratio": method.demo_ratio or 0} if isinstance(method, OffPolicySettings) else {}
        )
        if self.replay.reuse:
            shares["replay.reuse_ratio"] = self.replay.reuse_ratio
        if self.human.input != "none":
            shares["human.ratio"] = self.human.ratio
        if sum(shares.values()) >= 1:
            last = list(shares)[-1]
            others = " and ".join(f"{name} {share}" for name, share in list(shares.items())[:-1])
            raise ConfigError(
                f"{last}: got {shares[last]} with {others}, allowed: a sum below 1, so that a share is "
                "left for new steps"
            )

    def _check_cloned(self) -> None:
        """Refuses a base whose chunks are too short, or that cannot explore or learn its guess."""
        self.check_guess(self.policy, "policy.guess_weight")
        self._check_read()
        horizon = self.policy.horizon
        require(self.n_exec <= horizon, "n_exec", self.n_exec, f"1 to policy.horizon, which is {horizon}")
        kind, own = self.policy.chosen, self.policy
        if "online" in self.plan:
            self.method.check_base("policy.kind", kind)
        if isinstance(self.method, ChainSettings) and isinstance(own, ChunkPolicyConfig):
            self.method.explored(own, self.n_exec)
            distils, at = self.method.distil.updates, "method.distil.updates"
            require(distils == 0 or kind in DENOISING, at, distils, f"0 with policy.kind={kind}")

    def _check_read(self) -> None:
        """Refuses to clone a policy that does not fit the pictures, or several tasks without instructions."""
        size, read = self.env.image_size, getattr(self.policy, "picture", self.env.image_size)
        fits = read == size or not getattr(self.policy, "cameras", ())
        require(fits, "policy.picture", list(read), f"env.image_size, {list(size)}, the size of the pictures")
        given, allowed = self.bc.encoder, f"none with policy.kind={FINETUNED[0]}, which draws its own"
        require(given is None or self.policy.chosen not in FINETUNED, "bc.encoder", given, allowed)
        tasks = {scene.task for scene in self.scenes.values()}
        has_words = self.policy.chosen in FINETUNED and self.env.instruction == OWN_WORDS
        allowed = (
            f"{OWN_WORDS}, and policy.kind={FINETUNED[0]}, with sources of several tasks: only the "
            "instruction says which one is wanted"
        )
        require(has_words or len(tasks) == 1, "env.instruction", self.env.instruction, allowed)

    def check_guess(self, policy: Any, at: str) -> None:
        """Refuses to clone a policy that guesses the privileged state where the env does not show it."""
        guess = getattr(policy, "guess_weight", 0.0)
        allowed = "0 without env.privileged=true, which shows the truth to the guess. Add env.privileged=true"
        require(guess == 0 or self.env.privileged, at, guess, allowed)

    def _check_disturbed(self) -> None:
        """Refuses demonstrations of a pushed expert where nobody knows, or asks, what was executed."""
        method, disturb = self.method, self.demos.disturb
        with_replay = isinstance(method, OffPolicySettings)
        knows = isinstance(method, DaggerSettings) or (with_replay and self.demos.path is None)
        knows |= with_replay and method.demo_ratio == 0
        learns_steps = "filter" in self.plan or ("online" in self.plan and not knows)
        allowed = (
            "0 but with method=dagger, a method with a replay (without demos.path, or with "
            "method.demo_ratio=0) or cloning alone: it keeps actions that were not executed"
        )
        require(disturb == 0 or not learns_steps, "demos.disturb", disturb, allowed)

    def _check_critics(self) -> None:
        """Refuses critics that read what the env does not show."""
        if self.method.reads_privileged:
            allowed = "false without env.privileged=true, which shows the privileged state"
            require(self.env.privileged, "method.algorithm.privileged", True, allowed)
            allowed = "false with an arm, which has no privileged state"
            require(not self.has_arm, "method.algorithm.privileged", True, allowed)

    def _check_labelled(self) -> None:
        """Refuses what DAgger cannot label: an arm, other simulators, chunks."""
        require(not self.has_arm, "method", "dagger", "methods with a replay, for an arm or a person")
        allowed = "a task of ours, or env.expert=module:function, with method=dagger: it asks the expert"
        require(self.env.has_expert, "env.kind", self.env.kind, allowed)
        require(self.n_exec == 1, "n_exec", self.n_exec, "1 with method=dagger, which labels single actions")

    def _check_finetuned(self) -> None:
        """Refuses what cannot be fine-tuned, or not improved by the run's method."""
        own, plan = self.finetune, self.plan
        for other in ("clone", "filter"):
            if other in plan:
                raise ConfigError(
                    f"stages: got {other!r} and 'finetune', allowed: one of them. A run has one base, and "
                    f"fine-tuning learns from all frames. Leave {other!r} out, or clone in its place."
                )
        alone = "with the stage `finetune`, which reads what was recorded"
        require(not self.demos.mirror, "demos.mirror", self.demos.mirror, f"false {alone}")
        require(not self.demos.by, "demos.by", list(self.demos.by), f"[] {alone}")
        if not is_ours(own.policy, at="finetune.policy"):
            raise ConfigError(
                f"finetune.policy: got {own.policy!r}, allowed: {', '.join(FINETUNED)}, or the folder of one "
                "of ours. LeRobot's are fine-tuned by `robot-rl finetune`; what it leaves is a base: "
                "bc.policy=<run>/policy."
            )
        kind = kind_of(own.policy)
        if "online" in plan:
            self.method.check_base(f"finetune.policy: {own.policy}", kind)
        horizon = own.horizon
        require(self.n_exec <= horizon, "n_exec", self.n_exec, f"1 to finetune.horizon, which is {horizon}")
        own.check_precision(self.device)
        if self.demos.path is None:
            most, episodes = self.demos.episodes - 2, self.demos.episodes
            allowed = f"at most {max(0, most)} of demos.episodes={episodes}: two or more are to learn from"
            require(own.heldout <= most, "finetune.heldout", own.heldout, allowed)

    def _check_booked(self) -> None:
        """Refuses a person, and judges other than the station, where an arm is booked for real episodes."""
        kind, human = self.method.kind, self.human
        require(self.station is not None, "real_time", self.real_time, f"with station=, for method={kind}")
        require(self.station != ANY, "station", self.station, f"one by name with method={kind}, for now")
        require(human.input == "none", "human.input", human.input, f"none with method={kind}")
        require(human.reward == "task", "human.reward", human.reward, f"task with method={kind}")
        allowed = (
            f"simulated arms with method={kind}, for now: nobody puts a real scene back between episodes"
        )
        require(not load_station(str(self.station)).real, "station", self.station, allowed)

    def _check_rollouts(self) -> None:
        """Refuses what methods without a replay cannot have."""
        kind, reuse = self.method.kind, self.replay.reuse
        allowed = "methods with a replay, or imagined, for an arm or a person"
        require(not self.has_arm or self.books_arm, "method", kind, allowed)
        if self.books_arm:
            self._check_booked()
        require(not reuse, "replay.reuse", list(reuse), f"none with method={kind}, which has no replay")
        if isinstance(self.method, ImaginedSettings):
            self.method.world.images.check_shown(self.env, "method.world.images")
            self.check_imagined(self.policy, "policy.cameras")

    def check_imagined(self, policy: Any, at: str) -> None:
        """Refuses a policy that reads cameras which the model that learns in the loop does not show."""
        if isinstance(self.method, ImaginedSettings):
            read, shown = list(getattr(policy, "cameras", ())), list(self.method.world.images.cameras)
            allowed = f"names of method.world.images.cameras, {shown}, which imagined episodes show"
            require(set(read) <= set(shown), at, read, allowed)
