"""The settings of every method of improving a base; `RunConfig.method` is one of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from robot_rl.algos.config.cloning import BCConfig, DistilConfig
from robot_rl.algos.config.off_policy import (
    ActorCriticConfig,
    ChunkQConfig,
    LatentConfig,
    QARLConfig,
    ResidualConfig,
    SequenceConfig,
)
from robot_rl.algos.config.on_policy import ChainPPOConfig, GRPOConfig, OfflinePPOConfig, PlainPPOConfig
from robot_rl.config.build import Choice
from robot_rl.core.errors import ConfigError, nearest, require
from robot_rl.core.registry import TABLE, resolve, table
from robot_rl.policies.config import (
    PROCESSES,
    GaussianPolicyConfig,
    LatentActorConfig,
    ProcessConfig,
    ResidualHeadConfig,
)
from robot_rl.train.stages import DEMONSTRATIONS
from robot_rl.worlds.config import Measure, StartsConfig, WorldSettings

CLONED = (*PROCESSES, GaussianPolicyConfig.kind)
"""Kinds of base that a run clones."""
DENOISING = tuple(kind for kind in PROCESSES if kind != "token")
"""Those whose chunk begins as noise."""
FINETUNED = ("small_vla",)
"""Kinds that `robot-rl finetune` makes."""
FOREIGN = ("lerobot_act", "lerobot_diffusion", "lerobot_flow", "onnx", "onnx_without_noise")
"""Kinds of base that others made. Of LeRobot: ACT, Diffusion; SmolVLA, pi0 and pi0.5 are flows. A graph of
ONNX, with noise for an input or without."""
NOISE = "noise"
"""The kind of a base that draws random actions."""


class RunLike(Protocol):
    """What the settings of a method read of a `RunConfig`."""

    @property
    def n_exec(self) -> int: ...
    @property
    def num_envs(self) -> int: ...
    @property
    def fewest_envs(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def policy(self) -> Any: ...
    @property
    def human(self) -> Any: ...
    @property
    def replay(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Choice):
    """Settings of every method."""

    kind: ClassVar[str]
    bases: ClassVar[tuple[str, ...]] = CLONED
    """Kinds of base that it improves."""
    env_steps: int = 100_000
    """Control steps over all envs; 0 leaves the base as it is."""

    def __post_init__(self) -> None:
        self._require("env_steps", self.env_steps >= 0, "0 or more")

    def check_run(self, run: RunLike) -> None:
        """Refuses what does not fit in the other settings of a run.

        Raises:
            ConfigError: names the setting.
        """

    @property
    def title(self) -> str:
        """What a run says that it does by the method."""
        return f"{self.kind} RL"

    @classmethod
    def of_kind(cls, kind: str | None, at: str) -> type[Any]:
        own = {found.kind: found for found in _OWN}
        if kind is None or kind in own:
            return own[kind or ResidualSettings.kind]
        if kind not in table("method"):
            raise ConfigError(f"{at}: got {kind!r}.{nearest(kind, table('method'))}")
        found = resolve("method", kind, at=at).settings  # of a plug-in
        if found.kind != kind:
            raise ConfigError(
                f"{at}: the settings of the plug-in's method {kind!r} say {found.kind!r}, allowed: its name. "
                f"Write kind: ClassVar[str] = {kind!r} into {found.__qualname__}."
            )
        return found

    @classmethod
    def kinds(cls) -> list[str]:
        return [found.kind for found in _OWN]

    @classmethod
    def improves(cls, kind: str) -> bool:
        """Returns whether it improves a base of that kind; a plug-in's, if it improves all clones."""
        is_plugin = kind not in TABLE["policy"] and not kind.startswith(("lerobot_", "onnx"))
        return kind in cls.bases or (is_plugin and set(CLONED) <= set(cls.bases))

    @classmethod
    def check_base(cls, at: str, kind: str) -> None:
        """Refuses a base of a kind that it does not improve; `at` begins the message.

        Raises:
            ConfigError: names the kinds that it improves, and the methods that improve this one.
        """
        if not cls.improves(kind):
            able = [method.kind for method in _OWN if method.improves(kind)]
            remedy = f" Use method={', '.join(able[:-1])} or {able[-1]}." if len(able) > 1 else ""
            allowed = f"{', '.join(cls.bases)} with method={cls.kind}"
            raise ConfigError(f"{at}: got {kind!r}, allowed: {allowed}.{remedy}")

    @property
    def needs(self) -> tuple[str, ...]:
        """What it needs, apart from a base and its observations."""
        return (DEMONSTRATIONS,)

    @property
    def leaves_base(self) -> bool:
        """Whether nothing is learned, and the base is the result."""
        return self.env_steps == 0

    @property
    def reads_privileged(self) -> bool:
        """Whether its critics read the privileged state."""
        return getattr(getattr(self, "algorithm", None), "privileged", False)

    def _require(self, field: str, holds: bool, allowed: str) -> None:
        require(holds, f"method.{field}", getattr(self, field), allowed)


