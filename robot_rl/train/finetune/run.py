"""`robot-rl finetune`: a run that only fine-tunes; its phases are in `phases`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from robot_rl.config import dump, read, shell, words
from robot_rl.core.files import replace_file, with_checksum_line, write_json
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.train.devices import devices_of_finetuning
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.data import policy_past, read_facts
from robot_rl.train.finetune.learn import PICTURES, Finetuning
from robot_rl.train.finetune.names import is_ours, kind_of, saved_folder
from robot_rl.train.finetune.phases import PHASES, Outcome, make, outcome
from robot_rl.train.finetune.policies import check_policy, picture_size
from robot_rl.train.finetune.split import Split, open_data
from robot_rl.train.record import check_kind, machine, new_folder, removed_if_refused, versions, write_report
from robot_rl.train.session import RunSession, execute


@dataclass(frozen=True, kw_only=True)
class FinetuneSummary(Outcome):
    """The result of a run: the content of summary.json."""

    minutes: float
    """From the start to this summary, over all lives of the run."""
    run: str
    """Run folder."""
    seed: int
    command: str
    timing: dict[str, float]
    """Wall-clock seconds by stage."""
    versions: dict[str, str]
    machine: dict[str, str]
    rows: int
    """Of metrics.jsonl: one that was cut between two of them has fewer."""


def run(config: FinetuneConfig) -> FinetuneSummary:
    """Fine-tunes from the beginning, in a new run folder below `config.out`.

    Raises:
        RobotRLError: a mistake in the configuration, a dataset or a checkpoint that does not fit or
            is damaged, a device that another run holds, a full disk; the message has the remedy.
    """
    config = _absolute(config)
    dataset, split = open_data(config)  # mistakes are found before there is a folder
    kind = check(config, dataset, split)
    folder = new_folder(config.out, f"finetune-{kind}-seed{config.seed}")
    with removed_if_refused(folder):
        replace_file(folder / "config.yaml", with_checksum_line(dump(config)))
        return _execute(config, folder, dataset, split)


def resume(folder: Path | str) -> FinetuneSummary:
    """Goes on with a run that was cut short, to the same result as if it had not been.

    Raises:
        ConfigError: the folder is none of `robot-rl finetune`.
    """
    folder = Path(folder)
    config = load_config(folder)
    return _execute(config, folder, *open_data(config))


def load_config(folder: Path) -> FinetuneConfig:
    """Returns the configuration that a run was made with."""
    check_kind(folder, "finetune", at="resume")
    return read(FinetuneConfig, folder / "config.yaml")


def session_of(config: FinetuneConfig, folder: Path) -> RunSession:
    """Returns the session of a run; it opens nothing yet."""
    return RunSession(
        folder,
        command="finetune",
        holder=f"finetune {config.policy} seed {config.seed}",
        devices=devices_of_finetuning(config),
        lease_wait_s=config.lease_wait_s,
        keep=config.checkpoint.keep,
    )


def _execute(config: FinetuneConfig, folder: Path, dataset: Dataset, split: Split) -> FinetuneSummary:
    torch.set_num_threads(config.torch_threads)
    session = session_of(config, folder)
    work = Finetuning(session, config, dataset, split)

    def of_work(phase: Callable[[Finetuning], None]) -> Callable[[RunSession], None]:
        return lambda _: phase(work)

    phases = {name: of_work(phase) for name, phase in PHASES.items()}
    return execute(session, phases, lambda _: _conclude(work))


def check(config: FinetuneConfig, dataset: Dataset, split: Split) -> str:
    """Returns what kind of policy it is, after building it once if it is one of ours.

    LeRobot's may be large, and are checked by their settings alone.
    """
    facts = read_facts(
        dataset,
        split.train,
        picture=picture_size(config),
        past=policy_past(config, dataset),
        decode=False,
    )
    check_policy(config, facts)
    if is_ours(config.policy):
        make(config, facts)
    return kind_of(config.policy)


def _conclude(work: Finetuning) -> FinetuneSummary:
    """Writes summary.json and the report."""
    config, session, found = work.config, work.session, outcome(work)
    summary = FinetuneSummary(
        **vars(found),
        minutes=round(session.elapsed_s / 60.0, 3),
        run=str(session.folder),
        seed=config.seed,
        command=_command(config, found.updates),
        timing=session.timer.seconds(),
        versions=versions(_packages()),
        machine=machine(config.device),
        rows=session.metrics.num_rows,
    )
    shutil.rmtree(session.folder / PICTURES, ignore_errors=True)
    write_json(session.folder / "summary.json", summary.to_json(), is_checked=True)
    with session.timer.stage("report"):
        session.display.message(f"report: {write_report(session.folder)}")
    return summary


def _command(config: FinetuneConfig, updates: int) -> str:
    """Returns the command that repeats the run, its number of updates included."""
    return f"robot-rl finetune {shell(words(replace(config, updates=updates, minutes=None)))}"


def _packages() -> list[str]:
    return [name for name in ("torch", "numpy", "av", "lerobot") if find_spec(name) is not None]


def _absolute(config: FinetuneConfig) -> FinetuneConfig:
    """Returns the config with paths that hold wherever the run is resumed."""
    policy = saved_folder(config.policy)
    dataset = str(Path(config.dataset).resolve())
    return replace(config, dataset=dataset, policy=config.policy if policy is None else str(policy.resolve()))
