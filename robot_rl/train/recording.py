"""The recorder of a run's experience, and the pool that replays recorded experience.

T steps of an episode, A action dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.names import EXECUTED_ACTION
from robot_rl.core.policy import Policy
from robot_rl.core.seeding import train_seed
from robot_rl.data.episode import (
    EXECUTED,
    POLICY_ACTION,
    RESET_ROW,
    Episode,
    EpisodeSource,
    Feature,
    Starts,
    observed,
)
from robot_rl.data.episodes import EpisodesMeta, episodes_meta
from robot_rl.data.pool import EpisodePool, Relabel
from robot_rl.data.store.layout import PictureFormat, is_store, read_layout
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.writer import StoreWriter
from robot_rl.data.transitions import StepBatch
from robot_rl.hal.vector import VectorEnv
from robot_rl.sim.bank_files import OWN, load_bank
from robot_rl.sim.config import ResetsConfig
from robot_rl.train.demos import chunks_of

logger = logging.getLogger(__name__)

Array = NDArray[Any]


class Recorder:
    """Appends every control step of all envs to a store; a resumed run goes on where its checkpoint was."""

    def __init__(
        self,
        folder: Path,
        meta: EpisodesMeta,
        features: Mapping[str, Feature],
        *,
        person: bool = False,
        joints: int = 0,
        starts: Starts | None = None,
        has_labels: bool = False,
        device: str | None = None,
        is_exact: bool = False,
    ) -> None:
        """Opens the store, made on the spot if there is none.

        Args:
            folder: of the store.
            meta: what the episodes are of.
            features: what is observed.
            person: whether a person can take over; then what the policy wanted is kept too, as the
                group `policy_action`.
            joints: of the arm, if there is one; then the targets that safety let through are kept too,
                as the group `executed_target_rad`.
            starts: of episodes that begin in rows of a start bank; then class and row are kept too, as the
                group `reset_row`.
            has_labels: whether an expert labels the steps; then its label is the recorded `action`, and the
                group `executed_action` keeps what was executed.
            device: that acts; simulators of the robot if None.
            is_exact: whether pictures keep every bit: larger on the disk, as a replay that is restored from
                them needs it.

        Raises:
            DatasetError: another process writes to it, or it holds something else, or rows of another bank.
        """
        self._keys = tuple(features)
        self._person = person
        if person:
            features = {**features, POLICY_ACTION: Feature("float32", (len(meta.action_names),))}
        self._has_arm = joints > 0
        if joints:
            features = {**features, EXECUTED: Feature("float32", (joints,))}
        self._has_bank = starts is not None
        if self._has_bank:
            features = {**features, RESET_ROW: Feature("int64", (2,))}
        self._has_labels = has_labels
        if has_labels:
            features = {**features, EXECUTED_ACTION: Feature("float32", (len(meta.action_names),))}
        device = device or f"sim {meta.robot}"
        picture: PictureFormat = "png" if is_exact else "jpeg"
        self._writer = StoreWriter(
            folder, meta, features, when_behind="wait", device=device, picture=picture, starts=starts
        )
        self._period_ns = 1e9 / meta.control_hz
        self._turns = 0
        self._instruction = meta.instruction
        self._inside: set[int] = set()

    def add(self, steps: StepBatch) -> None:
        """Appends one control step of each lane; its stamp is the simulators' own time."""
        lanes = np.arange(len(steps.reward)) if steps.lanes is None else steps.lanes
        self._mark_episodes(lanes, steps)
        extra, action = self._extra(steps), steps.action
        if self._has_labels:
            assert steps.expert_action is not None, "its source has no expert"
            action = steps.expert_action
        ended = steps.terminated | steps.truncated
        self._writer.append_lanes(
            lanes,
            obs={key: steps.obs[key] for key in self._keys} | extra,
            action=action,
            base_action=steps.base_action,
            reward=steps.reward,
            terminated=steps.terminated,
            truncated=steps.truncated,
            success=False if steps.success is None else steps.success,
            source=steps.source,
            policy_version=steps.policy_version,
            stamp_ns=round(self._turns * self._period_ns) if steps.stamp_ns is None else steps.stamp_ns,
            picture_stamp_ns=steps.picture_stamp_ns,
            final_obs={key: steps.next_obs[key] for key in self._keys} | extra,
        )
        self._turns += 1
        self._inside = (self._inside | set(lanes.tolist())) - set(lanes[ended].tolist())

    def _extra(self, steps: StepBatch) -> dict[str, Array]:
        """Returns what is kept in addition to the observation."""
        kept: dict[str, Array] = {}
        if self._person:
            kept[POLICY_ACTION] = steps.action if steps.policy_action is None else steps.policy_action
        if self._has_arm:
            assert steps.executed_target_rad is not None, "an arm reports the executed targets"
            kept[EXECUTED] = steps.executed_target_rad.astype(np.float32)
        if self._has_bank:
            assert steps.reset_row is not None, "an env with a bank reports the rows"
            kept[RESET_ROW] = steps.reset_row
        if self._has_labels:
            kept[EXECUTED_ACTION] = steps.action
        return kept

    def _mark_episodes(self, lanes: Array, steps: StepBatch) -> None:
        """Ends episodes that were cut short, or whose instruction has changed."""
        instruction = self._instruction if steps.instruction is None else steps.instruction
        if steps.begins or instruction != self._instruction:
            for lane in self._inside.intersection(lanes.tolist()):
                self._writer.end_episode(lane)
                self._inside.remove(lane)
        self._instruction = instruction
        if instruction != self._writer.layout.meta.instruction:  # else the writer begins them by itself
            for lane in set(lanes.tolist()) - self._inside:
                self._writer.begin_episode(lane, instruction=instruction)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the store stands, after everything so far is on the disk."""
        return {
            "store": self._writer.mark(),
            "turns": self._turns,
            "instruction": self._instruction,
            "inside": sorted(self._inside),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cuts off what was recorded after the checkpoint: the run makes those steps again."""
        self._writer.rewind(state["store"])
        self._turns = int(state["turns"])
        self._instruction = str(state.get("instruction", self._instruction))
        self._inside = set(state.get("inside", ()))

    def newest_first(self) -> Callable[[int], Iterator[Episode]]:
        """Returns a function that reads the episodes of a lane that are on the disk now, the newest first."""
        reader = StoreReader(self._writer.folder)
        return lambda lane: (reader.read(episode) for episode in reversed(reader.of_lane(lane)))

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def recorded_of(env: VectorEnv, *, is_arm: bool, has_labels: bool = False) -> dict[str, Any]:
    """Returns what a recorder of an env's steps has to know.

    Args:
        env: whose steps.
        is_arm: a person may take over.
        has_labels: an expert labels the steps; then no joint targets are kept, they are not the label's.
    """
    return {
        "meta": episodes_meta(env),
        "features": observed(env),
        "person": is_arm,
        "joints": 0 if env.limits is None or has_labels else env.limits.num_joints,
        "has_labels": has_labels,
    }


