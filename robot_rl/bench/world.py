"""How far a world model can be believed: calibration, agreement with the real env, replayed failures.

    calibration  coverage of its intervals by depth on episodes that neither fitted nor calibrated it
    replays      real failures whose actions succeed in it
    agreement    success of some 30 policies in both worlds, from the same starts: `passive` ones that never
                 saw the model, and `optimised` ones that learned in it, which alone can find its mistakes

Everything is a run of `robot-rl`, kept in `out`: finished ones are not repeated. The limits of trust are
lifted for the fit, so that the agreement of a model that nobody would lease can be measured, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robot_rl.bench.trials import Training, call, train_all
from robot_rl.core.errors import ConfigError
from robot_rl.core.files import make_folder, write_json
from robot_rl.core.seeding import quick_eval_seeds
from robot_rl.policies.checkpoint import load_policy
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.evaluate import evaluate_in
from robot_rl.sched.opened import opened
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.imagine import RealStartsEnv
from robot_rl.worlds.audit import agreement
from robot_rl.worlds.calibration import LEVELS
from robot_rl.worlds.config import TrustConfig
from robot_rl.worlds.env import ImaginedConfig
from robot_rl.worlds.plots import draw_agreement, draw_coverage, draw_replays
from robot_rl.worlds.saved import World, load_world
from robot_rl.worlds.trust import reasons_against

Row = dict[str, Any]

# Thresholds, set before the first run of this benchmark.
COVERAGE_WITHIN = 0.05
"""How far coverage may be from its level at any depth."""
MIN_PEARSON, MAX_BIAS, MAX_OPTIMISED_BIAS = 0.85, 0.10, 0.15
"""Over all policies; the bias of the optimised ones apart."""
MAX_FALSE_SUCCESS = 0.10
"""Share of replayed real failures that may succeed."""

LIFTED = ("trust.coverage_within=1", "trust.min_rank=-1", "trust.max_false_success=1", "trust.max_bias=1")
"""Settings of a fit whose model is leased whatever was measured of it."""
_QUIET = ("video.episodes=0", "video.failures=0", "lease_wait_s=1e6", "torch_threads=1")
_BIASES_M, _CLONED = (0.0, 0.015, 0.025, 0.035), (200, 800, 3000)
_PUSHED, _PUSHES = (0.0, 0.025), (0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
"""Biases of the longest-trained clones that are corrupted, and the largest pushes on every action. With the
clones, and the optimised runs of two seeds, they are the 30 policies of E2."""
_IMAGINED_STEPS = (30_000, 90_000, 180_000)
_ANCHOR = ("method.algorithm.regulariser=bc", "method.algorithm.regulariser_weight=0.05")
_FREE = "without controls"
"""Kind of the policies that learned in the model with nothing to hold them; they are no part of E2."""
_BRANCH = 32
"""Control steps that an imagined episode of the policies with controls has at most."""
_CONTROLS = {
    "": ("env.settings={{strides: {strides}}}", *_ANCHOR),
    "-without-controls": (
        "env.settings={{strides: 0, gate: false, starts: {{initial: 1.0, keyframe: 0.0, replay: 0.0}}}}",
    ),
}
"""Settings of the runs in the model, where `strides` is as many strides as the branch has."""
_SHARES = {"clone-25mm-3000": (1 / 3, 2), "clone-0mm-800": (2 / 9, 3), "clone-35mm-800": (1 / 9, 4)}
"""Of the model's episodes, which these policies play, and seeds. Experts alone push only what they touch: a
model of their episodes learns that whatever is pushed at moves."""


@dataclass(frozen=True)
class Candidate:
    """A policy that is judged in both worlds."""

    name: str
    kind: str
    folder: Path
    """Of the policy."""
    disturb: float = 0.0


def run(
    *,
    task: str = "push_cube",
    episodes: int = 450,
    updates: int = 4000,
    stride: int = 4,
    real: int = 100,
    seeds: tuple[int, ...] = (10, 11),
    jobs: int = 0,
    out: str = "runs/world",
    figure: str = "world.png",
) -> dict[str, Any]:
    """Fits a model, makes policies, and judges them in both worlds.

    Args:
        task: of ours, with a scripted expert.
        episodes: real ones behind the model: a third of a biased expert, the others of three of the clones.
        updates: of the model.
        stride: of the model, in control steps.
        real: real episodes of each policy; the imagined ones begin there, in every member.
        seeds: of the runs in the model.
        jobs: runs at a time, one core each; 0: as many as there are cores.
        out: folder of data, model, runs and world.json.
        figure: file of the agreement plot; the others stand next to it. None is drawn if empty.

    Raises:
        ConfigError: strides of which no whole number is 32 control steps, or the model in `out` has others.
        DeviceError: a run failed; the message names its log.
    """
    if stride < 1 or _BRANCH % stride:
        raise ConfigError(f"bench world: stride must divide {_BRANCH}, got {stride}.")
    home = Path(out).resolve()
    make_folder(home)
    passive = [_clone(home, task, bias, count) for bias, count in itertools.product(_BIASES_M, _CLONED)]
    _train(passive, jobs)
    how = (f"fit.updates={updates}", f"model.stride={stride}")
    model = _model(home, task, episodes, how, {one.folder.name: _policy(one) for one in passive})
    world = load_world(model)
    if world.model.config.stride != stride:
        raise ConfigError(
            f"bench world: {model} has strides of {world.model.config.stride}, got stride={stride}. "
            "Give each stride an `out` of its own."
        )
    base = _longest(passive, 0.025)
    inside = [
        _optimised(home, task, model, base, steps, seed, name, stride)
        for steps, seed, name in itertools.product(_IMAGINED_STEPS, seeds, _CONTROLS)
    ]
    _train(inside, jobs)
    candidates = _candidates(passive, inside)
    torch.set_num_threads(1)
    rows = _judged(world, candidates, real)
    write_json(home / "world.json", {"report": _plain(world), "rows": rows})
    found = _numbers(rows)
    return {
        "title": f"World of {task}: {world.report.episodes} episodes, {world.report.real_steps:,} real steps",
        "claims": _claims(world, found),
        "calibration": world.report.depths,
        "agreement": [{"policies": kind, **numbers} for kind, numbers in found.items()],
        "rows": rows,
        "figures": _draw(Path(figure), task, world, rows, found["all"]) if figure else {},
        "notes": [
            f"replays: {world.report.replayed[0]} real failures, {world.report.replayed[1]} successes",
            f"with the usual limits: {'; '.join(reasons_against(world.report, TrustConfig())) or 'believed'}",
            f"optimised: branches of {_BRANCH} control steps from real states, cut by the gate, anchored "
            "to the base; without controls: whole episodes from first states, nothing cut, no anchor",
        ],
    }


def _longest(passive: list[Training], bias_m: float) -> Training:
    """Returns the clone of the expert of that bias which learned longest."""
    return passive[_BIASES_M.index(bias_m) * len(_CLONED) + len(_CLONED) - 1]


def _candidates(passive: list[Training], inside: list[Training]) -> list[Candidate]:
    """Returns the clones, corrupted ones of them, and the policies that learned in the model."""
    found = [Candidate(one.folder.name, "passive", _policy(one)) for one in passive]
    for bias_m, push in itertools.product(_PUSHED, _PUSHES):
        one = _longest(passive, bias_m)
        found.append(Candidate(f"{one.folder.name} pushed by {push:g}", "passive", _policy(one), push))
    for one in inside:
        kind = _FREE if "without" in one.folder.name else "optimised"
        found.append(Candidate(one.folder.name, kind, _policy(one)))
    return found


def _draw(
    path: Path, task: str, world: World, rows: list[Row], numbers: Mapping[str, float]
) -> dict[str, str]:
    """Writes the figures; returns their paths by experiment."""
    report = world.report
    paths = {
        "E1": path.with_stem(f"{path.stem}_coverage"),
        "E2": path,
        "E5": path.with_stem(f"{path.stem}_replays"),
    }
    draw_coverage(paths["E1"], f"{task}: coverage on the third split", report.depths, COVERAGE_WITHIN)
    counted = sum(row["kind"] != _FREE for row in rows)
    title = f"{task}: {counted} policies in both worlds, and {len(rows) - counted} {_FREE}"
    draw_agreement(paths["E2"], title, rows, numbers)
    draw_replays(paths["E5"], f"{task}: replays of real episodes", report, MAX_FALSE_SUCCESS)
    return {name: str(drawn) for name, drawn in paths.items()}


def _model(home: Path, task: str, episodes: int, how: tuple[str, ...], policies: Mapping[str, Path]) -> Path:
    """Returns the folder of the model, which is fitted so if it is not there."""
    expert = (f"task={task}", f"episodes={episodes // 3}", "bias_m=0.02", "noise_m=0.02", "seed=0")
    parts: dict[str, tuple[str, ...]] = {"expert": expert}
    for name, (share, seed) in _SHARES.items():
        count = f"episodes={round(share * episodes)}"
        parts[f"of-{name}"] = (f"policy={policies[name]}", count, "keep.success=false", f"seed={seed}")
    for name, words in parts.items():
        if not (home / name).is_dir():
            _call(home, "collect", *words, f"out={home / name}", "lease_wait_s=1e6")
    model = home / "model"
    if not (model / "world.json").is_file():
        data = f"data={','.join(str(home / name) for name in parts)}"
        fixed = ("torch_threads=1", "lease_wait_s=1e6", *LIFTED)
        _call(home, "worlds", "fit", data, f"out={model}", *how, *fixed)
    return model


def _call(home: Path, *words: str) -> None:
    call("bench world", home / f"{words[0]}.log", *words)


def _clone(home: Path, task: str, bias_m: float, updates: int) -> Training:
    name = f"clone-{1000 * bias_m:g}mm-{updates}"
    words = (
        *("recipe=imagined", f"env.task={task}", "stages=[demos,clone,evaluate]", "seed=10"),
        *(f"demos.bias_m={bias_m}", f"bc.updates={updates}", "evaluate.episodes=50", *_QUIET),
    )
    return Training(f"bench world: {name}", home / name, words)


def _optimised(
    home: Path,
    task: str,
    model: Path,
    base: Training,
    steps: int,
    seed: int,
    name: str,
    stride: int,
) -> Training:
    label = f"inside-{steps}{name}-seed{seed}"
    found = base.done()
    words = (
        *("recipe=reinflow", f"env.task={task}", "env.kind=world", f"env.id={model}", f"seed={seed}"),
        *(word.format(strides=_BRANCH // stride) for word in _CONTROLS[name]),
        *(f"demos.path={found}/demos", f"bc.policy={found}/policy/base", f"method.env_steps={steps}"),
        *("method.decisions=4", "method.algorithm.actor_lr=5e-5", "method.algorithm.clip=0.05"),
        *("method.algorithm.target_kl=0.002", "method.algorithm.epochs=5", "method.algorithm.batch=512"),
        *("evaluate.episodes=50", "evaluate.every_env_steps=0", *_QUIET),
    )
    return Training(f"bench world: {label}", home / label, words)


def _train(runs: list[Training], jobs: int) -> None:
    train_all("runs", [(one, ()) for one in runs if one.done() is None], jobs)


def _policy(run: Training) -> Path:
    return run.finished()[0] / "policy" / "final"


def _judged(world: World, candidates: list[Candidate], episodes: int) -> list[Row]:
    """Returns success of each policy in both worlds, from the same starts."""
    seeds, rows = quick_eval_seeds(0, episodes), list[Row]()
    members = world.model.config.members
    with ExitStack() as stack, ProgressDisplay() as display:
        device = simulation(world.env, min(50, episodes))
        env = stack.enter_context(opened(device, holder="bench world", wait_s=1e6))
        progress = stack.enter_context(display.phase("judge", len(candidates), unit="policies"))
        for number, one in enumerate(candidates, start=1):
            policy, meta = load_policy(one.folder)
            how: dict[str, Any] = {"seeds": seeds, "n_exec": meta.n_exec, "disturb": one.disturb}
            truth = evaluate_in(env, policy, **how)
            imagined = [
                evaluate_in(
                    RealStartsEnv(world, env, ImaginedConfig(gate=False, member=member)), policy, **how
                ).rate
                for member in range(members)
            ]
            rows.append(
                {
                    "policy": one.name,
                    "kind": one.kind,
                    "real": truth.rate,
                    "imagined": float(np.mean(imagined)),
                    "episodes": episodes,
                    "imagined_episodes": episodes * members,
                }
            )
            progress.update(number)
    return rows


def _numbers(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Returns the agreement over all policies with controls, and over each kind."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    groups = {"all": [row for row in rows if row["kind"] != _FREE]}
    groups |= {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    return {
        name: agreement(np.array([row["imagined"] for row in some]), np.array([row["real"] for row in some]))
        for name, some in groups.items()
    }


def _claims(world: World, found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Returns each threshold, what was found, and whether it holds."""
    report = world.report
    shares = [(row.get(f"coverage_{level:.0%}"), level) for row in report.depths for level in LEVELS]
    far = max((abs(share - level) for share, level in shares if share is not None), default=1.0)
    optimised = found.get("optimised", {}).get("bias", 0.0)
    claims = [
        ("E1 coverage, largest distance from its level", far, COVERAGE_WITHIN, far <= COVERAGE_WITHIN),
        (
            "E2 Pearson, all policies",
            found["all"]["pearson"],
            MIN_PEARSON,
            found["all"]["pearson"] >= MIN_PEARSON,
        ),
        ("E2 bias, all policies", found["all"]["bias"], MAX_BIAS, abs(found["all"]["bias"]) <= MAX_BIAS),
        ("E2 bias, optimised", optimised, MAX_OPTIMISED_BIAS, abs(optimised) <= MAX_OPTIMISED_BIAS),
    ]
    if report.false_success is not None:
        false = report.false_success
        claims.append(
            ("E5 replayed failures that succeed", false, MAX_FALSE_SUCCESS, false <= MAX_FALSE_SUCCESS)
        )
    return [
        {"claim": name, "found": round(value, 3), "threshold": limit, "holds": bool(holds)}
        for name, value, limit, holds in claims
    ]


def _plain(world: World) -> Row:
    return vars(replace(world.report))
