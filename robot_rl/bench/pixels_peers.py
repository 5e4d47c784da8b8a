"""Policies that see, against others' learners: the same task, pictures, held-out episodes, processor time.

    clone, dagger, clone_long  ours, the rows of `bench pixels`; runs in `out` that it has finished are taken
    act, diffusion             LeRobot's `lerobot-train` on our run's demonstrations, with a ResNet-18 that
                               begins without weights, then `robot-rl evaluate`
    sac, sac_long              Stable-Baselines3's SAC with its CNN on shifted pictures, from a dense reward;
                               `sac_long` has three times as long

Each peer has as much processor time to learn in as our run had in the end, demonstrations and labels
included; LeRobot's demonstrations cost it nothing. `lerobot-train` counts steps, so two short runs measure
what a step costs before the one that counts. Programs run one after the other, on one core each.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from robot_rl.bench import pixels
from robot_rl.bench.trials import check_plan, command_line
from robot_rl.core.errors import ConfigError, DeviceError, StorageError, require
from robot_rl.core.files import make_folder, read_json, write_json
from robot_rl.policies.vla.lerobot_saved import lerobot_folder
from robot_rl.sim.config import check_names
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.record import commit, machine

Name = Literal["clone", "dagger", "clone_long", "act", "diffusion", "sac", "sac_long"]
OURS = ("clone", "dagger", "clone_long")
Row = dict[str, Any]

_LEROBOT = (
    "--policy.device=cpu",
    "--policy.push_to_hub=false",
    "--policy.pretrained_backbone_weights=null",
    "--batch_size=8",
    "--num_workers=0",
    "--env_eval_freq=0",
    "--save_freq=0",
    "--wandb.enable=false",
)
"""Of both policies. Batches are of LeRobot's own size."""
LEROBOT = {
    "act": (
        "--policy.type=act",
        "--policy.chunk_size=8",
        "--policy.n_action_steps=4",
        "--policy.use_vae=false",
        "--policy.dim_model=256",
        "--policy.dim_feedforward=512",
        "--policy.n_encoder_layers=2",
        "--policy.optimizer_lr=3e-4",
        "--policy.optimizer_lr_backbone=3e-4",
    ),
    "diffusion": (
        "--policy.type=diffusion",
        "--policy.n_obs_steps=1",
        "--policy.horizon=16",
        "--policy.n_action_steps=4",
        "--policy.drop_n_last_frames=0",
        "--policy.down_dims=[64,128,256]",
        "--policy.use_group_norm=true",
        "--policy.optimizer_lr=3e-4",
        "--policy.scheduler_warmup_steps=50",
    ),
}
"""What differs from LeRobot's defaults: short chunks for episodes of 30 steps, small networks and larger
learning rates for minutes of a core; one observation step, which is all that policies see here."""
CALIBRATION = (5, 45)
"""Steps of the two short runs."""
_LONG = 3.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another's learner on the task and seed of one of our runs."""

    name: str
    trial: pixels.Trial
    cpu_minutes: float
    """Of learning, as our run had."""
    extra: tuple[str, ...] = field(default=())
    """More arguments of `lerobot-train`."""

    @property
    def at(self) -> str:
        return f"bench pixels_peers: {self.trial.task}, {self.name}, seed {self.trial.seed}"

    @property
    def folder(self) -> Path:
        return self.trial.out / f"{self.trial.task}-{self.name}-seed{self.trial.seed}"

    @property
    def package(self) -> str:
        """The peer as it is installed."""
        return "lerobot" if self.name in LEROBOT else "stable-baselines3"

    @property
    def words(self) -> list[str]:
        """The arguments of the program that learns."""
        seed, config = self.trial.seed, self.trial.config
        if self.name in LEROBOT:
            data = self.trial.training().finished()[0] / "demos"
            own = (f"--dataset.repo_id=local/{self.trial.task}", f"--dataset.root={data}", f"--seed={seed}")
            return [*own, *_LEROBOT, *LEROBOT[self.name], *self.extra]
        settings = {
            "task": self.trial.task,
            "seed": seed,
            "result": str(self.folder / "learned.json"),
            "cpu_minutes": self.cpu_minutes,
            "env": {name: getattr(config.env, name) for name in ("state", "cameras", "image_size")},
            "episodes": config.evaluate.episodes,
        }
        return [json.dumps(settings)]

    def row(self) -> Row:
        """Returns success and cost; learns and plays if that is not done.

        Raises:
            ConfigError: it was done with other settings.
            DeviceError: a program failed; the message names its log.
        """
        done = self.folder / "result.json"
        plan = {"cpu_minutes": self.cpu_minutes, "words": self.words}
        if done.exists():
            found = read_json(done, StorageError, "Remove the folder; it is run again.")
            check_plan("bench pixels_peers", self.folder, found["plan"], plan)
            return found["row"]
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was interrupted
        make_folder(self.folder)
        row = self._row(self._lerobot() if self.name in LEROBOT else self._sac())
        write_json(done, {"plan": plan, "row": row})
        return row

    def _row(self, found: Row) -> Row:
        low, high = wilson_interval(round(found["success"] * found["episodes"]), found["episodes"])
        facts = machine("cpu")
        return {
            "task": self.trial.task,
            "arm": self.name,
            "seed": self.trial.seed,
            "success": found["success"],
            "ci_low": low,
            "ci_high": high,
            **{
                name: found.get(name)
                for name in (
                    "episodes",
                    "minutes",
                    "cpu_minutes",
                    "labels",
                    "env_steps",
                    "updates",
                    "weights",
                )
            },
            "peer": f"{self.package} {version(self.package)}",
            "commit": commit(),
            "machine": f"{facts['cores']} cores, {facts['processor']}",
        }

    def _sac(self) -> Row:
        self._spent(["-m", "robot_rl.bench.pixels_peer", *self.words], "learn.log")
        return read_json(self.folder / "learned.json", StorageError, "Remove the folder; it is run again.")

    def _lerobot(self) -> Row:
        """Trains for the processor time, and plays the held-out episodes."""
        few, many = CALIBRATION
        started, more = (self._train(steps, f"calibration-{steps}")[1] for steps in CALIBRATION)
        pace = max(more - started, 1e-3) / (many - few)
        steps = max(1, round(self.cpu_minutes / pace))
        minutes, cpu = self._train(steps, "policy")
        episodes = self.trial.config.evaluate.episodes
        policy = self.folder / "policy"
        asked = (f"policy={policy}", f"seed={self.trial.seed}", f"episodes={episodes}", "lease_wait_s=1e6")
        printed = self._output(command_line("evaluate", *asked, "--json")[1:], "evaluate.log")[0]
        labels = self.trial.training().finished()[1]["demo_env_steps"]
        return {
            **json.loads(printed.strip().splitlines()[-1]),
            "minutes": round(minutes, 3),
            "cpu_minutes": round(cpu - (started - few * pace), 3),
            "labels": labels,
            "env_steps": 0,
            "updates": steps,
            "weights": _weights(policy),
        }

    def _train(self, steps: int, name: str) -> tuple[float, float]:
        """Returns minutes and processor minutes of `lerobot-train`, its start included."""
        own = (f"--steps={steps}", f"--output_dir={self.folder / name}")
        return self._spent(["-m", "lerobot.scripts.lerobot_train", *self.words, *own], f"{name}.log")

    def _spent(self, words: Sequence[str], log: str) -> tuple[float, float]:
        """Runs a Python program; returns its minutes and processor minutes."""
        return self._output(words, log)[1:]

    def _output(self, words: Sequence[str], log: str) -> tuple[str, float, float]:
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        began_s, before = time.perf_counter(), os.times()
        with (self.folder / log).open("wb") as output:
            done = subprocess.run(
                [sys.executable, *words], stdout=subprocess.PIPE, stderr=output, env=variables, check=False
            )
            output.write(done.stdout)
        after = os.times()
        if done.returncode != 0:
            raise DeviceError(f"{self.at}: see {self.folder / log}.")
        cpu_s = sum(after[2:4]) - sum(before[2:4])  # of ended children
        return done.stdout.decode(), (time.perf_counter() - began_s) / 60.0, cpu_s / 60.0


