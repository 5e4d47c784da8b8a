"""Makes a small recording for examples, without a robot or a simulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from robot_rl.data.episode import Array, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.writer import StoreWriter

STEPS = 20


def record_example(folder: str | Path) -> Path:
    """Records one more episode into a store, which is made if it does not exist; returns its folder.

    The episode is that of the first example in docs/data.md: 20 steps, state, pictures and action of a
    made-up arm with two joints. Step t has state (t, t), and a picture of brightness t at every third step.

    Raises:
        DatasetError: the store has other episodes, or another process writes to it.
    """
    joints = ("q0", "q1")
    meta = EpisodesMeta(
        task="reach",
        robot="my_arm",
        control_hz=100.0,
        instruction="reach the mark",
        state_names=joints,
        action_names=joints,
    )
    features = {"state": Feature("float32", (2,)), "wrist.rgb": Feature("uint8", (48, 64, 3))}
    with StoreWriter(folder, meta, features, device="arm 3") as store:
        for step in range(STEPS):
            obs: dict[str, Array] = {"state": np.full(2, step, np.float32)}
            if step % 3 == 0:
                obs["wrist.rgb"] = np.full((48, 64, 3), step, np.uint8)
            store.append(obs=obs, action=np.zeros(2, np.float32), truncated=step == STEPS - 1, source="human")
    return Path(folder)
