"""Fine-tuning from end to end.

    pictures -> baselines -> neighbour -> length -> policy -> act settings -> act -> summary

The last episodes are held out. What repeating, a linear map and remembering alone would do is measured
on them, then the policy learns from the others, then LeRobot's ACT does for as long. Each is measured on
the held-out episodes at its end, and nothing is chosen by that. Each phase leaves its result in a
checkpoint, so a resumed run and an unbroken one go the same way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from robot_rl.config import dump, read, shell, words
from robot_rl.core.errors import ConfigError
from robot_rl.core.files import replace_file, with_checksum_line, write_json
from robot_rl.core.policy import DemoBatch
from robot_rl.data.facts import DatasetFacts
from robot_rl.data.lerobot.damage import left_out
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.policies.checkpoint import save_policy
from robot_rl.policies.saved import read_head
from robot_rl.train.finetune.act import Trial, act_job, make_act, try_settings, why_no_act
from robot_rl.train.finetune.baselines import fit_ridge, past_of, predictor, seen_meta, simple_baselines
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.data import Split, in_journal, open_data, policy_past, read_facts, stream_seed
from robot_rl.train.finetune.errors import Errors
from robot_rl.train.finetune.learn import (
    PICTURES,
    FinetuneSession,
    TrainingJob,
    assemble_watched,
    count_parameters,
    policy_errors,
    prepare,
    updates_in,
    write_errors,
)
from robot_rl.train.finetune.length import choose_length
from robot_rl.train.finetune.names import OWN, saved_folder
from robot_rl.train.finetune.neighbour import Choice, NearestNeighbour, read_moments, thumbnails
from robot_rl.train.finetune.policies import (
    Module,
    check_policy,
    make_policy,
    picture_size,
    policy_meta,
    recipe_of,
    save,
)
from robot_rl.train.finetune.verdict import judge
from robot_rl.train.record import check_kind, machine, new_folder, removed_if_refused, versions, write_report
from robot_rl.train.session import execute, learn


@dataclass(frozen=True, kw_only=True)
class FinetuneSummary:
    """What a run came to: the content of summary.json. Errors are those of `errors.Ruler`."""

    heldout_error: float
    """Mean absolute error on the held-out episodes, in standard deviations of the training actions."""
    nearest_neighbour_error: float | None
    """Of the best choice for it: the mean of several neighbours, as a rule."""
    single_neighbour_error: float | None
    """Of the best choice with one neighbour, which is what many call by this name."""
    act_error: float | None
    """None where there was no ACT; `act` says why."""
    minutes: float
    """From the start to this summary, over all lives of the run."""
    policy: str
    dataset: str
    robot: str
    """That was recorded."""
    run: str
    """Run folder."""
    seed: int
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
    """Predictor -> everything that `errors.Errors` says of it."""
    verdict: dict[str, Any]
    """Whether anything trained beats the best baseline: `verdict.Verdict`, with its text."""
    ridge: dict[str, Any]
    """What was chosen for the ridge regression, on training episodes."""
    nearest_neighbour: dict[str, Any] | None
    """What was chosen for it, on training episodes."""
    act: dict[str, Any] | str
    """What was chosen for it, on training episodes, and what was tried."""
    length: dict[str, Any] | None
    """How the number of updates was found, on training episodes; None if it was given."""
    command: str
    timing: dict[str, float]
    """Wall-clock seconds by stage."""
    versions: dict[str, str]
    machine: dict[str, str]
    rows: int
    """Of metrics.jsonl: one that was cut between two of them has fewer."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(config: FinetuneConfig) -> FinetuneSummary:
    """Fine-tunes from the beginning, in a new run folder below `config.out`.

    Raises:
        RobotRLError: a mistake in the configuration, a dataset or a checkpoint that does not fit or
            is damaged, a device that somebody else holds, a full disk; the message says what to do.
    """
    config = _absolute(config)
    dataset, split = open_data(config)  # mistakes are found before there is a folder
    kind = _check(config, dataset, split)
    folder = new_folder(config.out, f"finetune-{kind}-seed{config.seed}")
    with removed_if_refused(folder):
        replace_file(folder / "config.yaml", with_checksum_line(dump(config)))
        return _execute(config, folder, dataset, split)


