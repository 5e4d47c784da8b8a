"""Opens the dataset of a fine-tuning run and divides its episodes; without torch, for quick refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.store.layout import is_store
from robot_rl.data.store.reader import StoreReader
from robot_rl.train.finetune.config import FinetuneConfig

COMMANDED = re.compile(r"tool\.\w+|gripper")
"""Actions that move the tool: every arm with a gripper understands them."""


@dataclass(frozen=True)
class Split:
    """Which episodes are learned from, and which are only measured on."""

    train: tuple[int, ...]
    heldout: tuple[int, ...]

    def text(self) -> str:
        return f"training on episodes {_spans(self.train)}, held out: {_spans(self.heldout)}"

    def inner(self) -> Split:
        """Splits the training episodes alone, the same way: what settings may be chosen on."""
        held = min(len(self.heldout), max(1, len(self.train) // 4))
        return Split(self.train[:-held], self.train[-held:])


def open_data(config: FinetuneConfig) -> tuple[Dataset, Split]:
    """Opens the dataset and divides its episodes.

    Raises:
        DatasetError: no dataset, one that is not sealed, a damaged one, too few episodes, or none as
            long as a chunk.
        ConfigError: the robot has other joints.
    """
    folder = Path(config.dataset)
    if is_store(folder) and not (folder / "meta/info.json").is_file():
        waiting = len(StoreReader(folder))
        raise DatasetError(
            f"dataset: {folder} is a store whose {waiting} episodes are in its journal; fine-tuning reads "
            f"datasets. Seal it first: robot-rl replay seal {folder}"
        )
    dataset = Dataset(folder, **config.reading.options())
    if "state" not in dataset.features:
        there = ", ".join(dataset.index.features)
        raise DatasetError(
            f"{config.dataset}: no feature 'observation.state', there are {there}. "
            "Every policy here reads a state: name the column that is one, rename=<column>:observation.state"
        )
    if config.robot is not None:
        check_robot(config.robot, dataset.meta.action_names, at=config.dataset)
    longest, wrong = int(dataset.lengths().max()), list[str]()
    if longest < config.horizon:
        wrong.append(
            f"{config.dataset}: the longest episode has {longest} control steps, a chunk needs "
            f"{config.at}horizon={config.horizon}. Use {config.at}horizon={longest} or less."
        )
    try:
        split = split_episodes(len(dataset), config.heldout, at=config.dataset, key=f"{config.at}heldout")
    except DatasetError as error:
        raise DatasetError("\n".join([str(error), *wrong])) from error
    if wrong:
        raise DatasetError(wrong[0])
    return dataset, split


def split_episodes(episodes: int, heldout: int, *, at: str, key: str = "heldout") -> Split:
    """Holds out the last episodes: no random choice.

    Raises:
        DatasetError: fewer than two episodes are left to learn from.
    """
    if episodes - heldout < 2:
        fewer = f"Say {key}={max(1, episodes // 5)}, or record more." if episodes > 2 else "Record more."
        raise DatasetError(
            f"{at}: {episodes} episodes, {key}={heldout} leaves {max(0, episodes - heldout)} to learn "
            f"from, needed: 2 or more. {fewer}"
        )
    first = episodes - heldout
    return Split(tuple(range(first)), tuple(range(first, episodes)))


def check_robot(robot: str, action_names: Sequence[str], *, at: str) -> None:
    """Refuses a robot whose joints are not those that the dataset's actions move.

    Raises:
        ConfigError: the message names the joints that only one of them has.
    """
    from robot_rl.sim.robots.loading import load_robot  # MuJoCo

    found = load_robot(robot)
    names = [re.sub(r"\.(pos|delta)$", "", name) for name in action_names]
    if all(COMMANDED.fullmatch(name) for name in names):
        return
    joints = [*found.arm_joints, "gripper"]
    lacking = [name for name in names if name not in joints]
    unused = [joint for joint in joints if joint not in names and joint != "gripper"]
    if lacking or unused:
        parts = [f"{robot} lacks {_listed(lacking)}"] if lacking else []
        parts += [f"the dataset lacks {_listed(unused)}"] if unused else []
        raise ConfigError(
            f"robot: {robot!r} does not fit {at}: {'; '.join(parts)}. "
            "Leave robot out to train for the robot that was recorded."
        )


def _spans(numbers: Sequence[int]) -> str:
    """Returns `0-15 (16)`."""
    span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return f"{span} ({len(numbers)})"


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
