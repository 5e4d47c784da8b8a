"""Ids for `gymnasium.make` and `make_vec`, such as `robot_rl/PickCube-v0`: one for every task, plugins' too.

Strings only; nothing is imported until an env is made. `import robot_rl` registers them, and
Gymnasium's own form `gymnasium.make("robot_rl:robot_rl/PickCube-v0")` imports it by itself.
(Gymnasium dropped registration by entry points in version 1.0.)
"""

from robot_rl.core.registry import table

NAMESPACE = "robot_rl"


def env_id(task: str) -> str:
    """Returns the id of a task: `pick_cube` is `robot_rl/PickCube-v0`."""
    return f"{NAMESPACE}/{''.join(word.capitalize() for word in task.split('_'))}-v0"


def register_envs() -> None:
    """Registers every task that `robot-rl doctor --list task` shows; a second call does nothing.

    Other people's learners expect shaping, so the reward is "dense" here, where `EnvConfig` has
    "sparse". All fields of `EnvConfig` are keywords of `make`: `make(id, reward="sparse")`.
    """
    import gymnasium  # not above: importing gymnasium calls this function

    for task in table("task"):
        if env_id(task) not in gymnasium.registry:
            gymnasium.register(
                id=env_id(task),
                entry_point="robot_rl.sim.single:SingleEnv",
                vector_entry_point="robot_rl.sim.single:make_vector",
                kwargs={"task": task, "reward": "dense"},
            )
