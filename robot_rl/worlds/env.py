"""Imagined episodes as a `VectorEnv`: what learns or judges in a simulator does so here, unchanged.

The first k control steps of a state are asked of the model one by one where they are seen, from that state;
after k the model goes on from its own prediction. Success, failure and a cut are looked at every k steps, so
an imagined success comes up to k - 1 steps late. An episode is

    terminated   where most members see success (or its own member failure): no reward follows
    truncated    at its horizon, or where the members disagree more than the calibrated gate (or two samples
                 of its own member): the value goes on

Rewards are success, and with `smooth` a potential (Ng, Harada, Russell 1999): an average, which runs over
strides, of the share of members that see success. The discounted return of an episode that ends by its task
stays what it was; rewards of steps show earlier where success is near. (DreamSmooth, arXiv 2311.01450,
smooths rewards themselves, by which returns change where success ends an episode.)

Each episode has one member for all its steps (NEUBAY, arXiv 2512.04341), so that its physics stay the same.
Starts, members and noise follow from (seed, episode), so episodes of one seed share them.
B envs, S state elements, A action dim, k control steps of a stride.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from gymnasium.vector import AutoresetMode

from robot_rl.config.build import build
from robot_rl.core.errors import ConfigError, require
from robot_rl.core.machine import check_device
from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.hal.vector import Obs, VectorEnv, finite_actions, next_episodes, row_mask, set_spaces
from robot_rl.worlds.bill import Meter
from robot_rl.worlds.calibration import samples_apart
from robot_rl.worlds.config import Measure, StartsConfig
from robot_rl.worlds.history import Array, Window, window_at
from robot_rl.worlds.images.easel import Easel
from robot_rl.worlds.saved import World, load_world
from robot_rl.worlds.starts import Starts
from robot_rl.worlds.trust import samples_blind

_BLOCK = 32
"""Rows that a model sees at once are a multiple: a row is then the same alone and among others."""
_AGREED = 1e-9
"""Least limit of the disagreement about pictures, of members that never differed."""
_GATES = "true, false, disagreement or samples"
_WORST = 1e4
"""Largest distance of a state element from its mean, in deviations: beyond it a prediction is lost."""


@dataclass(frozen=True, kw_only=True)
class ImaginedConfig:
    """Settings of imagined episodes; `env.settings.<name>` of a run."""

    strides: int = 0
    """Longest imagined episode, in strides; 0: as long as a real one."""
    starts: StartsConfig = field(default_factory=StartsConfig)
    gate: bool | Measure = True
    """What cuts episodes: disagreement of the members (also if true), or the distance of two samples of the
    episode's own member; nothing if false."""
    vote: float = 0.8
    """Share of the members that must see success."""
    hold: int = 1
    """Strides in a row in which they must."""
    noise: float = 0.0
    """Share of the deviation that a member states which is drawn, once a stride; 0: its mean."""
    member: int | None = None
    """The one member of all episodes; each draws its own if null."""
    smooth: float = 0.0
    """Weight of the newest stride in the running share of members that see success, by whose change the
    reward is shaped; 0: success alone is rewarded."""
    gamma_step: float = 0.98
    """Discount of a control step behind `smooth`: that of the algorithm, or returns change."""
    device: str = "cpu"
    """Where the networks of a model that is read from its folder compute: cpu, cuda, cuda:1, ..."""

    def __post_init__(self) -> None:
        check_device(self.device, at="env.settings.device")
        require(self.strides >= 0, "env.settings.strides", self.strides, "0 or more")
        require(self.gate in (False, True, *get_args(Measure)), "env.settings.gate", self.gate, _GATES)
        require(0 < self.vote <= 1, "env.settings.vote", self.vote, "above 0, up to 1")
        require(self.hold >= 1, "env.settings.hold", self.hold, "1 or more")
        require(self.noise >= 0, "env.settings.noise", self.noise, "0 or more")
        require(0 <= self.smooth <= 1, "env.settings.smooth", self.smooth, "0 to 1")
        require(0 < self.gamma_step <= 1, "env.settings.gamma_step", self.gamma_step, "above 0, up to 1")

    @property
    def measure(self) -> Measure:
        """What is compared with the calibrated limit, also where nothing is cut."""
        return "samples" if self.gate == "samples" else "disagreement"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ImaginedConfig:
        """Returns the settings of a run's `env.settings`.

        Raises:
            ConfigError: one that does not exist.
        """
        given = dict(settings)
        unknown = sorted(set(given) - set(cls.__dataclass_fields__))
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise ConfigError(f"env.settings: got {', '.join(unknown)}, allowed: {allowed}")
        starts = given.pop("starts", {})
        if not isinstance(starts, StartsConfig):
            starts = build(StartsConfig, starts, at="env.settings.starts")
        return cls(**given, starts=starts)