def resume(folder: Path | str) -> FinetuneSummary:
    """Goes on with a run that was cut short, to the same result as if it had not been.

    Raises:
        ConfigError: the folder is none of `robot-rl finetune`.
    """
    folder = Path(folder)
    config = load_config(folder)
    return _execute(config, folder, *open_data(config))


def load_config(folder: Path) -> FinetuneConfig:
    """Returns the configuration that a run was made with."""
    check_kind(folder, "finetune", at="resume")
    return read(FinetuneConfig, folder / "config.yaml")


def _execute(config: FinetuneConfig, folder: Path, dataset: Dataset, split: Split) -> FinetuneSummary:
    torch.set_num_threads(config.torch_threads)
    return execute(FinetuneSession(config, folder, dataset, split), _PHASES, _conclude)


# Phases: each leaves its result in the session.


def _pictures(session: FinetuneSession) -> None:
    """Decodes the pictures once, for everybody who reads them."""
    data = session.data
    session.display.message(f"{session.config.dataset}: {data.split.text()}")
    if waiting := in_journal(Path(session.config.dataset)):
        session.display.message(
            f"left out: {waiting} episodes in its journal; robot-rl replay seal would add them"
        )
    for line in left_out(data.dataset.skipped):
        session.display.message(line)
    total = data.num_pictures()
    with session.phase("pictures", total, unit="pictures") as progress, session.timer.stage("pictures"):
        data.decode(lambda done, _: progress.update(done))


def _baselines(session: FinetuneSession) -> None:
    """Measures what needs neither pictures nor training, and saves it: `evaluate` can play it."""
    data, horizon = session.data, session.config.horizon
    past = past_of(data)
    with session.timer.stage("baselines"):
        ridge = fit_ridge(data, past, session.ruler.std, horizon=horizon)
    policies = {**simple_baselines(data, past, horizon=horizon), "ridge": ridge.policy}
    errors = {
        name: session.measure(predictor(policy, past), data.split.heldout, pictures=False)
        for name, policy in policies.items()
    }
    meta = policy_meta(seen_meta(data), n_exec=horizon)
    for name, policy in policies.items():
        save_policy(session.folder / f"baseline-{name.replace(' ', '-')}", policy, meta=meta)
    session.results["baselines"] = {
        "errors": {name: error.to_json() for name, error in errors.items()},
        "ridge": ridge.choice.to_json(),
    }
    for name, error in errors.items():
        session.write("baselines", {f"heldout/{name.replace(' ', '_')}": error.normalised})


def _neighbour(session: FinetuneSession) -> None:
    """Measures what remembering alone would do."""
    data, config = session.data, session.config
    if not config.baselines:
        return
    with session.phase("nearest neighbour", len(data.split.train), unit="episodes") as progress:
        with session.timer.stage("neighbour"):
            meta = session.facts.meta
            moments = read_moments(data, horizon=config.horizon, on_episode=progress.update)
            same = meta.state_names[: len(meta.action_names)] == meta.action_names
            baseline = NearestNeighbour(moments, session.ruler.std, same_names=same)
        errors, single = (
            session.measure(partial(_remembered, baseline=baseline, choice=choice), data.split.heldout)
            for choice in (baseline.choice, baseline.single)
        )
    session.results["neighbour"] = {
        "errors": errors.to_json(),
        "choice": baseline.choice.to_json(),
        "single": baseline.single.to_json(),
        "single_errors": single.to_json(),
    }
    session.write("neighbour", {"heldout/error": errors.normalised})


