"""One learner on the one loop: what the policy and the baseline ACT have in common.

Both are `BehaviourCloning` on chunks of the same loader, with the same schedule and average, and
both are measured in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.core.policy import DemoBatch
from robot_rl.core.registry import resolve
from robot_rl.data.lerobot.pictures import PictureCache
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.data import (
    DemoData,
    decoded_bytes,
    moving_joints,
    policy_past,
    stream_seed,
)
from robot_rl.train.finetune.errors import Errors, Ruler
from robot_rl.train.finetune.policies import Module, fit_units, picture_size, recipe_of
from robot_rl.train.finetune.split import Split
from robot_rl.train.hooks import checkpoint_hooks, show_progress, updates, write_metrics
from robot_rl.train.loop import Hook, Learner, Pacer, Run
from robot_rl.train.schedule import Always, Counters, Every
from robot_rl.train.session import RunSession

Array = NDArray[Any]
Clock = Callable[[], float]

PICTURES = "pictures"
"""Folder of decoded pictures in a run folder, while it runs."""
PACE_UPDATES = 8
"""Updates that are timed to know how many fit into the minutes; two more before them warm up."""


class Finetuning:
    """One policy and the episodes that it learns from, as a whole run or as a stage of one."""

    def __init__(
        self,
        session: RunSession,
        config: FinetuneConfig,
        dataset: Dataset,
        split: Split,
        *,
        policy_folder: str = "policy",
        meta: PolicyMeta | None = None,
    ) -> None:
        """Reads the statistics of the dataset.

        Args:
            session: of the run.
            config: what is learned, and how.
            dataset: what to learn from.
            split: which of its episodes are only measured on.
            policy_folder: where in the run folder the policy goes.
            meta: what the policy is saved for; None: the dataset, with all actions of a chunk executed.
        """
        self.session, self.config = session, config
        self.policy_folder, self.meta = session.folder / policy_folder, meta
        picture = picture_size(config)
        cache = PictureCache(ram_bytes=1 << 30)
        if decoded_bytes(dataset, picture) <= config.cache_gb * 1e9:
            cache = PictureCache(folder=config.cache or str(session.folder / PICTURES))
        self.data = DemoData(
            dataset,
            split,
            picture=picture,
            device=config.device,
            cache=cache,
            workers=config.workers,
            past=policy_past(config, dataset),
        )
        self.facts = self.data.facts()
        self.ruler = Ruler(
            self.facts.stats["action"]["std"],
            self.facts.meta.action_names,
            moving=moving_joints(dataset, split.train),
        )

    def measure(
        self, predict: Callable[[DemoBatch], Array], episodes: Sequence[int], *, pictures: bool = True
    ) -> Errors:
        """Returns the errors of a predictor on these episodes; `pictures=False` if it looks at none."""
        config = self.config
        with self.session.timer.stage("evaluate"):
            batches = self.data.batches(
                episodes, horizon=config.horizon, stride=config.stride, pictures=pictures
            )
            return self.ruler.measure(batches, predict)

    def minutes(self, learner: str) -> float:
        """Returns how long a learner's loop has sampled and updated: the currency of the comparison.

        Processor time of all threads, so that other programs on the machine do not count; on a GPU
        wall-clock time.
        """
        stages = self.session.timer.state_dict()["stages"]
        index = 1 if self.config.device == "cpu" else 0
        return sum(stages.get(f"{learner} {part}", (0.0, 0.0))[index] for part in ("sample", "update")) / 60.0

    def stage(self, learner: str) -> Callable[[str], AbstractContextManager[Any]]:
        """Returns what times the stages of one learner's loop."""
        return lambda name: self.session.timer.stage(f"{learner} {name}")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What one learner is given."""

    name: str
    """`policy`, or `act`: of its phase, its stages and its rows."""
    episodes: Sequence[int]
    learning: BCConfig
    batch: int
    updates: int
    minutes: float = 0.0
    """It goes on at its last learning rate until it had this much time."""


def job_of_policy(
    work: Finetuning, policy: Module, *, name: str, episodes: Sequence[int], updates: int
) -> TrainingJob:
    """Returns what the run's policy is given, by its authors' recipe."""
    learning = work.config.learning(recipe_of(policy), updates=updates)
    return TrainingJob(
        name=name, episodes=episodes, learning=learning, batch=work.config.batch, updates=updates
    )


def assemble_job(work: Finetuning, job: TrainingJob, policy: Module) -> tuple[Run, BehaviourCloning]:
    """Returns the loop that trains a policy in place, and the algorithm that holds its average."""
    config, name = work.config, job.name
    policy.train()
    algorithm: BehaviourCloning = resolve("algorithm", "bc", at="finetune")(
        policy, job.learning, stream_seed(config, f"{name} noise"), total_updates=job.updates
    )
    work.session.counters.updates = 0
    batches = work.data.random_chunks(
        job.episodes,
        horizon=policy.horizon,
        batch=job.batch,
        seed=stream_seed(config, f"{name} batches"),
    )
    run = Run(
        learners=[Learner(algorithm, batches, Always())],
        pacer=Pacer(finished=lambda at: at.updates >= job.updates and work.minutes(name) >= job.minutes),
        stage=work.stage(name),
        counters=work.session.counters,
    )
    return run, algorithm


def assemble_watched(work: Finetuning, job: TrainingJob, policy: Module) -> tuple[Run, BehaviourCloning]:
    """Returns a loop that also writes metrics, measures the held-out error, and saves."""
    config, session, name = work.config, work.session, job.name
    run, algorithm = assemble_job(work, job, policy)

    def every(times: int) -> Every:
        return Every(-(-job.updates // times) if times else 0)

    def look(at: Counters) -> None:
        if at.updates < job.updates:  # the last measurement is the result
            with session.paused(), algorithm.acting():
                error = policy_errors(work, policy, work.data.split.heldout)
            write_errors(work, name, error)

    def leases(at: Counters) -> None:
        session.check_leases()
        show_progress(session, min(at.updates, job.updates))

    run.pacer.hooks = [
        Hook("progress", Every(1), updates, leases),
        Hook("metrics", every(config.metrics_rows), updates, lambda at: write_metrics(session, run, name)),
        Hook("heldout", every(config.curve_points), updates, look),
        *checkpoint_hooks(session, run, name, config.checkpoint, updates),
    ]
    return run, algorithm


def prepare(work: Finetuning, policy: Module, episodes: Sequence[int]) -> Module:
    """Returns the policy on its device, its units measured on the episodes that it learns from."""
    fit_units(policy, lambda: work.data.batches(episodes, horizon=policy.horizon, stride=work.config.stride))
    return policy.to(work.config.device)


def policy_errors(work: Finetuning, policy: Module, episodes: Sequence[int]) -> Errors:
    """Returns the errors of a policy's deterministic chunks on these episodes."""
    was_training = policy.training
    policy.eval()

    def predict(batch: DemoBatch) -> Array:
        with torch.no_grad():
            encoded = policy.encode(batch.obs)
            return policy.sample(encoded, mode="mean").actions.float().cpu().numpy()

    errors = work.measure(predict, episodes)
    policy.train(was_training)
    return errors