def run(
    *,
    task: str = "pick_cube",
    arms: tuple[Name, ...] = ("clone", "dagger", "act", "diffusion", "sac"),
    seeds: tuple[int, ...] = (0,),
    cpu_minutes: float = 0.0,
    settings: tuple[str, ...] = (),
    lerobot: tuple[str, ...] = (),
    out: str = "runs/pixels",
) -> dict[str, Any]:
    """Trains peers for as long as our run took; returns rows.

    Args:
        task: name of the task.
        arms: ours `clone`, `dagger`, `clone_long`; peers `act`, `diffusion`, `sac`, `sac_long`.
        seeds: of the runs.
        cpu_minutes: processor minutes of each peer's learning; 0: those of our run to its end.
        settings: key=value for our runs, as in `bench pixels`.
        lerobot: more arguments of lerobot-train, with quotes: "lerobot=['--batch_size=16']".
        out: folder of the runs, that of `bench pixels` too, and of pixels_peers.json; finished ones are not
            repeated.

    Raises:
        ConfigError: an unknown task, a package is missing, or a run in `out` was begun with other settings.
        DeviceError: a program failed; the message names its log.
    """
    check_names(task, None, at="bench pixels_peers: ")
    require(cpu_minutes >= 0, "bench pixels_peers: cpu_minutes", cpu_minutes, "0 or more")
    for arm in arms:
        _check_installed(arm)
    rows: list[Row] = []
    with ProgressDisplay() as display, display.phase("rows", len(seeds) * len(arms), unit="rows") as progress:
        for seed in seeds:
            trial = pixels.Trial(task, seed, Path(out).resolve(), settings)
            rows += _rows(trial, arms, cpu_minutes, lerobot)
            progress.update(len(rows))
    rows.sort(key=lambda row: arms.index(row["arm"]))  # stable: seeds in order
    write_json(Path(out) / "pixels_peers.json", {"rows": rows})
    return {
        "title": f"Policies that see, ours and others' ({task}, held-out episodes)",
        "rows": rows,
        "notes": [
            "cpu_minutes: of ours from the first demonstration on, of a peer from its first update or step "
            "on; evaluations left out",
            "act, diffusion: LeRobot's, on the demonstrations of `clone`, which cost them nothing; sac: "
            "Stable-Baselines3's, from a dense reward, without an expert",
        ],
    }


