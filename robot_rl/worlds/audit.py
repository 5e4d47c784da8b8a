"""What a world model is worth, measured on real experience that it did not learn from.

depths      errors, coverage of the intervals and rank of disagreement, by depth, on the third split
pictures    errors of predicted pictures against those of copying the last real one, by depth
replays     real episodes, played again in the model by their actions from their first states: which real
failures succeed there (hallucinated success, as in PiL-World and World4RL), which successes fail
shift       disagreement on episodes newer than the model
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from robot_rl.core.errors import DatasetError
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.calibration import Calibration, Played, played_by_depth
from robot_rl.worlds.config import TrustConfig
from robot_rl.worlds.dynamics import Dynamics
from robot_rl.worlds.env import ImaginedConfig, WorldEnv
from robot_rl.worlds.fit import open_loop
from robot_rl.worlds.history import AUDIT, CALIBRATION, Array, History, Windows
from robot_rl.worlds.images.pictures import Pictures
from robot_rl.worlds.images.play import picture_rows, play_pictures
from robot_rl.worlds.outcome import Outcome, PredicateOutcome
from robot_rl.worlds.saved import World
from robot_rl.worlds.trust import TrustReport, depth_rows, reasons_against

_BATCH = 128


def measured(
    model: Dynamics,
    outcome: Outcome,
    history: History,
    *,
    env: EnvConfig,
    horizon: int,
    limits: TrustConfig,
    version: int,
    images: Pictures | None = None,
) -> tuple[World, list[Played]]:
    """Returns a fitted model with its calibration and its trust report, and the play behind it.

    Args: images: the picture part, fitted to the same history, which has its pictures.

    Raises:
        DatasetError: too few held-out episodes.
    """
    k = model.config.stride
    scaled = Windows(history, history.split(CALIBRATION), stride=k)
    calibration = Calibration.fit(model, scaled, quantile=limits.gate)
    played = played_by_depth(model, Windows(history, history.split(AUDIT), stride=k), seed=1)
    report = TrustReport(
        version=version,
        episodes=history.num_episodes,
        real_steps=history.steps,
        depths=depth_rows(calibration, played),
        disagreement=float(np.median(played[0].uncertainty)) if played else 0.0,
        pictures=[] if images is None else _judged_pictures(images, model, history, limits),
    )
    world = World(
        meta=history.meta,
        env=env,
        horizon=horizon,
        model=model,
        outcome=outcome,
        calibration=calibration,
        history=history,
        limits=limits,
        report=report,
        images=images,
    )
    world.report = judged(world, report)
    return world, played


def _judged_pictures(
    images: Pictures, model: Dynamics, history: History, limits: TrustConfig
) -> list[dict[str, float]]:
    """Finds the gate of pictures on the second split; returns what the third one says of them, by depth.

    One member has no gate: there is none to disagree with.
    """
    if images.num_members > 1:
        scaled = play_pictures(images, model, history, history.split(CALIBRATION))
        gate = [np.quantile(found.disagreement, limits.gate) for found in scaled]
        images.depths = np.array([found.depth for found in scaled], float)
        images.gate = np.maximum.accumulate(np.array(gate))
    return picture_rows(images, history, play_pictures(images, model, history, history.split(AUDIT)))


def judged(world: World, report: TrustReport) -> TrustReport:
    """Returns a report with what replays of the third split say, and its verdict."""
    success, failed = replayed(world, world.history.split(AUDIT))
    report = replace(
        report,
        false_success=float(failed.mean()) if len(failed) else None,
        missed_success=float(1.0 - success.mean()) if len(success) else None,
        replayed=(len(failed), len(success)),
    )
    return replace(report, reasons=reasons_against(report, world.limits))


def replayed(world: World, episodes: Array) -> tuple[Array, Array]:
    """Plays the actions of real episodes behind the model, from their first states, without a gate.

    Returns:
        Whether each real success (n,) succeeds there, and each real failure (m,).
    """
    if world.outcome.kind == PredicateOutcome.kind:
        world = replace(world, images=None)  # it reads states alone
    history = world.history
    truth = history.solved()[episodes]
    found = np.zeros(len(episodes), bool)
    settings = ImaginedConfig(gate=False)
    for begin in range(0, len(episodes), _BATCH):
        some = episodes[begin : begin + _BATCH]
        env = WorldEnv(world, len(some), autoreset="disabled", settings=settings, by="audit")
        options = {"observed": history.state[history.first[some]]}
        if world.images is not None:
            options["codes"] = world.images.codes[history.first[some]]
        env.reset(seed=begin, options=options)
        length = history.last[some] - history.first[some]
        live, success = np.ones(len(some), bool), np.zeros(len(some), bool)
        for t in range(int(length.max())):
            rows = np.minimum(history.first[some] + t, history.last[some] - 1)
            _, _, terminated, truncated, infos = env.step_unseen(history.action[rows], live)
            success |= infos["success"] & live
            # An episode that ended in the middle of a stride has its last stride filled with its last action.
            whole = -(-length // env.stride) * env.stride
            live = live & ~(terminated | truncated) & (t + 1 < whole)
            if not live.any():
                break
        env.close()
        found[begin : begin + len(some)] = success
    return found[truth], found[~truth]


def shift_of(world: World, newer: History) -> float:
    """Returns the median disagreement on newer episodes over that which the model was judged by.

    Raises:
        DatasetError: the episodes are too short.
    """
    windows = Windows(newer, np.arange(newer.num_episodes), stride=world.model.config.stride)
    spread = open_loop(world.model, windows, windows.rows[:4000])[1][0]
    now = float(np.median(np.sqrt((spread**2).mean(axis=-1))))
    if world.report.disagreement <= 0:
        raise DatasetError("world model: it was never audited. `robot-rl worlds audit`.")
    return now / world.report.disagreement


def agreement(imagined: Array, real: Array) -> dict[str, float]:
    """Returns how well imagined successes of policies (n,) tell their real ones.

    Pearson's and Spearman's correlations; `bias`, the mean of imagined minus real; `mmrv`, by how much the
    worst wrong order of two policies is wrong, on average (SIMPLER, arXiv 2405.05941, section 3).
    """
    order = (real[:, None] < real[None, :]) != (imagined[:, None] < imagined[None, :])
    wrong = np.abs(real[:, None] - real[None, :]) * order
    varies = min(np.ptp(imagined), np.ptp(real)) > 0
    rank = [np.argsort(np.argsort(x, kind="stable"), kind="stable").astype(float) for x in (imagined, real)]
    return {
        "pearson": float(np.corrcoef(imagined, real)[0, 1]) if varies else 0.0,
        "spearman": float(np.corrcoef(rank[0], rank[1])[0, 1]) if varies else 0.0,
        "mmrv": float(wrong.max(axis=1).mean()),
        "bias": float((imagined - real).mean()),
    }
