"""Labels recorded episodes by an expert that reads the true state: DAgger offline.

A recording has no state of the simulator. So its episodes are played again, from the same starts and with
the recorded actions, and what the simulations show is compared with the recording at every step: one that
they do not lead to is refused. B lanes, T steps of an episode, A action dim.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.config import build
from robot_rl.core.errors import DatasetError
from robot_rl.core.files import read_json
from robot_rl.core.names import EXECUTED_ACTION
from robot_rl.core.seeding import train_seed
from robot_rl.data.collecting import COLLECTED
from robot_rl.data.episode import Episode, EpisodeSource, Feature
from robot_rl.data.store.reader import StoreReader, open_source
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.rollout.envs import Expert
from robot_rl.rollout.stepping import step
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import RunConfig
from robot_rl.train.record import load_config

Array = NDArray[Any]

_TOLERANCE = 1e-4
"""Largest difference, absolute and of the number's size, that counts as rounding."""
_ALLOWED = (
    "allowed: the experience/ of a run in simulation (with sources, experience/<source>), or a whole dataset "
    "that `robot-rl collect` of this version wrote"
)


@dataclass(frozen=True)
class Recording:
    """Episodes that simulations can play again."""

    folder: Path
    source: EpisodeSource
    env: EnvConfig
    """What they were recorded in, without cameras: the expert needs none."""
    lanes: list[list[int]]
    """For each of B envs, the numbers of its episodes in `source`, in order."""
    seeds: list[list[int | None]]
    """For each of them its seed; None goes on to the next episode of the seed before."""


@dataclass
class _Tape:
    """An episode while it is played again."""

    number: int
    episode: Episode
    executed: Array
    """(T, A)"""
    numbers: dict[str, Array]
    """What is compared, (T, ...) by observation."""
    columns: Array
    """Which elements of the state were recorded."""
    labels: list[Array] = field(default_factory=list[Array])


def open_recording(folder: Path, *, num_envs: int) -> Recording:
    """Opens a recording, and finds out in which simulations and from which seeds it was made.

    Args:
        folder: of a store or a dataset.
        num_envs: in how many a dataset of `robot-rl collect` is played again; a run's in as many as it had.

    Raises:
        DatasetError: there is none, or nobody knows that.
    """
    source, at = open_source(folder), folder.absolute()
    for run, name in ((at.parent, ""), (at.parent.parent, at.name)):
        if at == run / "experience" / name and (run / "config.yaml").is_file():
            return _of_run(folder, source, load_config(run, at="label"), name)
    collected = folder / COLLECTED
    facts = read_json(collected, DatasetError, "") if collected.is_file() else {}
    seeds = facts.get("seeds", [])
    if len(seeds) != len(source):
        why = f"it has {len(source)} episodes, and says the seeds of {len(seeds)}"
        raise DatasetError(f"label: {folder}: {why}; {_ALLOWED}.")
    lanes = [list(range(first, len(seeds), num_envs)) for first in range(min(num_envs, len(seeds)))]
    env = build(EnvConfig, facts["env"]).unseen()
    return Recording(folder, source, env, lanes, [[seeds[number] for number in lane] for lane in lanes])


def _of_run(folder: Path, source: EpisodeSource, config: RunConfig, name: str) -> Recording:
    """Returns what a run recorded: each env's episodes follow each other from the seed of its source."""
    if name not in config.acting or config.acting[name].is_arm or not isinstance(source, StoreReader):
        raise DatasetError(
            f"label: {folder}: no simulation of the run {folder.parent} acted there; {_ALLOWED}."
        )
    num_envs = config.acting[name].batch
    lanes = lanes_of(
        [source.store_episode(number) for number in range(len(source))], source.lengths(), num_envs
    )
    first = train_seed(config.seed, f"collect {name}".strip()) // 2
    seeds: list[list[int | None]] = [
        [first + lane, *[None] * (len(numbers) - 1)] if numbers else [] for lane, numbers in enumerate(lanes)
    ]
    return Recording(folder, source, config.env_of(name).unseen(), lanes, seeds)


def lanes_of(begun: Sequence[int], lengths: Array, num_envs: int) -> list[list[int]]:
    """Returns the episodes of each env: all envs step together, and a free one begins the next episode.

    Args:
        begun: which was begun first, second and so on, (E,).
        lengths: their control steps, (E,).
        num_envs: B; where several are free, the first of them begins the next episode.
    """
    lanes: list[list[int]] = [[] for _ in range(num_envs)]
    free = [(0, lane) for lane in range(num_envs)]
    for number in np.argsort(begun, kind="stable").tolist():
        now, lane = heapq.heappop(free)
        lanes[lane].append(number)
        heapq.heappush(free, (now + int(lengths[number]), lane))
    return lanes


