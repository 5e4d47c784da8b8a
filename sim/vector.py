"""A task on a robot in many simulations at once, as a Gymnasium vector env.

B envs, n arm joints, A action dim. There is no Python per env anywhere in `step`: observations,
success and rewards are array operations on the back end's view, and episodes draw their start from
(seed, episode number), so env i of a thousand is env i alone. Arrays are the back end's, numpy's or
torch tensors; what a person looks at and what is saved (`picture`, `state_dict`) is numpy's.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from robot_rl.core.arrays import Array, Kind, assign, copied, like, to_numpy
from robot_rl.core.errors import ConfigError, require
from robot_rl.core.language import INSTRUCTION, encode_text
from robot_rl.core.machine import usable_cores
from robot_rl.core.names import ENVIRONMENT, PRIVILEGED, chosen, without_past
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.hal.safety import SafetyEnvelope
from robot_rl.hal.vector import Obs, VectorEnv, next_episodes, row_mask
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.backends.engines import make_backend
from robot_rl.sim.bank_files import BankKey
from robot_rl.sim.bodies import Among, layouts_of
from robot_rl.sim.cameras import Camera
from robot_rl.sim.config import OWN_WORDS, EnvConfig, ResetsConfig, check_num_envs, check_reward
from robot_rl.sim.control import Controller
from robot_rl.sim.domain import Domain
from robot_rl.sim.experts import Expert
from robot_rl.sim.looks import scene_and_looks
from robot_rl.sim.monitor import NAMES, Monitor
from robot_rl.sim.own_starts import OwnStarts
from robot_rl.sim.pictures import Pictures
from robot_rl.sim.predicates import check_formula, predicates_of
from robot_rl.sim.randomize import Randomizer
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.spaces import observation_spaces
from robot_rl.sim.start_bank import StartBank, key_of
from robot_rl.sim.task import Task, control_of, state_quantities
from robot_rl.sim.variants import Variants, prepare_scene
from robot_rl.sim.variation import check_variation

MOST_SHAPING = 0.5
"""Largest dense reward of a step without success, which is 1."""


class SimVectorEnv(VectorEnv):
    """B simulations of one task; see `robot_rl.hal.vector.VectorEnv` for the contract."""

    def __init__(
        self,
        config: EnvConfig,
        num_envs: int,
        *,
        autoreset: Literal["same_step", "disabled"] = "same_step",
        array: Kind = "numpy",
    ) -> None:
        self.config, self.num_envs = config, num_envs
        check_num_envs(num_envs)
        _check_present(config)
        check_reward(config)
        check_variation(config.task, config.variation)
        self._task: Task = resolve("task", config.task, at="env.task")()
        self._robot: Robot = load_robot(config.robot or self._task.default_robot)
        control = control_of(
            self._task, self._robot, common=config.common_actions, gripper_steps=config.gripper_steps
        )
        self._state = state_quantities(self._task, self._robot)
        scene, looks = scene_and_looks(self._task, self._robot, config.looks)
        variants = prepare_scene(scene, self._task, config.variation)
        quantities = (*self._state, "tool.zaxis", *self._task.privileged)
        self.backend: Backend = make_backend(config, scene, self._robot, quantities, num_envs, array=array)
        self.xp, self.device = self.backend.xp, self.backend.device
        self.index, self.view = self.backend.index, self.backend.view
        self.controller = Controller(replace(control, hz=config.rate_hz), self._robot, self.backend)
        self._monitor = self._follow(config.formula)
        self._describe(autoreset)
        self._bind()
        drawn = self._task.vary if config.randomize else ()
        self._randomizer = Randomizer(drawn, self.backend)
        drawn_of = {(term.field, term.element) for term in (*drawn, *looks)}
        self.variants = Variants(variants, self.backend, drawn_of)
        self._own_starts = OwnStarts(
            self._task, self._robot, self.backend, self.controller, self.variants, self.num_substeps
        )
        self._looks = Randomizer(looks, self.backend)
        self._domain = Domain(
            config.domain,
            self.backend,
            self._robot,
            self._task,
            self._state,
            num_envs=num_envs,
            learns=self.autoreset,
        )
        threads = min(num_envs, config.num_threads or usable_cores())
        self._pictures = Pictures(config, self.backend, num_envs, self.num_substeps, threads)
        self._starts: StartBank | None = None
        if config.resets != ResetsConfig():
            self._starts = StartBank(config.resets, self.bank_key(), self.backend, self._randomizer)
            self.reset_classes = self._starts.classes
        self._seed, self._episode = self._words(np.arange(num_envs)), self._words(np.zeros(num_envs))
        self._elapsed = self._asarray(np.zeros(num_envs, np.int64))
        self._held = self._asarray(np.zeros(num_envs, np.int64))
        """For how many control steps the goal has been met without a break."""
        self.num_diverged = 0
        self._is_seen = True

    def _follow(self, formula: str | None) -> Monitor | None:
        """Returns what follows the formula, if there is one."""
        if formula is None:
            return None
        self._predicates = predicates_of(self._task)
        return Monitor(
            check_formula(formula, self._task, self.config.rate_hz, self.config.horizon_s),
            self.num_envs,
            control_hz=self.config.rate_hz,
            xp=self.xp,
            device=self.device,
        )

    def _describe(self, autoreset: str) -> None:
        task, robot = self._task, self._robot
        self.task, self.robot, shown_text = task.name, robot.name, self.config.instruction
        self.instruction = task.instruction if shown_text in ("", OWN_WORDS) else shown_text
        self._text = encode_text([self.instruction])
        self.control_hz, self.caps = self.config.rate_hz, self.backend.caps
        self.horizon = round((self.config.horizon_s or task.horizon_s) * self.control_hz)
        self._hold_steps = math.ceil(task.hold_s * self.control_hz - 1e-9)
        self._ends_at_success = task.ends_at_success or self._monitor is not None
        self.num_substeps = _substeps(self.control_hz, self.backend.timestep_s)
        index, names = self.view.elements(self._state)
        followed = () if self._monitor is None else NAMES  # shown whatever `env.state` leaves out
        self._true_index, self.true_names = self.backend.asarray(index), (*names, *followed)
        layouts = layouts_of(self.config) if self.config.robots else None
        self._state_among, self._action_among = (
            (None, None) if layouts is None else (Among(layout, self.backend) for layout in layouts)
        )
        if layouts is None:
            shown = chosen(names, robot.own_elements(self.config.state), at="env.state")
            shown_names, self.action_names = tuple(names[i] for i in shown), self.controller.action_names
        else:
            shown = list(layouts[0].shown)
            shown_names, self.action_names = (layout.names for layout in layouts)
        self._state_index = self.backend.asarray(index[shown])
        self.state_names = (*shown_names, *followed)
        hidden = sorted(set(range(len(names))) - set(shown)) if self.config.privileged else []
        self._hidden_index = self.backend.asarray(index[hidden])
        self.privileged_names = tuple(names[i] for i in hidden)
        apart, at = self.config.environment_state, "env.environment_state"
        apart = chosen(names, apart, at=at) if apart else []
        self._environment_index = self.backend.asarray(index[apart])
        self.autoreset = autoreset == "same_step"
        mode = AutoresetMode.SAME_STEP if self.autoreset else AutoresetMode.DISABLED
        fps = int(self.control_hz)
        self.metadata = {"autoreset_mode": mode, "render_modes": ["rgb_array"], "render_fps": fps}
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (len(self.action_names),), np.float32)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self.single_observation_space, self.observation_space = observation_spaces(
            self.config, len(self.state_names), self.num_envs, len(self.privileged_names), len(apart)
        )

    def _bind(self) -> None:
        backend, robot = self.backend, self._robot
        self._qvel, self._ctrl, self._asarray = backend.bind("qvel"), backend.bind("ctrl"), backend.asarray
        self._all_rows = self._asarray(np.arange(self.num_envs))
        self.limits = robot.limits if robot.arm_joints else None
        dt_s, xp, device = 1.0 / self.control_hz, self.xp, self.device
        self.safety = SafetyEnvelope(
            robot.limits, control_dt_s=dt_s, num_envs=self.num_envs, xp=xp, device=device
        )

    # The step is the specification: act, simulate, judge, observe, reset.

    def step_unseen(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """As `step_masked`, without an observation where no episode ends."""
        self._is_seen = False
        try:
            return self.step_masked(actions, active)
        finally:
            self._is_seen = True

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Advances the active envs by one control step; the others stay, with reward 0."""
        active = None if active is None else self._mask(active)
        commanded, limited = self._command(actions, active)
        self._domain.hold_back(active)
        target_rad = copied(self._ctrl[:, self.index.arm_ctrl])
        self._domain.pull(self.view)
        before, overflows = copied(self.backend.read_states()), self.backend.overflows
        so_far = None if overflows is None else copied(overflows)
        diverged = self._pictures.step(active)
        if diverged.any():
            self._contain(diverged, before)
        self._hold(active)
        if self._monitor is not None:
            going = ~diverged if active is None else active & ~diverged
            self._monitor.advance(lambda name: self._predicates[name](self.view), going)
        success, failed, reward = self.judge(~diverged)
        self._elapsed += 1 if active is None else active
        terminated = (success | failed if self._ends_at_success else failed) & ~diverged
        truncated = ((self._elapsed >= self.horizon) | diverged) & ~terminated
        if active is not None:
            reward, success = reward * active, success & active
            terminated, truncated, limited = terminated & active, truncated & active, limited & active
        infos: dict[str, Any] = {
            "success": success,
            "is_success": success,  # where Stable-Baselines3 and others look for it
            "commanded_action": commanded,
            "executed_target_rad": target_rad,
            "limited": limited,
            "diverged": diverged,
        }
        if overflows is not None:
            infos["overflowed"] = overflows > so_far
        ended = terminated | truncated
        if self._starts is not None:
            infos |= self._starts.infos()
            self._starts.note(ended, success)
        infos |= self.variants.infos(self._seed, self._episode)
        self._domain.note(ended, success)
        if self._domain.has_curriculum:
            infos["domain_scale"] = self._domain.scale
        obs = self._observe() if self._is_seen or ended.any() else {}
        if self.autoreset and ended.any():
            infos["final_obs"], infos["_final_obs"] = obs, ended
            solved = copied(success)
            infos["final_info"], infos["_final_info"] = {"success": solved, "is_success": solved}, ended
            obs = self._begin(ended, self._episode + 1, keep=obs)
        return obs, reward, terminated, truncated, infos

    def _command(self, actions: Array, active: Array | None) -> tuple[Array, Array]:
        """Writes actuator targets; returns the clipped actions, and where safety limited their targets."""
        xp = self.xp
        actions = self._asarray(actions, xp.float32)
        if actions.shape != (self.num_envs, len(self.action_names)):
            raise ConfigError(
                f"{self.task}: got actions of shape {tuple(actions.shape)}, "
                f"need ({self.num_envs}, {len(self.action_names)}): {', '.join(self.action_names)}"
            )
        commanded, is_finite = xp.clip(actions, -1.0, 1.0), None
        if xp is not np or not math.isfinite(commanded.sum()):  # a device would have to be waited for
            is_finite = xp.isfinite(commanded).all(axis=1)
            # The whole row: safety then holds the joints, and effectors stay.
            commanded = xp.where(is_finite[:, None], commanded, xp.nan)
        own, position = self.own_actions(commanded), self.controller.joint_positions()
        target = self.controller.targets(own, position)
        safe, limited = self.safety.filter(target, position, self._qvel[:, self.index.arm_dof], active)
        worked = active
        if is_finite is not None:
            commanded = xp.where(is_finite[:, None], commanded, 0.0)
            own, worked = self.own_actions(commanded), is_finite if active is None else active & is_finite
        effectors = self.controller.effectors(own, self._effector_commands())
        self._command_columns(self.index.arm_ctrl, safe, active)
        self._command_columns(self.index.effector_ctrl, effectors, worked)
        return commanded, limited

    def _command_columns(self, columns: Any, values: Array, rows: Array | None) -> None:
        """Writes some actuators' targets (B, k), of all simulations or the `rows` (B,) alone."""
        if rows is not None:
            values = self.xp.where(rows[:, None], values, self._ctrl[:, columns])
        assign(self._ctrl, (slice(None), columns), values)

    def _hold(self, active: Array | None) -> None:
        """Counts the control steps in which the goal is met without a break, of a task that must hold it."""
        if self._hold_steps:
            met = self._task.evaluate(self.view)["success"]
            held = self.xp.where(met, self._held + 1, 0)
            self._held = held if active is None else self.xp.where(active, held, self._held)

    def judge(self, is_valid: Array | bool = True) -> tuple[Array, Array, Array]:
        """Returns success, failure and reward of the present states, (B,); invalid rows have no success."""
        if self._monitor is None:
            verdict = self._task.evaluate(self.view)
            success = verdict["success"] & is_valid & (self._held >= self._hold_steps)
        else:
            verdict = {"fail": self._monitor.violated}
            success = self._monitor.complete & is_valid
        failed = verdict.get("fail")
        failed = self.xp.zeros_like(success) if failed is None else failed
        if self.config.reward == "sparse":
            return success, failed, self._asarray(success, self.xp.float64)
        shaped = MOST_SHAPING * (self.progress() if self._monitor is None else self._monitor.gained)
        return success, failed, self.xp.where(success, 1.0, shaped)

    def _contain(self, diverged: Array, before: Array) -> None:
        """Counts and dumps simulations that blew up, and gives them back their last good state.

        A row whose state was bad before the step takes the model's default state.
        """
        self.num_diverged += int(diverged.sum())
        (ids,) = self.xp.nonzero(diverged)
        if self.config.dump_diverged is not None:
            folder = Path(self.config.dump_diverged)
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(
                folder / f"diverged_{self.num_diverged:06d}.npz",
                state_before=to_numpy(before[ids]),
                ctrl=to_numpy(self._ctrl[ids]),
                seed=to_numpy(self._seed[ids]),
                episode=to_numpy(self._episode[ids]),
                control_step=to_numpy(self._elapsed[ids]),
            )
        self.backend.clear(ids)
        good = ids[(self.xp.abs(before[ids]) < self.backend.largest_state).all(axis=1)]
        self.backend.write_states(good, before[good])
        self.backend.forward(ids)
        self._pictures.begin(ids)

    # Beginning episodes

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins an episode in all envs, or in those of `options["reset_mask"]`.

        Args:
            seed: s gives env i the seed s + i; a sequence gives each its own; None, also in a
                sequence, goes on to the next episode of the present seed.
            options: `reset_mask` (B,) bool; `states` (B, n) rows of `get_state` to start from instead of
                the task's own distribution, with the model that the episode's seed draws; where there is a
                bank, `reset_class` and `reset_row` (B,), with the model of that row.

        Raises:
            ConfigError: an option that does not exist, or `states` with a row of a bank.
        """
        options = options or {}
        allowed = ["reset_mask", "states", *(() if self._starts is None else ("reset_class", "reset_row"))]
        unknown = set(options) - set(allowed)
        if unknown:
            raise ConfigError(
                f"{self.task}.reset: unknown options {sorted(unknown)}; allowed: {', '.join(allowed)}"
            )
        mask = self._mask(options.get("reset_mask"))
        self._seed, episode = next_episodes(seed, mask, self._seed, self._episode, at=self.task)
        with nullcontext() if self._starts is None else self._starts.asked(options):
            obs = self._begin(mask, episode, keep=None)
        if "states" in options:
            obs = self.set_state(options["states"], mask)
        success = self.judge(mask)[0]
        started = self.variants.infos(self._seed, self._episode)
        started |= {} if self._starts is None else self._starts.infos()
        return obs, {"success": success, "is_success": success, **started}

    def _begin(self, mask: Array, episode: Array, keep: Obs | None) -> Obs:
        """Starts new episodes where masked; returns the observation, rows of `keep` elsewhere."""
        (ids,) = self.xp.nonzero(mask)
        self._episode = self.xp.where(mask, episode, self._episode)
        self._elapsed[ids], self._held[ids] = 0, 0
        seed, episodes = self._seed[ids], self._episode[ids]
        self.backend.clear(ids)
        starts = self._starts
        own, drawn = (ids, episodes) if starts is None else starts.begin(ids, seed, episodes)
        self._looks.apply(ids, EpisodeRng(seed, episodes, stream=Stream.LOOKS), self._domain.scale)
        rng = EpisodeRng(self._seed[own], drawn)
        if len(own):
            self._randomizer.apply(own, rng)
        self._domain.draw(ids, seed, episodes)
        if len(own):
            self._own_starts.begin(own, rng, self._seed[own], drawn)
        self._domain.begin(ids)
        if self._monitor is not None:
            self._monitor.reset(ids)
        self.safety.reset(mask, self._ctrl[:, self.index.arm_ctrl])
        self.backend.forward(ids)
        self._pictures.begin(ids)
        fresh = self._observe(ids)
        if keep is None or mask.all():
            return fresh if len(ids) == self.num_envs else self._observe()
        merged = {key: copied(value) for key, value in keep.items()}
        for key, value in fresh.items():
            merged[key][ids] = value
        return merged

    def _observe(self, ids: Array | None = None) -> Obs:
        """Returns fresh arrays: the caller may keep them."""
        rows = self._all_rows if ids is None else ids
        values = self.view.values if ids is None else self.view.values[ids]
        sensed = self._domain.seen(values, rows, self._elapsed)
        obs: Obs = {"state": self._as_state(sensed, rows)}
        if len(self._hidden_index):
            obs[PRIVILEGED] = self._asarray(values[:, self._hidden_index], self.xp.float32)
        if len(self._environment_index):
            obs[ENVIRONMENT] = self._asarray(sensed[:, self._environment_index], self.xp.float32)
        if self.config.instruction:
            obs[INSTRUCTION] = self._asarray(np.repeat(self._text, len(values), axis=0))
        shown = self._pictures.show(rows)
        return obs | {key: self._asarray(pictures) for key, pictures in shown.items()}

    def _as_state(self, sensed: Array, rows: Array) -> Array:
        """Returns `state` (N, D) float32 of what some envs sense of their view (N, S)."""
        shown = sensed[:, self._state_index]
        shown = shown if self._state_among is None else self._state_among.put(shown)
        return self._with_monitor(shown, rows)

    @property
    def own_action_names(self) -> tuple[str, ...]:
        """Those of `action_names` that move this robot."""
        names = self.action_names
        return names if self._action_among is None else tuple(names[i] for i in self._action_among.where)

    def own_actions(self, actions: Array) -> Array:
        """Returns the part of actions (N, A) that moves this robot, of those of `env.robots`."""
        return actions if self._action_among is None else self._action_among.take(actions)

    def _as_shown(self, actions: Array) -> Array:
        """Returns this robot's actions (N, k) as those of `env.robots`, (N, A)."""
        return actions if self._action_among is None else self._action_among.put(actions)

    def _with_monitor(self, values: Array, rows: Array) -> Array:
        """Returns elements of the state of some envs as float32, followed by those of the formula."""
        if self._monitor is not None:
            values = self.xp.concat([values, like(self._monitor.observed(rows), values)], axis=1)
        return self._asarray(values, self.xp.float32)

    def _words(self, numbers: Array) -> Array:
        """Returns seeds or counters as the back end's arrays have them: uint64, int64 in a tensor."""
        words = np.asarray(numbers, np.uint64)
        return words if self.xp is np else self._asarray(words.view(np.int64))

    def _mask(self, mask: Array | None) -> Array:
        """Returns a bool mask (B,) of the back end, all True for None."""
        return self._asarray(row_mask(None, self.num_envs) if mask is None else mask, self.xp.bool)

    # States, seeds, experts, pictures

    def episode_seeds(self) -> Array:
        """Returns (B,) numbers that identify each env's present episode; see `EpisodeRng.key`."""
        return EpisodeRng(self._seed, self._episode).key

    def get_state(self) -> Array:
        """Returns (B, n): MuJoCo's states, late cameras' pictures, late commands, steps held, the monitor."""
        waiting = self._asarray(self._pictures.rows())
        commands = self._asarray(self._domain.rows(self.num_envs))
        states = self._asarray(self.backend.read_states(), self.xp.float64)
        held = self._asarray(self._held[:, None], self.xp.float64)[:, : bool(self._hold_steps)]
        followed = [] if self._monitor is None else [self._monitor.rows()]
        return self.xp.concat([states, waiting, commands, held, *followed], axis=1)

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        """Puts the masked simulations into rows of `get_state`; episode clocks run on."""
        rows, mask, own = self._asarray(rows), self._mask(mask), self.backend.state_size
        (ids,) = self.xp.nonzero(mask)
        late = own + self._pictures.num_columns
        held = late + self._domain.num_columns
        followed = held + bool(self._hold_steps)
        need = (self.num_envs, followed + (0 if self._monitor is None else Monitor.num_columns))
        if tuple(rows.shape) != need:
            raise ConfigError(f"{self.task}.set_state: got rows of shape {tuple(rows.shape)}, need {need}")
        self.backend.write_states(ids, rows[ids, :own])
        self.safety.reset(mask, self._ctrl[:, self.index.arm_ctrl])
        self.backend.forward(ids)
        self._pictures.put(ids, to_numpy(rows[ids, own:late]))
        self._domain.put(ids, rows[ids, late:held])
        if self._hold_steps:
            assign(self._held, ids, rows[ids, held])
        if self._monitor is not None:
            self._monitor.put(ids, rows[ids, followed:])
        return self._observe()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that an exact resume needs, in numpy arrays, whichever the env has."""
        arrays = {
            "state": self.get_state(),
            "seed": self._seed,
            "episode": self._episode,
            "elapsed": self._elapsed,
            **({} if self._starts is None else self._starts.state_dict()),
            **{f"field.{name}": self.backend.expand(name) for name in self._varied},
        }
        kept = {name: to_numpy(copied(array)) for name, array in arrays.items()}
        for name in ("seed", "episode"):
            kept[name] = kept[name].view(np.uint64)
        kept |= self._domain.state_dict()
        return {**kept, "num_diverged": self.num_diverged, "safety": self.safety.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        """Restores `state_dict`; the future is then the same, byte for byte."""
        self._seed, self._episode = (copied(self._words(state[name])) for name in ("seed", "episode"))
        self._elapsed = copied(self._asarray(state["elapsed"]))
        self.num_diverged = int(state["num_diverged"])
        if self._starts is not None:
            self._starts.load_state_dict(state)
        for each in (self._randomizer, self._looks, self.variants):
            each.restore({name: state[f"field.{name}"] for name in each.fields})
        self._domain.load_state_dict(state, self._seed, self._episode)
        obs = self.set_state(state["state"])
        self.safety.load_state_dict(state["safety"])
        return obs

    @property
    def _varied(self) -> tuple[str, ...]:
        return (*self._randomizer.fields, *self._looks.fields, *self.variants.fields)

    def bank_key(self) -> BankKey:
        """Returns the key of the banks whose starts fit these simulations."""
        return key_of(self.task, self.robot, self.backend, self._randomizer)

    def drawn(self, ids: Array) -> Array:
        """Returns what episodes have drawn of the model, (n, numbers), one for each of the key's `varied`."""
        return self._randomizer.values(ids)

    def shown_state(self) -> Array:
        """Returns the present `state` (B, D) float32, also after `step_unseen`; nothing is drawn."""
        sensed = self._domain.seen(self.view.values, self._all_rows, self._elapsed)
        return self._as_state(sensed, self._all_rows)

    def true_state(self) -> Array:
        """Returns the elements `true_names` (B, S) float32: what `state` is where all of it is shown."""
        return self._with_monitor(self.view.values[:, self._true_index], self._all_rows)

    def progress(self) -> Array:
        """Returns the progress (B,) of each episode in [0, 1], by formula or the task's shaped reward."""
        if self._monitor is not None:
            return self._monitor.progress
        return self.xp.clip(self._task.dense_reward(self.view), 0.0, 1.0)

    def action_towards(self, target_rad: Array, opening: Array) -> Array:
        """Returns actions (B, A) towards joint targets (B, n); see `Controller.towards`."""
        return self._as_shown(self.controller.towards(target_rad, opening, self._effector_commands()))

    def _effector_commands(self) -> Array:
        """Returns what the end effectors were sent last, (B, E)."""
        return self._domain.newest(self._ctrl)[:, self.index.effector_ctrl]

    def expert(self, bias_m: float = 0.0, noise_m: float = 0.0, noise_seed: int = 0) -> Expert:
        """Returns the task's scripted expert over all envs; see `robot_rl.sim.experts.Expert`.

        Raises:
            ConfigError: nobody wrote one.
        """
        control = self.controller.control
        return Expert(
            self._task, control, self.view, self.episode_seeds, bias_m, noise_m, noise_seed,
            is_shut=lambda: self.controller.is_shut(self._effector_commands()),
            as_shown=self._as_shown,
        )  # fmt: skip

    def picture(
        self, env: int = 0, *, camera: str | None = None, height: int = 480, width: int = 640
    ) -> Array:
        """Returns an RGB image (height, width, 3) of one env, by the task's own camera if None."""
        camera = camera or self._task.camera
        renderer = self.backend.renderer([Camera(name=camera, height=height, width=width)])
        try:
            return renderer.render_batch(np.array([env]), camera)[0]
        finally:
            renderer.close()

    def close_extras(self, **kwargs: Any) -> None:
        self._pictures.close()


def _check_present(config: EnvConfig) -> None:
    """Refuses the past in the state."""
    present = without_past(config.state)
    if past := [name for name in config.state if name not in present]:
        raise ConfigError(
            f"env.state: got {past[0]!r}, which is of the past; allowed here: elements of the present. "
            "`robot-rl` and `robot_rl.rollout.envs.make_env` show the past of simulations, an arm and "
            "`gymnasium.make` do not."
        )


def _substeps(control_hz: float, timestep_s: float) -> int:
    """Returns the physics steps of a control step.

    Raises:
        ConfigError: they are no whole number.
    """
    steps = 1.0 / (control_hz * timestep_s)
    allowed = f"{1.0 / timestep_s:g}, the rate of the physics, divided by a whole number"
    require(round(steps) >= 1 and abs(steps - round(steps)) < 1e-6, "env.control_hz", control_hz, allowed)
    return round(steps)
