"""From recorded episodes to a world model on the disk: the settings, and the fit that survives a kill."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from robot_rl.core.files import temporary_of
from robot_rl.data.demos import load_episodes
from robot_rl.data.episodes import EpisodesMeta, episodes_meta
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.audit import measured
from robot_rl.worlds.calibration import Played
from robot_rl.worlds.config import ServedConfig, WorldSettings
from robot_rl.worlds.fit import Fitter, bodies_in, check_enough, new_model
from robot_rl.worlds.history import TRAIN, History
from robot_rl.worlds.images.fit import ImageFitter, new_images
from robot_rl.worlds.images.model import Images
from robot_rl.worlds.images.served import ServedImages
from robot_rl.worlds.outcome import outcome_of
from robot_rl.worlds.saved import World
from robot_rl.worlds.served import Served

_CHECKPOINT, _PICTURES_CHECKPOINT = ".fitting.pt", ".fitting-pictures.pt"
_CHECKPOINT_S = 30.0


@dataclass(frozen=True)
class RealEnv:
    """What a model imitates."""

    env: EnvConfig
    meta: EpisodesMeta
    horizon: int
    """Control steps of an episode."""
    marks: tuple[str, ...] = ()
    """Bodies of a simulated scene that nothing can touch."""

    @classmethod
    def of(cls, env: EnvConfig, real: Any) -> RealEnv:
        """Returns it from one of its envs; `env` has the settings with which that was made."""
        meta = episodes_meta(real)
        observed = set[str]().union(*map(bodies_in, meta.state_names))
        return cls(env, meta, int(real.horizon), tuple(name for name in _marks(real) if name in observed))


def _marks(real: Any) -> tuple[str, ...]:
    """Returns the marks of a scene of ours; of others' scenes nothing is known."""
    backend = getattr(real, "backend", None)
    return () if backend is None else backend.marks()


def read_history(
    folders: tuple[str, ...],
    expect: EpisodesMeta,
    say: Callable[[str], None],
    *,
    cameras: Sequence[str] = (),
) -> History:
    """Returns the real experience in some datasets, with the pictures of some cameras.

    Raises:
        DatasetError: a dataset is of another task, robot or state, or has imagined steps, or no such camera.
    """
    parts = list[History]()
    for folder in folders:
        parts.append(
            History.of(load_episodes(folder, expect=expect, say=say, as_executed=True), cameras=cameras)
        )
    return replace(History.joined(parts), meta=expect)


def fitted(
    history: History,
    real: RealEnv,
    settings: WorldSettings,
    *,
    seed: int,
    version: int = 1,
    before: World | None = None,
    images: Images | None = None,
    folder: Path | None = None,
    device: str = "cpu",
    shown: Callable[[int, Mapping[str, float]], None] | None = None,
) -> tuple[World, list[Played]]:
    """Fits a model of the state, then calibrates and audits all of it.

    Args:
        history: real episodes.
        real: what they are of.
        settings: sizes, updates and limits.
        seed: of weights and batches.
        version: of the model.
        before: the model of fewer episodes whose weights it begins with.
        images: the picture part, from `pictures_fitted`.
        folder: keeps a checkpoint, from which the next call goes on; removed at the end.
        shown: called with the updates and metrics now and then.

    Raises:
        DatasetError: too few episodes.
    """
    model = new_model(settings.model, history, marks=real.marks, seed=seed).to(device)
    if before is not None:
        model.load_state_dict(before.model.state_dict())
    fitter = Fitter(model, history, settings.fit, seed=seed)
    _run_on(fitter, None if folder is None else folder / _CHECKPOINT, shown)
    codes = None if images is None else images.codes
    outcome = outcome_of(history, settings.outcome, codes=codes, vote=settings.outcome_vote, seed=seed)
    found = measured(
        model,
        outcome,
        history,
        env=real.env,
        horizon=real.horizon,
        limits=settings.trust,
        version=version,
        images=images,
    )
    if folder is not None:
        for name in (_CHECKPOINT, _PICTURES_CHECKPOINT):
            (folder / name).unlink(missing_ok=True)
    return found


def pictures_fitted(
    history: History,
    settings: WorldSettings,
    *,
    seed: int,
    folder: Path | None = None,
    device: str = "cpu",
    shown: Callable[[int, Mapping[str, float]], None] | None = None,
) -> Images:
    """Learns the pictures of a history's cameras; `fitted` calibrates and audits them.

    Args: folder: keeps a checkpoint, from which the next call goes on, until `fitted` ends.

    Raises:
        DatasetError: too few episodes, or cameras with pictures of different sizes.
        ConfigError: of a size that the model does not have.
    """
    check_enough(history, settings.model.stride)
    images = new_images(settings.images, history, stride=settings.model.stride, seed=seed).to(device)
    fitter = ImageFitter(images, history, seed=seed)
    _run_on(fitter, None if folder is None else folder / _PICTURES_CHECKPOINT, shown, is_last_kept=True)
    return images.eval()


def _run_on(
    fitter: Fitter | ImageFitter,
    checkpoint: Path | None,
    shown: Callable[[int, Mapping[str, float]], None] | None,
    *,
    is_last_kept: bool = False,
) -> None:
    """Takes the updates that are left behind a checkpoint, and writes it now and then."""
    if checkpoint is not None and checkpoint.is_file():
        fitter.load_state_dict(torch.load(checkpoint, weights_only=False))
    saved_s = time.monotonic()

    def note(updates: int, metrics: Mapping[str, float]) -> None:
        nonlocal saved_s
        if shown is not None:
            shown(updates, metrics)
        if checkpoint is not None and time.monotonic() - saved_s > _CHECKPOINT_S:
            _save(checkpoint, fitter.state_dict())
            saved_s = time.monotonic()

    fitter.run(note)
    if checkpoint is not None and is_last_kept:
        _save(checkpoint, fitter.state_dict())


def adopted(
    history: History, real: RealEnv, settings: WorldSettings, served: ServedConfig, *, seed: int
) -> tuple[World, list[Played]]:
    """Calibrates and audits a model of others, as `fitted` does ours; nothing is learned.

    Args: settings: with `images.cameras` pictures, too, are judged and shown, which `history` must have.

    Raises:
        DatasetError: too few episodes, or pictures of another size than the model's.
        ConfigError: no such model, or one of something else, or without these cameras.
        ModelError: it fails.
    """
    model, cameras = Served(served, real.meta), settings.images.cameras
    images = ServedImages(model.channel, cameras) if cameras else None
    check_enough(history, model.config.stride)
    model.fit_scales(history, history.split(TRAIN))
    if images is not None:
        images.read(history)
    codes = None if images is None else images.codes
    outcome = outcome_of(history, settings.outcome, codes=codes, vote=settings.outcome_vote, seed=seed)
    how: dict[str, Any] = {"limits": settings.trust, "version": 1, "images": images}
    return measured(model, outcome, history, env=real.env, horizon=real.horizon, **how)


def _save(path: Path, state: dict[str, Any]) -> None:
    temporary = temporary_of(path)
    torch.save(state, temporary)
    os.replace(temporary, path)
