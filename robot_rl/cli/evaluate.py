"""`robot-rl evaluate`: repeats the evaluation of a run, action for action."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from robot_rl.config import load
from robot_rl.core.errors import require

SUMMARY = "success of a run's policy on held-out seeds, repeated exactly"

_HELP = """\
Usage: robot-rl evaluate run=<folder> [which=final|base] [episodes=200] [disturb=0.0] [adversary=false]
                         [--json]

Evaluates a policy of a run folder on the run's held-out seeds, with the same batches as training
did, and compares the SHA-256 of all actions with the one that training wrote down. Exits with 1
if they differ. With disturb every episode has a push of its own, which is added to every action;
with adversary the one pushes that the policy was trained against (method=qarl).

Examples:
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3 which=base
  robot-rl evaluate run=runs/20261121-101500-qarl-seed3 disturb=0.3
  robot-rl evaluate run=runs/20261121-101500-pick_cube-seed3 episodes=1000 --json
"""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommandConfig:
    """What to evaluate."""

    run: str
    """Run folder."""
    which: Literal["final", "base"] = "final"
    """The policy after reinforcement learning, or the cloned one."""
    episodes: int | None = None
    """Held-out episodes; as many as the run's own evaluation if None."""
    disturb: float = 0.0
    """Largest push, as a share of the env's [-1, 1], the same in all actions of an episode."""
    adversary: bool = False
    """Whether the adversary acts that the policy was trained against."""

    def __post_init__(self) -> None:
        require(0 <= self.disturb <= 1, "disturb", self.disturb, "0 to 1")
        given = self.episodes
        require(given is None or 1 <= given <= 10_000, "episodes", given, "1 to 10000")


def run(argv: list[str]) -> int:
    """Evaluates and prints success, interval and digest."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    words = [word for word in argv if word != "--json"]
    options = load(EvaluateCommandConfig, words, config_name="evaluate")
    import torch  # the learner: not for --help

    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.assemble import make_eval_env
    from robot_rl.train.phases import evaluate_folder, load_config

    folder = Path(options.run)
    config = load_config(folder, at="run")
    torch.set_num_threads(config.torch_threads)
    total = options.episodes or config.evaluate.episodes
    print(f"policy {options.which} of {folder}, {total} held-out episodes", file=sys.stderr)
    with (
        closing(make_eval_env(config)) as env,
        ProgressDisplay() as display,
        display.phase("evaluate", total, unit="episodes") as progress,
    ):
        result = evaluate_folder(
            folder,
            options.which,
            config,
            env,
            episodes=total,
            disturb=options.disturb,
            adversary=options.adversary,
            on_batch=progress.update,
        ).to_json()
    is_pushed = options.disturb > 0 or options.adversary
    told = None if is_pushed else _told(folder, options.which)
    matches = told["digest"] == result["digest"] if told and told["episodes"] == total else None
    low, high = result["ci"]
    print(
        f"{config.env.task}, {options.which}: success {result['success']:.1%} of {total} episodes "
        f"(95 % interval {low:.1%} to {high:.1%}); actions {result['digest'][:16]}, {_verdict(matches)}"
    )
    if "--json" in argv:
        facts = {"task": config.env.task, "run": str(folder), "which": options.which, "matches": matches}
        print(json.dumps({**facts, **result}))
    return 1 if matches is False else 0


def _told(folder: Path, which: str) -> dict[str, Any] | None:
    """Returns what training wrote down, if it came so far."""
    path = folder / f"evaluation-{which}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _verdict(matches: bool | None) -> str:
    if matches is None:
        return "not to be compared: training evaluated other episodes, none yet, or without pushes"
    return "the same as in training" if matches else "NOT those of training (other code or processor?)"
