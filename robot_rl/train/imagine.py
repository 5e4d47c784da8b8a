"""One policy in both worlds: the same starts, imagined and real; and films of both next to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import RenderError
from robot_rl.core.policy import Policy
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.rollout.evaluate import EvalResult, evaluate_in
from robot_rl.rollout.stepping import Moment
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.worlds.env import ImaginedConfig, WorldEnv, begun_as
from robot_rl.worlds.saved import World

Array = NDArray[Any]
Frames = dict[str, list[list[Array]]]
"""`imagined` and `real`: of each episode its pictures."""
_LARGER = 4


class RealStartsEnv(WorldEnv):
    """Imagined episodes that begin where the real env's episodes of the same seeds do."""

    def __init__(self, world: World, real: VectorEnv, settings: ImaginedConfig) -> None:
        """Args: real: with as many envs as are to be imagined; it is reset, and nothing acts in it."""
        super().__init__(world, real.num_envs, autoreset="disabled", settings=settings, by="imagine")
        self._real = real

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins the episodes of the real env's seeds; see `WorldEnv.reset`."""
        obs, infos = self._real.reset(seed=seed, options=options)
        begun, _ = super().reset(seed=seed, options={**(options or {}), **begun_as(self.world, obs)})
        return begun, {"success": np.asarray(infos.get("success", np.zeros(self.num_envs, bool)))}


@dataclass(frozen=True)
class BothWorlds:
    """What a policy did in the same episodes."""

    imagined: EvalResult
    real: EvalResult
    cut: float
    """Share of the imagined episodes that the gate would have cut; they were played to the end."""


def judge_in_both(
    world: World,
    real: VectorEnv,
    policy: Policy,
    *,
    seeds: NDArray[np.uint64],
    n_exec: int,
    settings: ImaginedConfig | None = None,
    watch: Callable[[str, Moment], None] | None = None,
) -> BothWorlds:
    """Plays the policy, without exploration, from the same starts in the model and in the real env.

    Nothing is cut in the model: an episode that is not finished is neither a success nor a failure.

    Args:
        world: the model.
        real: what it imitates; autoreset DISABLED.
        policy: acts in both.
        seeds: one for each episode.
        n_exec: control steps executed of each chunk.
        settings: of the imagined episodes; the usual ones without a gate if None.
        watch: sees the control steps of the first batch, of `imagined` and `real`.
    """
    settings = settings or ImaginedConfig(gate=False)
    env = RealStartsEnv(world, real, settings)
    over = np.zeros(len(seeds), bool)

    def seen(which: str) -> Callable[[slice, Moment], None]:
        def look(where: slice, moment: Moment) -> None:
            kept = where.stop - where.start
            if which == "imagined":
                depth = moment.infos["depth"]
                beyond = moment.infos["uncertainty"] > world.calibration.limit(depth, settings.measure)
                over[where] |= (beyond & moment.live & (depth > 0))[:kept]
            if watch is not None and where.start == 0:
                watch(which, moment)

        return look

    how: dict[str, Any] = {"seeds": seeds, "n_exec": n_exec}
    with closing(env):
        imagined = evaluate_in(env, policy, **how, watch=seen("imagined"))
    truth = evaluate_in(real, policy, **how, watch=seen("real"))
    return BothWorlds(imagined, truth, float(over.mean()))


class CameraFilm:
    """Keeps what a camera shows of some episodes of both worlds, where the model predicts it."""

    def __init__(self, camera: str, episodes: int) -> None:
        """Args: episodes: how many, of the first batch."""
        self._key, self._episodes = f"{camera}.rgb", episodes
        self.frames: Frames = empty_frames(episodes)

    def begin(self, seeds: NDArray[np.uint64]) -> None:
        """Nothing has to be put anywhere."""

    def watch(self, which: str, moment: Moment) -> None:
        """Keeps a control step of one world, four times as large."""
        for i in np.flatnonzero(moment.live[: self._episodes]):
            shown = np.asarray(moment.next_obs[self._key][i])
            self.frames[which][i].append(shown.repeat(_LARGER, axis=0).repeat(_LARGER, axis=1))


