"""Scripted experts: a task gives targets for the tool, and this module turns them into actions.

Bias and noise act on the target, not on the action. A policy that imitates the expert is then smooth and
wrong by a known amount: a base of chosen quality for methods that improve a base.
"""

from collections.abc import Callable

from robot_rl.core.arrays import Array, namespace
from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.task import Aim, Control, Task, View

_GAIN = 1.5
"""Proportional gain on the servo lead: about 45 % of the error is closed in a control step."""


class Expert:
    """Acts in all envs at once from their present state.

    The target is displaced by `bias_m` along world x, and by a Gaussian of standard deviation
    `noise_m` in x and y that is drawn again for every episode. `as_shown` makes of an
    action of this robot one of the env's, which may be of several robots. With `gripper=step` a tool that
    closes its gripper waits until the command says shut, of which `is_shut` tells (B,).
    """

    def __init__(
        self,
        task: Task,
        control: Control,
        view: View,
        episode_seeds: Callable[[], Array],
        bias_m: float,
        noise_m: float,
        noise_seed: int,
        is_shut: Callable[[], Array],
        as_shown: Callable[[Array], Array] = lambda action: action,
    ) -> None:
        require_expert(type(task))
        self._task, self._control = task, control
        self._view, self._episode_seeds = view, episode_seeds
        self._bias_m, self._noise_m, self._noise_seed = bias_m, noise_m, noise_seed
        self._is_shut, self._as_shown = is_shut, as_shown
        self.aim: Aim | None = None
        """The target of the last action."""

    def act(self) -> Array:
        """Returns actions (B, A) float32 in [-1, 1] for the task's end-effector control."""
        self.aim = self._task.expert(self._view, self._offset())
        action = action_for(self.aim, self._control, self._view["tool.pos"])
        if self._control.gripper == "step":
            waits = self.aim.closed & ~self._is_shut()
            action[waits, :-1] = 0.0
        return self._as_shown(action)

    def _offset(self) -> Array:
        keys = self._episode_seeds()
        xp = namespace(keys)
        draws = EpisodeRng(keys, xp.full_like(keys, self._noise_seed)).normal(size=2)
        offset = xp.concat([self._noise_m * draws, 0.0 * draws[:, :1]], axis=1)
        offset[:, 0] += self._bias_m
        return offset


def action_for(aim: Aim, control: Control, tool_m: Array) -> Array:
    """Returns end-effector actions (B, A) float32 in [-1, 1] that bring the tool, now at `tool_m`, nearer."""
    step = _GAIN * (aim.position_m - tool_m) / control.linear_m
    turn = _GAIN * aim.yaw_rad[:, None] / control.angular_rad
    xp = namespace(step)
    grip = (
        [1.0 - 2.0 * xp.asarray(aim.closed, dtype=step.dtype)[:, None]] if control.gripper != "shut" else []
    )
    turns = {"none": [], "yaw": [turn], "full": [xp.zeros_like(turn), xp.zeros_like(turn), turn]}
    action = xp.concat([step, *turns[control.rotation], *grip], axis=1)
    return xp.asarray(xp.clip(action, -1.0, 1.0), dtype=xp.float32)


def require_expert(task: type[Task]) -> None:
    """Refuses a task for which nobody wrote an expert.

    Raises:
        ConfigError: says what else makes demonstrations.
    """
    if not task.has_expert():
        raise ConfigError(
            f"demos: the task {task.name!r} has no scripted expert. Train without demonstrations, "
            "stages=look,evaluate,online,evaluate, name a trained policy, env.expert=<run folder>, or "
            "give recorded episodes, demos.path=<folder>."
        )
