"""Whole training runs: the stages of a run's plan, one after another; exact resume.

    stage   demos  look  filter    clone  finetune                   evaluate       online    distil
    phase   demos  look  progress  bc     those of finetune.phases   base or final  <method>  distil

Each phase reads what the phases before it left on the disk and leaves its own result there, so a
resumed run and an unbroken one go the same way. Only the loops of `progress`, `bc` and of
the method, and those of fine-tuning, have a state of their own; it is in the checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from robot_rl.config import dump, load, options, plain, shell, words
from robot_rl.core.errors import CheckpointError, RenderError, require
from robot_rl.core.files import is_yaml, replace_file, with_checksum_line, write_json
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import eval_seeds, train_seed
from robot_rl.data.episode import Feature, observed
from robot_rl.data.episodes import EpisodesMeta, episodes_meta
from robot_rl.data.store.layout import is_store
from robot_rl.hal.leased import EnvDevice
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicy
from robot_rl.policies.one_step import OneStepPolicy
from robot_rl.policies.vla.lerobot import LeRobotPolicy
from robot_rl.real.station import load_station
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.evaluate import EvalResult, evaluate_in, to_json
from robot_rl.sched.opened import opened
from robot_rl.sim.config import making
from robot_rl.sim.sight import check_sight
from robot_rl.train.assemble import evaluator, evaluators, generator, policy_meta
from robot_rl.train.base import (
    LOOK,
    PROGRESS,
    clone,
    collect,
    demo_folder,
    given_base,
    look,
    value_progress,
)
from robot_rl.train.before import check_start_classes
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import load_demonstrations
from robot_rl.train.deploy.online import check_arms, make_arm
from robot_rl.train.earlier import check_earlier, check_spaces
from robot_rl.train.finetune.names import saved_folder
from robot_rl.train.finetune.stage import check_finetuned, finetuning_phases
from robot_rl.train.improve.acting import open_sim
from robot_rl.train.improve.config import ChainSettings, DaggerSettings
from robot_rl.train.improve.method import Method, Start, eval_metrics, method_of, settings_of
from robot_rl.train.improve.offline import learn_offline
from robot_rl.train.pictures import Photographer
from robot_rl.train.record import (
    load_config,
    machine,
    new_folder,
    removed_if_refused,
    versions,
    write_report,
)
from robot_rl.train.recording import Recorder, recorded_of, starts_of
from robot_rl.train.session import Session, execute, learn

_BEGINS_MIDWAY = (
    "the run is resumed without a record of its first steps: the later ones are not recorded either. Labels "
    "go on in labels/"
)
DISTIL = "distil"
"""The phase in which a student of the improved policy learns to act in one network call."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run: the content of summary.json."""

    task: str
    recipe: str
    seed: int
    base_success: float | None
    """None where only the result was evaluated, as with `stages=demos,clone,evaluate`."""
    final_success: float
    episodes: int
    """Held-out episodes behind each success."""
    env_steps: int
    """Control steps of reinforcement learning, over all envs."""
    control_steps: dict[str, int]
    """The bill: control steps by who made them, of `SOURCES`. It has the demonstrations too."""
    train_minutes: float
    """From the start to this summary, evaluations included, over all lives of the run."""
    run: str
    """Run folder."""
    base_ci: tuple[float, float] | None
    """95 % Wilson interval."""
    final_ci: tuple[float, float]
    solved_at_reset: int
    """Held-out episodes that were solved before the policy acted; they count as solved above."""
    base_return: float | None
    """Mean undiscounted sum of rewards of the same episodes."""
    final_return: float | None
    says_success: bool
    """Whether the env reports successes; if not, the return counts."""
    demo_success: float | None
    """Share of the demonstrations that succeed; None without any."""
    demo_env_steps: int
    """Control steps of the demonstrations, or of the noise of `look`; not in `env_steps`."""
    base_digest: str | None
    """SHA-256 over all actions of the evaluation: `robot-rl evaluate` gives the same."""
    final_digest: str
    finetune: dict[str, Any] | None
    """Held-out errors of the policy that was fine-tuned and of its baselines: `finetune.phases.Outcome`."""
    nan_resets: int
    command: str
    """Repeats the run."""
    timing: dict[str, float]
    """Wall-clock seconds by stage."""
    spent: dict[str, dict[str, float]]
    """What each evaluated policy had cost, from the first demonstration on: `minutes` of wall-clock and
    `cpu_minutes` of this process, evaluations left out."""
    versions: dict[str, str]
    machine: dict[str, str]
    rows: int
    """Of metrics.jsonl: one that was cut between two of them has fewer."""
    sources: dict[str, dict[str, Any]]
    """Of several sources, by name: `task`, `robot`, `env_steps`, and where these have several scenes `base`
    and `final` as in the files of the evaluations. What stands above is of all together. Empty with one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(config: RunConfig) -> Summary:
    """Trains from the beginning, in a new run folder below `config.out`.

    Raises:
        RobotRLError: a mistake in the configuration, a device that another run holds, a full
            disk; the message says what to do.
    """
    config = absolute(config)
    _look_at_envs(config)  # before there is a folder
    if config.has_arm:
        check_arms(config)
    folder = new_folder(config.out, f"{config.recipe}-seed{config.seed}")
    with removed_if_refused(folder):
        replace_file(folder / "config.yaml", with_checksum_line(dump(config.used())))
        return _execute(config, folder)


def _look_at_envs(config: RunConfig) -> None:
    """Refuses experience, a base, sources or cameras that do not fit the run's envs."""
    if config.env.kind == "sim" and config.env.cameras:
        for scene in config.scenes.values():
            check_sight(scene)
    check_start_classes(config)
    is_finetuned = "finetune" in config.plan
    if not (config.replay.reuse or config.bc.policy or config.sources or is_finetuned):
        return
    metas: dict[str, EpisodesMeta] = {}
    features: dict[str, Mapping[str, Feature]] = {}
    for name in config.acting:
        holder, wait_s = f"train {config.recipe}, a look", config.lease_wait_s
        with opened(_looked_at(config, name), holder=holder, wait_s=wait_s) as env:
            metas[name], features[name] = episodes_meta(env), observed(env)
            if config.replay.reuse:
                check_earlier(config.replay, metas[name], features[name])
            if config.bc.policy:
                given_base(config, env)
            if is_finetuned:
                check_finetuned(config, env)
    for name, source in config.acting.items():
        if source.world is not None:
            hz, own = config.scenes[config.scene_of(name)].rate_hz, metas[name].control_hz
            allowed = f"a model at {hz:g} Hz, as its scene; this one is at {own:g}: env.control_hz={own:g}"
            require(own == hz, f"sources.{name}.world", source.world, allowed)
    # What a scene hides differs from task to task; cloning pads what it lacks.
    hidden = (PRIVILEGED,) if isinstance(config.method, DaggerSettings) else ()
    check_spaces(metas, features, but=hidden)


