"""Targets of the storage campaign that import torch, and the leases: see `storage_targets.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from storage_targets import LostError, Promise, Run, WrongError

from robot_rl.core.clock import ManualClock
from robot_rl.core.files import replace_file
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.device import DeviceSpec
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.sched.leases import LeaseStore
from robot_rl.telemetry.metrics import FILE_NAME, MetricsWriter, read_metrics
from robot_rl.train.checkpoint import CheckpointStore
from robot_rl.train.deploy.config import DeployConfig
from robot_rl.train.deploy.journal import Journal
from robot_rl.train.record import new_folder
from robot_rl.train.session import saying_how_to_resume

T = TypeVar("T")

POLICY_META = PolicyMeta(
    task="reach",
    robot="so101",
    control_hz=20.0,
    state_names=("pan", "lift"),
    action_names=("x", "y"),
    instruction="reach",
    n_exec=1,
)
ARM = DeviceSpec(name="arm", kind="robot", slots=10)
CPU = DeviceSpec(name="cpu", kind="cpu", slots=10)


class Checkpoints:
    """Saves checkpoints of a run and its policy, and resumes."""

    def prepare(self, folder: Path) -> Promise:
        return {"step": 0, "policy": 0}

    def work(self, folder: Path, run: Run) -> None:
        store = CheckpointStore(folder / "run/checkpoints", keep=2)
        state = store.load()
        begun = 0 if state is None else int(state["step"])
        for step in range(begun + 1, begun + 4):
            state = {"step": step, "weights": weights_of(step), "replay": weights_of(-step).numpy()}
            run.attempt(lambda state=state, step=step: store.save(state, f"step{step}"))
            run.ack(step=step)
        policy = folder / "run/policy/final"
        for number in range(run.promised["policy"] + 1, run.promised["policy"] + 3):
            run.attempt(lambda number=number: save_policy(policy, policy_of(number), meta=POLICY_META))
            run.ack(policy=number)

    def check(self, folder: Path, run: Run) -> None:
        state = CheckpointStore(folder / "run/checkpoints").load()
        step = 0 if state is None else int(state["step"])
        if step < run.promised["step"]:
            raise LostError(f"checkpoint {run.promised['step']}, the last is {step}")
        if state is not None and not (
            torch.equal(state["weights"], weights_of(step))
            and np.array_equal(state["replay"], weights_of(-step).numpy())
        ):
            raise WrongError(f"checkpoint {step} is not what was saved")
        if not run.promised["policy"] and not (folder / "run/policy/final").exists():
            return
        policy, _ = load_policy(folder / "run/policy/final", expect=POLICY_META)
        weights = cast("torch.nn.Module", policy).state_dict()
        number = max(float(tensor.reshape(-1)[0]) for tensor in weights.values())
        if number < run.promised["policy"]:
            raise LostError(f"policy {run.promised['policy']}, {number:g} is there")
        for name, tensor in policy_of(int(number)).state_dict().items():
            if not torch.equal(tensor, weights[name]):
                raise WrongError(f"policy {number:g}: {name} is not what was saved")


class RunFolder:
    """Writes what stays of a run: settings, metrics, evaluation, deployment, summary."""

    def prepare(self, folder: Path) -> Promise:
        return {"rows": 0, "files": {}}

    def work(self, folder: Path, run: Run) -> None:
        if "run" not in run.promised:
            made = run.attempt(lambda: new_folder(str(folder / "runs"), "reach"))
            run.ack(run=made.name)
        at = folder / "runs" / run.promised["run"]

        def attempt(act: Callable[[], T]) -> T:
            def act_in_a_run() -> T:
                with saying_how_to_resume(at, "train"):
                    return act()

            return run.attempt(act_in_a_run)

        def write(name: str, text: str) -> None:
            attempt(lambda: replace_file(at / name, text))
            run.ack(files={**run.promised["files"], name: text})

        write("config.yaml", "seed: 1\n" * 9)
        run.ack(rows=0)  # as a run that resumes without a checkpoint
        metrics = attempt(lambda: MetricsWriter(at, tensorboard=False))
        attempt(lambda: metrics.load_state_dict({"rows": 0}))

        def add(rows: int) -> None:
            for row in range(metrics.num_rows, metrics.num_rows + rows):
                attempt(lambda row=row: metrics.write(row, "improve", {"learn/loss": row / 8}))
            run.ack(rows=attempt(metrics.state_dict)["rows"])

        add(3)
        write("evaluation-base.json", json.dumps({"success": 0.5}))
        run.ack(rows=2)  # as a checkpoint says, whose rows after it are made again
        attempt(lambda: metrics.load_state_dict({"rows": 2}))
        add(2)
        attempt(metrics.close)
        journal = Journal(folder=at, config=DeployConfig(station="x", run="y"), task="reach", real=False)
        run.attempt(journal.write)
        run.ack(deployed=True)
        write("summary.json", json.dumps({"seed": 1, "success": 0.9}))

    def check(self, folder: Path, run: Run) -> None:
        if "run" not in run.promised:
            return
        at = folder / "runs" / run.promised["run"]
        if not at.is_dir():
            raise LostError("the run folder")
        for name, text in run.promised["files"].items():
            if not (at / name).is_file():
                raise LostError(name)
            if (at / name).read_text() != text:
                raise WrongError(f"{name} is {(at / name).read_text()[:40]!r}, {text[:40]!r} was written")
        self._check_metrics(at, run)
        report = at / "deploy.json"
        if run.promised.get("deployed") and not report.exists():
            raise LostError("deploy.json")
        if report.exists() and json.loads(report.read_text())["task"] != "reach":
            raise WrongError("deploy.json")

    @staticmethod
    def _check_metrics(at: Path, run: Run) -> None:
        rows = read_metrics(at / FILE_NAME) if (at / FILE_NAME).exists() else []
        for number, row in enumerate(rows):
            if (row["step"], row["learn/loss"]) != (number, number / 8):
                raise WrongError(f"row {number} of metrics.jsonl is {row}")
        if len(rows) < run.promised["rows"]:
            raise LostError(
                f"{run.promised['rows'] - len(rows)} of {run.promised['rows']} rows of metrics.jsonl"
            )


class Leases:
    """Takes, renews and gives back slots of two devices."""

    def prepare(self, folder: Path) -> Promise:
        return {"tokens": {}, "held": []}

    def work(self, folder: Path, run: Run) -> None:
        leases = run.attempt(lambda: open_leases(folder))
        run.ack(held=[])
        for lease in leases.active():  # of an earlier one
            run.attempt(lambda lease=lease: leases.release(lease))
        for spec in (ARM, CPU, ARM):
            lease = run.attempt(lambda spec=spec: leases.acquire(spec, holder="campaign", slots=1))
            run.ack(
                tokens=run.promised["tokens"] | {spec.name: lease.token},
                held=[*run.promised["held"], [spec.name, lease.token]],
            )
            run.attempt(lambda lease=lease: leases.renew(lease, 100.0))
        run.ack(held=run.promised["held"][:-1])
        run.attempt(lambda: leases.release(lease))

    def check(self, folder: Path, run: Run) -> None:
        if not run.promised["tokens"] and not (folder / "state/leases.db").exists():
            return
        leases = open_leases(folder)
        held = [[lease.device, lease.token] for lease in leases.active()]
        missing = [lease for lease in run.promised["held"] if lease not in held]
        if missing:
            raise LostError(f"lease {missing[0]}")
        for spec in (ARM, CPU):
            lease = leases.acquire(spec, holder="check", slots=1)
            leases.release(lease)
            if lease.token <= run.promised["tokens"].get(spec.name, 0):
                raise WrongError(f"{spec.name}: token {lease.token} was given twice")


def open_leases(folder: Path) -> LeaseStore:
    clock = ManualClock(1000.0)
    return LeaseStore(folder / "state/leases.db", clock, is_alive=lambda holder: True)


def weights_of(number: int) -> torch.Tensor:
    return torch.arange(40.0) * number


def policy_of(number: int) -> GaussianPolicy:
    """Returns a policy all of whose weights are its number."""
    normaliser = Normaliser.fit({"state": np.ones((3, 2), np.float32)}, np.ones((3, 2), np.float32))
    config = GaussianPolicyConfig(horizon=1, width=8, depth=1)
    policy = GaussianPolicy(config, state_dim=2, action_dim=2, normaliser=normaliser)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(float(number))
    return policy
