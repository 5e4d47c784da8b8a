"""Configuration (layer L0): Hydra composes and sweeps, frozen dataclasses hold and check."""

from robot_rl.config.build import build, plain
from robot_rl.config.compose import CONFIGS, dump, load, options, read, sweep
from robot_rl.config.words import shell, words

__all__ = ["CONFIGS", "build", "dump", "load", "options", "plain", "read", "shell", "sweep", "words"]
