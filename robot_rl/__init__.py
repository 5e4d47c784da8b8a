"""Robot learning where simulated arms, real arms and world models are schedulable devices."""

from robot_rl.core.after_import import after_import

__version__ = "0.1.0"


def _register_envs() -> None:
    from robot_rl.sim.registration import register_envs

    register_envs()


after_import("gymnasium", _register_envs)  # half a second, which a mistyped command need not wait for