def _check_installed(arm: str) -> None:
    """Raises `ConfigError` if the package of a peer is not there."""
    package, remedy = "stable_baselines3", "pip install stable-baselines3"
    if arm in LEROBOT:
        package, remedy = "lerobot", "pip install -e '.[lerobot]', on Python 3.12 or later"
    if arm not in OURS and find_spec(package) is None:
        raise ConfigError(f"bench pixels_peers: arm {arm!r} needs {package}: {remedy}. Or leave the arm out.")


def _weights(policy: Path) -> int:
    """Returns how many numbers a policy has that LeRobot saved, buffers included."""
    from safetensors import safe_open

    folder = lerobot_folder(policy)
    assert folder is not None, policy
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        names = tensors.keys()
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)


def _rows(
    trial: pixels.Trial, arms: Sequence[Name], cpu_minutes: float, lerobot: tuple[str, ...]
) -> list[Row]:
    """Returns the rows of one seed, ours first: the peers have its demonstrations and its time."""
    for one in [trial.training(), *([trial.long()] if "clone_long" in arms else [])]:
        one.check()
        if one.done() is None:
            one.train()
    cpu_minutes = cpu_minutes or trial.row("dagger")["cpu_minutes"]
    rows: list[Row] = []
    for arm in arms:
        if arm in OURS:
            rows.append(trial.row(arm))
            continue
        times = _LONG if arm == "sac_long" else 1.0
        extra = lerobot if arm in LEROBOT else ()
        rows.append(Peer(name=arm, trial=trial, cpu_minutes=times * cpu_minutes, extra=extra).row())
    return rows
