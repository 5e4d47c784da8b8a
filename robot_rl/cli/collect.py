"""`robot-rl collect`: demonstrations of a scripted expert, as a dataset on the disk."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from robot_rl.config import load
from robot_rl.core.errors import ConfigError, DatasetError

SUMMARY = "demonstrations of a scripted expert, as a LeRobot dataset"

_HELP = """\
Usage: robot-rl collect task=<name> out=<folder> [episodes=100] [bias_m=0] [noise_m=0.01]
                        [robot=<name>] [seed=0] [num_envs=50]
                        [cameras=[front]] [images=png|video] [--json]

Runs the task's scripted expert and writes its episodes, failures included, as a LeRobotDataset v3.
bias_m lets it aim beside the target, noise_m varies the aim between episodes: a base of chosen
quality. images=video is smaller, png loses nothing.
Train on the result with `robot-rl train demos.path=<folder>`.

Examples:
  robot-rl collect task=pick_cube episodes=50 out=demos/pick_cube
  robot-rl collect task=pick_cube episodes=200 bias_m=0.015 noise_m=0.01 out=demos/mediocre
"""


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """What to collect."""

    task: str
    out: str
    """Folder of the dataset; must not exist."""
    robot: str | None = None
    """The task's own if None."""
    episodes: int = 100
    bias_m: float = 0.0
    noise_m: float = 0.01
    seed: int = 0
    num_envs: int = 50
    cameras: tuple[str, ...] = field(default=())
    images: Literal["png", "video"] = "png"
    """How pictures are kept: without loss, or as h264 video, which is smaller."""

    def __post_init__(self) -> None:
        if self.num_envs < 1 or self.seed < 0:
            raise ConfigError(
                f"collect: got num_envs {self.num_envs} and seed {self.seed}, allowed: 1 or more, 0 or more"
            )


def run(argv: list[str]) -> int:
    """Collects and prints what was collected."""
    if {"-h", "--help"} & set(argv):
        print(_HELP, end="")
        return 0
    options = load(CollectConfig, [word for word in argv if word != "--json"], config_name="collect")
    from robot_rl.data.demos import save_episodes  # the simulator: not for --help
    from robot_rl.sim.vector import EnvConfig
    from robot_rl.telemetry.progress import ProgressDisplay
    from robot_rl.train.config import DemosConfig
    from robot_rl.train.demos import collect_demonstrations
    from robot_rl.train.envs import make_env

    folder = Path(options.out)
    if folder.exists():
        raise DatasetError(f"out: {str(folder)!r} exists already. Choose another folder, or remove it first.")
    knobs = DemosConfig(episodes=options.episodes, bias_m=options.bias_m, noise_m=options.noise_m)
    env_config = EnvConfig(task=options.task, robot=options.robot, cameras=options.cameras)
    print(f"expert of {options.task}: {options.episodes} episodes", file=sys.stderr)
    with (
        closing(make_env(env_config, options.num_envs, autoreset="disabled")) as env,
        ProgressDisplay() as display,
        display.phase("collect", options.episodes, unit="episodes") as progress,
    ):
        episodes = collect_demonstrations(env, knobs, options.seed, on_batch=progress.update)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_episodes(folder, episodes, images=options.images)
    success = float(episodes.episode_success().mean())
    steps = len(episodes.reward)
    print(f"{folder}: {episodes.num_episodes} episodes, {steps:,} control steps, success {success:.1%}")
    if "--json" in argv:
        facts = {"task": options.task, "episodes": episodes.num_episodes, "env_steps": steps}
        print(json.dumps({**facts, "success": success, "out": str(folder)}))
    return 0
