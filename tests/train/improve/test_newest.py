"""What is saved and looked at is the learner's newest policy, however seldom it hands its weights over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.config import build
from robot_rl.policies.checkpoint import load_policy
from robot_rl.sim.tasks import reach
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import method
from tests.runs import TINY

pytestmark = pytest.mark.usefixtures("whole_runs")

SMALL: dict[str, Any] = {"width": 16, "depth": 1}
OFF: dict[str, Any] = {
    "env_steps": 69,  # the last look is at 60
    "batch": 8,
    "explore_steps": 12,
    "capacity": 1000,
    "publish_every": 900,
}
ACTOR: dict[str, Any] = {"actor": SMALL, "critic": SMALL}
CHAIN: dict[str, Any] = {
    "env_steps": 60,
    "decisions": 5,
    "algorithm": {"batch": 8, "epochs": 1, **SMALL},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "residual": {**OFF, "head": SMALL, "algorithm": {**SMALL, "num_critics": 2, "critic_warmup": 2}},
    "latent": {**OFF, "actor": SMALL, "algorithm": {**SMALL, "actor_warmup": 2}},
    "chunked": {**OFF, "algorithm": {"candidates": 3, "critics": SMALL}},
    "direct": {**OFF, "algorithm": ACTOR},
    "sequence": {**OFF, "algorithm": {**ACTOR, "n_step": 3, "model_width": 16}},
    "qarl": {**OFF, "algorithm": {**ACTOR, "adversary": {"width": 16, "curriculum": 20}}},
    "ppo": CHAIN,
    "grpo": {
        "env_steps": 60,
        "group": 3,
        "reward": "process",
        "keep": [0.0, 1.0],
        "algorithm": {"batch": 8, "epochs": 1, **SMALL},
    },
    "rl100": {
        **CHAIN,
        "exploration": {"process": "flow_sde", "stochastic_steps": "all"},
        "algorithm": {**CHAIN["algorithm"], "reduction": "per_step"},
        "offline": {
            "critic_updates": 2,
            "updates": 2,
            "batch": 8,
            "iql": {"critics": SMALL},
            "gate": {"every": 2, "scorer": "critics", "states": 4},
        },
    },
}


def differing(policy: torch.nn.Module, loop: Any) -> list[str]:
    """Returns the names of what the learner has otherwise than the policy."""
    own = {name: value.cpu().clone() for name, value in policy.state_dict().items()}  # before it is asked for
    weights = loop.leader.algorithm.policy_weights()
    return [name for name, value in weights.items() if not torch.equal(own[name], value.cpu())]


@pytest.mark.parametrize("name", SECTIONS)
def test_the_policy_that_is_saved_or_looked_at_is_the_newest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[Any] = []
    looks: list[list[str]] = []
    learn = phases.learn

    def watched(session: Any, loop: Any, *args: Any, **options: Any) -> None:
        loops.append(loop)
        learn(session, loop, *args, **options)

    def look(session: Any, policy: torch.nn.Module, _: Any) -> None:
        if loops:  # an offline phase before has a loop of its own
            looks.append(differing(policy, loops[0]))

    monkeypatch.setattr(reach, "GOAL_RADIUS_M", 0.2)  # a policy that knows nothing sometimes gets there
    monkeypatch.setattr(phases, "learn", watched)
    monkeypatch.setattr(method, "quick_evaluation", look)
    values = {**TINY, "method": {"kind": name, **SECTIONS[name]}}
    values["checkpoint"] = {"every_s": 0.0, "every_steps": 30}
    values["evaluate"] = {"episodes": 2, "num_envs": 2, "every_env_steps": 30, "quick_episodes": 2}
    summary = phases.run(replace(build(RunConfig, values), out=str(tmp_path)))
    (loop,) = loops
    assert loop.counters.updates >= 1
    saved, _ = load_policy(Path(summary.run) / "policy" / "final")
    assert isinstance(saved, torch.nn.Module)
    assert differing(saved, loop) == []
    assert looks
    assert looks == [[]] * len(looks)
