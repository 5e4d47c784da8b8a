"""The command line, one file per command (layer L5)."""

from robot_rl.cli import interrupts

interrupts.begin()  # until `main` is there