def _length(session: FinetuneSession) -> None:
    """Finds how long to train, on training episodes alone, if nobody said."""
    config = session.config
    if config.updates is None and config.minutes is None:
        found = choose_length(session, partial(_build, session))
        session.results["updates"], session.results["length"] = found.updates, found.to_json()
        session.display.message(f"length: {found.updates} updates, read from episodes {found.validation}")


def _policy(session: FinetuneSession) -> None:
    """Trains the policy and saves it."""
    config, train = session.config, session.data.split.train
    policy = _build(session, train)
    updates = session.results.get("updates") or config.updates
    job = TrainingJob(
        name="policy",
        episodes=train,
        learning=config.learning(recipe_of(policy), updates=updates or 1),
        batch=config.batch,
        updates=updates or 1,
    )
    if updates is None:
        # Noted with the first checkpoint: a resumed run does not measure again.
        assert config.minutes is not None, "without both, the length was found before"
        updates = session.results["updates"] = updates_in(session, job, policy, minutes=config.minutes)
        policy = _build(session, train)  # the first has learned while it was timed
        learning = config.learning(recipe_of(policy), updates=updates)
        job = TrainingJob(
            name="policy", episodes=train, learning=learning, batch=config.batch, updates=updates
        )
    _fit(session, job, policy)
    save(policy, session.folder / "policy", session.facts)


def _act_settings(session: FinetuneSession) -> None:
    """Chooses learning rate and batch size for ACT, on training episodes alone."""
    why = why_no_act(session)
    session.results["no_act"] = why
    if why is not None:
        if session.config.baselines:
            session.display.message(f"no ACT to compare with: {why}")
        return
    minutes = session.minutes("policy") * session.config.act.trial
    session.results["trials"] = [asdict(trial) for trial in try_settings(session, minutes=minutes)]


def _act(session: FinetuneSession) -> None:
    """Trains ACT for as long as the policy was trained."""
    if session.results["no_act"] is None:
        policy = make_act(session, session.data.split.train)
        job = act_job(session, policy, _best_trial(session), minutes=session.minutes("policy"))
        _fit(session, job, policy)


_PHASES: dict[str, Callable[[FinetuneSession], None]] = {
    "pictures": _pictures,
    "baselines": _baselines,
    "neighbour": _neighbour,
    "length": _length,
    "policy": _policy,
    "act settings": _act_settings,
    "act": _act,
}


def _build(session: FinetuneSession, episodes: tuple[int, ...]) -> Module:
    """Returns the policy with its first weights, for the statistics of these episodes."""
    with session.timer.stage("build"):
        return prepare(session, _make(session.config, session.data.facts(episodes)), episodes)


def _make(config: FinetuneConfig, facts: DatasetFacts) -> Module:
    policy = make_policy(config, facts, torch.Generator().manual_seed(stream_seed(config, "policy")))
    if policy.horizon < config.horizon:
        raise ConfigError(
            f"horizon: got {config.horizon}, the policy predicts {policy.horizon} control steps. "
            f"Use horizon={policy.horizon} or less."
        )
    return policy


def _check(config: FinetuneConfig, dataset: Dataset, split: Split) -> str:
    """Returns what kind of policy it is, after building it once if it is one of ours.

    LeRobot's may be large, and are checked by their settings alone.
    """
    facts = read_facts(
        dataset,
        split.train,
        picture=picture_size(config),
        past=policy_past(config, dataset),
        decode=False,
    )
    check_policy(config, facts)
    folder = saved_folder(config.policy)
    is_saved = folder is not None and (folder / "policy.json").is_file()
    if config.policy in OWN or is_saved:
        _make(config, facts)
    if folder is None:
        return Path(config.policy).name
    if is_saved:
        return str(read_head(folder)["policy"]["kind"])
    return str(json.loads((folder / "config.json").read_text())["type"])


