"""How much of its time an arm moves while a policy learns: waiting for its learner, and not waiting.

The arm is the simulated one of `station=sim_in_process`: driver, supervisor, control steps in real time. What
waits acts when it is asked, and is asked after the updates; what does not wait sends its steps from another
process. Both owe the same updates for each control step, turn about: A B A B.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.bench.trials import one_torch_thread
from robot_rl.config import load
from robot_rl.core.errors import require
from robot_rl.policies.checkpoint import load_policy
from robot_rl.real.claim import device_of
from robot_rl.real.station import load_station
from robot_rl.rollout.process import ProcessSource
from robot_rl.sched.leases import LeaseStore
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import load_demonstrations
from robot_rl.train.improve.acting import act_alone
from robot_rl.train.improve.config import OffPolicySettings
from robot_rl.train.improve.method import Start, method_of, settings_of
from robot_rl.train.loop import train
from robot_rl.train.session import Session

STATION = "sim_in_process"
EPISODE_S = 5.0
"""Of an episode that does not succeed."""
EXPLORE = 100
"""Control steps before the first update."""


def run(
    *,
    utd: tuple[float, ...] = (2.0, 8.0),
    steps: int = 1000,
    batch: int = 256,
    rounds: int = 2,
    hz: float = 20.0,
) -> dict[str, Any]:
    """Learns `pick_cube` on the arm by residual RL; returns rows.

    Args:
        utd: learner updates for each control step; each is measured.
        steps: control steps of each run.
        batch: rows of an update.
        rounds: turns of each kind of arm.
        hz: control steps in a second.
    """
    require(min(utd) > 0, "bench arm_time: utd", list(utd), "above 0")
    require(steps >= 200, "bench arm_time: steps", steps, "200 or more")
    require(rounds >= 1, "bench arm_time: rounds", rounds, "1 or more")
    out = Path(tempfile.mkdtemp(prefix="robot-rl-arm-time-"))
    words = [
        "recipe=online",
        "human.input=none",
        "real_time=false",
        f"station={STATION}",
        f"env.control_hz={hz}",
        f"method.env_steps={steps}",
        f"method.batch={batch}",
        f"method.explore_steps={EXPLORE}",
        "method.algorithm.critic_warmup=0",
        "evaluate.every_env_steps=0",
        "checkpoint.every_s=0",
        f"out={out}",
    ]
    base = ["stages=demos,clone,evaluate", "video.episodes=0", "video.failures=0", "bc.updates=500"]
    try:
        with one_torch_thread():
            cloned = Path(phases.run(load(RunConfig, [*words, *base], config_name="train")).run)
            found: dict[tuple[float, bool], list[dict[str, float]]] = {}
            for number in range(rounds):
                for ratio in utd:
                    for waits in (True, False):
                        config = load(RunConfig, [*words, f"method.utd={ratio}"], config_name="train")
                        folder = out / f"{ratio:g}-{waits}-{number}"
                        shutil.copytree(cloned, folder, ignore=shutil.ignore_patterns("checkpoints"))
                        found.setdefault((ratio, waits), []).append(_timed(config, folder, waits))
    finally:
        shutil.rmtree(out, ignore_errors=True)
    rows = [
        {"updates for a step": ratio, "the arm": "waits" if waits else "does not wait"}
        | {name: float(np.mean([one[name] for one in each])) for name in each[0]}
        for (ratio, waits), each in found.items()
    ]
    note = (
        "arm's time used: control steps times their period, as a share of the clock from the first step to "
        "the last; resets, of a tenth of a second each, are not steps. Updates made: of those that were owed."
    )
    return {"title": "an arm and its learner", "rows": rows, "notes": [note]}


def _timed(config: RunConfig, folder: Path, waits: bool) -> dict[str, float]:
    """Returns how one run went."""
    episodes = load_demonstrations(folder / "demos", config, as_executed=True)
    base: Any = load_policy(folder / "policy" / "base")[0]
    arm = device_of(load_station(STATION))
    with Session(config, folder) as session, ExitStack() as stack:
        start = Start(episodes=episodes, base=base, envs={}, eval_envs={})
        loop, _ = method_of(config).assemble(session, start)
        if waits:
            held = stack.enter_context(LeaseStore().hold(arm, holder="bench arm_time"))
            leases = [held.lease, *(one.lease for one in session.leases)]
            build = partial(act_alone, config, folder, leases, "")
            loop.sources = [ProcessSource(build, ahead=0)]
        (source,) = loop.sources
        stack.enter_context(closing(source))
        while not loop.counters.env_steps:  # processes begin, once
            segment = source.collect(loop.publisher)
            if segment is not None:
                loop.keep(segment)
        began_s = time.monotonic()
        train(loop)
        wall_s = time.monotonic() - began_s
        made = loop.leader.updates
        owed = (config.method.env_steps - EXPLORE) * settings_of(config, OffPolicySettings).utd
    return {
        "updates made": made / owed,
        "s for an episode": wall_s * EPISODE_S * config.env.rate_hz / config.method.env_steps,
        "arm's time used": config.method.env_steps / config.env.rate_hz / wall_s,
    }
