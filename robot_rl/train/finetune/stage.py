"""Fine-tuning as a stage of a training run: what it refuses, its phases, and the base that it leaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.data.demos import check_meta
from robot_rl.data.episodes import episodes_meta
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.vla.config import read_options
from robot_rl.train.assemble import evaluator, policy_meta
from robot_rl.train.base import check_base, demo_folder
from robot_rl.train.config import RunConfig
from robot_rl.train.finetune.config import stage_config
from robot_rl.train.finetune.learn import PICTURES, Finetuning
from robot_rl.train.finetune.names import saved_folder
from robot_rl.train.finetune.phases import PHASES, outcome
from robot_rl.train.finetune.run import check
from robot_rl.train.finetune.split import open_data
from robot_rl.train.session import Session

PHASE = "finetune"
"""The last phase of the stage, and the key of its result in the run's summary."""


def check_finetuned(config: RunConfig, env: VectorEnv) -> None:
    """Refuses a policy that the run cannot improve, and demonstrations that show it what the env does not.

    Raises:
        CheckpointError: a saved policy is damaged, or of other elements than the env has.
        ConfigError: the run's method cannot improve it, or the run does not give it what it needs.
        DatasetError: `demos.path` does not fit the env, or is too small.
    """
    own, shown = config.finetune, config.env
    at, folder = f"finetune.policy: {own.policy}", saved_folder(own.policy)
    if folder is None:
        known = {"horizon": own.horizon, "cameras": shown.cameras, "picture": shown.image_size}
        made = read_options({"preset": own.size, **own.options}, known)
        check_base(config, at, "small_vla", made.horizon, made)
    else:
        policy, meta = load_policy(folder)
        _check_names(at, meta.state_names, env.state_names)
        _check_names(at, meta.action_names, env.action_names)
        check_base(config, at, policy.kind, policy.horizon, vars(policy)["config"])
    if config.demos.path is not None:
        tuned = stage_config(config, Path(config.demos.path))
        dataset, split = open_data(tuned)
        check_meta(dataset.folder, dataset.meta, episodes_meta(env))
        _check_cameras(config, [camera.removesuffix(".rgb") for camera in dataset.cameras])
        check(tuned, dataset, split)


def finetuning_phases() -> dict[str, Callable[[Session], None]]:
    """Returns the phases of the stage, by their names; the first that is due opens the demonstrations."""
    opened: list[Finetuning] = []

    def work_of(session: Session) -> Finetuning:
        if not opened:
            opened.append(_opened(session))
        return opened[0]

    def of_work(phase: Callable[[Finetuning], None]) -> Callable[[Session], None]:
        return lambda session: phase(work_of(session))

    def end(session: Session) -> None:
        session.results[PHASE] = outcome(work_of(session)).to_json()
        shutil.rmtree(session.folder / PICTURES, ignore_errors=True)
        opened.clear()  # the pictures that it holds in memory are not needed any more

    return {**{name: of_work(phase) for name, phase in PHASES.items()}, PHASE: end}


def _opened(session: Session) -> Finetuning:
    config = session.config
    with closing(session.open(evaluator(config))) as env:
        meta = policy_meta(config, env)
    tuned = stage_config(config, demo_folder(session))
    return Finetuning(session, tuned, *open_data(tuned), policy_folder="policy/base", meta=meta)


def _check_names(at: str, have: tuple[str, ...], want: tuple[str, ...]) -> None:
    """Refuses a saved policy of other elements than the env's."""
    if have == want:
        return
    only = [name for name in (*have, *want) if name not in have or name not in want]
    raise CheckpointError(
        f"{at}: was trained with {len(have)} elements, the env has {len(want)}; they differ in: "
        f"{', '.join(only[:8]) or 'their order'}. Set env.robot and env.state to what it was trained with, "
        "or start a new one: finetune.policy=small_vla."
    )


def _check_cameras(config: RunConfig, cameras: Sequence[str]) -> None:
    """Refuses demonstrations with cameras that the env does not show: a policy that sees them needs them."""
    shown = config.env.cameras
    lacking = [camera for camera in cameras if camera not in shown]
    if lacking:
        kept = ",".join(camera for camera in cameras if camera in shown)
        raise ConfigError(
            f"env.cameras: got {', '.join(shown) or 'none'}, the demonstrations of {config.demos.path} have "
            f"{', '.join(cameras)}, and the policy would see all of them. Say "
            f"env.cameras=[{','.join(cameras)}], or leave some out: demos.read.cameras=[{kept}]."
        )