def write_errors(work: Finetuning, name: str, errors: Errors) -> None:
    """Writes a point of the curve."""
    work.session.write(name, {"heldout/error": errors.normalised, "heldout/minutes": work.minutes(name)})


def updates_in(
    work: Finetuning,
    job: TrainingJob,
    policy: Module,
    *,
    minutes: float,
    by: Clock = time.perf_counter,
) -> int:
    """Returns how many updates fit into so much time, by doing a few.

    Args:
        work: whose episodes are learned.
        job: what is learned.
        policy: what learns; it is another one afterwards.
        minutes: how long.
        by: what counts seconds: those that pass, or those of the processor.
    """
    run, algorithm = assemble_job(work, job, policy)
    start = 0.0
    for done in range(PACE_UPDATES + 2):
        if done == 2:
            start = _now(work.config, by)
        algorithm.update(run.leader.batches.sample())
    seconds = (_now(work.config, by) - start) / PACE_UPDATES
    return max(1, round(60.0 * minutes / seconds))


def _now(config: FinetuneConfig, clock: Clock) -> float:
    if config.device != "cpu":
        torch.cuda.synchronize(config.device)
    return clock()


def count_parameters(policy: Module) -> int:
    """Returns how many numbers learn."""
    return int(np.sum([p.numel() for p in policy.parameters() if p.requires_grad]))