class WorldEnv(VectorEnv):
    """B imagined episodes of one world model; see the module."""

    def __init__(
        self,
        world: World | str,
        num_envs: int,
        *,
        autoreset: Literal["same_step", "disabled"] = "same_step",
        settings: Mapping[str, Any] | ImaginedConfig | None = None,
        by: str = "without a lease",
    ) -> None:
        """Reads the model, if its folder is given.

        Args:
            world: the model, or its folder.
            num_envs: B.
            autoreset: whether the env begins the next episode itself.
            settings: of the imagined episodes.
            by: who imagines, for the bill of a model that has a folder.

        Raises:
            CheckpointError: no world model is there.
            ConfigError: a setting that does not exist, or a gate that was not calibrated, or that is blind.
        """
        self.config = settings if isinstance(settings, ImaginedConfig) else ImaginedConfig.of(settings or {})
        is_folder = isinstance(world, str | Path)
        self.world = load_world(world, device=self.config.device) if is_folder else world
        model, meta = self.world.model, self.world.meta
        members = model.config.members
        fixed = self.config.member
        require(
            fixed is None or 0 <= fixed < members,
            "env.settings.member",
            fixed,
            f"0 to {members - 1}, or null",
        )
        require(num_envs >= 1, "num_envs", num_envs, "1 or more")
        if self.config.gate == "samples":
            why = samples_blind(self.world.report, self.world.calibration, self.world.limits)
            allowed = f"disagreement: {why}. Or fit a model whose noise tells its errors"
            require(not why, "env.settings.gate", "samples", allowed)
        self.num_envs, self.task, self.robot = num_envs, meta.task, meta.robot
        self.instruction, self.control_hz = meta.instruction, meta.control_hz
        self.state_names, self.action_names = meta.state_names, meta.action_names
        self.caps = frozenset({"set_state", "fork", "batch"})
        self.stride = model.config.stride
        steps = self.config.strides * self.stride
        longest = max(1, self.world.horizon // self.stride) * self.stride
        self.horizon = min(steps, longest) if steps else longest
        self.autoreset = autoreset == "same_step"
        mode = AutoresetMode.SAME_STEP if self.autoreset else AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": mode, "render_modes": [], "render_fps": int(meta.control_hz)}
        images = self.world.images
        set_spaces(self, {} if images is None else dict.fromkeys(images.cameras, images.size))
        self._easel = None if images is None else Easel(images, num_envs, noise=self.config.noise)
        self._starts = Starts(self.world.history, self.config.starts, stride=self.stride)
        self._centre, self._unit = (np.asarray(t.cpu()) for t in (model.centre, model.spread_of_states))
        self._moving, self._scale = (np.asarray(t.cpu()) for t in (model.moves.bool(), model.scale))
        self._seed, self._episode = np.arange(num_envs, dtype=np.uint64), np.zeros(num_envs, np.uint64)
        state_dim, action_dim, k = len(self.state_names), len(self.action_names), self.stride
        self._anchor, self._past, self._shown = (
            np.zeros((num_envs, state_dim), np.float32) for _ in range(3)
        )
        self._past_action, self._actions = (np.zeros((num_envs, k, action_dim), np.float32) for _ in range(2))
        self._has_past = np.zeros(num_envs, bool)
        self._phase, self._elapsed, self._depth, self._held, self._member, self._limit = (
            np.zeros(num_envs, np.int64) for _ in range(6)
        )
        self._potential = np.zeros(num_envs)
        self._is_fresh = np.ones(num_envs, bool)
        """Which rows of `_shown` are what the model says now."""
        self._seen = True
        self._meter = Meter(self.world.folder, **self.world.report.behind, by=by)
        self.uncertainty = np.zeros(num_envs)
        """(B,): disagreement, or distance of samples, at the last stride."""

    # Steps

    def step_unseen(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """As `step_masked`; an observation where no episode ends may be an earlier one."""
        self._seen = False
        try:
            return self.step_masked(actions, active)
        finally:
            self._seen = True

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Advances the active envs by one control step; the others stay, with reward 0."""
        rows = row_mask(active, self.num_envs)
        commanded = finite_actions(self, actions)
        ids = np.flatnonzero(rows)
        self._meter.add(len(ids))
        self._actions[ids, self._phase[ids]] = commanded[ids]
        self._phase[ids] += 1
        self._elapsed[ids] += 1
        self._is_fresh[ids] = False
        if self._easel is not None:
            self._easel.touched(ids)
        success, failed, cut, lost = (np.zeros(self.num_envs, bool) for _ in range(4))
        before = self._potential.copy()
        due = ids[(self._phase[ids] == self.stride) | (self._elapsed[ids] >= self._limit[ids])]
        if len(due):
            success[due], failed[due], cut[due], lost[due] = self._advance(due)
        terminated = (success | failed) & ~lost
        truncated = rows & ((self._elapsed >= self._limit) | cut | lost) & ~terminated
        ended = terminated | truncated
        self._potential[terminated] = 0.0
        shaped = (self.config.gamma_step * self._potential - before) * rows
        reward = success + (shaped if self.config.smooth else 0.0)
        infos: dict[str, Any] = {
            "success": success,
            "is_success": success,
            "commanded_action": commanded,
            "cut": cut & truncated,
            "uncertainty": self.uncertainty.copy(),
            "depth": self._depth.copy(),
            "member": self._member.copy(),
            "diverged": lost,
            "source": "world",
        }
        obs = self._observe(None if self._seen else ended)
        if self.autoreset and ended.any():
            infos |= {"final_obs": obs, "_final_obs": ended}
            infos |= {"final_info": {"success": success.copy()}, "_final_info": ended}
            self._begin(ended, self._episode + np.uint64(1))
            obs = self._observe(ended)
        return obs, np.asarray(reward, np.float64), terminated, truncated, infos

    def _advance(self, ids: Array) -> tuple[Array, Array, Array, Array]:
        """Goes on to the model's own prediction; returns success, failure, cut and lost (n,)."""
        mean, std, uncertainty = self._predicted(ids)
        rows = np.arange(len(ids))
        own = mean[self._member[ids], rows]
        own_std = std[self._member[ids], rows]
        if self.config.noise:
            own = own + self.config.noise * own_std * self._drawn(ids, Stream.SENSING).normal(own.shape[1])
        if self.config.measure == "samples":
            uncertainty = self._samples_apart(ids, own_std)
        own = own.astype(np.float32)
        lost = ~(np.abs((own - self._centre) / self._unit) < _WORST).all(axis=1)
        own[lost] = self._anchor[ids][lost]
        codes = None
        if self._easel is not None:
            codes, uncertainty = self._advance_pictures(self._easel, ids, own, uncertainty)
            codes = np.tile(codes, (len(mean), 1, 1, 1))
        votes, failures = self.world.outcome.judge(mean.reshape(-1, mean.shape[2]), codes)
        share = votes.reshape(len(mean), -1).mean(axis=0)
        self._potential[ids] += self.config.smooth * (share - self._potential[ids])
        most = share >= self.config.vote
        failed = failures.reshape(len(mean), -1)[self._member[ids], rows] & ~most
        self._depth[ids] += 1
        self._held[ids] = np.where(most & ~lost, self._held[ids] + 1, 0)
        cut = (uncertainty > self._gate_limit(self._depth[ids])) & bool(self.config.gate)
        self.uncertainty[ids] = uncertainty
        success: Array = (self._held[ids] >= self.config.hold) & ~cut
        whole = self._phase[ids] == self.stride
        self._past[ids], self._past_action[ids] = self._anchor[ids], self._actions[ids]
        self._has_past[ids] = whole
        self._anchor[ids], self._shown[ids] = own, own
        self._phase[ids], self._actions[ids], self._is_fresh[ids] = 0, 0.0, True
        return success, np.asarray(failed & ~cut), cut, np.asarray(lost)

    def _drawn(self, ids: Array, stream: Stream) -> EpisodeRng:
        """Returns the draws of a stride, which depend on (seed, episode, depth) alone."""
        strides = self._episode[ids] * np.uint64(1000) + self._depth[ids].astype(np.uint64)
        return EpisodeRng(self._seed[ids], strides, stream=stream)

    def _samples_apart(self, ids: Array, std: Array) -> Array:
        """Returns how far two next states (n,) are apart that are drawn by deviations (n, S)."""
        std = std[:, self._moving] / self._scale[self._moving]
        noise = self._drawn(ids, Stream.SAMPLES).normal(2 * std.shape[1])
        return samples_apart(std, noise.reshape(len(ids), 2, -1))

    def _gate_limit(self, depth: Array) -> Array:
        """Returns the largest uncertainty that is believed at each depth (n,)."""
        return self.world.calibration.limit(depth, self.config.measure)

    def _advance_pictures(
        self, easel: Easel, ids: Array, own: Array, uncertainty: Array
    ) -> tuple[Array, Array]:
        """Goes on to the next codes (n, C, h, w); returns them, and the larger of the uncertainties.

        Disagreement about pictures is stated as uncertainty about states is: limits are where limits are.
        """
        facts = {
            "state": self._anchor[ids],
            "after": own,
            "actions": self._actions[ids],
            "steps": self._phase[ids],
        }
        found = easel.advance(ids, facts, (self._member[ids], self._seed[ids], self._episode[ids]))
        depth = self._depth[ids] + 1
        scale = self._gate_limit(depth) / np.maximum(easel.images.limit(depth), _AGREED)
        return easel.codes(ids), np.maximum(uncertainty, found * scale)

    def _predicted(self, ids: Array) -> tuple[Array, Array, Array]:
        """Returns means and deviations (M, n, S), and the disagreement (n,), after the actions so far."""
        size = -len(ids) % _BLOCK
        padded = np.concatenate([ids, np.repeat(ids[:1], size)])
        parts = list[tuple[Array, Array, Array]]()
        for block in padded.reshape(-1, _BLOCK) if len(padded) <= 4 * _BLOCK else padded.reshape(1, -1):
            window = Window(
                state=self._anchor[block],
                past_state=self._past[block],
                past_action=self._past_action[block],
                has_past=self._has_past[block],
            )
            found = self.world.model.predict(window, self._actions[block], self._phase[block])
            parts.append((found.mean.cpu().numpy(), found.std.cpu().numpy(), found.uncertainty.cpu().numpy()))
        mean, std = (np.concatenate([part[i] for part in parts], axis=1)[:, : len(ids)] for i in range(2))
        return mean, std, np.concatenate([part[2] for part in parts])[: len(ids)].astype(np.float64)

    def _observe(self, rows: Array | None = None) -> Obs:
        """Returns what the model says of the envs now, in the other rows (B,) perhaps something earlier.

        The caller may keep it.
        """
        mask = row_mask(rows, self.num_envs)
        ids = np.flatnonzero(~self._is_fresh & mask)
        if len(ids):
            mean = self._predicted(ids)[0]
            self._shown[ids], self._is_fresh[ids] = mean[self._member[ids], np.arange(len(ids))], True
        obs = {"state": self._shown.copy()}
        if self._easel is not None:
            facts = {
                "state": self._anchor,
                "after": self._shown,
                "actions": self._actions,
                "steps": self._phase,
            }
            self._easel.show(np.flatnonzero(mask), facts, self._member)
            obs |= self._easel.pictures()
        return obs

    # Episodes

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins an episode in all envs, or in those of `options["reset_mask"]`.

        Args:
            seed: see `VectorEnv`.
            options: `reset_mask` (B,) bool; `observed` (B, S): real states in which to begin an episode, at
                its first control step; with them, of a model of pictures, `codes` (B, C, h, w) of the real
                pictures: `begun_as` returns both.

        Raises:
            ConfigError: an option that does not exist, or states of another size.
        """
        options = options or {}
        unknown = sorted(set(options) - {"reset_mask", "observed", "codes"})
        if unknown:
            allowed = "reset_mask, observed, codes"
            raise ConfigError(f"{self.task}.reset: unknown options {unknown}; allowed: {allowed}")
        mask = row_mask(options.get("reset_mask"), self.num_envs)
        self._seed, episodes = next_episodes(seed, mask, self._seed, self._episode, at=self.task)
        self._begin(mask, episodes)
        if "observed" in options:
            observed = np.asarray(options["observed"], np.float32)
            self._put_observed(np.flatnonzero(mask), observed, options.get("codes"))
        return self._observe(), {"success": np.zeros(self.num_envs, bool)}

    def _begin(self, mask: Array, episodes: Array) -> None:
        """Begins episodes where masked, in real states."""
        ids = np.flatnonzero(mask)
        self._episode = np.where(mask, episodes, self._episode)
        rng = EpisodeRng(self._seed[ids], self._episode[ids], stream=Stream.BANK_ROWS)
        history = self.world.history
        at = self._starts.draw(rng)
        members = self.world.model.config.members
        drawn = (rng.uniform()[:, 0] * members).astype(np.int64)
        self._member[ids] = drawn if self.config.member is None else self.config.member
        window = window_at(history, at, self.stride)
        self._anchor[ids], self._past[ids] = window.state, window.past_state
        self._past_action[ids], self._has_past[ids] = window.past_action, window.has_past
        if self._easel is not None:
            self._easel.begin(ids, history, at)
        left = self.world.horizon - (at - history.first[history.episode[at]])
        whole = np.maximum(1, left // self.stride) * self.stride  # so that all envs end strides together
        self._start_clock(ids, np.minimum(self.horizon, whole))

    def _put_observed(self, ids: Array, states: Array, codes: Array | None) -> None:
        if states.shape != self._anchor.shape:
            need = self._anchor.shape
            raise ConfigError(f"{self.task}.reset: got `observed` of shape {states.shape}, need {need}")
        if self._easel is not None:
            if codes is None:
                raise ConfigError(
                    f"{self.task}.reset: `codes` missing: the model has pictures. See `begun_as`."
                )
            self._easel.put(ids, codes[ids])
        self._anchor[ids] = self._past[ids] = states[ids]
        self._past_action[ids], self._has_past[ids] = 0.0, False
        self._start_clock(ids, np.full(len(ids), self.horizon))

    def _start_clock(self, ids: Array, limit: Array) -> None:
        for counter in (self._phase, self._elapsed, self._depth, self._held):
            counter[ids] = 0
        self._limit[ids], self._actions[ids], self.uncertainty[ids] = limit, 0.0, 0.0
        self._potential[ids] = 0.0
        self._shown[ids], self._is_fresh[ids] = self._anchor[ids], True

    # States

    @property
    def _columns(self) -> tuple[Array, ...]:
        """The arrays of which a state row consists, (B, ...) each."""
        clocks = (self._phase, self._elapsed, self._depth, self._held, self._limit)
        counters = (*clocks, self._member, self._potential)
        states = (self._anchor, self._past, self._past_action, self._actions, self._has_past)
        return (*states, *counters, *(() if self._easel is None else self._easel.columns))

    def get_state(self) -> Array:
        """Returns all that determines an imagined episode but its noise, (B, n) float64."""
        return np.concatenate(
            [part.reshape(self.num_envs, -1).astype(np.float64) for part in self._columns], axis=1
        )

    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        """Puts the masked envs into rows of `get_state`."""
        rows, ids = np.asarray(rows, np.float64), np.flatnonzero(row_mask(mask, self.num_envs))
        sizes = [part[0].size for part in self._columns]
        if rows.shape != (self.num_envs, sum(sizes)):
            need = (self.num_envs, sum(sizes))
            raise ConfigError(f"{self.task}.set_state: got rows of shape {rows.shape}, need {need}")
        for part, values in zip(self._columns, np.split(rows, np.cumsum(sizes)[:-1], axis=1), strict=True):
            part[ids] = values[ids].reshape(len(ids), *part.shape[1:])
        self._shown[ids], self._is_fresh[ids] = self._anchor[ids], self._phase[ids] == 0
        if self._easel is not None:
            self._easel.touched(ids)
        return self._observe()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that an exact resume needs."""
        return {"rows": self.get_state(), "seed": self._seed.copy(), "episode": self._episode.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        """Restores `state_dict`; the future is then the same, byte for byte."""
        self._seed, self._episode = state["seed"].copy(), state["episode"].copy()
        return self.set_state(state["rows"])

    def bill_to(self, holder: str) -> None:
        """Says who imagines from now on: the holder of the lease under which this was opened."""
        self._meter.write()
        self._meter.by = holder

    def close_extras(self, **kwargs: Any) -> None:
        """Completes the model's bill."""
        self._meter.write()


def begun_as(world: World, obs: Obs) -> dict[str, Any]:
    """Returns the options of a reset that begins episodes in what was observed of real envs (B, ...)."""
    options: dict[str, Any] = {"observed": np.asarray(obs["state"])}
    if world.images is not None:
        cameras = world.images.cameras
        options["codes"] = world.images.encode({name: np.asarray(obs[f"{name}.rgb"]) for name in cameras})
    return options