def _looked_at(config: RunConfig, name: str) -> EnvDevice:
    """Returns a world model as it is, and else simulations of what a source acts in."""
    if config.acting[name].world is not None:
        return simulation(config.env_of(name), 1)
    return evaluator(config, config.scene_of(name))


def resume(folder: Path | str) -> Summary:
    """Goes on with a run that was cut short, to the same result as if it had not been.

    Raises:
        ConfigError: the folder is no run folder.
    """
    folder = Path(folder)
    return _execute(load_config(folder), folder)


def _execute(config: RunConfig, folder: Path) -> Summary:
    torch.set_num_threads(config.torch_threads)
    return execute(Session(config, folder), _phases(config), _conclude)


# Phases: each leaves its result on the disk.


def _evaluate_base(session: Session) -> None:
    _final_evaluation(session, "base")


def _take_base(session: Session) -> None:
    """Makes the base the run's result."""
    shutil.copytree(session.folder / "policy/base", session.folder / "policy/final", dirs_exist_ok=True)


def _improve(session: Session) -> None:
    """Improves the base by the run's method; where nothing is learned the base is the result."""
    config, method = session.config, method_of(session.config)
    if config.method.leaves_base:
        _take_base(session)
        return
    base: Any = load_policy(session.folder / "policy" / "base")[0]
    learns_steps = not isinstance(config.method, DaggerSettings)
    episodes = load_demonstrations(demo_folder(session), config, as_executed=learns_steps)
    with (
        _acting_envs(method, session) as envs,
        evaluators(session) as eval_envs,
        _recorders(session, eval_envs) as recorders,
    ):
        base = base.to(config.device)
        start = Start(episodes=episodes, base=base, envs=envs, eval_envs=eval_envs, recorders=recorders)
        with session.timer.stage("build"):
            loop, policy = method.assemble(session, start)
        with ExitStack() as stack:
            for source in loop.sources:
                stack.enter_context(closing(source))
            learn(session, loop, config.method.kind, config.env_steps, unit="steps")
        loop.hand_over(policy)
        meta = policy_meta(config, *eval_envs.values())
        save_policy(session.folder / "policy" / "final", policy, meta=meta)
        if isinstance(policy, LeRobotPolicy):  # LeRobot reads it, too
            policy.save(session.folder / "policy" / "lerobot")
        session.results["nan_resets"] = sum(source.episodes.nan_resets for source in loop.sources)


