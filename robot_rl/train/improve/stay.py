"""Pictures that stay on the machine of an arm: recorded there, sent as what a frozen policy makes of them.

A policy whose encoder does not learn makes the same of a picture whenever it sees it, so a learner needs no
more than that. `robot-rl replay fetch <run>` brings the pictures later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.replay import Keep
from robot_rl.data.store.layout import Layout
from robot_rl.data.transitions import StepBatch
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import load_policy
from robot_rl.rollout.fetch import fetch, kept_folder
from robot_rl.rollout.hub_connection import machines
from robot_rl.rollout.on_node import job_name
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.method import Module, method_of
from robot_rl.train.record import identity_of, load_config_here
from robot_rl.train.recording import Recorder, recorded_of


def job_of(config: RunConfig, folder: Path, name: str) -> str:
    """Returns the name of the job that acts for a source of a run on another machine, in all its lives."""
    return job_name(identity_of(folder), name, config.recipe)


def encoder(policy: Module, reads: Collection[str], device: str) -> Keep:
    """Returns what makes a frozen policy's encoding of observations.

    Args:
        policy: its encoder does not learn.
        reads: names in its encoding that are kept.
        device: where the policy computes.
    """

    def keep(obs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        tensors = {key: torch.as_tensor(value, device=device) for key, value in obs.items()}
        encoded = policy.encode(tensors)
        kept = {name: encoded[name].cpu().numpy() for name in reads}
        return kept | {key: value for key, value in obs.items() if key == PRIVILEGED}

    return keep


def order(reads: Collection[str], env: VectorEnv | None) -> dict[str, Any]:
    """Returns what the arm's machine has to know, in values of msgpack.

    Args:
        reads: names in the encoding that are sent.
        env: shows what the arm shows; None: nothing is recorded.
    """
    if env is None:
        return {"reads": list(reads), "record": None}
    how = recorded_of(env, is_arm=True)
    layout = Layout(meta=how["meta"], features=how["features"])
    record = {"layout": layout.to_json(), "person": how["person"], "joints": how["joints"]}
    return {"reads": list(reads), "record": record}


class Staying:
    """Records the steps of an arm as they are, and returns them without pictures."""

    def __init__(self, keep: Keep, recorder: Recorder | None) -> None:
        self._keep, self._recorder = keep, recorder
        self._led_to: dict[str, NDArray[Any]] | None = None
        """What the last step led to, encoded; None where the next one continues none."""

    def __call__(self, steps: StepBatch) -> StepBatch:
        if self._recorder is not None:
            self._recorder.add(steps)
        goes_on = self._led_to is not None and not steps.begins
        obs = self._led_to if goes_on else self._keep(steps.obs)
        next_obs = self._keep(steps.next_obs)
        self._led_to = None if np.any(steps.terminated | steps.truncated) else next_obs
        return replace(steps, obs=obs, next_obs=next_obs)

    def close(self) -> None:
        """Closes the record."""
        if self._recorder is not None:
            self._recorder.close()


def staying(config: RunConfig, job: Path, order: Mapping[str, Any], device: str) -> Staying:
    """Returns what the process of a job does with the steps of its arm.

    Args:
        config: of the run.
        job: folder of the job; has the base.
        order: what the run's `order` returned.
        device: name of what acts.

    Raises:
        DatasetError: what was recorded before is damaged, or of another robot.
    """
    base, _ = load_policy(job / "policy" / "base")
    keep = encoder(method_of(config).make_policy(config, base).eval(), order["reads"], "cpu")
    if order["record"] is None:
        return Staying(keep, None)
    record = order["record"]  # one that an agent kept of an earlier version has keys that mean nothing here
    layout = Layout.from_json(record["layout"])
    folder, how = kept_folder() / job.name, {name: record[name] for name in ("person", "joints")}
    return Staying(keep, Recorder(folder, layout.meta, layout.features, **how, device=device))


def bring(
    run: Path, on_bytes: Callable[[int, int], None] = lambda *_: None
) -> tuple[dict[Path, int], list[str]]:
    """Copies what arms of other machines have recorded for a run into its `experience/`.

    Args:
        run: its folder; the run may go on meanwhile.
        on_bytes: gets the bytes of one recording that are here, and all of its bytes.

    Returns:
        The folder of each copy with the bytes that were sent for it, and the sources of which no machine that
        is connected has a recording.

    Raises:
        ConfigError: nothing of this run was recorded elsewhere.
        DeviceError: the hub cannot be reached.
        DatasetError: a copy is being written to, or was sealed.
    """
    run = run.resolve()
    config, _ = load_config_here(run, at="replay fetch")
    names = [name for name in config.acting if config.keeps_pictures_there(name) and config.replay.record]
    if not names:
        raise ConfigError(f"replay fetch: {run} recorded nothing on other machines.")
    there, copies, lacking = machines(config.hub), dict[Path, int](), list[str]()
    for name in names:
        job = job_of(config, run, name)
        nodes = [str(node["name"]) for node in there if job in node.get("kept", ())]
        for node in nodes:
            out = run / "experience" / f"{name}-{node}".strip("-")
            folder, sent = fetch(config.hub, node, job, out, on_bytes)
            copies[folder] = sent
        if not nodes:
            lacking.append(name or "its arm")
    return copies, lacking