def empty_frames(episodes: int) -> Frames:
    """Returns films without a picture."""
    return {which: [[] for _ in range(episodes)] for which in ("imagined", "real")}


class Film:
    """Draws some episodes of both worlds with the simulator's camera, from observed and predicted states."""

    def __init__(self, env: SimVectorEnv, episodes: int, *, size: tuple[int, int] = (240, 320)) -> None:
        """Args: env: simulations of the task, to draw with; episodes: how many, of the first batch."""
        self._env, self._episodes, self._size = env, episodes, size
        self._start: Array | None = None
        self.frames: Frames = empty_frames(episodes)

    def begin(self, seeds: NDArray[np.uint64]) -> None:
        """Puts the simulations into the states in which the episodes begin."""
        self._env.reset(seed=[int(seed) for seed in seeds[: self._env.num_envs]])
        self._start = self._env.get_state()

    def watch(self, which: str, moment: Moment) -> None:
        """Draws a control step of both worlds in the same way, from its state alone."""
        state = np.asarray(moment.next_obs["state"])
        for i in range(self._episodes):
            if moment.live[i]:
                self.frames[which][i].append(self._drawn(i, state[i]))

    def _drawn(self, i: int, state: Array) -> Array:
        assert self._start is not None
        env = self._env
        rows = env.get_state()
        rows[i] = self._start[i]
        env.set_state(rows)
        pose_by_state(env, i, state)
        try:
            return env.picture(i, height=self._size[0], width=self._size[1])
        except RenderError as error:
            raise RenderError(f"film: this machine cannot draw: {error}") from error


def pose_by_state(env: SimVectorEnv, i: int, state: Array) -> None:
    """Moves joints and things of one simulation to where a state (S,) says they are; the rest stays.

    A thing's place is `<thing>.pos`, or `<thing>_in_tool.pos`; its turn is kept upright, by `<thing>.xaxis`.
    """
    named: dict[str, list[float]] = {}
    for name, value in zip(env.state_names, state, strict=True):
        quantity = name.rpartition(".")[0] if name.rpartition(".")[2].isdigit() else name
        named.setdefault(quantity, []).append(float(value))
    index, backend = env.index, env.backend
    qpos, mocap = backend.bind("qpos"), backend.bind("mocap_pos")
    for joint, first in index.qpos_of.items():
        if f"{joint}.pos" in named and len(named[f"{joint}.pos"]) == 1:
            qpos[i, first] = named[f"{joint}.pos"][0]
    for body, number in index.mocap_of.items():
        if f"{body}.pos" in named:
            mocap[i, number] = named[f"{body}.pos"]
    ids = np.array([i])
    backend.forward(ids)
    tool = env.controller.tool_poses(ids)[0]
    for joint, first in index.qpos_of.items():
        where, held = named.get(f"{joint}.pos", []), named.get(f"{joint}_in_tool.pos")
        if len(where) != 3 and held is not None:
            where = list(tool[:3] + _turned(tool[3:7], np.array(held)))
        if len(where) == 3:
            qpos[i, first : first + 3] = where
            if f"{joint}.xaxis" in named:
                x, y = named[f"{joint}.xaxis"][:2]
                half = 0.5 * np.arctan2(y, x)
                qpos[i, first + 3 : first + 7] = np.cos(half), 0.0, 0.0, np.sin(half)
    backend.forward(ids)


def _turned(quat: Array, vector: Array) -> Array:
    """Returns a vector (3,) turned by a quaternion w, x, y, z."""
    w, axis = quat[0], quat[1:]
    cross = 2.0 * np.cross(axis, vector)
    return vector + w * cross + np.cross(axis, cross)