def _fit(session: FinetuneSession, job: TrainingJob, policy: Module) -> None:
    """Runs a learner's loop, leaves the policy with its averaged weights, and measures it."""
    loop, algorithm = assemble_watched(session, job, policy)
    learn(session, loop, job.name, job.updates, unit="updates")
    policy.load_state_dict(algorithm.policy_weights())
    errors = policy_errors(session, policy, session.data.split.heldout)
    write_errors(session, job.name, errors)
    session.results[job.name] = {
        "errors": errors.to_json(),
        "updates": session.counters.updates,
        "minutes": session.minutes(job.name),
        "parameters": count_parameters(policy),
    }
    session.counters.updates = 0


def _conclude(session: FinetuneSession) -> FinetuneSummary:
    """Writes summary.json and the report."""
    config, results, split = session.config, session.results, session.data.split
    policy, act, neighbour = results["policy"], results.get("act"), results.get("neighbour")
    errors = _all_errors(results)
    summary = FinetuneSummary(
        heldout_error=policy["errors"]["normalised"],
        nearest_neighbour_error=neighbour and neighbour["errors"]["normalised"],
        single_neighbour_error=neighbour and neighbour["single_errors"]["normalised"],
        act_error=act and act["errors"]["normalised"],
        minutes=round(session.elapsed_s / 60.0, 3),
        policy=config.policy,
        dataset=config.dataset,
        robot=session.facts.meta.robot,
        run=str(session.folder),
        seed=config.seed,
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
        predictors={name: error.to_json() for name, error in errors.items()},
        verdict=judge(errors).to_json(),
        ridge=results["baselines"]["ridge"],
        nearest_neighbour=neighbour and {**neighbour["choice"], "single": neighbour["single"]},
        act=results["no_act"] or {"chosen": asdict(_best_trial(session)), "tried": results["trials"]},
        length=results.get("length"),
        command=_command(config, policy["updates"]),
        timing=session.timer.seconds(),
        versions=versions(_packages()),
        machine=machine(config.device),
        rows=session.metrics.num_rows,
    )
    shutil.rmtree(session.folder / PICTURES, ignore_errors=True)
    write_json(session.folder / "summary.json", summary.to_json(), is_checked=True)
    with session.timer.stage("report"):
        session.display.message(f"report: {write_report(session.folder)}")
    return summary


def _all_errors(results: Mapping[str, Any]) -> dict[str, Errors]:
    """Returns the errors of every predictor that was measured, by its name in the tables."""
    neighbour, act = results.get("neighbour"), results.get("act")
    found = {"policy": results["policy"]["errors"], **results["baselines"]["errors"]}
    if neighbour is not None:
        found |= {"nearest neighbour": neighbour["errors"], "single neighbour": neighbour["single_errors"]}
    if act is not None:
        found["ACT"] = act["errors"]
    return {name: Errors.from_json(values) for name, values in found.items()}


def _best_trial(session: FinetuneSession) -> Trial:
    return min((Trial(**trial) for trial in session.results["trials"]), key=lambda trial: trial.error)


def _remembered(batch: DemoBatch, *, baseline: NearestNeighbour, choice: Choice) -> Any:
    return baseline.predict(batch.obs["state"].cpu().numpy(), thumbnails(batch), choice)


def _command(config: FinetuneConfig, updates: int) -> str:
    """Returns the command that repeats the run, its number of updates included."""
    return f"robot-rl finetune {shell(words(replace(config, updates=updates, minutes=None)))}"


def _packages() -> list[str]:
    return [name for name in ("torch", "numpy", "av", "lerobot") if find_spec(name) is not None]


def _absolute(config: FinetuneConfig) -> FinetuneConfig:
    """Returns the config with paths that hold wherever the run is resumed."""
    policy = saved_folder(config.policy)
    dataset = str(Path(config.dataset).resolve())
    return replace(config, dataset=dataset, policy=config.policy if policy is None else str(policy.resolve()))
