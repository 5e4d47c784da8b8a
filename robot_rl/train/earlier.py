"""The recorded experience of earlier runs: opened, and checked against this run; without torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from robot_rl.core.errors import ConfigError, DatasetError, require
from robot_rl.core.names import PRESENT
from robot_rl.data.episode import Array, EpisodeSource, Feature, refuse_imagined
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.fit import misfit
from robot_rl.data.lerobot.damage import left_out
from robot_rl.data.store.reader import StoreReader, open_source
from robot_rl.train.recorded import ReplayConfig

logger = logging.getLogger(__name__)


def open_earlier(
    config: ReplayConfig, meta: EpisodesMeta, features: Mapping[str, Feature]
) -> list[EpisodeSource]:
    """Opens the experience of earlier runs, and checks that this run can learn from it.

    Args:
        config: names stores or datasets, or run folders that have one in `experience/`, and how they are
            read.
        meta: what this run's episodes are of.
        features: what this run observes.

    Raises:
        DatasetError: no experience there, or of another robot, task, or joints; the message says
            which joints differ.
    """
    reading = config.read.options("replay.read.")
    sources = [open_source(experience_of(path), **reading) for path in config.reuse]
    for path, source in zip(config.reuse, sources, strict=True):
        problem = _problem(source, meta, features)
        if problem is not None:
            raise DatasetError(
                f"replay.reuse: {path} does not fit this run: {problem}. Leave it out, or give this run the "
                "env settings it was recorded with."
            )
    return sources


def check_earlier(config: ReplayConfig, meta: EpisodesMeta, features: Mapping[str, Feature]) -> None:
    """Opens the experience of earlier runs, and reads every number of it once.

    Raises:
        DatasetError: it does not fit, is damaged, or has imagined steps.
    """
    for path, source in zip(config.reuse, open_earlier(config, meta, features), strict=True):
        for line in left_out(getattr(source, "skipped", [])):
            logger.warning("%s", line)
        problems = source.problems() if isinstance(source, StoreReader) else []
        damage = next((str(problem) for problem in problems if problem.kind != "torn"), None)
        made = list[Array]()
        try:
            made = [source.read(episode).source for episode in range(0 if damage else len(source))]
        except DatasetError as error:
            damage = str(error)
        if damage is not None:
            raise DatasetError(
                f"replay.reuse: {path} is damaged: {damage} What is whole can be saved by "
                f"`robot-rl replay repair {experience_of(path)}`; or leave it out."
            )
        for steps in made:
            refuse_imagined(steps, at=f"replay.reuse: {path}")


def experience_of(path: str) -> Path:
    """Returns the folder of the episodes: `experience/` of a run folder, or else the folder itself.

    Raises:
        DatasetError: a run folder without experience.
    """
    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        return folder
    if not (folder / "experience").is_dir():
        raise DatasetError(
            f"replay.reuse: the run {path} left no experience/: it had replay.record=false, ended before "
            "residual RL, or its arm's machine has it (`robot-rl replay fetch`). Give another run folder, a "
            "store, or a dataset."
        )
    experience = folder / "experience"
    if sources := sorted(path.name for path in experience.iterdir() if (path / "meta").is_dir()):
        raise DatasetError(
            f"replay.reuse: the run {path} has experience of {' and '.join(sources)}. Give that of one: "
            f"{experience / sources[0]}"
        )
    return experience


def _problem(source: EpisodeSource, meta: EpisodesMeta, features: Mapping[str, Feature]) -> str | None:
    """Returns why this run cannot learn from a source, or None."""
    problem = misfit(source.meta, meta)
    if problem is not None:
        return problem
    for name in ("task", "robot"):
        got, wanted = getattr(source.meta, name), getattr(meta, name)
        if got != wanted:
            return f"it was recorded with {name} {got!r}, not {wanted!r}"
    for key, feature in features.items():
        got = source.features.get(key)
        if got != feature:
            return f"its observation {key!r} is {_words(got)}, not {_words(feature)}"
    return None if source.lengths().any() else "it holds no steps"


def _words(feature: Feature | None) -> str:
    return "missing" if feature is None else f"{feature.dtype} {feature.shape}"


def check_spaces(
    metas: Mapping[str, EpisodesMeta],
    features: Mapping[str, Mapping[str, Feature]],
    *,
    but: Collection[str] = (),
) -> None:
    """Refuses sources that one policy and one mixture of replays cannot serve.

    Args:
        metas: what the episodes of each source are of.
        features: what each source observes.
        but: what may differ of that.

    Raises:
        ConfigError: says which elements differ, and what to show instead.
    """
    first, *others = metas
    _check_rates(metas)
    for other in others:
        problem = misfit(replace(metas[other], control_hz=metas[first].control_hz), metas[first])
        mine, theirs = (
            {key: value for key, value in features[name].items() if key not in but} for name in (first, other)
        )
        if problem is None and theirs != mine:
            problem = f"it observes {theirs}, not {mine}"
        if problem is not None:
            raise ConfigError(
                f"sources: one policy cannot serve {first} and {other}. {other} with {first}: {problem}. "
                f"{_remedy(metas)}"
            )


def _check_rates(metas: Mapping[str, EpisodesMeta]) -> None:
    """Refuses rates that a policy cannot know from what it reads: it has to see which robot it moves."""
    rates = dict[str, tuple[str, float]]()
    sees = all(f"{meta.robot}{PRESENT}" in meta.state_names for meta in metas.values())
    for name, meta in metas.items():
        at, hz = f"sources.{name}.control_hz", meta.control_hz
        same, own = rates.setdefault(meta.robot, (name, hz))
        require(hz == own, at, hz, f"{own:g}, that of sources.{same}: a robot has one rate")
        usual = next(iter(rates.values()))[1]
        allowed = f"{usual:g}, or all robots in env.robots: the policy has to see which one it moves"
        require(sees or hz == usual, at, hz, allowed)


def _remedy(metas: Mapping[str, EpisodesMeta]) -> str:
    """Returns a remedy: the groups of the state that all sources share, or one state of all robots."""
    lists = [meta.state_names for meta in metas.values()]
    beginnings = dict.fromkeys(name.split(".")[0] for name in lists[0])

    def are_equal(beginning: str) -> bool:
        return len({tuple(name for name in names if name.startswith(beginning)) for names in lists}) == 1

    common = [beginning for beginning in beginnings if are_equal(beginning)]
    one_action = len({meta.action_names for meta in metas.values()}) == 1
    one_state = len(set(lists)) == 1
    remedies = list[str]()
    if common and one_action and not one_state:
        remedies.append(f"Show what all of them have: env.state={','.join(common)}.")
    if len({meta.robot for meta in metas.values()}) > 1 and not (one_action and one_state):
        tasks = {meta.task for meta in metas.values()}
        each = [meta.robot if len(tasks) == 1 else f"{meta.task}:{meta.robot}" for meta in metas.values()]
        listed = ",".join(dict.fromkeys(each))
        remedies.append(f"{'Or list' if remedies else 'List'} all robots: env.robots={listed}.")
    return " ".join(remedies) or "Train them in a run each."
