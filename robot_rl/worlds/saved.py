"""A world model on the disk: what it is of, its weights, its scales, its trust report, and its experience.

A folder with world.json (written last), model.safetensors, outcome.safetensors, arrays.npz and history.npz.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from robot_rl.config.build import build, plain
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import at_home, read_json, temporary_of, write_json
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.fit import misfit
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.calibration import Calibration
from robot_rl.worlds.config import EnsembleConfig, ServedConfig, TrustConfig
from robot_rl.worlds.diffusion import Learned, untrained
from robot_rl.worlds.dynamics import Dynamics
from robot_rl.worlds.history import History
from robot_rl.worlds.inventory import HEAD, REMEDY, env_of, head_of
from robot_rl.worlds.outcome import ClassifierOutcome, Outcome, PredicateOutcome, state_of
from robot_rl.worlds.served import Served
from robot_rl.worlds.trust import TrustReport

_OF_HISTORY = ("state", "action", "success", "episode", "first", "last", "ended")


@dataclass(kw_only=True)
class World:
    """All of a world model."""

    meta: EpisodesMeta
    env: EnvConfig
    """The real env that it imitates: evaluations are made there."""
    horizon: int
    """Control steps of a real episode."""
    model: Dynamics
    outcome: Outcome
    calibration: Calibration
    history: History
    """The real experience behind it; imagined episodes begin there."""
    limits: TrustConfig
    report: TrustReport

    def check(self, meta: EpisodesMeta, *, at: str) -> None:
        """Refuses another task, robot, rate or state.

        Raises:
            CheckpointError: `at` begins its message.
        """
        problem = misfit(self.meta, meta, also=("robot", "task"))
        if problem is not None:
            raise CheckpointError(f"{at}: the world model is of something else: {problem}. {REMEDY}")

    def save(self, folder: Path) -> None:
        """Writes the folder, or replaces what is in it; world.json comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
        _replace_tensors(folder / "model.safetensors", weights)
        judged = {name: value.detach().cpu().contiguous() for name, value in state_of(self.outcome).items()}
        if judged:
            _replace_tensors(folder / "outcome.safetensors", judged)
        _replace_arrays(folder / "arrays.npz", self.calibration.arrays())
        _replace_arrays(folder / "history.npz", {name: getattr(self.history, name) for name in _OF_HISTORY})
        head = {
            "meta": asdict(self.meta),
            "env": plain(self.env),
            "horizon": self.horizon,
            "model": self.model.to_json(),
            "outcome": self.outcome.kind,
            "limits": asdict(self.limits),
            "report": asdict(self.report),
        }
        write_json(folder / HEAD, head, is_checked=True)

    def save_report(self, folder: Path, report: TrustReport) -> None:
        """Replaces the trust report alone."""
        self.report = report
        head = read_json(folder / HEAD, CheckpointError, REMEDY)
        write_json(folder / HEAD, {**head, "report": asdict(report)}, is_checked=True)


def load_world(folder: str | Path, *, device: str = "cpu") -> World:
    """Reads a world model.

    Raises:
        CheckpointError: none is there, or it is damaged, or another one is served than was measured.
        ConfigError: it is one of others, which cannot be served here.
    """
    path = Path(at_home(str(folder)))
    head = head_of(path)
    meta = build(EpisodesMeta, head["meta"])
    model = _model(dict(head["model"]), meta)
    try:
        model.load_state_dict(load_file(path / "model.safetensors"))
        with np.load(path / "arrays.npz") as arrays:
            calibration = Calibration.of({name: arrays[name] for name in arrays.files})
        with np.load(path / "history.npz") as arrays:
            history = History(meta=meta, **{name: arrays[name] for name in _OF_HISTORY})
        outcome = _outcome(head["outcome"], meta, path)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged: {error}. {REMEDY}") from error
    return World(
        meta=meta,
        env=env_of(path),
        horizon=int(head["horizon"]),
        model=model.to(device).eval(),
        outcome=outcome,
        calibration=calibration,
        history=history,
        limits=build(TrustConfig, head["limits"]),
        report=build(TrustReport, head["report"]),
    )


def _model(sizes: dict[str, Any], meta: EpisodesMeta) -> Learned | Served:
    """Returns the model that `to_json` described, without its weights and scales."""
    if sizes.get("kind") == Served.kind:
        version, _ = sizes.pop("version"), sizes.pop("kind")
        return Served(build(ServedConfig, sizes), meta, version=version)
    state_dim, action_dim, aside = (sizes.pop(name, ()) for name in ("state_dim", "action_dim", "aside"))
    return untrained(build(EnsembleConfig, sizes), state_dim, action_dim, aside=aside)


def _outcome(kind: str, meta: EpisodesMeta, folder: Path) -> Outcome:
    if kind == PredicateOutcome.kind:
        return PredicateOutcome(meta.task, meta.robot, meta.state_names)
    classifier = ClassifierOutcome(len(meta.state_names))
    classifier.load_state_dict(load_file(folder / "outcome.safetensors"))
    return classifier


def imitated(env: EnvConfig) -> EnvConfig:
    """Returns the env without what a model of its state does not have: pictures, banks, drawn dynamics."""
    return replace(env.unseen(), resets=EnvConfig().resets, num_threads=0, dump_diverged=None)


def _replace_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    temporary = temporary_of(path)
    save_file(dict(tensors), temporary)
    temporary.replace(path)


def _replace_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    temporary = temporary_of(path)
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    temporary.replace(path)
