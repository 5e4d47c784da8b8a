"""DAgger (Ross et al. 2011): the policy acts, the scripted expert labels what it met, the policy clones that.

Deviation: no mixing of expert and policy, and no rounds: each turn of the loop takes one control step of all
envs, labels it and pays its updates. Labels are single actions, so chunks are executed one action at a time.
B envs, H chunk length, A action dim.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from robot_rl.core.policy import DemoBatch
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.demos import ChunkSampler, Episodes
from robot_rl.data.episodes import padded
from robot_rl.data.transitions import StepBatch
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.spec import SavedPolicy
from robot_rl.rollout.envs import make_expert
from robot_rl.rollout.sources import InlineSource
from robot_rl.rollout.weights import Publisher
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.acting import sources_of, step_by_step
from robot_rl.train.improve.config import DaggerSettings
from robot_rl.train.improve.method import Method, Module, Start, add_hooks, settings_of
from robot_rl.train.loop import Learner, Pacer, Run
from robot_rl.train.recording import Recorder
from robot_rl.train.schedule import Ratio
from robot_rl.train.session import Session

Array = NDArray[Any]


class LabelRecord:
    """Records the labelled steps of each source; the last step of its budget ends the episodes of its envs.

    So each recorded episode is whole, and `robot-rl replay seal` makes demonstrations of all of them.
    """

    def __init__(self, recorders: Sequence[Recorder | None], budgets: Sequence[int]) -> None:
        """Puts them together.

        Args:
            recorders: of the sources, in their order; None records nothing.
            budgets: control steps of each source.
        """
        self._recorders, self._budgets = recorders, budgets
        self._counts = [0] * len(budgets)

    def add(self, steps: StepBatch) -> None:
        """Appends a control step of each env of its source."""
        self._counts[steps.actor] += steps.cost
        if self._counts[steps.actor] >= self._budgets[steps.actor]:
            steps = replace(steps, truncated=~steps.terminated)
        recorder = self._recorders[steps.actor]
        if recorder is not None:
            recorder.add(steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the records stand, after everything so far is on the disk."""
        found = [None if recorder is None else recorder.state_dict() for recorder in self._recorders]
        return {"counts": list(self._counts), "recorders": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cuts off what was recorded after the checkpoint."""
        self._counts = list(state["counts"])
        for recorder, saved in zip(self._recorders, state["recorders"], strict=True):
            if recorder is not None and saved is not None:
                recorder.load_state_dict(saved)


class LabelledSteps:
    """Demonstrations, and the steps of the policy with the expert's labels, which are kept in files."""

    def __init__(
        self,
        episodes: Episodes,
        folder: Path,
        *,
        capacity: int,
        horizon: int,
        batch: int,
        seed: int,
        device: str,
        record: LabelRecord | None = None,
    ) -> None:
        """Keeps nothing yet.

        Args:
            episodes: the demonstrations.
            folder: of the files, one for each part of an observation and one for the labels.
            capacity: labelled steps that they hold.
            horizon: H of the windows.
            batch: windows that a learner draws at once.
            seed: of the draws.
            device: where they go.
            record: gets each step, too.
        """
        self._record = record
        self._demos = ChunkSampler(episodes, horizon)
        self._folder, self._horizon = folder, horizon
        self._batch, self._device = batch, device
        self._rng = np.random.default_rng(seed)
        rows = {**episodes.obs, _LABEL: episodes.action}
        self._shapes = {key: ((capacity, *value.shape[1:]), value.dtype) for key, value in rows.items()}
        self._files: dict[str, np.memmap[Any, Any]] = {}
        self._count = 0

    def add(self, steps: StepBatch) -> None:
        """Keeps a step of every env with its label."""
        assert steps.expert_action is not None, "its source has no expert"
        count = len(steps.reward)
        where = slice(self._count, self._count + count)
        for key, file in self._opened().items():
            values = steps.expert_action if key == _LABEL else steps.obs[key]
            file[where] = padded(values, file.shape[1])
        self._count += count
        if self._record is not None:
            self._record.add(steps)

    def sample(self) -> DemoBatch:
        """Returns windows, each step as likely as any; of a labelled one only the first action is valid."""
        index = np.sort(self._rng.integers(0, len(self._demos) + self._count, self._batch))
        demos = self._demos.at(index[index < len(self._demos)])
        rows = index[index >= len(self._demos)] - len(self._demos)
        if not len(rows):
            return demos.to(self._device)
        found = {key: torch.from_numpy(file[rows]) for key, file in self._opened().items()}
        label = found.pop(_LABEL)
        valid = torch.zeros(len(rows), self._horizon, dtype=torch.bool)
        valid[:, 0] = True
        return DemoBatch(
            obs={key: torch.cat([demos.obs[key], value]) for key, value in found.items()},
            actions=torch.cat([demos.actions, label[:, None].expand(-1, self._horizon, -1)]),
            valid=torch.cat([demos.valid, valid]),
        ).to(self._device)

    def state_dict(self) -> dict[str, Any]:
        """Returns how many steps the files hold, after they are on the disk, and the draws."""
        for file in self._files.values():
            file.flush()
        state = {"count": self._count, "rng": self._rng.bit_generator.state}
        return state if self._record is None else state | {"record": self._record.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._rng.bit_generator.state = state["rng"]
        self._files = {key: open_memmap(self._file(key), mode="r+") for key in self._shapes}
        if self._record is not None and "record" in state:  # one of a version that kept none has no recorders
            self._record.load_state_dict(state["record"])

    def _opened(self) -> dict[str, np.memmap[Any, Any]]:
        if not self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files = {
                key: open_memmap(self._file(key), mode="w+", dtype=dtype, shape=shape)
                for key, (shape, dtype) in self._shapes.items()
            }
        return self._files

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.npy"


_LABEL = "expert_action"


def make_policy(config: RunConfig, base: SavedPolicy) -> Module:
    """Returns a copy of the base."""
    return copy.deepcopy(base)


def make_source(config: RunConfig, policy: Module, env: VectorEnv, name: str) -> InlineSource:
    """Returns a source whose steps have the expert's labels."""
    expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
    return step_by_step(config, policy, env, name, advise=expert.act)


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop that clones the expert where the policy goes, and the policy."""
    config, cfg = session.config, settings_of(session.config, DaggerSettings)
    session.counters.updates = 0
    policy = make_policy(config, start.base).to(config.device).train()
    algorithm = resolve("algorithm", "bc", at="dagger")(
        policy,
        cfg.algorithm,
        train_seed(config.seed, "dagger"),
        total_updates=round(cfg.utd * config.env_steps),
    )
    budgets = [source.env_steps for source in config.acting.values()]
    labelled = LabelledSteps(
        start.episodes,
        session.folder / "labels",
        capacity=sum(source.env_steps + source.batch for source in config.acting.values()),
        horizon=policy.horizon,
        batch=cfg.batch,
        seed=train_seed(config.seed, "dagger batches"),
        device=config.device,
        record=LabelRecord([start.recorders.get(name) for name in config.acting], budgets),
    )
    learner = Learner(algorithm, labelled, Ratio(cfg.utd), Publisher(publish_every=cfg.publish_every))
    run = Run(
        sources=sources_of(session, start, policy),
        experience=labelled,
        learners=[learner],
        pacer=Pacer.of_budgets(budgets),
        stage=session.timer.stage,
        counters=session.counters,
    )
    add_hooks(session, run, policy, start.eval_envs, dict)
    return run, policy


DAGGER = Method(make_policy=make_policy, assemble=assemble, make_source=make_source)