def labels_of(
    recording: Recording,
    env: VectorEnv,
    expert: Expert,
    *,
    on_step: Callable[[int], None] | None = None,
) -> dict[int, Array]:
    """Plays a recording again, and returns what the expert would have done: (T, A) by number of the episode.

    Args:
        recording: to label.
        env: as many simulations as it has lanes, autoreset DISABLED.
        expert: acts in all of them from their present state.
        on_step: called with the number of labels so far.

    Raises:
        DatasetError: the simulations show something else than was recorded.
    """
    waiting = [list(zip(*both, strict=True)) for both in zip(recording.lanes, recording.seeds, strict=True)]
    tapes, found, count, obs = dict[int, _Tape](), dict[int, Array](), 0, dict[str, Array]()
    while tapes or any(waiting):
        begins = np.array([bool(left) and lane not in tapes for lane, left in enumerate(waiting)])
        if begins.any():
            seeds: list[int | None] = [None] * env.num_envs
            for lane in np.flatnonzero(begins).tolist():
                number, seeds[lane] = waiting[lane].pop(0)
                tapes[lane] = _tape(recording, number, env)
            obs, _ = env.reset(seed=seeds, options={"reset_mask": begins} if count else None)
        live, action = (
            np.zeros(env.num_envs, bool),
            np.zeros((env.num_envs, len(env.action_names)), np.float32),
        )
        wanted = expert.act()
        for lane, tape in tapes.items():
            _compare(recording, tape, obs, lane)
            live[lane], action[lane] = True, tape.executed[len(tape.labels)]
            tape.labels.append(np.asarray(wanted[lane], np.float32))
        moment = step(env, obs, action, None if live.all() else live)
        obs, count = moment.next_obs, count + len(tapes)
        for lane, tape in list(tapes.items()):
            _compare_end(recording, tape, bool(moment.terminated[lane]), bool(moment.truncated[lane]))
            if len(tape.labels) == len(tape.episode):
                found[tape.number] = np.stack(tape.labels)
                del tapes[lane]
        if on_step is not None:
            on_step(count)
    return found


def relabelled(recording: Recording, labels: Mapping[int, Array]) -> Iterator[Episode]:
    """Yields the episodes with the labels for actions, and `executed_action`; without those cut short."""
    for number, label in sorted(labels.items()):
        episode = recording.source.read(number)
        if episode.is_complete and episode.final_obs:
            executed = {EXECUTED_ACTION: episode.as_executed().action}
            final = {EXECUTED_ACTION: executed[EXECUTED_ACTION][-1]}
            yield replace(
                episode, action=label, obs=episode.obs | executed, final_obs=episode.final_obs | final
            )


def features_of(recording: Recording) -> dict[str, Feature]:
    """Returns type and shape of what the labelled episodes keep."""
    action = Feature("float32", (len(recording.source.meta.action_names),))
    return {**recording.source.features, EXECUTED_ACTION: action}


def _tape(recording: Recording, number: int, env: VectorEnv) -> _Tape:
    episode = recording.source.read(number)
    shown: Any = env.single_observation_space
    numbers = {
        key: np.asarray(values)
        for key, values in episode.obs.items()
        if key in shown.spaces and recording.source.features[key].dtype.startswith("float")
    }
    names = episode.meta.state_names
    lacking = [name for name in names if name not in env.state_names]
    if lacking or episode.meta.action_names != env.action_names:
        what = f"its state has {lacking[0]!r}" if lacking else f"its actions are {episode.meta.action_names}"
        raise DatasetError(f"label: {recording.folder}: {what}, the simulation has none such; {_ALLOWED}.")
    columns = np.array([env.state_names.index(name) for name in names])
    return _Tape(number, episode, episode.as_executed().action, numbers, columns)


def _compare(recording: Recording, tape: _Tape, obs: Obs, lane: int) -> None:
    """Refuses a recording of something else than the simulation shows."""
    at = len(tape.labels)
    for key, recorded in tape.numbers.items():
        shown = obs[key][lane][tape.columns] if key == "state" else obs[key][lane]
        if shown.shape == recorded[at].shape and np.allclose(
            shown, recorded[at], rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
        ):
            continue
        apart = (
            f"{np.abs(shown - recorded[at]).max():.3g}" if shown.shape == recorded[at].shape else "its size"
        )
        raise _differs(recording, tape, at, f"{key!r} differs by {apart}")


def _compare_end(recording: Recording, tape: _Tape, terminated: bool, truncated: bool) -> None:
    """Refuses a recording that ends elsewhere; the end of a run's budget cuts episodes that go on here."""
    at, episode = len(tape.labels) - 1, tape.episode
    if terminated != bool(episode.terminated[at]) or (truncated and not episode.truncated[at]):
        raise _differs(recording, tape, at, "only one of both ends")


def _differs(recording: Recording, tape: _Tape, at: int, how: str) -> DatasetError:
    return DatasetError(
        f"label: {recording.folder}: episode {tape.number}, step {at}: played again, {how}. The recorded "
        "actions do not lead there: the task, the robot or MuJoCo has changed, the episodes were edited, the "
        "randomisation learned meanwhile, or a process of the run began again. Record episodes of the "
        "policy, `robot-rl collect policy=<run> keep.success=false`, and label those."
    )
