"""The engine that `EnvConfig.engine` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from robot_rl.core.arrays import Kind
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.backends.mujoco_cpu import MujocoCpu
from robot_rl.sim.config import EnvConfig

if TYPE_CHECKING:
    import mujoco

    from robot_rl.sim.robots.robot import RobotNames


def make_backend(
    config: EnvConfig,
    scene: mujoco.MjSpec,
    robot: RobotNames,
    quantities: Sequence[str],
    num_sims: int,
    *,
    array: Kind,
) -> Backend:
    """Returns simulations of a scene by the engine that the configuration names.

    Args:
        config: names the engine and where it runs.
        scene: robot and task.
        robot: its names in the scene.
        quantities: what the view holds.
        num_sims: how many simulations.
        array: kind of arrays of the engine on the CPU; the others have tensors.

    Raises:
        ModelError: the scene lacks what a quantity names.
        ConfigError: the engine is not installed, or has no such device here.
    """
    if config.engine == "mujoco":
        return MujocoCpu(scene, robot, quantities, num_sims, config.num_threads, array=array)
    if config.engine == "genesis":
        from robot_rl.sim.backends.genesis import Genesis  # torch

        device = config.engine_device
        return Genesis(scene, robot, quantities, num_sims, device=device, scene=config.task)
    from robot_rl.sim.backends.mujoco_warp import MujocoWarp  # torch, warp

    return MujocoWarp(scene, robot, quantities, num_sims, device=config.engine_device)
