"""Robot learning where simulated arms, real arms and world models are schedulable devices."""

from robot_rl.sim.registration import register_envs

__version__ = "0.1.0"

register_envs()