def _distil(session: Session) -> None:
    """Replaces the improved policy by a one-step student; the teacher stays in policy/improved."""
    folder = session.folder / "policy"
    if not (folder / "improved").is_dir():  # else this phase was begun before
        (folder / "final").rename(folder / "improved")
    improved, meta = load_policy(folder / "improved")
    config, cfg = session.config, settings_of(session.config, ChainSettings).distil
    teacher = cast("ChunkPolicy", improved).to(config.device)
    student = OneStepPolicy.student_of(teacher, generator=generator(config.seed, "student"))
    how: dict[str, Any] = {"horizon": student.horizon, "gamma_step": 1.0}
    algorithm = resolve("algorithm", "distil", at=DISTIL)(
        student, teacher, cfg, train_seed(config.seed, DISTIL)
    )
    episodes = load_demonstrations(demo_folder(session), config)
    with evaluators(session) as envs:
        learn_offline(
            session,
            Start(episodes=episodes, base=improved, envs={}, eval_envs=envs),
            student,
            algorithm,
            lambda sampler, rng: sampler.sample_chunks(cfg.batch, **how, rng=rng),
            cfg.updates,
            phase=DISTIL,
        )
        save_policy(folder / "final", student, meta=meta)


@contextmanager
def _acting_envs(method: Method, session: Session) -> Generator[Mapping[str, VectorEnv]]:
    """Opens the envs that collect in this process, by the name of the source."""
    config, envs = session.config, dict[str, VectorEnv]()
    leases = [held.lease for held in session.leases]
    with ExitStack() as stack:
        inline = [name for name in config.acting if method.opens and not config.acts_alone(name)]
        for name in inline:
            if waits := making(config.acting[name].batch):
                session.display.message(waits)
            if config.acting[name].is_arm:
                env = make_arm(config, session.folder, leases, name)
            else:
                env = open_sim(config, session.folder, leases, name, method)
            envs[name] = stack.enter_context(closing(env))
        yield envs


@contextmanager
def _recorders(session: Session, envs: Mapping[str, VectorEnv]) -> Generator[Mapping[str, Recorder]]:
    """Opens the recorders of the run's experience, by the name of the source; `envs`: of the scenes."""
    config, folder = session.config, session.folder / "experience"
    has_begun = session.loop_state(config.method.kind) is not None
    if not has_begun:
        shutil.rmtree(folder, ignore_errors=True)  # of a life that was cut short before its first checkpoint
    keeps = config.replay.record and method_of(config).records
    has_labels = isinstance(config.method, DaggerSettings)
    with ExitStack() as stack:
        recorders = dict[str, Recorder]()
        for name, source in config.acting.items() if keeps else ():
            if config.env_of(name).kind == "world":  # nobody may learn from that as if it had happened
                continue
            if config.keeps_pictures_there(name):
                continue
            if has_labels and has_begun and not is_store(folder / name):  # of a version that kept none
                session.display.message(_BEGINS_MIDWAY)
                continue
            device = None if source.named is None else load_station(source.named).name
            how = recorded_of(envs[config.scene_of(name)], is_arm=source.is_arm, has_labels=has_labels)
            # Of the env that acts: that of an evaluation has no bank, or another mixture.
            starts = None if source.is_arm else starts_of(config.env_of(name).resets, folder / name)
            # Labels are learned from files of their own; a replay is restored from what is recorded.
            recorder = Recorder(folder / name, **how, starts=starts, device=device, is_exact=not has_labels)
            recorders[name] = stack.enter_context(recorder)
        yield recorders


def _evaluate_final(session: Session) -> None:
    if "online" not in session.config.plan:
        _take_base(session)
    _final_evaluation(session, "final")


