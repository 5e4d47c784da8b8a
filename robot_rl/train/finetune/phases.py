"""The phases of fine-tuning: of `robot-rl finetune`, and of the stage `finetune` of a run.

    pictures -> baselines -> neighbour -> length -> policy -> act settings -> act

The last episodes are held out. The baselines that repeat, map linearly or
remember are measured on them. Then the policy learns from the others, then LeRobot's ACT for as long. Each
is measured on the held-out episodes at its end, and nothing is chosen by that. Each phase leaves its
result in a checkpoint, so a resumed run and an unbroken one go the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robot_rl.core.errors import ConfigError
from robot_rl.core.policy import DemoBatch
from robot_rl.data.facts import DatasetFacts
from robot_rl.data.lerobot.damage import left_out
from robot_rl.policies.checkpoint import PolicyMeta, save_policy
from robot_rl.train.finetune.act import Trial, act_job, make_act, try_settings, why_no_act
from robot_rl.train.finetune.baselines import fit_ridge, past_of, predictor, seen_meta, simple_baselines
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.data import in_journal, stream_seed
from robot_rl.train.finetune.errors import Errors, judge
from robot_rl.train.finetune.learn import (
    Finetuning,
    TrainingJob,
    assemble_watched,
    count_parameters,
    job_of_policy,
    policy_errors,
    prepare,
    updates_in,
    write_errors,
)
from robot_rl.train.finetune.length import choose_length
from robot_rl.train.finetune.neighbour import Choice, NearestNeighbour, read_moments, thumbnails
from robot_rl.train.finetune.policies import Module, make_policy, save
from robot_rl.train.session import learn


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of the policy and of its baselines. Errors are those of `errors.Ruler`."""

    heldout_error: float
    """Mean absolute error on the held-out episodes, in standard deviations of the training actions."""
    nearest_neighbour_error: float | None
    """Of the best choice for it: the mean of several neighbours, as a rule."""
    single_neighbour_error: float | None
    """Of the best choice with one neighbour, which is what many call by this name."""
    act_error: float | None
    """None where there was no ACT; `act` says why."""
    policy: str
    dataset: str
    robot: str
    """That was recorded."""
    parameters: int
    """Numbers that learned."""
    updates: int
    policy_minutes: float
    """Processor minutes of the policy's training loop; wall-clock on a GPU."""
    act_parameters: int | None
    act_updates: int | None
    act_minutes: float | None
    train_episodes: tuple[int, ...]
    heldout_episodes: tuple[int, ...]
    horizon: int
    stride: int
    chunks: int
    """Held-out chunks that every error is a mean over."""
    groups: dict[str, dict[str, float]]
    """Predictor -> group of joints -> normalised error."""
    units: dict[str, dict[str, float]]
    """Predictor -> group of joints -> error in the dataset's units."""
    predictors: dict[str, dict[str, Any]]
    """Predictor -> all fields of `errors.Errors`."""
    verdict: dict[str, Any]
    """Whether anything trained beats the best baseline: `errors.Verdict`, with its text."""
    ridge: dict[str, Any]
    """What was chosen for the ridge regression, on training episodes."""
    nearest_neighbour: dict[str, Any] | None
    """What was chosen for it, on training episodes."""
    act: dict[str, Any] | str
    """What was chosen for it, on training episodes, and what was tried."""
    length: dict[str, Any] | None
    """How the number of updates was found, on training episodes; None if it was given."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def outcome(work: Finetuning) -> Outcome:
    """Returns what all phases left in the session."""
    config, results, split = work.config, work.session.results, work.data.split
    policy, act, neighbour = results["policy"], results.get("act"), results.get("neighbour")
    errors = _all_errors(results)
    return Outcome(
        heldout_error=policy["errors"]["normalised"],
        nearest_neighbour_error=neighbour and neighbour["errors"]["normalised"],
        single_neighbour_error=neighbour and neighbour["single_errors"]["normalised"],
        act_error=act and act["errors"]["normalised"],
        policy=config.policy,
        dataset=config.dataset,
        robot=work.facts.meta.robot,
        parameters=policy["parameters"],
        updates=policy["updates"],
        policy_minutes=round(policy["minutes"], 3),
        act_parameters=act and act["parameters"],
        act_updates=act and act["updates"],
        act_minutes=act and round(act["minutes"], 3),
        train_episodes=split.train,
        heldout_episodes=split.heldout,
        horizon=config.horizon,
        stride=config.stride,
        chunks=policy["errors"]["chunks"],
        groups={name: error.groups for name, error in errors.items()},
        units={name: error.units for name, error in errors.items()},
        predictors={name: asdict(error) for name, error in errors.items()},
        verdict=judge(errors).to_json(),
        ridge=results["baselines"]["ridge"],
        nearest_neighbour=neighbour and {**neighbour["choice"], "single": neighbour["single"]},
        act=results["no_act"] or {"chosen": asdict(_best_trial(results)), "tried": results["trials"]},
        length=results.get("length"),
    )


def _pictures(work: Finetuning) -> None:
    """Decodes the pictures once, for all readers."""
    data, session = work.data, work.session
    session.display.message(f"{work.config.dataset}: {data.split.text()}")
    if waiting := in_journal(Path(work.config.dataset)):
        session.display.message(
            f"left out: {waiting} episodes in its journal; robot-rl replay seal would add them"
        )
    for line in left_out(data.dataset.skipped):
        session.display.message(line)
    total = data.num_pictures()
    if not total:
        return
    with (
        session.phase("pictures", total, unit="pictures") as progress,
        session.timer.stage("pictures"),
    ):
        data.decode(lambda done, _: progress.update(done))


def _baselines(work: Finetuning) -> None:
    """Measures and saves the baselines without pictures and training: `evaluate` can play them."""
    data, horizon = work.data, work.config.horizon
    past = past_of(data)
    with work.session.timer.stage("baselines"):
        ridge = fit_ridge(data, past, work.ruler.std, horizon=horizon)
    policies = {**simple_baselines(data, past, horizon=horizon), "ridge": ridge.policy}
    errors = {
        name: work.measure(predictor(policy, past), data.split.heldout, pictures=False)
        for name, policy in policies.items()
    }
    meta = PolicyMeta(**vars(seen_meta(data)), n_exec=horizon)
    for name, policy in policies.items():
        save_policy(work.session.folder / f"baseline-{name.replace(' ', '-')}", policy, meta=meta)
    work.session.results["baselines"] = {
        "errors": {name: asdict(error) for name, error in errors.items()},
        "ridge": asdict(ridge.choice),
    }
    for name, error in errors.items():
        work.session.write("baselines", {f"heldout/{name.replace(' ', '_')}": error.normalised})


def _neighbour(work: Finetuning) -> None:
    """Measures the nearest neighbours."""
    data, config = work.data, work.config
    if not config.baselines:
        return
    with work.session.phase("nearest neighbour", len(data.split.train), unit="episodes") as progress:
        with work.session.timer.stage("neighbour"):
            meta = work.facts.meta
            moments = read_moments(data, horizon=config.horizon, on_episode=progress.update)
            same = meta.state_names[: len(meta.action_names)] == meta.action_names
            baseline = NearestNeighbour(moments, work.ruler.std, same_names=same)
        errors, single = (
            work.measure(partial(_remembered, baseline=baseline, choice=choice), data.split.heldout)
            for choice in (baseline.choice, baseline.single)
        )
    work.session.results["neighbour"] = {
        "errors": asdict(errors),
        "choice": asdict(baseline.choice),
        "single": asdict(baseline.single),
        "single_errors": asdict(single),
    }
    work.session.write("neighbour", {"heldout/error": errors.normalised})


def _length(work: Finetuning) -> None:
    """Finds how long to train, on training episodes alone, if it was not given."""
    config, session = work.config, work.session
    if config.updates is None and config.minutes is None:
        found = choose_length(work, partial(_build, work))
        session.results["updates"], session.results["length"] = found.updates, asdict(found)
        session.display.message(f"length: {found.updates} updates, read from episodes {found.validation}")


def _policy(work: Finetuning) -> None:
    """Trains the policy and saves it."""
    config, train = work.config, work.data.split.train

    def job(updates: int) -> TrainingJob:
        return job_of_policy(work, policy, name="policy", episodes=train, updates=updates)

    policy = _build(work, train)
    updates = work.session.results.get("updates") or config.updates
    if updates is None:
        # Noted with the first checkpoint: a resumed run does not measure again.
        assert config.minutes is not None, "without both, the length was found before"
        updates = updates_in(work, job(1), policy, minutes=config.minutes)
        work.session.results["updates"] = updates
        policy = _build(work, train)  # the first has learned while it was timed
    _fit(work, job(updates), policy)
    save(policy, work.policy_folder, work.facts, work.meta)


def _act_settings(work: Finetuning) -> None:
    """Chooses learning rate and batch size for ACT, on training episodes alone."""
    why = why_no_act(work)
    work.session.results["no_act"] = why
    if why is not None:
        if work.config.baselines:
            work.session.display.message(f"no ACT to compare with: {why}")
        return
    minutes = work.minutes("policy") * work.config.act.trial
    work.session.results["trials"] = [asdict(trial) for trial in try_settings(work, minutes=minutes)]


def _act(work: Finetuning) -> None:
    """Trains ACT for as long as the policy was trained."""
    if work.session.results["no_act"] is None:
        policy = make_act(work, work.data.split.train)
        job = act_job(work, policy, _best_trial(work.session.results), minutes=work.minutes("policy"))
        _fit(work, job, policy)


PHASES: dict[str, Callable[[Finetuning], None]] = {
    "pictures": _pictures,
    "baselines": _baselines,
    "neighbour": _neighbour,
    "length": _length,
    "policy": _policy,
    "act settings": _act_settings,
    "act": _act,
}


def _build(work: Finetuning, episodes: tuple[int, ...]) -> Module:
    """Returns the policy with its first weights, for the statistics of these episodes."""
    with work.session.timer.stage("build"):
        return prepare(work, make(work.config, work.data.facts(episodes)), episodes)


def make(config: FinetuneConfig, facts: DatasetFacts) -> Module:
    """Returns the policy with its first weights.

    Raises:
        RobotRLError: there is no such policy, or it does not fit the episodes.
    """
    policy = make_policy(config, facts, torch.Generator().manual_seed(stream_seed(config, "policy")))
    if policy.horizon < config.horizon:
        raise ConfigError(
            f"{config.at}horizon: got {config.horizon}, the policy predicts {policy.horizon} control steps. "
            f"Use {config.at}horizon={policy.horizon} or less."
        )
    return policy


def _fit(work: Finetuning, job: TrainingJob, policy: Module) -> None:
    """Runs a learner's loop, leaves the policy with its averaged weights, and measures it."""
    loop, algorithm = assemble_watched(work, job, policy)
    learn(work.session, loop, job.name, job.updates, unit="updates")
    policy.load_state_dict(algorithm.policy_weights())
    errors = policy_errors(work, policy, work.data.split.heldout)
    write_errors(work, job.name, errors)
    work.session.results[job.name] = {
        "errors": asdict(errors),
        "updates": work.session.counters.updates,
        "minutes": work.minutes(job.name),
        "parameters": count_parameters(policy),
    }
    work.session.counters.updates = 0


def _all_errors(results: Mapping[str, Any]) -> dict[str, Errors]:
    """Returns the errors of every predictor that was measured, by its name in the tables."""
    neighbour, act = results.get("neighbour"), results.get("act")
    found = {"policy": results["policy"]["errors"], **results["baselines"]["errors"]}
    if neighbour is not None:
        found |= {"nearest neighbour": neighbour["errors"], "single neighbour": neighbour["single_errors"]}
    if act is not None:
        found["ACT"] = act["errors"]
    return {name: Errors.from_json(values) for name, values in found.items()}


def _best_trial(results: Mapping[str, Any]) -> Trial:
    return min((Trial(**trial) for trial in results["trials"]), key=lambda trial: trial.error)


def _remembered(batch: DemoBatch, *, baseline: NearestNeighbour, choice: Choice) -> Any:
    return baseline.predict(batch.obs["state"].cpu().numpy(), thumbnails(batch), choice)
