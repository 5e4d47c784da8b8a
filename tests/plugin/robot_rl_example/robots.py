"""A robot of its own: the Panda at half its speed."""

from dataclasses import replace

from robot_rl.sim.robots.panda import LIMITS, PANDA

SLOW_PANDA = replace(
    PANDA,
    name="slow_panda",
    limits=replace(LIMITS, velocity_rad_s=tuple(0.5 * speed for speed in LIMITS.velocity_rad_s)),
)
