"""Serves a policy to `vla-eval`, whose suites run in containers of their own.

vla-eval's own server speaks its protocol: msgpack over a WebSocket, without TLS and without a token. For
robots there is `robot_rl.train.serve`. An executor for each episode owns the chunks, so every observation
gets the action that it would get in `robot_rl.rollout.evaluate`.

B is 1, A action dim, S state dim.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn
from vla_eval.api import ServerHandle, serve_background
from vla_eval.model_servers import serve
from vla_eval.model_servers.base import SessionContext
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.specs import GRIPPER_CLOSE_NEG, IMAGE_RGB, LANGUAGE, POSITION_DELTA, ROTATION_AA, DimSpec

from robot_rl.core.errors import ConfigError, DeviceError, RobotRLError, require
from robot_rl.core.language import INSTRUCTION, encode_text
from robot_rl.data.lerobot.pictures import resize_pictures
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.spec import SavedPolicy
from robot_rl.sim.config import EnvConfig

Array = NDArray[Any]

_PARTS: tuple[tuple[tuple[str, ...], DimSpec], ...] = (
    (("tool.dx", "tool.dy", "tool.dz"), POSITION_DELTA),
    (("tool.rx", "tool.ry", "tool.rz"), ROTATION_AA),
    (("tool.yaw",), DimSpec("rotation", 1, "delta_yaw", (-1, 1))),
    (("gripper",), GRIPPER_CLOSE_NEG),
)
"""Names of our actions -> what they mean in the harness's words."""


@dataclass
class HarnessCounts:
    """What a server has done."""

    episodes: int = 0
    actions: int = 0
    errors: int = 0


