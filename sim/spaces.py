"""What envs of a configuration show, as Gymnasium's spaces."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from robot_rl.core.language import INSTRUCTION, MAX_BYTES
from robot_rl.core.names import ENVIRONMENT, PRIVILEGED
from robot_rl.sim.config import EnvConfig


def observation_spaces(
    config: EnvConfig, num_state: int, num_envs: int, num_privileged: int = 0, num_apart: int = 0
) -> tuple[gymnasium.spaces.Dict, gymnasium.Space[Any]]:
    """Returns the spaces of what one env and all envs observe: `state` and the cameras' pictures."""
    box, size = gymnasium.spaces.Box, config.image_size
    spaces: dict[str, gymnasium.Space[Any]] = {"state": box(-np.inf, np.inf, (num_state,), np.float32)}
    if num_privileged:
        spaces[PRIVILEGED] = box(-np.inf, np.inf, (num_privileged,), np.float32)
    if num_apart:
        spaces[ENVIRONMENT] = box(-np.inf, np.inf, (num_apart,), np.float32)
    if config.instruction:
        spaces[INSTRUCTION] = box(0, 255, (MAX_BYTES,), np.uint8)
    for camera in config.cameras:
        spaces[f"{camera}.rgb"] = box(0, 255, (*size, 3), np.uint8)
        if config.depth:
            spaces[f"{camera}.depth"] = box(0, np.inf, size, np.float32)
    single = gymnasium.spaces.Dict(spaces)
    return single, gymnasium.vector.utils.batch_space(single, num_envs)
