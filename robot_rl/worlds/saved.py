"""A world model on the disk: what it is of, its weights, its scales, its trust report, and its experience.

A folder with world.json (written last), model.safetensors, outcome.safetensors, arrays.npz and history.npz;
with pictures images.safetensors and images.npz, which has their codes: the pictures stay in the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from robot_rl.config.build import build, plain
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import at_home, temporary_of, write_json
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.bill import keep_version
from robot_rl.worlds.calibration import Calibration
from robot_rl.worlds.config import EnsembleConfig, ImagesConfig, ServedConfig, TrustConfig
from robot_rl.worlds.diffusion import Learned, untrained
from robot_rl.worlds.dynamics import Dynamics
from robot_rl.worlds.history import History
from robot_rl.worlds.images.model import Images
from robot_rl.worlds.images.pictures import Pictures
from robot_rl.worlds.images.served import ServedImages
from robot_rl.worlds.inventory import HEAD, REMEDY, changing, check_same, env_of, head_of
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
    images: Pictures | None = None
    """The picture part, where the model has one."""
    folder: Path | None = None
    """Where it is on the disk: what is imagined is billed there. None: in memory alone."""

    def check(self, meta: EpisodesMeta, *, at: str) -> None:
        """Refuses another task, robot, rate or state.

        Raises:
            CheckpointError: `at` begins its message.
        """
        check_same(self.meta, meta, at=at)

    def save(self, folder: Path) -> None:
        """Writes the folder, or replaces what is in it; world.json comes last."""
        folder.mkdir(parents=True, exist_ok=True)
        with changing(folder):
            self._replace(folder)
            keep_version(folder, **self.report.behind)
        self.folder = folder

    def _replace(self, folder: Path) -> None:
        _replace_tensors(folder / "model.safetensors", _on_cpu(self.model.state_dict()))
        if judged := _on_cpu(state_of(self.outcome)):
            _replace_tensors(folder / "outcome.safetensors", judged)
        _replace_arrays(folder / "arrays.npz", self.calibration.arrays())
        arrays = {name: getattr(self.history, name) for name in _OF_HISTORY}
        arrays |= {} if self.history.start is None else {"start": self.history.start}
        _replace_arrays(folder / "history.npz", arrays)
        if self.images is not None:
            _replace_tensors(folder / "images.safetensors", _on_cpu(self.images.state_dict()))
            _replace_arrays(folder / "images.npz", self.images.arrays())
        head = {
            "meta": asdict(self.meta),
            "env": plain(self.env),
            "horizon": self.horizon,
            "model": self.model.to_json(),
            "outcome": self.outcome.kind,
            "limits": asdict(self.limits),
            "report": asdict(self.report),
            "images": None if self.images is None else self.images.to_json(),
        }
        write_json(folder / HEAD, head, is_checked=True)

    def save_report(self, folder: Path, report: TrustReport) -> None:
        """Replaces the trust report alone.

        Raises:
            CheckpointError: the folder has another version of the model by now, of which it says nothing.
        """
        with changing(folder):
            head = head_of(folder)
            if (version := head["report"]["version"]) != report.version:
                raise CheckpointError(
                    f"{folder}: has version {version} of the model by now; the report is of version "
                    f"{report.version}, and is not kept. Give the same command for the new version."
                )
            write_json(folder / HEAD, {**head, "report": asdict(report)}, is_checked=True)
        self.report = report


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
            history = History(meta=meta, **{name: arrays[name] for name in arrays.files})
        images = _images(head.get("images"), model, meta, path)
        outcome = _outcome(head["outcome"], meta, images, path)
    except (CheckpointError, ConfigError):
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
        images=None if images is None else images.to(device).eval(),
        folder=path,
    )


def _model(sizes: dict[str, Any], meta: EpisodesMeta) -> Learned | Served:
    """Returns the model that `to_json` described, without its weights and scales."""
    if sizes.get("kind") == Served.kind:
        version, _ = sizes.pop("version"), sizes.pop("kind")
        return Served(build(ServedConfig, sizes), meta, version=version)
    state_dim, action_dim, aside = (sizes.pop(name, ()) for name in ("state_dim", "action_dim", "aside"))
    return untrained(build(EnsembleConfig, sizes), state_dim, action_dim, aside=aside)


def _images(
    sizes: dict[str, Any] | None, model: Learned | Served, meta: EpisodesMeta, folder: Path
) -> Pictures | None:
    """Returns the picture part that `to_json` described, with what was learned and measured."""
    if sizes is None:
        return None
    if isinstance(model, Served):
        images = ServedImages(model.channel, model.channel.pictures.cameras)
        if (shown := plain(images.to_json())) != sizes:
            raise CheckpointError(
                f"{model.channel.at}: the model says {shown}, but {sizes} was measured. Serve that again, or "
                "measure this one under another version: robot-rl worlds fit served.id=... out=<folder>."
            )
    else:
        height, width = sizes["size"]
        images = Images(
            build(ImagesConfig, sizes["config"]),
            (height, width),
            stride=model.config.stride,
            state_dim=len(meta.state_names),
            action_dim=len(meta.action_names),
        )
    images.load_state_dict(load_file(folder / "images.safetensors"))
    with np.load(folder / "images.npz") as arrays:
        images.codes, images.depths, images.gate = (arrays[name] for name in images.arrays())
    return images


def _outcome(kind: str, meta: EpisodesMeta, images: Pictures | None, folder: Path) -> Outcome:
    if kind == PredicateOutcome.kind:
        return PredicateOutcome(meta.task, meta.robot, meta.state_names)
    channels = 0 if images is None else images.codes.shape[1]
    classifier = ClassifierOutcome(len(meta.state_names), channels)
    weights = load_file(folder / "outcome.safetensors")
    classifier.load_state_dict({"vote": classifier.vote, **weights})  # older folders have none
    return classifier


def imitated(env: EnvConfig, cameras: Sequence[str] = ()) -> EnvConfig:
    """Returns the env without what a model does not have: banks, late pictures, other cameras than these."""
    rest = {"resets": EnvConfig().resets, "num_threads": 0, "dump_diverged": None}
    return replace(env.unseen(), cameras=tuple(cameras), **rest)


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _replace_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    temporary = temporary_of(path)
    save_file(dict(tensors), temporary)
    temporary.replace(path)


def _replace_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    temporary = temporary_of(path)
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    temporary.replace(path)