def _phases(config: RunConfig) -> dict[str, Callable[[Session], None]]:
    """Returns what the stages of the run's plan do, by the name of their phase."""
    known: dict[str, dict[str, Callable[[Session], None]]] = {
        "demos": {"demos": collect},
        "look": {LOOK: look},
        "filter": {PROGRESS: value_progress},
        "clone": {"bc": clone},
        "finetune": finetuning_phases(),
        "evaluate": {"base": _evaluate_base},
        "online": {config.method.kind: _improve},
        "distil": {DISTIL: _distil},
    }
    stages = [*(known[stage] for stage in config.plan[:-1]), {"final": _evaluate_final}]
    return {name: phase for stage in stages for name, phase in stage.items()}


def _final_evaluation(session: Session, which: str) -> None:
    """Evaluates a saved policy on the held-out seeds, as `robot-rl evaluate` does again."""
    session.results.setdefault("pictures", {})[which] = []
    session.results.setdefault("spent", {})[which] = session.timer.minutes(without="evaluate")
    results = {scene: _evaluated(session, which, scene) for scene in session.config.scenes}
    pictures = session.results["pictures"]
    entries = [entry for phase in reversed(pictures.values()) for entry in phase]  # the newest first
    if entries:
        write_json(session.folder / "failures/index.json", {"pictures": entries}, is_checked=True)
    session.results[which] = to_json(results)
    write_json(session.folder / f"evaluation-{which}.json", to_json(results), is_checked=True)
    session.write(which, eval_metrics(results))


def _evaluated(session: Session, which: str, scene: str) -> EvalResult:
    """Evaluates a saved policy in one scene, and takes pictures of it."""
    config, total = session.config, session.config.evaluate.episodes
    with closing(session.open(evaluator(config, scene, draws=config.video.is_wanted))) as env:
        photographer = _photographer(session, env, eval_seeds(config.seed, total))
        with session.phase(f"evaluate {which} {scene}".strip(), total, unit="episodes") as progress:
            with session.timer.stage("evaluate"):
                result = evaluate_folder(
                    session.folder, which, config, env, on_batch=progress.update, watch=photographer
                )
            progress.update(total, **result.shown())
        if photographer is not None:
            label = f"{which}-{scene}" if scene else which
            session.results["pictures"][which] += photographer.save(session.folder, label)
            photographer.close()
    return result


def evaluate_folder(
    folder: Path,
    which: str,
    config: RunConfig,
    env: VectorEnv,
    *,
    episodes: int | None = None,
    disturb: float = 0.0,
    adversary: bool = False,
    on_batch: Callable[[int], None] | None = None,
    watch: Callable[..., None] | None = None,
) -> EvalResult:
    """Evaluates `policy/<which>` of a run folder on the run's held-out seeds.

    Args: disturb: see `evaluate_in`. adversary: whether the adversary acts that the policy learned against.

    Raises:
        CheckpointError: no such policy, or one of another task or robot.
        ConfigError: an adversary is asked for, and there is none.
    """
    if not (folder / "policy" / which).is_dir():
        raise CheckpointError(
            f"{folder}: the run ended before it had a policy {which!r}. "
            f"`robot-rl train resume={folder}` goes on with it."
        )
    policy, meta = load_policy(folder / "policy" / which, expect=policy_meta(config, env))
    module: Any = policy
    if adversary:
        require(policy.kind == "contested", "adversary", adversary, "false, but for runs with method=qarl")
        module.is_contested = True
    return evaluate_in(
        env,
        module.to(config.device),
        seeds=eval_seeds(config.seed, episodes or config.evaluate.episodes),
        n_exec=meta.n_exec,
        device=config.device,
        disturb=disturb,
        on_batch=on_batch,
        watch=watch,
    )


def _photographer(session: Session, env: VectorEnv, seeds: Any) -> Photographer | None:
    """Returns what takes the pictures, or None after a message why not."""
    config = session.config.video
    if not config.is_wanted:
        return None
    try:
        return Photographer(env, seeds, config)
    except RenderError as error:
        session.display.message(f"no video: {str(error).splitlines()[0]}")
        return None