@dataclass(frozen=True, kw_only=True)
class DaggerSettings(MethodSettings):
    """The policy acts, the task's scripted expert says what it would have done, the policy clones that."""

    kind: ClassVar[str] = "dagger"
    bases: ClassVar[tuple[str, ...]] = (*CLONED, *FINETUNED)
    utd: float = 0.2
    """Learner updates per control step."""
    batch: int = 96
    """Windows of an update, drawn evenly from the demonstrations and all labelled steps."""
    publish_every: int = 25
    """Learner updates between two hand-overs of weights to the policy that acts."""
    algorithm: BCConfig = field(default_factory=BCConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("utd", 0 < self.utd <= 64, "above 0, at most 64")
        self._require("batch", self.batch >= 2, "2 or more")
        self._require("publish_every", self.publish_every >= 1, "1 or more")

    @property
    def title(self) -> str:
        return "DAgger"


@dataclass(frozen=True, kw_only=True)
class OffPolicySettings(MethodSettings):
    """Settings of methods that learn from replayed steps."""

    utd: float = 1.0
    """Learner updates per control step."""
    batch: int = 256
    demo_ratio: float | None = 0.5
    """Share of each batch that comes from the demonstrations; null: as large as their share of all steps."""
    explore_steps: int = 2000
    """Control steps of the first policy with exploration noise before the learner starts."""
    capacity: int = 200_000
    """Control steps the replay of each source holds; the oldest go first."""
    publish_every: int = 1
    """Learner updates between two hand-overs of weights to those who act."""
    max_staleness: int = 1000
    """Learner updates by which acting weights may be older than the learner's; else their steps are stale."""
    stale: Literal["drop", "keep"] = "drop"
    """What becomes of stale steps in the replay; they are counted, and recorded, in any case."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("utd", 0 < self.utd <= 64, "above 0, at most 64")
        self._require("batch", self.batch >= 2, "2 or more")
        self._require("demo_ratio", 0 <= (self.demo_ratio or 0) < 1, "0 to below 1, or null")
        self._require("explore_steps", self.explore_steps >= 0, "0 or more")
        self._require("capacity", self.capacity >= 1000, "1000 or more")
        bound = self.max_staleness
        self._require("publish_every", 1 <= self.publish_every <= bound, f"1 to max_staleness, {bound}")

    @property
    def n_step(self) -> int:
        """Longest window of rewards before the bootstrap, in control steps."""
        return vars(self)["algorithm"].n_step

    @property
    def gamma_step(self) -> float:
        """Discount per control step."""
        return vars(self)["algorithm"].gamma_step


@dataclass(frozen=True, kw_only=True)
class ResidualSettings(OffPolicySettings):
    """Residual RL on the frozen base."""

    kind: ClassVar[str] = "residual"
    bases: ClassVar[tuple[str, ...]] = (*CLONED, *FINETUNED, *FOREIGN)
    scale: float = 0.2
    """Largest correction, as a share of the env's [-1, 1]."""
    head: ResidualHeadConfig = field(default_factory=ResidualHeadConfig)
    algorithm: ResidualConfig = field(default_factory=ResidualConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("scale", 0 < self.scale <= 1, "above 0, at most 1")


class Explorable(Protocol):
    """The configuration of a policy that can explore by another process."""

    @property
    def steps(self) -> int:
        """K, the number of denoising steps when acting."""
        ...

    def exploring(self, options: ProcessConfig) -> Any:
        """Returns the configuration with that process, or raises ValueError."""
        ...


@dataclass(frozen=True, kw_only=True)
class ChainSettings(MethodSettings):
    """Settings of methods that learn from the denoising chains of the newest rollouts."""

    exploration: ProcessConfig = field(default_factory=lambda: ProcessConfig(process="flow_sde"))
    """The process put on the base's weights; log-probabilities are of the executed actions by default."""
    algorithm: ChainPPOConfig = field(default_factory=ChainPPOConfig)
    distil: DistilConfig = field(default_factory=DistilConfig)
    """The student that is distilled in the end: one network call for a chunk. None by default."""
    max_staleness: int | None = None
    """Learner updates by which the weights that acted may be older than the learner's, where sources act
    elsewhere (`transport`). Rollouts of older ones are dropped, and counted; null: all are learned from. A
    turn of the loop makes epochs times minibatches of them; those of the value alone count, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("max_staleness", (self.max_staleness or 0) >= 0, "0 or more, or null")

    def check_run(self, run: RunLike) -> None:
        allowed = "null with transport=inline, where nothing is stale"
        self._require("max_staleness", self.max_staleness is None or run.transport != "inline", allowed)

    def explored(self, policy: Explorable, n_exec: int) -> ProcessConfig:
        """Returns the process for a base of that configuration.

        Raises:
            ConfigError: the base cannot have it, or the reduction does not fit it.
        """
        process = self.exploration
        process = process if process.scored is not None else replace(process, scored=n_exec)
        try:
            policy.exploring(process)
        except ValueError as error:
            raise ConfigError(f"method.exploration: {error}") from error
        name, reduction = process.process, self.algorithm.reduction
        if name == "token":
            allowed = "per_step, a ratio for each token, or joint"
            require(reduction != "single", "method.algorithm.reduction", reduction, allowed)
            kept = self.algorithm.regulariser
            require(kept != "w2", "method.algorithm.regulariser", kept, "none, bc with process=token")
            return process
        if name in (None, "flow_ode") or (name in ("flow_sde", "ddim") and process.eta == 0):
            raise ConfigError(
                f"method.exploration: got process {name} with eta {process.eta}, "
                "which does not explore. Use flow_sde, flow_noise, flow_cfm, ddpm, ddim with eta above 0, "
                "or token."
            )
        scored = transitions(process, policy.steps)
        if reduction == "single" and scored != 1:
            raise ConfigError(
                f"method.algorithm.reduction: got 'single' where {name} scores {scored} transitions "
                "of a chunk, allowed: per_step, joint"
            )
        return process


@dataclass(frozen=True, kw_only=True)
class PPOSettings(ChainSettings):
    """PPO through the denoising chain: flow-SDE, DPPO, ReinFlow or FPO, by `exploration` and `algorithm`."""

    kind: ClassVar[str] = "ppo"
    bases: ClassVar[tuple[str, ...]] = (*PROCESSES, *FINETUNED, "lerobot_diffusion", "lerobot_flow", NOISE)
    """With noise for a base, `policy` is learned from nothing."""
    decisions: int = 50
    """Chunks that each env executes between two blocks of updates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("decisions", self.decisions >= 1, "1 or more")

    @property
    def needs(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class PlainPPOSettings(MethodSettings):
    """PPO of a Gaussian policy from nothing; `policy` is its network, of which a decision is one action."""

    kind: ClassVar[str] = "plain_ppo"
    bases: ClassVar[tuple[str, ...]] = (NOISE,)
    env_steps: int = 1_000_000
    """As everywhere."""
    steps: int = 32
    """Control steps that each env takes between two blocks of updates."""
    noise_correlation: float = 0.0
    """Of the exploration of a control step with that of the step before; 0: none. Likelihoods are those of
    the step alone, as in Hollenstein et al. 2024 (arXiv 2312.11091); weak correlation helps PPO there.
    A gripper that is moved at random each step never holds a thing; one that is moved slowly does."""
    algorithm: PlainPPOConfig = field(default_factory=PlainPPOConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("steps", self.steps >= 1, "1 or more")
        self._require("noise_correlation", 0 <= self.noise_correlation < 1, "0 or more, below 1")

    def check_run(self, run: RunLike) -> None:
        given, here = run.policy, f"with method={self.kind}"
        require(isinstance(given, GaussianPolicyConfig), "policy.kind", given.chosen, f"gaussian {here}")
        require(given.horizon == 1, "policy.horizon", given.horizon, f"1 {here}")
        require(run.n_exec == 1, "n_exec", run.n_exec, f"1 {here}, which decides at every step")
        cameras = list(getattr(given, "cameras", ()))
        require(not cameras, "policy.cameras", cameras, f"none {here}, which reads the state alone")
        allowed = f"inline {here}, whose rollouts lie in the memory that the learner reads"
        require(run.transport == "inline", "transport", run.transport, allowed)
        num_envs = run.fewest_envs  # the other sources may end first
        rows, parts = num_envs * self.steps, self.algorithm.minibatches
        self._require("steps", rows > 1, f"2 or more with num_envs={num_envs}")
        allowed = f"at most {rows}, which is num_envs={num_envs} times method.steps={self.steps}"
        require(parts <= rows, "method.algorithm.minibatches", parts, allowed)

    @property
    def needs(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class ImaginedSettings(PPOSettings):
    """PPO in a world model that learns in the same loop; real episodes are its data and its judge."""

    kind: ClassVar[str] = "imagined"
    bases: ClassVar[tuple[str, ...]] = tuple(PROCESSES)
    env_steps: int = 2_000_000
    """Control steps in all, imagined ones too."""
    decisions: int = 4
    """As in PPO, of imagined episodes."""
    real_steps: int = 40_000
    """Real control steps after which no more are collected; demonstrations and probes count."""
    world: WorldSettings = field(default_factory=WorldSettings)
    starts: StartsConfig = field(default_factory=StartsConfig)
    """Where imagined episodes begin."""
    strides: int = 8
    """Longest imagined episode, in strides of the model; 0: as long as a real one."""
    gate: bool | Measure = True
    """What cuts imagined episodes: disagreement of the members (also if true), or two samples of one."""
    vote: float = 0.8
    """Share of the members that must see success."""
    hold: int = 1
    """Strides in a row in which they must."""
    smooth: float = 0.0
    """Above 0, rewards are shaped by the running share of the members that see success; returns stay."""
    first_episodes: int = 100
    """Real episodes of the base, exploring, before the first fit."""
    more_episodes: int = 50
    """Real episodes before each further fit."""
    refit_updates: int = 2000
    """Updates of the model in each further fit, from the weights before; the networks of pictures take the
    same share of theirs, and the codec none."""
    recent: float = 0.3
    """Share of its batches then from the newest quarter of the episodes, as in DIAMOND."""
    rollouts: int = 20
    """Imagined rollouts between two probes."""
    probe_episodes: int = 20
    """Real episodes of a probe."""
    probes: int = 20
    """At most so many."""
    enough: int = 2
    """The run ends after so many probes in a row without a failure; 0: it goes on."""
    real_envs: int = 10
    """Real episodes at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = "null with method=imagined, whose rollouts are of the newest weights"
        self._require("max_staleness", self.max_staleness is None, allowed)
        one = ("real_steps", "first_episodes", "more_episodes", "refit_updates", "rollouts")
        for name in (*one, "probe_episodes", "probes", "real_envs", "hold"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        self._require("strides", self.strides >= 0, "0 or more")
        self._require("enough", self.enough >= 0, "0 or more")
        self._require("vote", 0 < self.vote <= 1, "above 0, up to 1")
        self._require("smooth", 0 <= self.smooth <= 1, "0 to 1")
        self._require("recent", 0 <= self.recent <= 1, "0 to 1")

    @property
    def needs(self) -> tuple[str, ...]:
        return (DEMONSTRATIONS,)


@dataclass(frozen=True, kw_only=True)
class GRPOSettings(ChainSettings):
    """Whole episodes, `num_envs` at a time, in groups from the same start, through the denoising chain."""

    kind: ClassVar[str] = "grpo"
    bases: ClassVar[tuple[str, ...]] = (*PROCESSES, *FINETUNED, "lerobot_diffusion", "lerobot_flow")
    group: int = 8
    """Episodes from the same start; their advantage is (score - mean) / std of the group."""
    keep: tuple[float, float] = (0.1, 0.9)
    """Least and largest share of successes of a group that is learned from."""
    reward: Literal["success", "progress", "process"] = "success"
    """`success`: 1 or 0 (SimpleVLA-RL); `progress`: failures by their distance to the successes (SRPO);
    `process`: of every decision, by the chance of success, with a value instead of groups (VLA-RL)."""
    algorithm: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.keep
        self._require("group", self.group >= 2, "2 or more")
        self._require("keep", 0 <= low <= high <= 1, "0 to 1, the lower one first")
        scaled = self.algorithm.scale_reward
        require(not scaled, "method.algorithm.scale_reward", scaled, "false: episodes do not go on")
        reads = self.algorithm.privileged
        require(not reads, "method.algorithm.privileged", reads, "false: episodes are compared, not valued")

    def check_run(self, run: RunLike) -> None:
        super().check_run(run)
        allowed = f"multiples of method.group, {self.group}"
        require(run.num_envs % self.group == 0, "num_envs", run.num_envs, allowed)


@dataclass(frozen=True, kw_only=True)
class RL100Settings(PPOSettings):
    """RL-100: PPO inside the chain on the demonstrations, gated; then online; then one step."""

    kind: ClassVar[str] = "rl100"
    bases: ClassVar[tuple[str, ...]] = DENOISING
    exploration: ProcessConfig = field(
        default_factory=lambda: ProcessConfig(process="flow_sde", stochastic_steps="all")
    )
    """As everywhere; here all steps of the chain explore, and each has a ratio."""
    algorithm: ChainPPOConfig = field(default_factory=lambda: ChainPPOConfig(reduction="per_step"))
    """Of the online phase; the offline one has its own rate and range, and the rest from here."""
    offline: OfflinePPOConfig = field(default_factory=OfflinePPOConfig)

    @property
    def needs(self) -> tuple[str, ...]:
        return (DEMONSTRATIONS,)

    @property
    def leaves_base(self) -> bool:
        return self.env_steps == 0 and self.offline.updates == 0


def transitions(process: ProcessConfig, steps: int) -> int:
    """Returns S, how many transitions of a chunk of so many denoising steps a process scores."""
    named = {
        "flow_sde": 1 if process.stochastic_steps == "one" else steps,
        "flow_noise": steps,
        "flow_cfm": process.pairs,
    }
    return named.get(process.process or "", process.tuned_steps or steps)


@dataclass(frozen=True, kw_only=True)
class LatentSettings(OffPolicySettings):
    """RL on the noise that the frozen base decodes."""

    kind: ClassVar[str] = "latent"
    bases: ClassVar[tuple[str, ...]] = (*DENOISING, *FINETUNED, "lerobot_diffusion", "lerobot_flow", "onnx")
    demo_ratio: float | None = 0.0
    """The noise behind demonstrations is unknown: only algorithm.variant=na learns from them."""
    actor: LatentActorConfig = field(default_factory=LatentActorConfig)
    algorithm: LatentConfig = field(default_factory=LatentConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm.variant == "sac":
            self._require("demo_ratio", self.demo_ratio == 0, "0 with method.algorithm.variant=sac")

    def check_run(self, run: RunLike) -> None:
        """Refuses experience whose noise is unknown."""
        if run.human.input != "none":
            raise ConfigError(
                f"human.input: got {run.human.input!r} with method=latent, allowed: none. What a person "
                "does was not decoded from noise. Use method=residual."
            )
        if run.replay.reuse and self.algorithm.variant == "sac":
            raise ConfigError(
                "replay.reuse: given with method.algorithm.variant=sac, allowed: none. Earlier steps "
                "were kept without their noise. Use method.algorithm.variant=na."
            )


@dataclass(frozen=True, kw_only=True)
class ChunkedSettings(OffPolicySettings):
    """Q-learning over the chunks that are executed, of `n_exec` actions: offline, then online."""

    kind: ClassVar[str] = "chunked"
    bases: ClassVar[tuple[str, ...]] = ("flow",)
    offline_updates: int = 0
    """Learner updates on the demonstrations alone, before the first control step."""
    explore_steps: int = 0
    """As everywhere; what acts from the first step on has learned offline."""
    algorithm: ChunkQConfig = field(default_factory=ChunkQConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("offline_updates", self.offline_updates >= 0, "0 or more")

    @property
    def leaves_base(self) -> bool:
        return self.env_steps == 0 and self.offline_updates == 0


@dataclass(frozen=True, kw_only=True)
class ActorSettings(OffPolicySettings):
    """Settings of methods that learn a new actor and do not use the base."""

    explore_std: tuple[float, float] = (0.1, 0.1)
    """Noise of a deterministic actor: that of the first env and of the last; those between step evenly."""
    algorithm: ActorCriticConfig = field(default_factory=ActorCriticConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("explore_std", min(self.explore_std) >= 0, "0 or more, each")


@dataclass(frozen=True, kw_only=True)
class DirectSettings(ActorSettings):
    """One action at a time (RLPD, WSRL, FastTD3, FastSAC)."""

    kind: ClassVar[str] = "direct"
    bases: ClassVar[tuple[str, ...]] = (*CLONED, NOISE)
    pretrain_updates: int = 0
    """Updates on the demonstrations before the first control step: the actor clones them, the critics
    learn the clone's values; then `explore_steps` of the clone come before any other update (WSRL)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("pretrain_updates", self.pretrain_updates >= 0, "0 or more")

    @property
    def needs(self) -> tuple[str, ...]:
        return (DEMONSTRATIONS,) if self.demo_ratio != 0 or self.pretrain_updates else ()


@dataclass(frozen=True, kw_only=True)
class SequenceSettings(ActorSettings):
    """`n_exec` actions from one observation (SRL)."""

    kind: ClassVar[str] = "sequence"
    algorithm: SequenceConfig = field(default_factory=SequenceConfig)


@dataclass(frozen=True, kw_only=True)
class QARLSettings(ActorSettings):
    """An actor against an adversary that pushes it, at random first and by what it learned later (QARL)."""

    kind: ClassVar[str] = "qarl"
    algorithm: QARLConfig = field(default_factory=QARLConfig)


_OWN: tuple[type[MethodSettings], ...] = (
    ResidualSettings,
    DaggerSettings,
    PPOSettings,
    PlainPPOSettings,
    ImaginedSettings,
    GRPOSettings,
    LatentSettings,
    ChunkedSettings,
    DirectSettings,
    RL100Settings,
    SequenceSettings,
    QARLSettings,
)
