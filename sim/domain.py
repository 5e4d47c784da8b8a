"""What each episode draws of the arm, of what is sensed and of the line, and the curriculum on it.

Domain randomisation (Peng et al. 2018; Tobin et al. 2017) with one scale s in [0, 1] for all ranges: s moves
the bounds of each from no difference (0) to those of the settings (1). The curriculum on s is that of
OmniReset's second stage (success above 0.95 widens by 0.01, below 0.9 narrows): automatic domain
randomisation (OpenAI 2019, arXiv 1910.07113, section 5.2) with one parameter instead of two a range, and
the success of all episodes instead of those at a bound. With it, virtual forces on a thing (arXiv 2502.15442,
"privileged action") are withdrawn as s grows; deviation: forces only, no relaxed constraints, no schedule of
their own.

All draws are functions of (seed, episode) or (seed, episode, step), on streams of their own, so nothing
else shifts. B envs, n arm joints, U columns of `ctrl`, K steps of delay, S columns of the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from robot_rl.core.arrays import Array, assign, copied, like, norm, to_numpy
from robot_rl.core.errors import ConfigError
from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.sim.backends.backend import Backend, View
from robot_rl.sim.backends.model_index import cells
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.poses import cross
from robot_rl.sim.robots.robot import RobotNames, require_arm
from robot_rl.sim.task import Task

_SERVO_FIELDS: tuple[tuple[str, str, int | None], ...] = (
    ("friction", "dof_frictionloss", None),
    ("damping", "dof_damping", None),
    ("damping", "actuator_biasprm", 2),
    ("stiffness", "actuator_gainprm", 0),
    ("stiffness", "actuator_biasprm", 1),
    ("armature", "dof_armature", None),
)
"""Setting, field of the model, and the servo's parameter: force = g0 ctrl + b1 position + b2 velocity."""
_KINDS = ("friction", "damping", "stiffness", "armature")
"""In the order of their draws, n each."""
_NEAR_M = 0.05
"""Within this distance of its goal a thing is pulled less."""