def starts_of(resets: ResetsConfig, folder: Path) -> Starts | None:
    """Returns what the rows of episodes that are recorded into `folder` mean; None without a bank.

    A store that an earlier version began without rows goes on without them.

    Raises:
        DatasetError: there is no such bank, or it is damaged; or the store is.
    """
    if resets.bank is None or (is_store(folder) and RESET_ROW not in read_layout(folder).features):
        return None
    bank = load_bank(resets.bank, at="env.resets.bank")
    key = asdict(bank.key) | {"varied": list(bank.key.varied)}
    return Starts(classes=(OWN, *bank.sets), bank={"digest": bank.digest, "key": key})


def pool_of(
    sources: Sequence[EpisodeSource],
    features: Mapping[str, Feature],
    base: Policy,
    *,
    n_exec: int,
    seed: int,
    device: str,
) -> EpisodePool:
    """Returns a pool of all their episodes, with what the present base would have proposed."""
    rows = sum(int(source.lengths().sum()) + len(source) for source in sources)
    relabel = _relabel(base, n_exec=n_exec, seed=seed, device=device)
    return EpisodePool(sources, capacity=rows, keys=tuple(features), relabel=relabel)


def _relabel(base: Policy, *, n_exec: int, seed: int, device: str) -> Relabel:
    """Returns a function that asks the base, which plans at every `n_exec`-th frame, as when acting."""

    def ask(number: int, episode: Episode) -> Array:
        frames = np.arange(len(episode) + bool(episode.final_obs))
        steps, final = frames[::n_exec], episode.final_obs
        obs: dict[str, Array] = {}
        for key, values in episode.obs.items():
            obs[key] = np.asarray(values[steps[steps < len(episode)]])
            if steps[-1] == len(episode):
                obs[key] = np.concatenate([obs[key], np.asarray(final[key])[None]])
        chunks = chunks_of(obs, base, train_seed(seed, f"relabel {number}"), device)
        return chunks[frames // n_exec, frames % n_exec]

    return ask