class HarnessServer(PredictModelServer):
    """One policy behind vla-eval's protocol."""

    def __init__(
        self,
        policy: SavedPolicy,
        meta: PolicyMeta,
        shown: EnvConfig,
        *,
        cameras: Mapping[str, str] | None = None,
        n_exec: int | None = None,
        device: str = "cpu",
    ) -> None:
        """Loads nothing and listens nowhere yet; see `listen`.

        Args:
            policy: acts, without exploration.
            meta: what it was made for.
            shown: the env in which it acts at home.
            cameras: our cameras that the harness calls by another name -> that name.
            n_exec: control steps executed of each chunk; the policy's own number if None.
            device: where to compute.

        Raises:
            ConfigError: a setting does not fit the policy, or no suite sends what the policy reads.
        """
        super().__init__()
        read, self._size = _seen_by(policy, shown)
        for camera in cameras or {}:
            require(
                camera in read,
                "cameras",
                camera,
                ", ".join(read) or "none, since the policy reads no pictures",
            )
        self._cameras = {camera: (cameras or {}).get(camera, camera) for camera in read}
        apart = shown.environment_state
        require(not apart, "run: environment_state", apart, "none, since the harness's suites do not send it")
        self._n_exec = meta.n_exec if n_exec is None else n_exec
        require(1 <= self._n_exec <= policy.horizon, "n_exec", n_exec, f"1 to the policy's {policy.horizon}")
        self._reads_words = bool(shown.instruction)
        self._meta, self._device = meta, device
        cast("nn.Module", policy).to(device).eval()
        self._policy = policy
        self._executors: dict[str, ChunkExecutor] = {}
        """By the episode's id."""
        self.counts = HarnessCounts()

    def listen(self, host: str, port: int) -> ServerHandle:
        """Returns the server, which answers until it is closed.

        Raises:
            DeviceError: the port is taken.
        """
        logging.getLogger(serve.__name__).addFilter(_in_one_line)
        why: BaseException | None = None
        try:
            return serve_background(self, host=host, port=port)
        except* OSError as errors:  # it serves in a group of tasks
            why = errors.exceptions[0]
        raise DeviceError(f"policy server: cannot listen at {host}:{port}: {why}") from why

    async def on_episode_start(self, config: dict[str, Any], ctx: SessionContext) -> None:
        """Begins an episode with empty queues, and noise that its task alone decides."""
        await super().on_episode_start(config, ctx)
        executor = ChunkExecutor(self._policy, 1, n_exec=self._n_exec, mode="ode", device=self._device)
        seed = seed_of(config.get("task") or {})
        executor.reset(seeds=np.array([seed], np.uint64))
        self._executors[ctx.episode_id] = executor
        self.counts.episodes += 1

    async def on_episode_end(self, result: dict[str, Any], ctx: SessionContext) -> None:
        """Forgets the episode."""
        await super().on_episode_end(result, ctx)
        self._executors.pop(ctx.episode_id, None)

    def predict(self, obs: dict[str, Any], ctx: SessionContext) -> dict[str, Any]:
        """Returns the action (A,) to execute now.

        Raises:
            ConfigError: the observation is not what the policy reads; the harness gets the message.
        """
        try:
            executor = self._executors.get(ctx.episode_id)
            if executor is None:
                raise ConfigError("observation: there was no episode_start before it.")
            action = executor.act(self._read(obs)).action[0]
        except Exception:
            self.counts.errors += 1
            raise
        self.counts.actions += 1
        return {"actions": action}

    def get_action_spec(self) -> dict[str, DimSpec]:
        """Returns what the elements of an action mean; the harness warns of a suite that takes others."""
        left, parts = list(self._meta.action_names), dict[str, DimSpec]()
        for names, spec in _PARTS:
            if tuple(left[: len(names)]) == names:
                parts[spec.name] = spec
                del left[: len(names)]
        if left or not parts:
            names = " ".join(self._meta.action_names)
            return {"actions": DimSpec("actions", len(self._meta.action_names), names)}
        return parts

    def get_observation_spec(self) -> dict[str, DimSpec]:
        """Returns what the policy reads; the format of the state is the names of its elements."""
        names = self._meta.state_names
        words = {"language": LANGUAGE} if self._reads_words else {}
        pictures = dict.fromkeys(self._cameras.values(), IMAGE_RGB)
        return {**pictures, **words, "state": DimSpec("state", len(names), " ".join(names))}

    def get_observation_params(self) -> dict[str, Any]:
        """Returns what the harness's suites have to be asked for, by the names of their settings."""
        return {"send_state": True} | ({"send_wrist_image": True} if len(self._cameras) > 1 else {})

    def _read(self, obs: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the observation (1, ...) by our names."""
        pictures = self._pictures(obs.get("images") or {})
        words = obs.get("task_description") or self._meta.instruction
        return {"state": self._state(obs), INSTRUCTION: encode_text([words]), **pictures}

    def _state(self, obs: Mapping[str, Any]) -> Array:
        names = self._meta.state_names
        key = "states" if "states" in obs else "state"
        given, given_names = obs.get(key), obs.get("state_names")
        what = f"an array ({len(names)},): {', '.join(names)}"
        if not isinstance(given, np.ndarray | list):
            raise ConfigError(f"observation: state: got {type(given).__name__}, allowed: {what}")
        state = np.asarray(given, np.float32)
        require(state.shape == (len(names),), f"observation: {key}: shape", state.shape, what)
        if given_names is not None and tuple(given_names) != names:
            raise ConfigError(f"observation: state_names: got {', '.join(given_names)}, allowed: {what}")
        return state[None]

    def _pictures(self, given: Mapping[str, Array]) -> dict[str, Array]:
        pictures: dict[str, Array] = {}
        for ours, theirs in self._cameras.items():
            if theirs not in given:
                named = ", ".join(given) or "none"
                raise ConfigError(
                    f"observation: images: got {named}; the policy reads {theirs!r}. If the suite has that "
                    f"camera by another name, give cameras.{ours}=<its name>."
                )
            picture = np.asarray(given[theirs])
            height, width = self._size or (1, 1)
            rows, columns, channels = picture.shape if picture.ndim == 3 else (0, 0, 0)
            fits = rows >= height and columns >= width and channels == 3 and picture.dtype == np.uint8
            got, allowed = f"{picture.dtype} {picture.shape}", f"uint8 ({height}, {width}, 3)"
            require(
                fits, f"observation: images: {theirs}", got, f"{allowed}, or larger: resized as in training"
            )
            pictures[f"{ours}.rgb"] = resize_pictures(picture[None], self._size)
        return pictures


def _seen_by(policy: SavedPolicy, shown: EnvConfig) -> tuple[tuple[str, ...], tuple[int, int] | None]:
    """Returns the cameras that a policy reads, and the size of its pictures; None if it takes any size."""
    base: Any = getattr(policy, "base", policy)
    own = getattr(base, "config", None)
    cameras = getattr(base, "cameras", getattr(own, "cameras", shown.cameras))
    size = getattr(own, "picture", shown.image_size if shown.cameras else None)
    return tuple(cameras), size


def _in_one_line(record: logging.LogRecord) -> bool:
    """Leaves the traceback out of what vla-eval logs of a suite's mistake."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RobotRLError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True


def seed_of(task: Mapping[str, Any]) -> int:
    """Returns the seed of an episode's noise: the task's own `seed`, or one made of all that it says."""
    given = task.get("seed")
    if isinstance(given, int) and 0 <= given < 2**64:
        return given
    text = json.dumps(task, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