def _conclude(session: Session) -> Summary:
    """Writes summary.json and the report."""
    config, results = session.config, session.results
    final, base = results["final"], results.get("base", {})
    moments = {which: results[which] for which in ("base", "final") if which in results}
    seen: dict[str, Any] = results.get("demos") or results.get(LOOK, {})
    tuned = results.get("finetune")
    summary = Summary(
        task=config.task,
        recipe=config.recipe,
        seed=config.seed,
        base_success=base.get("success"),
        final_success=final["success"],
        episodes=final["episodes"],
        env_steps=session.counters.env_steps,
        control_steps=session.counters.by_kind,
        train_minutes=round(session.elapsed_s / 60.0, 3),
        run=str(session.folder),
        base_ci=tuple(base["ci"]) if base else None,
        final_ci=tuple(final["ci"]),
        solved_at_reset=final["solved_at_reset"],
        base_return=base.get("return"),
        final_return=final.get("return"),
        says_success=final.get("says_success", True),
        demo_success=seen.get("success"),
        demo_env_steps=seen.get("env_steps", 0),
        base_digest=base.get("digest"),
        final_digest=final["digest"],
        finetune=tuned,
        nan_resets=results.get("nan_resets", 0) + base.get("nan_resets", 0) + final["nan_resets"],
        command=_command(config, None if tuned is None else tuned["updates"]),
        timing=session.timer.seconds(),
        spent=results["spent"],
        versions=versions(_PACKAGES),
        machine=machine(config.device),
        rows=session.metrics.num_rows,
        sources={
            name: {
                "task": source.task or config.env.task,
                "robot": source.robot,
                "env_steps": session.counters.of_source(number),
                **_of_scene(moments, config.scene_of(name)),
            }
            for number, (name, source) in enumerate(config.sources.items())
        },
    )
    write_json(session.folder / "summary.json", summary.to_json(), is_checked=True)
    with session.timer.stage("report"):
        session.display.message(f"report: {write_report(session.folder)}")
    return summary


def _of_scene(moments: Mapping[str, dict[str, Any]], scene: str) -> dict[str, Any]:
    """Returns the evaluations of one of several scenes; those of a scene alone are the run's."""
    return {which: found["sources"][scene] for which, found in moments.items() if "sources" in found}


_PACKAGES = ("mujoco", "torch", "gymnasium", "numpy")


def _command(config: RunConfig, finetuned: int | None) -> str:
    """Returns the command that repeats the run: its recipe, and every setting that is not the recipe's.

    Args: finetuned: updates of fine-tuning, which may have been found; None without that stage.
    """
    if finetuned is not None:
        config = replace(config, finetune=replace(config.finetune, updates=finetuned, minutes=None))
    chosen = [f"recipe={config.recipe}"] if config.recipe in options("recipe") else []
    usual = load(RunConfig, chosen, config_name="train")
    base, given = plain(usual), replace(config, recipe=usual.recipe).used()
    if usual.method.kind != config.method.kind:
        base["method"] = {**plain(type(config.method)()), "kind": usual.method.kind}
    return f"robot-rl train {shell(chosen + words(given, base))}"


def absolute(config: RunConfig) -> RunConfig:
    """Returns the config with paths that hold wherever the run is resumed."""

    def absolute(path: str | Path | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().resolve())

    def named(name: str | None) -> str | None:
        return absolute(name) if name is not None and is_yaml(name) else name

    def listed(entry: str) -> str:
        task, colon, robot = entry.rpartition(":")
        return f"{task}{colon}{named(robot)}"

    reuse = tuple(str(Path(folder).resolve()) for folder in config.replay.reuse)
    is_finetuned = "finetune" in config.plan
    tuned = saved_folder(config.finetune.policy) if is_finetuned else None
    sources = {
        name: replace(one, world=absolute(one.world), station=named(one.station), robot=named(one.robot))
        for name, one in config.sources.items()
    }
    env, hub = config.env, config.hub
    return replace(
        config,
        sources=sources,
        station=named(config.station),
        env=replace(
            env,
            id=absolute(env.id) if env.kind == "world" else env.id,
            expert=absolute(env.expert) if env.kind == "sim" else env.expert,
            robot=named(env.robot),
            robots=tuple(map(listed, env.robots)),
            resets=replace(env.resets, bank=absolute(env.resets.bank)),
        ),
        hub=replace(hub, token_file=absolute(hub.token_file), ca=absolute(hub.ca)),
        demos=replace(config.demos, path=absolute(config.demos.path)),
        bc=replace(config.bc, policy=absolute(config.bc.policy), encoder=absolute(config.bc.encoder)),
        finetune=replace(config.finetune, policy=absolute(tuned) or config.finetune.policy),
        replay=replace(config.replay, reuse=reuse),
        human=replace(config.human, classifier=absolute(config.human.classifier)),
    )
