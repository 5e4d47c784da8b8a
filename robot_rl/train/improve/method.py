"""What all methods of improving a base share: their start, their hooks and their evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import quick_eval_seeds
from robot_rl.data.demos import Episodes
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.spec import SavedPolicy
from robot_rl.rollout.envs import Autoreset
from robot_rl.rollout.evaluate import EvalResult, evaluate_in, of_all
from robot_rl.rollout.sources import Source
from robot_rl.train.config import RunConfig
from robot_rl.train.hooks import checkpoint_hooks, env_steps, group_of, show_progress, write_metrics
from robot_rl.train.improve.config import MethodSettings
from robot_rl.train.loop import Hook, Run
from robot_rl.train.recording import Recorder
from robot_rl.train.schedule import Counters, Every, Ratio
from robot_rl.train.session import Session

Module = Any
"""A policy that is a `torch.nn.Module` as well; Python has no type for both."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a method starts from."""

    episodes: Episodes
    """Demonstrations."""
    base: SavedPolicy
    """The policy to improve, on the device of the run."""
    envs: Mapping[str, VectorEnv]
    """What collects in this process, by the name of the source."""
    eval_envs: Mapping[str, VectorEnv]
    """Simulations of the quick evaluations, by the name of the scene; autoreset DISABLED."""
    recorders: Mapping[str, Recorder] = field(default_factory=lambda: dict[str, Recorder]())
    """Recorders of the experience, by the name of the source; none of one that is not recorded."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to improve a base."""

    make_policy: Callable[[RunConfig, SavedPolicy], Module]
    """Returns the policy that learns, as it is before the first update."""
    assemble: Callable[[Session, Start], tuple[Run, Module]]
    """Returns the loop, and the policy that it trains."""
    make_source: Callable[[RunConfig, Module, VectorEnv, str], Source] | None = None
    """Returns what collects in an env, with an acting copy of the policy, for the source of that name;
    None for single control steps."""
    settings: type[MethodSettings] | None = None
    """Of a plug-in's method, whose name is its `kind`; ours are in `improve.config`."""
    autoreset: Autoreset = "same_step"
    """Of the env that collects."""
    takes_tensors: bool = False
    """Whether its sources take the tensors of an engine that has them; else they get numpy arrays."""
    opens: bool = True
    """Whether it collects in envs that the run opens for it; else it leases its own when it needs them."""
    records: bool = True
    """Whether it collects single control steps, which can be kept for later runs."""


S = TypeVar("S", bound=MethodSettings)


def settings_of(config: RunConfig, kind: type[S]) -> S:
    """Returns the settings of the run's method, which are of that kind."""
    assert isinstance(config.method, kind), config.method.kind
    return config.method


def method_of(config: RunConfig) -> Method:
    """Returns the run's method."""
    return cast(Method, resolve("method", config.method.kind, at="method"))


def privileged_scale(config: RunConfig, episodes: Episodes) -> Normaliser | None:
    """Returns what scales the privileged state for critics; None where they do not read it.

    Raises:
        ConfigError: they should read it, and there is none.
    """
    if not config.method.reads_privileged:
        return None
    check_privileged(episodes)
    return Normaliser.fit({PRIVILEGED: episodes.obs[PRIVILEGED]}, episodes.action)


def check_privileged(episodes: Episodes) -> None:
    """Refuses critics that read the privileged state where there is none."""
    if PRIVILEGED not in episodes.obs:
        raise ConfigError(
            "method.algorithm.privileged: got True, allowed: false where the policy sees the whole state. "
            "Leave elements out by env.state."
        )


def add_hooks(
    session: Session,
    run: Run,
    policy: Module,
    eval_envs: Mapping[str, VectorEnv],
    more: Callable[[], dict[str, float]],
) -> None:
    """Adds the hooks of a loop that collects; `more` returns further metrics."""
    config, name = session.config, session.config.method.kind
    sources = dict(zip(config.acting, run.sources, strict=True))

    def offer(at: Counters) -> None:
        session.check_leases()
        for learner in run.learners:
            if learner.publisher is not None:
                learner.publisher.offer(at.updates, learner.algorithm.policy_weights)

    def look(_: Counters) -> None:
        run.hand_over(policy)
        quick_evaluation(session, policy, eval_envs)

    offer(session.counters)
    run.pacer.hooks = [
        Hook("offer", Every(1), env_steps, offer),
        Hook("progress", Every(1), env_steps, lambda at: show_progress(session, at.env_steps, at.updates)),
        Hook(
            "metrics",
            Every(max(1, config.env_steps // config.metrics_rows)),
            env_steps,
            lambda at: write_metrics(session, run, name, sources, more() | _forgone(run)),
        ),
        Hook("evaluate", Every(config.evaluate.every_env_steps), env_steps, look),
        *checkpoint_hooks(session, run, name, config.checkpoint, env_steps),
    ]


def eval_metrics(results: Mapping[str, EvalResult]) -> dict[str, float]:
    """Returns the row of an evaluation: of all sources together, and of each of several."""
    row: dict[str, float] = {}
    for name, result in {"": of_all(results), **results}.items():
        row |= {
            f"{group_of('eval', name)}/{metric}": value
            for metric, value in {
                "success": result.rate,
                "episodes": float(len(result.seeds)),
                "solved_at_reset": float(result.solved_at_reset.sum()),
                "steps": float(result.steps.mean()),
                "return": float(result.returns.mean()),
            }.items()
        }
    return row


def quick_evaluation(session: Session, policy: Module, eval_envs: Mapping[str, VectorEnv]) -> None:
    """Evaluates on seeds that neither training nor the final evaluation uses."""
    config = session.config
    seeds = quick_eval_seeds(config.seed, config.evaluate.quick_episodes)
    with session.timer.stage("evaluate"), session.paused():
        how: dict[str, Any] = {"seeds": seeds, "n_exec": config.n_exec, "device": config.device}
        results = {name: evaluate_in(env, policy, **how) for name, env in eval_envs.items()}
    session.write(config.method.kind, eval_metrics(results))
    if session.progress is not None:
        session.progress.update(session.progress.done, **of_all(results).shown())


def _forgone(run: Run) -> dict[str, float]:
    """Returns how many updates were left out because an arm does not wait."""
    paces = [learner.pace for learner in run.learners]
    forgone = sum(pace.forgone for pace in paces if isinstance(pace, Ratio))
    return {"collect/updates_forgone": float(forgone)} if forgone else {}
