"""Checks of a run that need its environment or its datasets; without torch, for quick refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from robot_rl.core.errors import ConfigError, require
from robot_rl.core.registry import resolve
from robot_rl.data.demos import open_demonstrations
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.policies.onnx_pictures import SUFFIX, read_encoder_graph
from robot_rl.policies.saved import policy_folder, read_head
from robot_rl.rollout.envs import episodes_of
from robot_rl.sim.bank_files import load_bank
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.experts import require_expert
from robot_rl.train.config import RunConfig
from robot_rl.train.earlier import open_earlier
from robot_rl.train.finetune.config import stage_config
from robot_rl.train.finetune.split import open_data
from robot_rl.train.given import check_given, find_given
from robot_rl.train.improve.config import ImaginedSettings, OffPolicySettings, RL100Settings
from robot_rl.worlds.inventory import check_fits


def check_before_learner(config: RunConfig) -> None:
    """Refuses an environment that cannot be made, and recorded episodes that do not fit it.

    The run makes the same checks again when it opens them. Damage is left to it: finding it takes long.

    Raises:
        CheckpointError: `bc.policy` or `env.expert` holds no policy, or `bc.policy` one of others for another
            embodiment; `bc.encoder` is a graph of another kind; a gate's world model imitates something else.
        ConfigError: no such environment, camera or element of the state.
        DatasetError: episodes of another task, robot or rate, or too few of them.
    """
    if config.env.kind == "gym":
        from robot_rl.envs.gym import check_id

        check_id(str(config.env.id))
    if config.env.kind == "process":
        from robot_rl.envs.process import program

        program(config.env.python)
    encoder = config.bc.encoder
    if config.env.kind == "sim" and encoder is not None and encoder.endswith(SUFFIX):
        read_encoder_graph(Path(encoder), config.env.image_size)
    if config.env.kind == "sim" and config.env.expert is not None:
        policy_folder(config.env.expert, at="env.expert")
    given = find_given(config)
    if config.env.kind == "sim":
        _check_experts(config)
        rows, allowed = config.env.resets.rows, "train: env.resets.evaluate=<class> evaluates held-out rows"
        require(rows == "train", "env.resets.rows", rows, allowed)
    check_start_classes(config)
    if config.bc.policy is not None and given is None:
        read_head(Path(config.bc.policy))
    if config.env.kind == "sim":  # others' environments may take long to make
        for scene in config.scenes.values():
            meta, features = episodes_of(scene)
            if given is not None:
                check_given(config, given, meta, features)
            if isinstance(config.method, RL100Settings) and (world := config.method.offline.gate.world):
                check_fits(world, meta, at="method.offline.gate.world")
            _check_recorded(config, meta, features)


def check_start_classes(config: RunConfig) -> None:
    """Refuses weights of classes in which no real episode of the run begins: nothing is imagined from there.

    Raises:
        ConfigError: names them, and those that its real episodes draw.
        DatasetError: the bank is missing or damaged.
    """
    if not (isinstance(config.method, ImaginedSettings) and config.method.starts.classes):
        return
    resets, given = config.env.resets, config.method.starts.classes
    if resets.bank is None or config.station is not None:  # an arm's episodes begin in no row
        drawn, allowed = (), "none without env.resets.bank, or with station="
    else:
        drawn = tuple(resets.weights(load_bank(resets.bank, at="env.resets.bank").sets))
        allowed = f"{', '.join(drawn)}, which real episodes draw by env.resets.mix"
    others = [name for name, weight in given.items() if weight > 0 and name not in drawn]
    require(not others, "method.starts.classes", ", ".join(others), allowed)


def _check_experts(config: RunConfig) -> None:
    """Refuses demonstrations, or labels, of tasks for which nobody wrote an expert."""
    asks = ("demos" in config.plan and config.demos.path is None) or config.method.kind == "dagger"
    for task in [env.task for env in config.scenes.values() if asks and env.expert is None]:
        require_expert(resolve("task", task, at="env.task"))


def _check_recorded(config: RunConfig, meta: EpisodesMeta, features: Mapping[str, Feature]) -> None:
    """Refuses earlier experience and demonstrations that do not fit; not with `skip`, which reads all."""
    if config.replay.reuse and config.replay.read.on_damage == "raise":
        open_earlier(config.replay, meta, features)
    if config.demos.path is None or config.demos.read.on_damage != "raise":
        return
    folder = Path(config.demos.path)
    dataset, _ = open_demonstrations(folder, expect=meta, read=config.demos.read)
    if isinstance(config.method, OffPolicySettings):
        check_pictures(config.env, folder, {key: found.shape for key, found in dataset.features.items()})
    if "finetune" in config.plan:
        open_data(stage_config(config, folder))


def check_pictures(shown: EnvConfig, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses demonstrations that do not show what the run does: what is replayed has the same elements.

    Args:
        shown: what the run shows.
        folder: of the demonstrations.
        shapes: of one step of each of their observations.
    """
    for camera in shown.cameras:
        key, shape = f"{camera}.rgb", (*shown.image_size, 3)
        got = shapes.get(key)
        if got != shape:
            height, width = shown.image_size
            words = f"cameras=[{','.join(shown.cameras)}] image_size=[{height},{width}]"
            raise ConfigError(
                f"demos.path: {folder} has {key} {got or 'nowhere'}, the run shows {shape}. "
                f"Collect others with `robot-rl collect {words}`."
            )