class Domain:
    """The differences of B simulations; every method returns at once where the settings ask for none."""

    def __init__(
        self,
        config: DomainConfig,
        backend: Backend,
        robot: RobotNames,
        task: Task,
        quantities: Sequence[str],
        *,
        num_envs: int,
        learns: bool,
    ) -> None:
        """Expands the fields of the model that vary.

        Args:
            config: what varies.
            backend: whose arrays are written.
            robot: has the arm.
            task: has the thing that virtual forces pull.
            quantities: that are observed, of the view.
            num_envs: B.
            learns: whether the curriculum is in force; the scale is 1 otherwise.

        Raises:
            ConfigError: virtual forces, and a task that does not say where they pull; or no arm.
        """
        self._config, self._backend, self._robot = config, backend, robot
        self._xp, self.is_on = backend.xp, config.is_on
        self.has_curriculum = config.curriculum and learns
        self.scale = config.scale if self.has_curriculum else 1.0
        """In force for the episodes that begin now."""
        self._successes: list[bool] = []
        self._task, can_assist = task, type(task).assist is not Task.assist
        if config.assist_n and not can_assist:
            raise ConfigError(
                f"env.domain.assist_n: got {config.assist_n:g}, allowed: 0, as {task.name!r} has no `assist`."
            )
        if not self.is_on:
            return
        require_arm(robot, "env.domain", at="env.robot")
        self._sense(quantities)
        self._expand()
        self._servo_ctrl, self._applied = backend.bind("ctrl"), backend.bind("xfrc_applied")
        rows, device = self._servo_ctrl.shape, backend.device
        self._unit = self._xp.zeros((num_envs, self._num_draws), dtype=self._xp.float64, device=device)
        self._scale_B1 = self._xp.ones((num_envs, 1), dtype=self._xp.float64, device=device)
        """The scale at the beginning of each episode."""
        self._pending = self._xp.zeros(
            (num_envs, config.delay_steps, rows[1]), dtype=self._xp.float64, device=device
        )
        """Commands that have not come to effect yet, the newest first (B, K, U)."""
        self._key = self._xp.zeros(num_envs, dtype=self._xp.int64, device=device)
        """The bits of `EpisodeRng.key` of each episode."""

    def _sense(self, quantities: Sequence[str]) -> None:
        """Finds the columns of joints, of the tool and of things."""
        backend, robot = self._backend, self._robot
        ours = (*(f"{joint}.pos" for joint in (*robot.arm_joints, *robot.finger_joints)), "tool.pos")
        things = [name for name in quantities if name.endswith(".pos") and name not in ours]

        def columns(names: Sequence[str]) -> Array:
            return backend.asarray(np.asarray(backend.view.elements(names)[0], np.int64))

        self._joints = columns([f"{joint}.pos" for joint in robot.arm_joints])
        self._tool, self._xaxis = columns(["tool.pos"]), columns(["tool.xaxis"])
        self._things = columns(things) if things else self._joints[:0]
        n, m = len(self._joints), len(self._things)
        ends = np.cumsum([len(_KINDS) * n, 1, n, m, 1])
        _, self._payload_at, self._joint_bias, self._thing_bias, self._delay_at = (
            slice(int(end - size), int(end))
            for end, size in zip(ends, (len(_KINDS) * n, 1, n, m, 1), strict=True)
        )
        self._num_draws = int(ends[-1])
        self._axis, self._anchor = backend.bind("xaxis"), backend.bind("xanchor")

    def _expand(self) -> None:
        config, backend, index = self._config, self._backend, self._backend.index
        usual = DomainConfig()
        self._fields: list[tuple[str, Array, Array | slice, int | None, Array]] = []
        for setting, field, part in _SERVO_FIELDS:
            if getattr(config, setting) != getattr(usual, setting):
                rows = index.arm_dof if part is None else index.arm_ctrl
                array = backend.expand(field)
                nominal = array[0][rows] if part is None else array[0][rows][:, part]
                self._fields.append((setting, array, rows, part, copied(nominal)))
        self._effort = backend.asarray(np.asarray(self._robot.limits.effort_n_m))
        self._body: tuple[Array, Array, float, float] | None = None
        if config.payload_kg != usual.payload_kg:
            mass, compensated = backend.expand("body_mass"), backend.expand("body_gravcomp")
            tool = index.tool_body
            self._body = mass, compensated, float(mass[0, tool]), float(compensated[0, tool])
        self._derives = self._body is not None or config.armature != usual.armature

    # Episodes

    def draw(self, ids: Array, seeds: Array, episodes: Array) -> None:
        """Draws what differs in new episodes, and writes it to the model; before the start is placed."""
        if not self.is_on:
            return
        self._scale_B1[ids] = self.scale
        self._redraw(ids, seeds, episodes)

    def _redraw(self, ids: Array, seeds: Array, episodes: Array) -> None:
        self._unit[ids] = EpisodeRng(seeds, episodes, stream=Stream.DOMAIN).uniform(size=self._num_draws)
        self._key[ids] = EpisodeRng(seeds, episodes).key
        num_joints = len(self._joints)
        for setting, array, rows, part, nominal in self._fields:
            first = _KINDS.index(setting) * num_joints
            drawn = self._within(setting, ids, slice(first, first + num_joints))
            new = nominal + drawn * self._effort if setting == "friction" else nominal * drawn
            at = cells(ids, rows)
            assign(array, at if part is None else (*at, part), new)
        if self._body is not None:
            mass, compensated, own_kg, share = self._body
            total_kg = own_kg + self._within("payload_kg", ids, self._payload_at)[:, 0]
            at = ids, self._backend.index.tool_body
            assign(mass, at, total_kg)
            assign(compensated, at, share * own_kg / total_kg)
        if self._derives:
            self._backend.recompute_constants(ids)

    def _within(self, setting: str, ids: Array, columns: slice) -> Array:
        """Returns values within a range as wide as the scale says."""
        low, high = getattr(self._config, setting)
        neutral = getattr(DomainConfig(), setting)[0]
        return neutral + self._scale_B1[ids] * (low - neutral + self._unit[ids, columns] * (high - low))

    def begin(self, ids: Array) -> None:
        """Forgets commands under way: those of the start stand for them; after the start is placed."""
        if self.is_on and self._config.delay_steps:
            assign(self._pending, ids, self._servo_ctrl[ids][:, None])

    # Control steps

    def newest(self, commands: Array) -> Array:
        """Returns the commands (B, U) that were sent last: those in `ctrl`, or what is still under way."""
        return self._pending[:, 0] if self.is_on and self._config.delay_steps else commands

    def hold_back(self, active: Array | None) -> None:
        """Replaces the commands in `ctrl` by those of `delays` control steps ago."""
        if not (self.is_on and self._config.delay_steps):
            return
        sent, pending = copied(self._servo_ctrl), self._pending
        (ids,) = self._xp.nonzero(self._xp.ones_like(self._scale_B1[:, 0]) if active is None else active)
        waiting = self._xp.concat([sent[:, None], pending], axis=1)
        assign(self._servo_ctrl, ids, waiting[ids, self.delays()[ids]])
        assign(pending, ids, waiting[ids, :-1])

    def pull(self, view: View) -> None:
        """Pulls things to their goals with what is left of the virtual force."""
        largest_n = self._config.assist_n
        if not (largest_n and self.has_curriculum):
            return
        force_n = largest_n * (1.0 - self._scale_B1)
        for body, way_m in self._task.assist(view).items():
            direction = way_m / self._xp.clip(norm(way_m), _NEAR_M, None)[:, None]
            self._applied[:, self._backend.index.tracked[body].body, :3] = force_n * direction

    def delays(self) -> Array:
        """Returns the delay of each env's present episode in control steps (B,)."""
        most, unit = self._config.delay_steps, self._unit[:, self._delay_at.start]
        drawn = self._xp.floor(unit * (most * self._scale_B1[:, 0] + 1.0))
        return self._xp.asarray(self._xp.clip(drawn, None, float(most)), dtype=self._xp.int64)

    def seen(self, values: Array, ids: Array, elapsed: Array) -> Array:
        """Returns what is sensed of values of the view (b, S); `elapsed` (B,) counts control steps."""
        config = self._config
        if not self.is_on:
            return values
        n, m = len(self._joints), len(self._things)
        normal = EpisodeRng(self._key[ids], elapsed[ids], stream=Stream.SENSING).normal(size=n + m)
        scale, unit = self._scale_B1[ids], self._unit[ids]
        wrong = scale * (
            config.joint_bias_rad * (2.0 * unit[:, self._joint_bias] - 1.0)
            + config.joint_noise_rad * normal[:, :n]
        )
        sensed = copied(values)
        sensed[:, self._joints] += wrong
        rows = self._backend.index.jacobian_rows(self._axis[ids], self._anchor[ids], values[:, self._tool])
        moved = (rows * wrong[:, :, None]).sum(axis=1)
        sensed[:, self._tool] += moved[:, :3]
        sensed[:, self._xaxis] += cross(moved[:, 3:], values[:, self._xaxis])
        sensed[:, self._things] += scale * (
            config.object_bias_m * (2.0 * unit[:, self._thing_bias] - 1.0)
            + config.object_noise_m * normal[:, n:]
        )
        return sensed

    def note(self, ended: Array, success: Array) -> None:
        """Counts the ends of episodes, and moves the scale after a window of them."""
        if not self.has_curriculum:
            return
        config = self._config
        self._successes += to_numpy(success[ended]).tolist()
        if len(self._successes) >= config.window:
            mean = sum(self._successes) / len(self._successes)
            change = config.step * (int(mean > config.widen_above) - int(mean < config.narrow_below))
            self.scale, self._successes = min(1.0, max(0.0, self.scale + change)), []

    # States

    @property
    def num_columns(self) -> int:
        """Columns of `rows`."""
        return int(np.prod(self._pending.shape[1:])) if self.is_on else 0

    def rows(self, num_envs: int) -> Array:
        """Returns the commands under way (B, K U); no columns without a delay."""
        if not self.is_on:
            return np.zeros((num_envs, 0))
        return self._pending.reshape(num_envs, -1)

    def put(self, ids: Array, rows: Array) -> None:
        """Goes on from rows (b, K U) of `rows`."""
        if self.num_columns:
            self._pending[ids] = like(rows, self._pending).reshape(len(rows), *self._pending.shape[1:])

    def state_dict(self) -> dict[str, Any]:
        """Returns what an exact resume needs in addition to `rows`; nothing where all is off."""
        if not self.is_on:
            return {}
        began = to_numpy(copied(self._scale_B1[:, 0]))
        return {"domain": {"scale": self.scale, "began": began, "successes": list(self._successes)}}

    def load_state_dict(self, state: dict[str, Any], seeds: Array, episodes: Array) -> None:
        """Restores `state_dict`, of envs with these seeds and episodes."""
        if not self.is_on:
            return
        own = state["domain"]
        self.scale, self._successes = float(own["scale"]), list(own["successes"])
        self._scale_B1[...] = like(own["began"], self._scale_B1)[:, None]
        ids = self._xp.arange(len(self._unit), device=self._backend.device)
        self._redraw(ids, seeds, episodes)
